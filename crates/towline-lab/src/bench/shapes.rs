//! What is measured: the shapes of transfers, per path and direction.

use super::Options;
use crate::worker::protocol::{Medium, Memory, Op};

/// A path of this build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Within the process.
    Inproc,
    /// A memory file that both processes map.
    Mapped,
    /// `process_vm_readv` and `process_vm_writev`.
    Cma,
    /// A Unix socket.
    Unix,
    /// TCP.
    Tcp,
    /// NIXL. Not measured unless named: it needs NIXL.
    Nixl,
}

impl Path {
    /// Those that are measured where none is named.
    pub const ALL: [Path; 5] = [Path::Inproc, Path::Mapped, Path::Cma, Path::Unix, Path::Tcp];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Path::Inproc => "inproc",
            Path::Mapped => "mapped",
            Path::Cma => "cma",
            Path::Unix => "unix",
            Path::Tcp => "tcp",
            Path::Nixl => "nixl",
        }
    }

    /// The memory that the owner has when this path is the one taken.
    pub(super) fn memory(self) -> Memory {
        if self == Path::Mapped { Memory::Shared } else { Memory::System }
    }

    pub(super) fn medium(self) -> Option<Medium> {
        match self {
            Path::Unix => Some(Medium::Unix),
            Path::Tcp => Some(Medium::Tcp),
            _ => None,
        }
    }

    /// What the limit of this path is.
    pub(super) fn against(self) -> &'static str {
        match self {
            Path::Inproc | Path::Mapped => "memcpy",
            Path::Cma | Path::Nixl => "process_vm",
            Path::Unix => "bare unix socket",
            Path::Tcp => "bare tcp socket",
        }
    }
}

/// How the blocks are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// One after the other, each timed alone: the median of the times.
    Latency,
    /// All blocks in one transfer: bytes per second.
    Together,
    /// Each block as a transfer of its own, all in flight at once: bytes per second.
    AtOnce,
}

/// One row to measure.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) path: Path,
    pub(super) op: Op,
    pub(super) manner: Manner,
    pub(super) blocks: u64,
    pub(super) block_size: u64,
    /// The ratio that is asked for.
    pub(super) goal: Option<f64>,
    /// The time in microseconds that is asked for.
    pub(super) target: Option<f64>,
}

impl Case {
    pub(super) fn label(&self) -> String {
        format!("{}/{}/{}", self.path.name(), self.name, self.op.name())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.blocks * self.block_size
    }
}

/// A standard shape: name, manner, blocks, block size, and whether the quick run has it for reads (of what is also written, over
/// every path; else over those of which figures are asked) and for writes.
struct Shape(&'static str, Manner, u64, u64, bool, bool);

/// Measured where such buckets are shared: read on one host.
const WEIGHTS: &str = "weights-2.67g";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const SHAPES: [Shape; 18] = [
    Shape("4k", Manner::Latency, 1, 4 * KIB, true, true),
    Shape("1m", Manner::Together, 1, MIB, true, false),
    Shape("256m", Manner::Together, 1, 256 * MIB, true, true),
    Shape("16384x4k", Manner::Together, 16384, 4 * KIB, true, true),
    Shape("4096x16k", Manner::Together, 4096, 16 * KIB, true, false),
    Shape("1024x64k", Manner::Together, 1024, 64 * KIB, true, false),
    Shape("256x1k", Manner::Together, 256, KIB, false, false),
    Shape("256x64k", Manner::Together, 256, 64 * KIB, false, false),
    Shape("81920x4k", Manner::Together, 81920, 4 * KIB, true, false),
    Shape("10240x32k", Manner::Together, 10240, 32 * KIB, false, false),
    Shape("512x5m", Manner::Together, 512, 5 * MIB, false, false),
    Shape("embedding-4m", Manner::AtOnce, 1, 4 * MIB, true, false),
    Shape("embedding-8m", Manner::AtOnce, 1, 8 * MIB, true, false),
    Shape("embedding-8x4m", Manner::AtOnce, 8, 4 * MIB, false, false),
    Shape("embedding-32x4m", Manner::AtOnce, 32, 4 * MIB, false, false),
    Shape("embedding-8x8m", Manner::AtOnce, 8, 8 * MIB, false, false),
    Shape("hidden-128m", Manner::Together, 1, 128 * MIB, false, false),
    // A bucket of 2.67 GiB, as weights are handed over.
    Shape(WEIGHTS, Manner::Together, 1, 2734 * MIB, false, false),
];

/// The rows that the options ask for, reads before writes: a write leaves other bytes at the owner.
pub(super) fn cases(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    let paths = options.path.map_or(Path::ALL.to_vec(), |only| vec![only]);
    for path in paths {
        for op in Op::BOTH.into_iter().filter(|op| options.op.is_none_or(|only| only == *op)) {
            if options.blocks.is_some() || options.block_size.is_some() {
                // Without a direction, a shape of one's own is read.
                if options.op.is_some() || op == Op::Read {
                    cases.push(own(options, path, op));
                }
                continue;
            }
            cases.extend(SHAPES.iter().filter_map(|shape| standard(shape, options, path, op)));
        }
    }
    cases
}

fn own(options: &Options, path: Path, op: Op) -> Case {
    let blocks = u64::from(options.blocks.unwrap_or(1));
    let block_size = options.block_size.unwrap_or(4 * KIB);
    let manner = if blocks == 1 && block_size <= 64 * KIB { Manner::Latency } else { Manner::Together };
    let name = format!("{blocks}x{block_size}");
    Case { name, path, op, manner, blocks, block_size, goal: None, target: None }
}

fn standard(shape: &Shape, options: &Options, path: Path, op: Op) -> Option<Case> {
    let Shape(name, manner, blocks, block_size, quick_read, quick_write) = *shape;
    let quick = match op {
        Op::Read => quick_read && (quick_write || !matches!(path, Path::Inproc | Path::Unix)),
        Op::Write => quick_write,
    };
    // What is in flight at once is read: an embedding is fetched.
    if (options.quick && !quick) || (manner == Manner::AtOnce && op == Op::Write) {
        return None;
    }
    if name == WEIGHTS && (path != Path::Mapped || op == Op::Write) {
        return None;
    }
    let goal = match (path, name) {
        (Path::Mapped, "256m") => Some(0.9),
        (Path::Mapped, "16384x4k") => Some(0.85),
        (Path::Cma, "256m" | "16384x4k") => Some(0.9),
        (Path::Tcp, "256m") => Some(0.85),
        (Path::Tcp, "16384x4k") => Some(0.7),
        _ => None,
    };
    let target = (path == Path::Mapped && name == "4k" && op == Op::Read).then_some(1.0);
    Some(Case { name: name.to_owned(), path, op, manner, blocks, block_size, goal, target })
}
