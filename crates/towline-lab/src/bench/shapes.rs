//! What is measured: the shapes of transfers, per path and direction.

use towline::{Contact, PathProperties};

use super::Options;
use crate::outcome::{Failure, Outcome};
use crate::worker::protocol::{Medium, Memory, Op};

/// A path that can be measured: one to host memory. Those to GPUs and files have shapes of their own, or none.
#[derive(Debug, Clone, Copy)]
pub struct Path(PathProperties);

impl PartialEq for Path {
    fn eq(&self, other: &Path) -> bool {
        self.name() == other.name()
    }
}

impl Path {
    /// All of them, in order of preference.
    pub fn all() -> impl Iterator<Item = Path> {
        towline::path_properties().into_iter().filter(|path| path.serves.has_words()).map(Path)
    }

    /// The one of that name.
    pub fn named(name: &str) -> Outcome<Path> {
        let no_path = || Failure::usage(format!("no path to host memory is called {name}"));
        Path::all().find(|path| path.name() == name).ok_or_else(no_path)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Whether it is measured only where it is named: owners lend by it only where they say so.
    pub fn is_opt_in(self) -> bool {
        self.0.opt_in
    }

    /// Whether both ends have to be in this process.
    pub(super) fn is_here(self) -> bool {
        self.0.contact == Contact::Nothing
    }

    /// The memory that the owner has when this path is the one taken.
    pub(super) fn memory(self) -> Memory {
        Memory::served_by(&self.0)
    }

    /// The kind of socket over which the owner serves; `None` where it takes no part.
    pub(super) fn medium(self) -> Option<Medium> {
        match self.0.contact {
            _ if !self.0.enforced => None,
            Contact::Unix => Some(Medium::Unix),
            Contact::Tcp => Some(Medium::Tcp),
            Contact::Nothing | Contact::Any => None,
        }
    }

    /// Whether its limit is a copy by this process from memory of its own.
    pub(super) fn shares_memory(self) -> bool {
        self.0.shares_memory
    }

    /// What the limit of this path is.
    pub(super) fn against(self) -> &'static str {
        match self.medium() {
            Some(Medium::Unix) => "bare unix socket",
            Some(Medium::Tcp) => "bare tcp socket",
            None if self.shares_memory() => "memcpy",
            None => "process_vm",
        }
    }

    /// Whether figures are asked of it.
    pub(super) fn is_asked(self) -> bool {
        GOALS.iter().any(|(path, ..)| *path == self.name())
    }
}

/// The ratios that are asked for: of which path, for which shape.
const GOALS: [(&str, &str, f64); 6] = [
    ("mapped", "256m", 0.9),
    ("mapped", "16384x4k", 0.85),
    ("cma", "256m", 0.9),
    ("cma", "16384x4k", 0.9),
    ("tcp", "256m", 0.85),
    ("tcp", "16384x4k", 0.7),
];

/// The time in microseconds that is asked for: of which path, for which shape, read.
const TARGET: (&str, &str, f64) = ("mapped", "4k", 1.0);

/// How the blocks are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// One after the other, each timed alone: the median of the times.
    Latency,
    /// All blocks in one transfer: bytes per second.
    Together,
    /// Each block as a transfer of its own, all in flight at once: bytes per second.
    Concurrent,
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
    Shape("embedding-4m", Manner::Concurrent, 1, 4 * MIB, true, false),
    Shape("embedding-8m", Manner::Concurrent, 1, 8 * MIB, true, false),
    Shape("embedding-8x4m", Manner::Concurrent, 8, 4 * MIB, false, false),
    Shape("embedding-32x4m", Manner::Concurrent, 32, 4 * MIB, false, false),
    Shape("embedding-8x8m", Manner::Concurrent, 8, 8 * MIB, false, false),
    Shape("hidden-128m", Manner::Together, 1, 128 * MIB, false, false),
    // A bucket of 2.67 GiB, as weights are handed over.
    Shape(WEIGHTS, Manner::Together, 1, 2734 * MIB, false, false),
];

/// The rows that the options ask for, reads before writes: a write leaves other bytes at the owner.
pub(super) fn cases(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    let unnamed = || Path::all().filter(|path| !path.is_opt_in()).collect();
    let paths: Vec<Path> = options.path.map_or_else(unnamed, |only| vec![only]);
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
        Op::Read => quick_read && (quick_write || path.is_asked()),
        Op::Write => quick_write,
    };
    // What is in flight at once is read: an embedding is fetched.
    if (options.quick && !quick) || (manner == Manner::Concurrent && op == Op::Write) {
        return None;
    }
    if name == WEIGHTS && (path.memory() != Memory::Shared || op == Op::Write) {
        return None;
    }
    let goal = GOALS.iter().find(|goal| (goal.0, goal.1) == (path.name(), name)).map(|goal| goal.2);
    let target = ((path.name(), name) == (TARGET.0, TARGET.1) && op == Op::Read).then_some(TARGET.2);
    Some(Case { name: name.to_owned(), path, op, manner, blocks, block_size, goal, target })
}
