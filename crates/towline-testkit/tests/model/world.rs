//! Random programs over a few endpoints, against plain vectors.
//!
//! A [`Step`] names endpoints, regions and remotes by numbers that are taken modulo how many there are, so that any
//! list of steps is a program. Whatever the library does, the vectors say what had to come of it: success with exactly
//! these bytes, or an error of one of the kinds for which there is a reason. Memory of GPUs takes part too: it is full of other
//! bytes at first, and words in it are refused.

#[path = "parts.rs"]
mod parts;

use std::cell::RefCell;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use towline::{
    Access, Dtype, Endpoint, Kind, Layout, MemoryAccess, ReduceOp, Registered, Remote, Result, Routing,
    Storage, Transfer,
};

use towline_testkit::bench::{STALL, options};
use towline_testkit::worker::storage;

const ENDPOINTS: usize = 3;
const LOCAL: usize = 1_300_000;
const BLOCK: u64 = 48;
const POISON: u8 = 0xE7;

/// What the memory of the owners and of the users is, in the words of the workers, and how long the users' is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kinds {
    pub(crate) theirs: &'static str,
    pub(crate) ours: &'static str,
    pub(crate) local: usize,
}

impl Kinds {
    pub(crate) fn new(theirs: &'static str, ours: &'static str) -> Kinds {
        Kinds { theirs, ours, local: LOCAL }
    }
}

/// One step of a program.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// A new region of an endpoint.
    Register {
        /// Whose.
        endpoint: u8,
        /// How long.
        len: u32,
        /// What peers may do.
        access: u8,
    },
    /// A region goes.
    Deregister {
        /// Which.
        region: u8,
        /// By dropping it, rather than by taking its storage back.
        dropped: bool,
    },
    /// A ticket, perhaps narrowed, becomes a remote.
    Import {
        /// By whom.
        endpoint: u8,
        /// Of which region.
        region: u8,
        /// Which part, where one is cut out.
        range: Option<(u32, u32)>,
        /// What is left of the rights.
        access: u8,
    },
    /// The owner changes its own bytes.
    Poke {
        /// Of which region.
        region: u8,
        /// Where.
        offset: u32,
        /// To what.
        value: u8,
    },
    /// One range moves.
    Move {
        /// Over which remote.
        remote: u8,
        /// Towards it.
        write: bool,
        /// Where, there.
        far: u32,
        /// Where, here.
        near: u32,
        /// How much.
        len: u32,
    },
    /// Several ranges move.
    Spans {
        /// Over which remote.
        remote: u8,
        /// Towards it.
        write: bool,
        /// Their offsets there and lengths; here they lie one after the other.
        spans: Vec<(u16, u16)>,
    },
    /// Blocks move.
    Blocks {
        /// Over which remote.
        remote: u8,
        /// Towards it.
        write: bool,
        /// Their numbers there; here they lie one after the other.
        blocks: Vec<u8>,
    },
    /// Blocks of any length move, in any order on both sides.
    Pages {
        /// Over which remote.
        remote: u8,
        /// Towards it.
        write: bool,
        /// How long each is.
        len: u32,
        /// Where the blocks begin here.
        base: u32,
        /// Their numbers there.
        far: Vec<u16>,
        /// By how much the numbers here are turned.
        turn: u8,
    },
    /// Ranges of several regions move as one.
    Parts(parts::Several),
    /// A word is added to.
    Add {
        /// Over which remote.
        remote: u8,
        /// Where.
        offset: u32,
        /// How much.
        value: u64,
    },
    /// A word is replaced where it is what it is believed to be.
    Swap {
        /// Over which remote.
        remote: u8,
        /// Where.
        offset: u32,
        /// Whether the belief is right.
        right: bool,
        /// By what.
        value: u64,
    },
    /// Local bytes are added to remote ones.
    Reduce {
        /// Over which remote.
        remote: u8,
        /// Where, there.
        far: u32,
        /// How many bytes.
        len: u32,
    },
    /// A write is followed by a counter and a message.
    Announce {
        /// Over which remote.
        remote: u8,
        /// How much is written.
        len: u16,
        /// Where the counter is.
        counter: u32,
    },
}

