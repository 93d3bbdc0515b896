//! What a worker does with memory that it has pinned.

use std::thread;
use std::time::{Duration, Instant};

use towline::{Kind, Patience, Pinned, Registered, Storage};

use super::{Answer, Words, Worker, bad, said};
use crate::process::Failure;

/// Where the bell and the flag of a game lie, on both sides.
const BELL: usize = 0;
const FLAG: usize = 64;

/// How long a round may take: longer means that a wake-up was lost, since the sleeper then wakes at the limit.
const ROUND: Duration = Duration::from_secs(15);

/// Plays `rounds` of a game in which two sides take turns in answering: each waits for its own flag and raises the
/// other's. Most rounds go to sleep at once, so that sleeping and waking meet at every possible moment.
///
/// # Errors
/// What went wrong, where a wake-up was lost or a word could not be reached.
pub fn play<S: Storage>(
    own: &Registered<S>,
    other: &Pinned,
    rounds: u64,
    begins: bool,
) -> Result<(), Failure> {
    let asleep = Patience { spin: Duration::ZERO, yielding: Duration::ZERO };
    for round in 1..=rounds {
        if begins {
            other.store(FLAG, round)?;
            other.wake(BELL)?;
        }
        let patience = if round % 8 == 0 { Patience::default() } else { asleep };
        let started = Instant::now();
        let seen =
            own.wait_changed(BELL, patience, ROUND, || own.load(FLAG).ok().filter(|flag| *flag >= round));
        if seen != Some(round) || started.elapsed() >= ROUND {
            let message = format!("round {round} of {rounds}: {seen:?} after {:?}", started.elapsed());
            return Err(Failure { kind: Kind::Timeout, message });
        }
        if !begins {
            other.store(FLAG, round)?;
            other.wake(BELL)?;
        }
    }
    Ok(())
}

impl Worker {
    /// `pin REMOTE`: pins on a thread that ends at once, which must not end the pin.
    pub(super) fn pin(&mut self, words: &mut Words<'_>) -> Answer {
        let remote = self.remote(words)?;
        let pinned = thread::scope(|scope| scope.spawn(|| remote.pin()).join())
            .map_err(|_| bad("the thread that pins has panicked"))??;
        self.next += 1;
        self.pinned.insert(self.next, pinned);
        said(self.next)
    }

    /// `pong REGION PINNED ROUNDS`: answers in a game that the other side begins.
    pub(super) fn pong(&mut self, words: &mut Words<'_>) -> Answer {
        let region = self.region(words)?;
        let id: u64 = words.take()?;
        let pinned = self.pinned.get(&id).ok_or_else(|| bad(format!("nothing pinned is called {id}")))?;
        play(region, pinned, words.take()?, false)?;
        said("")
    }
}
