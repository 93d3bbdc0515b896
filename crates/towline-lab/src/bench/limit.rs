//! The limits: what the machine does without the library, ready to be run in turns with it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::team::{Team, Work};
use crate::outcome::{Failure, Outcome};
use crate::raw::{Cut, Direction, Memory, RawCopy, RemoteMemory};
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Medium, Op, Reply};
use crate::worker::sockets::{Client, Style};

/// Threads that help each other take portions of this size.
const PORTION: u64 = 2 << 20;

/// The bytes of all buffers of a bare socket copy together; longer copies go round in them.
const SOCKET_BUFFERS: u64 = 256 << 20;

/// From this many bytes on, the library uses connections for bulk, and how a bare socket is used matters.
const BULK: u64 = 512 << 10;

/// And this many tell which way is the fastest.
const STYLE_TRIAL: u64 = 64 << 20;

/// Something that the machine does without the library.
pub(super) struct Limit {
    team: Team,
    work: Work,
    /// Set back before each round.
    next: Option<Arc<AtomicUsize>>,
}

impl Limit {
    pub(super) fn run(&self) -> Outcome<()> {
        if let Some(next) = &self.next {
            next.store(0, Ordering::Relaxed);
        }
        self.team.run(&self.work).map_err(|error| Failure::os("the bare copy", error))
    }

    /// A bare copy of those pieces (far offset, near offset, length) by that many threads: divided evenly or in
    /// portions, whichever is faster here.
    pub(super) fn copy(
        op: Op,
        near: &Memory,
        far: &RemoteMemory,
        pieces: &[(u64, u64, u64)],
        threads: usize,
    ) -> Outcome<Limit> {
        let even = Limit::copy_cut(op, near, far, pieces, threads, Cut::Even(threads))?;
        if threads < 2 {
            return Ok(even);
        }
        let portions = Limit::copy_cut(op, near, far, pieces, threads, Cut::Portions(PORTION))?;
        Ok(if portions.best_of(5)? < even.best_of(5)? { portions } else { even })
    }

    fn copy_cut(
        op: Op,
        near: &Memory,
        far: &RemoteMemory,
        pieces: &[(u64, u64, u64)],
        threads: usize,
        cut: Cut,
    ) -> Outcome<Limit> {
        let failed = |error| Failure::os("the bare copy", error);
        let direction = match op {
            Op::Read => Direction::Read,
            Op::Write => Direction::Write,
        };
        let copy = RawCopy::new(direction, near.clone(), far.clone(), pieces, cut).map_err(failed)?;
        let next = Arc::new(AtomicUsize::new(0));
        let taken = Arc::clone(&next);
        let work: Work = Arc::new(move |_| {
            loop {
                let part = taken.fetch_add(1, Ordering::Relaxed);
                if part >= copy.parts() {
                    return Ok(());
                }
                copy.run(part)?;
            }
        });
        Ok(Limit { team: Team::new(threads).map_err(failed)?, work, next: Some(next) })
    }

    /// A bare socket copy of that many bytes with that many streams, in the style that is the fastest here; the
    /// worker is at the other end.
    pub(super) fn sockets(
        worker: &mut Worker,
        medium: Medium,
        op: Op,
        bytes: u64,
        streams: usize,
    ) -> Outcome<Limit> {
        let failed = |error| Failure::os("the bare socket", error);
        let share = bytes.div_ceil(streams as u64);
        let buffer = share.min(SOCKET_BUFFERS / streams as u64).max(1);
        let bulk = bytes >= BULK;
        let address = match worker.ask(&Ask::Sockets { medium, op, streams, buffer, bulk })? {
            Reply::Address { address } => address,
            reply => return Err(worker.surprise(&reply)),
        };
        let clients: Vec<_> = (0..streams)
            .map(|_| Client::connect(medium, &address, op, buffer, bulk).map(Mutex::new))
            .collect::<io::Result<_>>()
            .map_err(failed)?;
        let clients: Arc<[Mutex<Client>]> = clients.into();
        let copy = |style: Style, bytes: u64| -> Work {
            let clients = Arc::clone(&clients);
            let share = bytes.div_ceil(streams as u64);
            Arc::new(move |number| {
                let rest = bytes.saturating_sub(share * number as u64).min(share);
                clients[number].lock().transfer(rest, style)
            })
        };
        let mut limit = Limit {
            team: Team::new(streams).map_err(failed)?,
            work: copy(Style::default(), bytes),
            next: None,
        };
        if bulk {
            let mut best = (f64::INFINITY, Style::default());
            for style in Style::ALL {
                limit.work = copy(style, bytes.min(STYLE_TRIAL));
                let time = limit.best_of(3)?;
                if time < best.0 {
                    best = (time, style);
                }
            }
            limit.work = copy(best.1, bytes);
        }
        Ok(limit)
    }

    fn best_of(&self, runs: usize) -> Outcome<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..runs {
            let start = Instant::now();
            self.run()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}