/// A random step.
pub(crate) fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![6 => 0..5000u32, 1 => 1_040_000..1_200_000u32];
    let offset = prop_oneof![6 => 0..5000u32, 1 => 0..1_200_000u32];
    let word = prop_oneof![5 => (0..600u32).prop_map(|word| word * 8), 1 => 0..5000u32];
    let remote = any::<u8>();
    prop_oneof![
        3 => (any::<u8>(), len.clone(), 0..4u8)
            .prop_map(|(endpoint, len, access)| Step::Register { endpoint, len: len + 1, access }),
        1 => (any::<u8>(), any::<bool>())
            .prop_map(|(region, dropped)| Step::Deregister { region, dropped }),
        4 => (any::<u8>(), any::<u8>(), prop::option::weighted(0.3, (0..5000u32, 1..5000u32)), 0..4u8).prop_map(
            |(endpoint, region, range, access)| Step::Import { endpoint, region, range, access }
        ),
        2 => (any::<u8>(), offset.clone(), any::<u8>())
            .prop_map(|(region, offset, value)| Step::Poke { region, offset, value }),
        8 => (remote, any::<bool>(), offset.clone(), offset, len.clone())
            .prop_map(|(remote, write, far, near, len)| Step::Move { remote, write, far, near, len }),
        3 => (remote, any::<bool>(), prop::collection::vec((0..5000u16, 0..700u16), 0..6))
            .prop_map(|(remote, write, spans)| Step::Spans { remote, write, spans }),
        3 => (remote, any::<bool>(), prop::collection::vec(0..110u8, 0..20))
            .prop_map(|(remote, write, blocks)| Step::Blocks { remote, write, blocks }),
        6 => parts::several(0..5000u32, len.clone()).prop_map(Step::Parts),
        2 => (remote, word.clone(), any::<u64>())
            .prop_map(|(remote, offset, value)| Step::Add { remote, offset, value }),
        2 => (remote, word.clone(), any::<bool>(), any::<u64>())
            .prop_map(|(remote, offset, right, value)| Step::Swap { remote, offset, right, value }),
        2 => (remote, word.clone(), len).prop_map(|(remote, far, len)| Step::Reduce { remote, far, len }),
        2 => (remote, any::<u16>(), word)
            .prop_map(|(remote, len, counter)| Step::Announce { remote, len, counter }),
    ]
}

/// A random program.
pub(crate) fn program() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..60)
}

/// A length of 1 to 2 to the power of `bits`: as many short ones as long ones.
#[allow(dead_code, reason = "each suite uses its own programs")]
fn any_len(bits: u32) -> impl Strategy<Value = u32> {
    (0..=bits).prop_flat_map(|bits| 1..=1u32 << bits)
}

/// A random program without words, whose transfers have any length up to 2 to the power of `bits`, at any offset.
#[allow(dead_code, reason = "each suite uses its own programs")]
pub(crate) fn long_program(bits: u32) -> impl Strategy<Value = Vec<Step>> {
    let (len, remote) = (|| any_len(bits), any::<u8>());
    let offset = || prop_oneof![2 => 0..70u32, 3 => any_len(bits)];
    let step = prop_oneof![
        1 => (any::<u8>(), any::<bool>())
            .prop_map(|(region, dropped)| Step::Deregister { region, dropped }),
        2 => (any::<u8>(), len()).prop_map(|(endpoint, len)| Step::Register { endpoint, len, access: 3 }),
        3 => (any::<u8>(), any::<u8>())
            .prop_map(|(endpoint, region)| Step::Import { endpoint, region, range: None, access: 3 }),
        1 => (any::<u8>(), offset(), any::<u8>())
            .prop_map(|(region, offset, value)| Step::Poke { region, offset, value }),
        8 => (remote, any::<bool>(), offset(), offset(), len())
            .prop_map(|(remote, write, far, near, len)| Step::Move { remote, write, far, near, len }),
        2 => (remote, any::<bool>(), prop::collection::vec((0..5000u16, 0..700u16), 0..40))
            .prop_map(|(remote, write, spans)| Step::Spans { remote, write, spans }),
        4 => parts::several(offset(), len()).prop_map(Step::Parts),
        6 => (remote, any::<bool>(), any_len(bits - 6), 0..100u32, prop::collection::vec(0..300u16, 1..200), any::<u8>())
            .prop_map(|(remote, write, len, base, far, turn)| Step::Pages { remote, write, len, base, far, turn }),
    ];
    // One region as long as it may be, so that there is something to do.
    prop::collection::vec(step, 4..24).prop_map(move |steps| {
        let first = Step::Register { endpoint: 0, len: (1 << bits) - 3, access: 3 };
        let import = Step::Import { endpoint: 1, region: 0, range: None, access: 3 };
        [first, import].into_iter().chain(steps).collect()
    })
}

