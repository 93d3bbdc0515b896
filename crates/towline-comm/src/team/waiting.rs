//! Waiting for other ranks: with a deadline, with an eye on who died, and with an end when the team is given up.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use towline::{Kind, Patience, Transfer};

use super::layout::{ABORTED, BELL, RECORD, STATE_WAITS};
use super::{Team, record};
use crate::{Error, Result, interrupt};

/// How often a waiter looks whether somebody died.
const LOOK: Duration = Duration::from_millis(100);

/// How often a waiter that may spin looks before it looks at the clock: ranks in step wait for less than the clock takes.
const LOOKS: usize = 16;

/// How long a rank that times out asks far ranks how far they are, each.
const ASK: Duration = Duration::from_millis(100);

/// How long the one that gives up waits until the others have been told.
const TELL: Duration = Duration::from_millis(500);

/// A waiter that has slept once does not spin again.
const NO_PATIENCE: Patience = Patience { spin: Duration::ZERO, yielding: Duration::ZERO };

/// Why a look into the region did not give what was waited for.
enum Seen<T> {
    It(T),
    Aborted,
}

impl Team {
    /// Waits until `check` gives something. The error names who is missing, as `missing` says at that moment; an empty
    /// list means everybody. It fails the team where a rank has died, and nowhere else: a collective calls
    /// [`abort`](Self::abort) with it.
    pub(crate) fn wait<T>(
        &self,
        op: &'static str,
        missing: impl Fn() -> Vec<usize>,
        mut check: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        self.working(op)?;
        let links = &self.links;
        let mut patience = self.options.patience;
        let mut slice = LOOK.min(self.options.timeout);
        let mut waited = Duration::ZERO;
        let mut since = None;
        self.publish_waits(None);
        if !patience.spin.is_zero() {
            for _ in 0..LOOKS {
                if let Some(it) = check() {
                    return Ok(it);
                }
                std::hint::spin_loop();
            }
        }
        loop {
            let seen = links.region.wait_changed(BELL, patience, slice, || match check() {
                Some(it) => Some(Seen::It(it)),
                None if self.is_aborted() => Some(Seen::Aborted),
                None => None,
            });
            match seen {
                Some(Seen::It(it)) => {
                    self.publish_waits(None);
                    return Ok(it);
                }
                Some(Seen::Aborted) => {
                    self.working(op)?;
                    return Err(Error::new(Kind::Internal, op, "aborted without a reason"));
                }
                None => {}
            }
            interrupt::check(op).map_err(|error| error.about([self.rank()]))?;
            // The clock is not looked at before: most waits are shorter than that costs.
            waited += slice;
            let since =
                since.get_or_insert_with(|| Instant::now().checked_sub(slice).unwrap_or_else(Instant::now));
            let spent = since.elapsed().max(waited);
            patience = NO_PATIENCE;
            let mut wanted = missing();
            if wanted.is_empty() {
                wanted = (0..self.nranks()).filter(|peer| *peer != self.rank()).collect();
            }
            self.publish_waits(wanted.first().copied());
            if let Some((error, died)) = self.gone(op, &wanted) {
                // What they did before they went may be all that was waited for.
                if let Some(it) = check() {
                    self.publish_waits(None);
                    return Ok(it);
                }
                // Who waits for this rank waits for the dead one, and does not know it.
                return Err(if died { self.fail(error) } else { error });
            }
            if spent >= self.options.timeout {
                let ranks = self.culprits(&wanted);
                // Another rank may have come to its conclusion while this one asked.
                self.working(op)?;
                let message = format!("{} in {:.3} s", did_not_come(&ranks), spent.as_secs_f64());
                return Err(Error::new(Kind::Timeout, op, message).about(ranks));
            }
            slice = LOOK.min(self.options.timeout - spent);
        }
    }

    /// [`wait`](Self::wait) in a collective: an error fails the team.
    pub(super) fn wait_together<T>(
        &self,
        op: &'static str,
        missing: impl Fn() -> Vec<usize>,
        check: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        self.wait(op, missing, check).map_err(|error| self.fail(error))
    }

