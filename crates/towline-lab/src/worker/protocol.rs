//! What a worker can be asked, and what it answers.

use serde::{Deserialize, Serialize};
use towline::{
    Endpoint, EndpointOptions, Isolation, NixlOptions, PathProperties, Quotas, Routing, Serves, Ticket, Tls,
};

use super::order::{Order, RankReply};
use crate::outcome::{Exit, Failure, Outcome};

/// Read or write, seen from the process that starts the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// A read.
    Read,
    /// A write.
    Write,
}

impl Op {
    /// Both of them.
    pub const BOTH: [Op; 2] = [Op::Read, Op::Write];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
        }
    }
}

/// What a region is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// A memory file.
    Shared,
    /// Private memory.
    System,
    /// A file on a disk.
    Disk,
    /// Memory of a GPU.
    Device,
}

impl Memory {
    /// What that path moves: the only kind that it knows, or private memory.
    pub fn served_by(path: &PathProperties) -> Memory {
        match path.serves {
            Serves::SharedMemory => Memory::Shared,
            Serves::Files => Memory::Disk,
            Serves::GpuMemory => Memory::Device,
            Serves::Anything | Serves::HostMemory => Memory::System,
        }
    }
}

/// Which kind of socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Medium {
    Unix,
    Tcp,
}

/// NIXL for what stays on this host: UCX listens on the loopback interface, and nowhere else.
pub fn nixl(lends: bool) -> NixlOptions {
    const DEVICE: [&str; 1] = ["lo"];
    if lends { NixlOptions::default().lend_over(DEVICE) } else { NixlOptions::default().reach_over(DEVICE) }
}

/// How an endpoint is guarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Guard {
    /// As by default.
    None,
    /// Limits that nobody reaches.
    Unlimited,
    Checksums,
    Tls,
    Enforced,
}

impl Guard {
    /// The options of an endpoint that is guarded in that way.
    pub(crate) fn options(self, name: &str) -> Outcome<EndpointOptions> {
        let options = Endpoint::options(name);
        Ok(match self {
            Guard::None => options,
            Guard::Unlimited => {
                options.quotas(Quotas { requests: usize::MAX, bytes: u64::MAX, ..Quotas::default() })
            }
            Guard::Checksums => options.checksums(true),
            Guard::Tls => options.tls(Tls::by_ticket()?),
            Guard::Enforced => options.routing(Routing::default().isolation(Isolation::Enforced)),
        })
    }
}

/// One order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Lends what is registered from now on by NIXL, too, over the loopback interface: the first order. Reply: `Done`.
    Lend,
    /// Registers memory for reading and writing, filled with a pattern. Reply: `Region`.
    Register { memory: Memory, bytes: u64, seed: u64 },
    /// Fills a region with a pattern. Reply: `Done`.
    Fill { region: usize, seed: u64 },
    /// Takes a region back. Reply: `Done`.
    Release { region: usize },
    /// Compares the first bytes of a region with a pattern. Reply: `Verified`.
    Verify { region: usize, seed: u64, bytes: u64 },
    /// Compares shuffled blocks that a peer wrote with the pattern that it wrote. Reply: `Verified`.
    VerifyBlocks { region: usize, seed: u64, blocks: u64, block_size: u64 },
    /// Moves the first bytes of a region over one path; verified when read. Reply: `Moved`.
    Move { ticket: Ticket, path: String, op: Op, bytes: u64, seed: u64, repeat: u32 },
    /// Answers notifications through that ticket until one says `stop`. Reply: `Done`, when it listens.
    Echo { ticket: Ticket },
    /// Opens an endpoint with that many registrations. Reply: `Ticket`, of the last of them.
    Crowd { regions: u32, bytes: u64 },
    /// Opens an endpoint that is guarded in that way, with one shared region. Reply: `Ticket`.
    Guarded { guard: Guard, bytes: u64 },
    /// Registers that many small regions. Reply: `Tickets`.
    Tickets { count: u32 },
    /// Opens that many endpoints, each with a small region. Reply: `Tickets`, one of each.
    Owners { count: u32 },
    /// Serves bare sockets: that many streams, each with a buffer of that size; `bulk` ones with socket buffers like
    /// the library's. Reply: `Address`.
    Sockets { medium: Medium, op: Op, streams: usize, buffer: u64, bulk: bool },
    /// Opens that many endpoints, each in contact with the ticket's owner. Reply: `Done`.
    Endpoints { count: u32, ticket: Ticket },
    /// What this process uses. Reply: `Usage`.
    Usage,
    /// Takes part in a group. Reply: `Comm`.
    Comm { order: Order },
}

/// One reply.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(crate) enum Reply {
    Done,
    /// A region: its number here, its ticket, and what a bare copy needs to reach it.
    Region {
        region: usize,
        ticket: Ticket,
        addr: u64,
        file: Option<i32>,
    },
    /// The first wrong offset, if there is one.
    Verified {
        wrong: Option<u64>,
    },
    /// How long one transfer took (the median), over which path, and the first wrong offset.
    Moved {
        seconds: f64,
        path: String,
        wrong: Option<u64>,
    },
    Ticket {
        ticket: Ticket,
    },
    Tickets {
        tickets: Vec<Ticket>,
    },
    Address {
        address: String,
    },
    Usage(Usage),
    Comm {
        answer: RankReply,
    },
    Failed {
        exit: u8,
        message: String,
        causes: Vec<String>,
        lacking: bool,
    },
}

impl Reply {
    pub(crate) fn failed(failure: &Failure) -> Reply {
        Reply::Failed {
            exit: failure.exit as u8,
            message: failure.message.clone(),
            causes: failure.causes.clone(),
            lacking: failure.lacking,
        }
    }

    /// The reply, or the failure that the worker reported as one of this process.
    pub(crate) fn or_failure(self) -> Outcome<Reply> {
        match self {
            Reply::Failed { exit, message, causes, lacking } => {
                let exit = if exit == Exit::Unavailable as u8 { Exit::Unavailable } else { Exit::Failed };
                Err(Failure { exit, message, causes, lacking })
            }
            reply => Ok(reply),
        }
    }
}

/// What a process uses.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    pub(crate) threads: usize,
    pub(crate) files: usize,
}

impl Usage {
    pub(crate) fn now() -> Usage {
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        // Listing the descriptors opens one.
        let entries = |path| std::fs::read_dir(path).map_or(0, |entries| entries.count());
        Usage {
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            threads: entries("/proc/self/task"),
            files: entries("/proc/self/fd").saturating_sub(1),
        }
    }
}