/// A region and what it must hold.
struct Region {
    owner: usize,
    access: Access,
    bytes: Vec<u8>,
    real: Option<Registered<Arc<dyn Storage>>>,
}

/// A remote and what it must allow.
struct Handle {
    user: usize,
    region: usize,
    start: usize,
    len: usize,
    access: Access,
    real: Remote,
}

/// An endpoint with the memory that its transfers use.
struct Worker {
    endpoint: Endpoint,
    local: Registered<Arc<dyn Storage>>,
    bytes: Vec<u8>,
}

struct World {
    workers: Vec<Worker>,
    regions: Vec<Region>,
    handles: Vec<Handle>,
    kinds: Kinds,
    /// What memory holds, while it is compared: fresh memory for each would take longer than the comparison.
    found: RefCell<Vec<u8>>,
}

type Case = std::result::Result<(), TestCaseError>;

/// Runs a program over endpoints that use those paths only.
pub(crate) fn run(routing: &Routing, kinds: Kinds, program: &[Step]) -> Case {
    let mut world = World::new(routing, kinds);
    for step in program {
        world.take(step).map_err(|error| match error {
            TestCaseError::Fail(reason) => TestCaseError::fail(format!("{step:?}: {reason}")),
            other => other,
        })?;
    }
    world.compare_all()
}

fn on_gpu(memory: &Arc<dyn Storage>) -> bool {
    matches!(memory.place(), towline::Place::Cuda(_))
}

fn access(bits: u8) -> Access {
    Access::from_bits(bits % 4).unwrap()
}

/// Checks an outcome against the reasons for which it had to fail; true when it went well.
fn judge(outcome: &Result<()>, reasons: &[Kind]) -> std::result::Result<bool, TestCaseError> {
    match outcome {
        Ok(()) => {
            prop_assert!(reasons.is_empty(), "it went well, and should have been {:?}", reasons);
            Ok(true)
        }
        Err(error) => {
            prop_assert!(reasons.contains(&error.kind()), "{}, and the reasons are {:?}", error, reasons);
            Ok(false)
        }
    }
}

impl World {
    fn new(routing: &Routing, kinds: Kinds) -> World {
        let workers = (0..ENDPOINTS)
            .map(|number| {
                let endpoint = options(&format!("model-{number}")).routing(routing.clone()).open().unwrap();
                let local =
                    endpoint.register(storage(kinds.local, kinds.ours).unwrap(), Access::NONE).unwrap();
                let start = LOCAL.min(kinds.local);
                let mut bytes: Vec<u8> = (0..start).map(|at| (at * 7 + number * 31) as u8).collect();
                while bytes.len() < kinds.local {
                    bytes.extend_from_within(..bytes.len().min(kinds.local - bytes.len()));
                }
                local.write_at(0, &bytes).unwrap();
                Worker { endpoint, local, bytes }
            })
            .collect();
        World { workers, regions: Vec::new(), handles: Vec::new(), kinds, found: RefCell::default() }
    }

