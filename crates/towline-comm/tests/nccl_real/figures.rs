//! What calls cost beside the bare ones, in turns.

use std::fmt;
use std::time::{Duration, Instant};

use towline::{Buffer, MemoryDescription};
use towline_comm::{Communicator, WindowFlag};
use towline_sys::nccl::{Comm, Nccl};

/// Registrations that are timed together: one of 0.3 µs is too near to what a look at the clock takes.
const BATCH: usize = 50;
/// How many batches of buffers are registered.
const BUFFERS: usize = 400;

/// The medians of a call and of the bare one, in microseconds.
pub(super) struct Figure {
    pub(super) ours: f64,
    pub(super) bare: f64,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figure { ours, bare } = self;
        write!(f, "ours {ours:.3} us, bare {bare:.3} us, ratio {:.3}", ours / bare)
    }
}

/// Makes both calls in turns, so often and a tenth of that before; what follows each of them is not counted.
pub(super) fn beside(
    turns: usize,
    after_each: impl Fn(),
    mut ours: impl FnMut(),
    mut bare: impl FnMut(),
) -> Figure {
    let timed = |call: &mut dyn FnMut()| {
        let begun = Instant::now();
        call();
        let took = begun.elapsed();
        after_each();
        took
    };
    in_turns(turns, || (timed(&mut ours), timed(&mut bare)))
}

/// The medians of so many turns, a tenth of that before them.
fn in_turns(turns: usize, mut turn: impl FnMut() -> (Duration, Duration)) -> Figure {
    let mut turns_of = |count: usize| (0..count).map(|_| turn()).unzip::<_, _, Vec<_>, Vec<_>>();
    let _warm = turns_of(turns / 10);
    let (ours, bare) = turns_of(turns);
    Figure { ours: median(ours), bare: median(bare) }
}

fn median(mut samples: Vec<Duration>) -> f64 {
    samples.sort_unstable();
    samples[samples.len() / 2].as_secs_f64() * 1e6
}

/// Gives owners of a buffer to our call, and makes the bare one, a batch of each in turns; the medians are for one call. To make an
/// owner is the caller's, to drop it is ours.
fn batches(turns: usize, buffer: &Buffer, ours: impl Fn(Buffer), bare: impl Fn()) -> Figure {
    let both = in_turns(turns, || {
        let owners: [Buffer; BATCH] = std::array::from_fn(|_| buffer.clone());
        let begun = Instant::now();
        for owner in owners {
            ours(owner);
        }
        let between = Instant::now();
        for _ in 0..BATCH {
            bare();
        }
        (between - begun, between.elapsed())
    });
    Figure { ours: both.ours / BATCH as f64, bare: both.bare / BATCH as f64 }
}

/// Registers a buffer and closes it again, by itself and as a window (so many batches), beside the bare calls on the
/// communicator `raw` of the same ranks.
pub(super) fn registrations(
    comm: &Communicator,
    nccl: &Nccl,
    raw: Comm,
    buffer: &Buffer,
    windows: usize,
    say: impl Fn(&str),
) {
    let (address, len) = (buffer.addr() as u64, buffer.size());
    let figure = batches(
        BUFFERS,
        buffer,
        |buffer| comm.register_buffer(buffer).unwrap().close(),
        || {
            // SAFETY: the communicator is alive, and so is the memory.
            unsafe {
                let registered = nccl.register(raw, address, len).unwrap();
                nccl.deregister(raw, registered).unwrap();
            }
        },
    );
    say(&format!("register and deregister {} MiB p50: {figure}", len >> 20));
    let figure = batches(
        windows,
        buffer,
        |buffer| drop(comm.register_window(buffer, WindowFlag::COLL_SYMMETRIC).unwrap()),
        || {
            // SAFETY: as above, the communicator blocks, and this thread has begun no group.
            unsafe {
                let handle = nccl.window_now(raw, address, len, 1).unwrap();
                if handle != 0 {
                    nccl.close_window(raw, handle).unwrap();
                }
            }
        },
    );
    say(&format!("window over {} MiB, register and close p50: {figure}", len >> 20));
}
