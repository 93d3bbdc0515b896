//! The orders that the processes of a group get, and their replies.

use serde::{Deserialize, Serialize};
use towline_comm::UniqueId;

use super::protocol::Op;

/// Which memory a collective works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Memory {
    /// Windows, registered by all ranks together.
    Window,
    /// Buffers that each rank has registered.
    Buffer,
    /// Memory that nobody has registered.
    Unregistered,
}

impl Memory {
    pub(crate) const ALL: [Memory; 3] = [Memory::Window, Memory::Buffer, Memory::Unregistered];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Memory::Window => "window",
            Memory::Buffer => "buffer",
            Memory::Unregistered => "unregistered",
        }
    }
}

/// One order to every rank, unless it says which.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Joins the group; a waiter spins where `spinning`. Reply: `Done`.
    Join { nranks: usize, rank: usize, id: Box<UniqueId>, spinning: bool },
    /// Opens the window of the one-sided rows. Reply: `Opened`.
    Open { bytes: u64 },
    /// Maps the window's memory of the other rank by hand. Reply: `Done`.
    Map { pid: i32, file: i32, bytes: u64 },
    /// Goes back and forth so many times: by puts with signals, or by bare flags. Reply: `Seconds` of one round trip.
    Ping { bare: bool, count: u64 },
    /// To rank 0: puts into or gets from the other rank's window, in turns with a bare copy. Reply: `Copied`.
    Copy { op: Op, bytes: u64, budget_ms: u64, fewest: usize, most: usize },
    /// Reduces so many times. Reply: `Seconds` of one.
    AllReduce { memory: Memory, bytes: u64, repeats: u64 },
    /// Gives back the memory of reductions. Reply: `Done`.
    Forget,
    /// Registers and closes a window so many times. Reply: `Seconds` of one registration.
    Register { bytes: u64, rounds: usize },
    /// Opens and closes windows, many at a time. Reply: `Grown`.
    Windows { count: usize, at_a_time: usize },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RankReply {
    Done,
    /// The descriptor of the window's memory in this process.
    Opened {
        pid: i32,
        file: i32,
    },
    Seconds(f64),
    Copied {
        ours: f64,
        bare: f64,
        rounds: usize,
    },
    /// How much more there is after than before.
    Grown {
        bytes: i64,
        files: i64,
        threads: i64,
    },
}