    fn take(&mut self, step: &Step) -> Case {
        match step {
            Step::Register { endpoint, len, access: bits } => {
                let owner = usize::from(*endpoint) % ENDPOINTS;
                let memory = storage(*len as usize, self.kinds.theirs).unwrap();
                let mut bytes = vec![0; *len as usize];
                if on_gpu(&memory) {
                    bytes.fill(POISON);
                    memory.memset(POISON, 0, bytes.len()).unwrap();
                }
                let real = self.workers[owner].endpoint.register(memory, access(*bits)).unwrap();
                self.regions.push(Region { owner, access: access(*bits), bytes, real: Some(real) });
                Ok(())
            }
            Step::Deregister { region, dropped } => {
                let Some(region) = pick(&mut self.regions, *region) else { return Ok(()) };
                let Some(real) = region.real.take() else { return Ok(()) };
                if *dropped {
                    drop(real);
                    return Ok(());
                }
                let memory = real.into_storage().expect("nobody is inside");
                let mut bytes = vec![0; region.bytes.len()];
                towline::MemoryAccess::read_at(&memory, 0, &mut bytes).unwrap();
                prop_assert!(bytes == region.bytes, "the storage that came back holds other bytes");
                Ok(())
            }
            Step::Import { endpoint, region, range, access: bits } => {
                self.import(*endpoint, *region, *range, access(*bits))
            }
            Step::Poke { region, offset, value } => {
                let Some(region) = pick(&mut self.regions, *region) else { return Ok(()) };
                let Some(real) = &region.real else { return Ok(()) };
                let at = *offset as usize % region.bytes.len();
                region.bytes[at] = *value;
                real.write_at(at, &[*value]).unwrap();
                Ok(())
            }
            Step::Move { remote, write, far, near, len } => {
                self.transfer(*remote, *write, &[(u64::from(*far), u64::from(*near), u64::from(*len))], None)
            }
            Step::Spans { remote, write, spans } => {
                let mut near = 11;
                let spans: Vec<_> = spans
                    .iter()
                    .map(|(far, len)| {
                        near += u64::from(*len);
                        (u64::from(*far), near - u64::from(*len), u64::from(*len))
                    })
                    .collect();
                self.transfer(*remote, *write, &spans, None)
            }
            Step::Blocks { remote, write, blocks } => {
                // A block that is written twice may end either way.
                let mut blocks = blocks.clone();
                if *write {
                    let mut seen = [false; 256];
                    blocks.retain(|block| !std::mem::replace(&mut seen[usize::from(*block)], true));
                }
                let spans: Vec<_> = blocks
                    .iter()
                    .enumerate()
                    .map(|(near, far)| (u64::from(*far) * BLOCK, near as u64 * BLOCK, BLOCK))
                    .collect();
                self.transfer(*remote, *write, &spans, Some(&blocks))
            }
            Step::Pages { remote, write, len, base, far, turn } => {
                self.pages(*remote, *write, *len, *base, far, *turn)
            }
            Step::Parts(several) => self.several(several),
            Step::Add { remote, offset, value } => self.atomic(*remote, *offset, None, *value),
            Step::Swap { remote, offset, right, value } => {
                self.atomic(*remote, *offset, Some(*right), *value)
            }
            Step::Reduce { remote, far, len } => self.reduce(*remote, *far, *len),
            Step::Announce { remote, len, counter } => self.announce(*remote, *len, *counter),
        }
    }

    fn import(&mut self, endpoint: u8, region: u8, range: Option<(u32, u32)>, allowed: Access) -> Case {
        let user = usize::from(endpoint) % ENDPOINTS;
        if self.regions.is_empty() {
            return Ok(());
        }
        let number = usize::from(region) % self.regions.len();
        let region = &self.regions[number];
        let Some(real) = &region.real else { return Ok(()) };
        let ticket = real.ticket().unwrap();
        let (mut start, mut len) = (0, region.bytes.len());
        let mut narrow = ticket.narrow();
        if let Some((offset, part)) = range {
            (start, len) = (offset as usize, part as usize);
            narrow = narrow.range(u64::from(offset), u64::from(part));
        }
        let inside = start + len <= region.bytes.len();
        let ticket = match narrow.access(allowed).finish() {
            Ok(ticket) => ticket,
            Err(error) => {
                let widened = !inside || !region.access.contains(allowed);
                prop_assert!(error.kind() == Kind::Invalid && widened, "{}", error);
                return Ok(());
            }
        };
        prop_assert!(inside && region.access.contains(allowed), "a ticket was widened");
        let text = ticket.to_string();
        let remote = self.workers[user].endpoint.import(&text.parse().unwrap());
        let real = match remote {
            Ok(remote) => remote,
            Err(error) => return Err(TestCaseError::fail(format!("import: {error}"))),
        };
        prop_assert_eq!((real.len(), real.access()), (len as u64, allowed));
        self.handles.push(Handle { user, region: number, start, len, access: allowed, real });
        Ok(())
    }