    /// Fails the team, and gives back why it failed: this, or what came before.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.abort(&error);
        // Another rank may have been first; everybody ends with the same cause.
        self.failure().map_or(error.clone(), |cause| cause.during(error.op()))
    }

    /// Refuses what is called after the team has failed.
    #[inline]
    pub(super) fn working(&self, op: &'static str) -> Result<()> {
        if !self.failed.load(Ordering::Relaxed) && !self.is_aborted() {
            return Ok(());
        }
        match self.failure() {
            Some(error) => Err(error.during(op)),
            None => Ok(()),
        }
    }

    #[inline]
    fn is_aborted(&self) -> bool {
        self.links.region.load(ABORTED).is_ok_and(|by| by != 0)
    }

    /// Why the team has failed; `None` while it works.
    pub(crate) fn failure(&self) -> Option<Error> {
        if let Some(error) = self.failure.get() {
            return Some(error.clone());
        }
        let by = self.links.region.load(ABORTED).ok()? as usize;
        let from = by.checked_sub(1).filter(|from| *from < self.nranks())?;
        let mut bytes = [0; RECORD];
        let at = self.links.layout.abort_record(from);
        self.links.region.read_at(at, &mut bytes).ok()?;
        let error = record::decode(&bytes, "team", self.nranks());
        if self.failure.set(error).is_ok() {
            self.failed.store(true, Ordering::Release);
            // Who gave up may have died before it had told everybody.
            self.tell(&bytes);
        }
        self.failure.get().cloned()
    }

    /// Fails the team: every rank's waits and later calls end with this error, or with the one that came before it.
    pub(crate) fn abort(&self, error: &Error) {
        if self.failure().is_some() || self.failure.set(error.clone()).is_err() {
            return;
        }
        self.failed.store(true, Ordering::Release);
        tracing::debug!(rank = self.rank(), %error, "gives the team up");
        let told = self.tell(&record::encode(error, self.rank()));
        let until = Instant::now() + TELL;
        for transfer in told {
            if transfer.wait_for(until.saturating_duration_since(Instant::now())).is_none() {
                break;
            }
        }
    }

    /// Leaves a record with every rank that has none; returns what is on its way to far ones.
    fn tell(&self, record: &[u8; RECORD]) -> Vec<Transfer> {
        let mut told = Vec::new();
        for peer in 0..self.nranks() {
            match self.links.tell_abort(peer, record) {
                Ok(sent) => told.extend(sent),
                Err(reason) => tracing::debug!(peer, %reason, "could not be told"),
            }
        }
        told
    }

    /// Fails the team because this rank takes part no longer.
    pub(crate) fn revoke(&self) {
        let rank = self.rank();
        let error = Error::new(Kind::Canceled, "revoke", format!("rank {rank} revoked the communicator"));
        self.abort(&error.about([rank]));
    }

    /// The ranks that cannot be reached any more, by this rank or by the one whose word on it has failed the team: that
    /// may come before this one notices.
    pub(crate) fn dead(&self) -> Vec<usize> {
        let failure = self.failure().filter(|error| error.kind() == Kind::Disconnected);
        let told = |peer: usize| failure.as_ref().is_some_and(|error| error.ranks().contains(&peer));
        (0..self.nranks()).filter(|peer| told(*peer) || self.links.check(*peer).is_err()).collect()
    }

    /// The error of waiting for ranks of which some are gone, and whether one of them did not leave in order.
    fn gone(&self, op: &'static str, wanted: &[usize]) -> Option<(Error, bool)> {
        let (mut ranks, mut words, mut died) = (Vec::new(), Vec::new(), false);
        for peer in wanted.iter().copied().filter(|peer| *peer < self.nranks()) {
            let why = match self.links.check(peer) {
                _ if self.has_departed(peer) => "it has left the group".to_owned(),
                Err(error) => {
                    died = true;
                    error.message().to_owned()
                }
                Ok(()) => continue,
            };
            ranks.push(peer);
            words.push(format!("rank {peer} is gone: {why}"));
        }
        let error = || Error::new(Kind::Disconnected, op, words.join("; ")).about(ranks.iter().copied());
        (!ranks.is_empty()).then(|| (error(), died))
    }

    fn has_departed(&self, peer: usize) -> bool {
        self.links.region.load(self.links.layout.departed(peer)).is_ok_and(|left| left != 0)
    }

    /// Says why an access to that rank's memory has failed. Where the rank is gone, and did not leave in order, the
    /// team fails with it. Where the team has failed, that is why: ranks that have learnt of it close their windows.
    pub(crate) fn lost(&self, peer: usize, error: Error) -> Error {
        if error.kind() == Kind::Invalid {
            return error;
        }
        let error = if error.ranks().is_empty() { error.about([peer]) } else { error };
        if error.kind() == Kind::Disconnected && peer < self.nranks() && !self.has_departed(peer) {
            return self.fail(error);
        }
        self.failure().map_or(error.clone(), |cause| cause.during(error.op()))
    }

    /// Whom the ranks that are missing wait for in turn: a rank that is held up is not to blame.
    fn culprits(&self, wanted: &[usize]) -> Vec<usize> {
        let Ok(mine) = self.links.state_of(self.rank(), ASK) else { return wanted.to_vec() };
        let mut states = vec![None; self.nranks()];
        let mut culprits = Vec::new();
        for first in wanted.iter().copied().filter(|peer| *peer < self.nranks()) {
            let (mut at, mut seen) = (first, vec![self.rank()]);
            loop {
                seen.push(at);
                let state = *states[at].get_or_insert_with(|| self.links.state_of(at, ASK).ok());
                match state.filter(|state| state.round >= mine.round).and_then(|state| state.waits_for) {
                    Some(next) if next < self.nranks() && !seen.contains(&next) => at = next,
                    _ => break,
                }
            }
            culprits.push(at);
        }
        culprits.sort_unstable();
        culprits.dedup();
        culprits
    }

    /// Publishes for whom this rank has waited for a while. It stays so when the wait fails: who waits for this rank in
    /// turn looks for the culprit at about the same time.
    pub(crate) fn publish_waits(&self, peer: Option<usize>) {
        let value = peer.map_or(0, |peer| peer as u64 + 1);
        if self.waits.load(Ordering::Relaxed) != value {
            self.waits.store(value, Ordering::Relaxed);
            let _ = self.links.region.store(STATE_WAITS, value);
        }
    }
}

fn did_not_come(ranks: &[usize]) -> String {
    match ranks {
        [one] => format!("rank {one} did not come"),
        many => {
            let names: Vec<String> = many.iter().map(usize::to_string).collect();
            format!("ranks {} did not come", names.join(", "))
        }
    }
}