    /// Why a request over that remote must fail.
    fn reasons(&self, handle: &Handle, needed: Access) -> Vec<Kind> {
        let mut reasons = Vec::new();
        if !handle.access.contains(needed) {
            reasons.push(Kind::PermissionDenied);
        }
        if self.regions[handle.region].real.is_none() {
            reasons.push(Kind::Stale);
        }
        reasons
    }

    /// [`reasons`](Self::reasons) for what touches words.
    fn reasons_for_words(&self, handle: &Handle) -> Vec<Kind> {
        let mut reasons = self.reasons(handle, Access::WRITE);
        if matches!(handle.real.place(), towline::Place::Cuda(_)) {
            reasons.push(Kind::Unsupported);
        }
        reasons
    }

    fn pages(&mut self, remote: u8, write: bool, len: u32, base: u32, far: &[u16], turn: u8) -> Case {
        let Some(number) = index(&self.handles, remote) else { return Ok(()) };
        let (len, base) = (u64::from(len), u64::from(base));
        let there = self.handles[number].len as u64 / len;
        let here = (self.kinds.local as u64 - base) / len;
        // As many as fit here, none of them twice.
        let mut seen = std::collections::HashSet::new();
        let far: Vec<u32> = far
            .iter()
            .map(|block| u32::from(*block) % u32::try_from(there.max(1)).unwrap())
            .filter(|block| seen.insert(*block))
            .take(usize::try_from(here).unwrap())
            .collect();
        if there == 0 || far.is_empty() {
            return Ok(());
        }
        let mut near: Vec<u32> = (0..far.len() as u32).collect();
        near.rotate_left(usize::from(turn) % far.len());
        let spans: Vec<_> = far
            .iter()
            .zip(&near)
            .map(|(far, near)| (u64::from(*far) * len, base + u64::from(*near) * len, len))
            .collect();
        let handle = &self.handles[number];
        let reasons = self.reasons(handle, if write { Access::WRITE } else { Access::READ });
        let worker = &self.workers[handle.user];
        let request = match write {
            true => worker.endpoint.write(&handle.real, &worker.local),
            false => worker.endpoint.read(&handle.real, &worker.local),
        };
        let theirs = Layout::blocks(0, len, there, len).unwrap();
        let ours = Layout::blocks(base, len, here, len).unwrap();
        let outcome =
            request.blocks(&theirs, &far[..], &ours, &near[..]).start().and_then(|transfer| transfer.wait());
        if judge(&outcome, &reasons)? {
            self.moved(number, write, &spans);
        }
        self.compare(number)
    }

    /// Those ranges have moved.
    fn moved(&mut self, handle: usize, write: bool, spans: &[(u64, u64, u64)]) {
        let handle = &self.handles[handle];
        let (region, worker) = (&mut self.regions[handle.region], &mut self.workers[handle.user]);
        for (far, near, len) in spans {
            let far = handle.start + *far as usize..handle.start + (*far + *len) as usize;
            let near = *near as usize..(*near + *len) as usize;
            if write {
                region.bytes[far].copy_from_slice(&worker.bytes[near]);
            } else {
                worker.bytes[near].copy_from_slice(&region.bytes[far]);
            }
        }
    }

    fn transfer(
        &mut self,
        remote: u8,
        write: bool,
        spans: &[(u64, u64, u64)],
        blocks: Option<&[u8]>,
    ) -> Case {
        let Some(number) = index(&self.handles, remote) else { return Ok(()) };
        let handle = &self.handles[number];
        let mut reasons = self.reasons(handle, if write { Access::WRITE } else { Access::READ });
        let outside = |(far, near, len): &(u64, u64, u64)| {
            *len == 0 || far + len > handle.len as u64 || near + len > self.kinds.local as u64
        };
        if spans.is_empty() || spans.iter().any(outside) {
            reasons.push(Kind::Invalid);
        }
        let worker = &self.workers[handle.user];
        let request = match write {
            true => worker.endpoint.write(&handle.real, &worker.local),
            false => worker.endpoint.read(&handle.real, &worker.local),
        };
        let started = match (blocks, spans) {
            (Some(blocks), _) => {
                let theirs = Layout::contiguous(BLOCK * 110, BLOCK).unwrap();
                let ours = Layout::contiguous(BLOCK * 32, BLOCK).unwrap();
                let far: Vec<u32> = blocks.iter().map(|block| u32::from(*block)).collect();
                let near: Vec<u64> = (0..blocks.len() as u64).collect();
                request.blocks(&theirs, &far, &ours, &near).start()
            }
            (None, [(far, near, len)]) => request.at(*far, *near, *len).start(),
            (None, spans) => request.spans(spans).start(),
        };
        // Overlapping destinations of one request may end in any order; do not try those.
        let outcome = started.and_then(|transfer| transfer.wait());
        if judge(&outcome, &reasons)? {
            if write && overlap(spans) {
                // Either of two sources may be there: ask, and believe what lies inside the ranges.
                let region = &mut self.regions[handle.region];
                for (far, _, len) in spans {
                    let at = handle.start + *far as usize;
                    let real = region.real.as_ref().unwrap();
                    real.read_at(at, &mut region.bytes[at..at + *len as usize]).unwrap();
                }
                return Ok(());
            }
            self.moved(number, write, spans);
        }
        self.compare(number)
    }

    fn atomic(&mut self, remote: u8, offset: u32, right: Option<bool>, value: u64) -> Case {
        let Some(number) = index(&self.handles, remote) else { return Ok(()) };
        let handle = &self.handles[number];
        let offset = offset as usize;
        let mut reasons = self.reasons_for_words(handle);
        let at = handle.start + offset;
        if offset + 8 > handle.len || !at.is_multiple_of(8) {
            reasons.push(Kind::Invalid);
        }
        let bytes = &mut self.regions[handle.region].bytes;
        let before = bytes.get(at..at + 8).map_or(0, |word| u64::from_ne_bytes(word.try_into().unwrap()));
        let endpoint = &self.workers[handle.user].endpoint;
        let expected = if right == Some(true) { before } else { before.wrapping_add(1) };
        let started = match right {
            None => endpoint.fetch_add(&handle.real, offset as u64, value),
            Some(_) => endpoint.compare_swap(&handle.real, offset as u64, expected, value),
        };
        let outcome = started.and_then(|transfer: Transfer| transfer.wait().map(|()| transfer.value()));
        if judge(&outcome.as_ref().map(|_| ()).map_err(Clone::clone), &reasons)? {
            prop_assert_eq!(outcome.unwrap(), Some(before));
            let after = match right {
                None => before.wrapping_add(value),
                Some(true) => value,
                Some(false) => before,
            };
            bytes[at..at + 8].copy_from_slice(&after.to_ne_bytes());
        }
        self.compare(number)
    }

    fn reduce(&mut self, remote: u8, far: u32, len: u32) -> Case {
        let Some(number) = index(&self.handles, remote) else { return Ok(()) };
        let handle = &self.handles[number];
        let (far, len) = (far as usize, len as usize);
        let mut reasons = self.reasons_for_words(handle);
        let at = handle.start + far;
        if len == 0
            || far + len > handle.len
            || len > self.kinds.local
            || !at.is_multiple_of(4)
            || !len.is_multiple_of(4)
        {
            reasons.push(Kind::Invalid);
        }
        let worker = &self.workers[handle.user];
        let request = worker.endpoint.reduce_into(&handle.real, &worker.local, ReduceOp::Sum, Dtype::U32);
        let outcome = request.at(far as u64, 0, len as u64).start().and_then(|transfer| transfer.wait());
        if judge(&outcome, &reasons)? {
            let bytes = &mut self.regions[handle.region].bytes[at..at + len];
            for (theirs, ours) in bytes.chunks_exact_mut(4).zip(worker.bytes.chunks_exact(4)) {
                let sum = u32::from_ne_bytes((&*theirs).try_into().unwrap())
                    .wrapping_add(u32::from_ne_bytes(ours.try_into().unwrap()));
                theirs.copy_from_slice(&sum.to_ne_bytes());
            }
        }
        self.compare(number)
    }

    fn announce(&mut self, remote: u8, len: u16, counter: u32) -> Case {
        let Some(number) = index(&self.handles, remote) else { return Ok(()) };
        let handle = &self.handles[number];
        let (len, counter) = (usize::from(len) % 4096 + 1, counter as usize);
        let mut reasons = self.reasons_for_words(handle);
        let word = handle.start + counter;
        if len > handle.len || counter + 8 > handle.len || !word.is_multiple_of(8) {
            reasons.push(Kind::Invalid);
        }
        // A counter inside the written range would be overwritten or not, as it happens.
        if counter < len {
            return Ok(());
        }
        let worker = &self.workers[handle.user];
        let request = worker.endpoint.write(&handle.real, &worker.local).at(0, 0, len as u64);
        let outcome =
            request.signal(counter as u64, 3).notify("done").start().and_then(|transfer| transfer.wait());
        if outcome.is_err() && reasons == [Kind::Invalid] && !word.is_multiple_of(8) {
            // A path may notice the odd word only after the bytes have moved: they are within what was asked for.
            let region = &mut self.regions[handle.region];
            let real = region.real.as_ref().unwrap();
            let part = handle.start..(handle.start + len).min(handle.start + handle.len);
            real.read_at(part.start, &mut region.bytes[part]).unwrap();
            return self.compare(number);
        }
        if judge(&outcome, &reasons)? {
            let region = &mut self.regions[handle.region];
            region.bytes[handle.start..handle.start + len].copy_from_slice(&worker.bytes[..len]);
            let count = u64::from_ne_bytes(region.bytes[word..word + 8].try_into().unwrap()).wrapping_add(3);
            region.bytes[word..word + 8].copy_from_slice(&count.to_ne_bytes());
            let real = region.real.as_ref().unwrap();
            prop_assert!(real.wait_signal(word, count, STALL).is_ok());
            let notification = self.workers[region.owner].endpoint.receive(STALL);
            prop_assert!(notification.is_ok_and(|one| one.message == b"done"));
        }
        self.compare(number)
    }

    /// Compares what the last step may have touched.
    fn compare(&self, handle: usize) -> Case {
        let handle = &self.handles[handle];
        self.compare_region(handle.region)?;
        self.compare_local(handle.user)
    }

    fn compare_region(&self, number: usize) -> Case {
        let region = &self.regions[number];
        let Some(real) = &region.real else { return Ok(()) };
        self.same(&format!("region {number}"), &region.bytes, |into| real.read_at(0, into))
    }

    fn compare_local(&self, number: usize) -> Case {
        let worker = &self.workers[number];
        let what = format!("the memory of endpoint {number}");
        self.same(&what, &worker.bytes, |into| worker.local.read_at(0, into))
    }

    fn same(&self, what: &str, expected: &[u8], read: impl FnOnce(&mut [u8]) -> Result<()>) -> Case {
        let mut found = self.found.borrow_mut();
        let len = found.len().max(expected.len());
        found.resize(len, 0);
        let found = &mut found[..expected.len()];
        // What is not read must not look right because of the last time.
        if let (Some(first), Some(last)) = (expected.first(), expected.last()) {
            found[0] = !first;
            found[expected.len() - 1] = !last;
        }
        read(found).unwrap();
        if found == expected {
            return Ok(());
        }
        let at = found.iter().zip(expected).position(|(a, b)| a != b);
        Err(TestCaseError::fail(format!("{what} differs from the model at byte {at:?}")))
    }

    fn compare_all(&self) -> Case {
        (0..self.regions.len()).try_for_each(|region| self.compare_region(region))?;
        (0..ENDPOINTS).try_for_each(|worker| self.compare_local(worker))
    }
}

fn overlap(spans: &[(u64, u64, u64)]) -> bool {
    let mut ranges: Vec<_> = spans.iter().map(|(far, _, len)| (*far, far + len)).collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[0].1 > pair[1].0)
}

fn index<T>(items: &[T], number: u8) -> Option<usize> {
    (!items.is_empty()).then(|| usize::from(number) % items.len())
}

fn pick<T>(items: &mut [T], number: u8) -> Option<&mut T> {
    let index = index(items, number)?;
    items.get_mut(index)
}
