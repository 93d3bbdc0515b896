//! Waiting for other ranks: with a deadline, with an eye on who died, and with an end when the team is given up.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use towline::{Endpoint, Kind, Patience, Remote, Routing, Ticket, Transfer};

use super::blame::{Schedule, Waits};
use super::inquiry::Inquiry;
use super::layout::{ABORTED, BELL, RECORD};
use super::link::is_missing;
use super::{Team, record};
use crate::{Error, Result, interrupt};

/// How often a waiter looks whether a rank died.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// How often a waiter that may spin looks before it looks at the clock: ranks in step wait for less than the clock takes.
const LOOKS: usize = 16;

/// How often a waiter looks that has come to its limit and does not know yet because of whom.
const LATE: Duration = Duration::from_millis(20);

/// How long a rank that gives up waits until the others have got its record; what is in flight then goes on.
const ABORT_LIMIT: Duration = Duration::from_millis(200);

/// A waiter that has slept once does not spin again.
const NO_PATIENCE: Patience = Patience { spin: Duration::ZERO, yielding: Duration::ZERO };

/// Why a look into the region did not give what was waited for.
enum Seen<T> {
    It(T),
    Aborted,
}

impl Team {
    /// Waits until `check` gives something. The error names who is missing, as `missing` says at that moment; an empty
    /// list means every rank. It fails the team where a rank has died, and nowhere else: a collective calls
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
        // The ranks that wait for this one must find which rank it waits for well before they give up.
        let limit = self.options.timeout;
        let look = LOOK.min(limit / 4);
        let schedule = Schedule::new(limit);
        let mut inquiry = None;
        let mut slice = look;
        let mut waited = Duration::ZERO;
        let mut since = None;
        links.publish(Waits::NOBODY);
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
                    links.publish(Waits::NOBODY);
                    return Ok(it);
                }
                Some(Seen::Aborted) => {
                    self.working(op)?;
                    return Err(Error::new(Kind::Internal, op, "aborted without a reason"));
                }
                None => {}
            }
            if let Err(error) = interrupt::check(op) {
                // Only the caller that interrupted it is to blame.
                links.publish(Waits::NOBODY);
                return Err(error.about([self.rank()]));
            }
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
            links.held_up(&wanted);
            if let Some((error, died)) = self.gone(op, &wanted) {
                // What they did before they went may be all that was waited for.
                if let Some(it) = check() {
                    links.publish(Waits::NOBODY);
                    return Ok(it);
                }
                links.publish(Waits::in_vain(error.ranks()));
                // A rank that waits for this one waits for the dead one, and does not know it.
                return Err(if died { self.fail(error) } else { error });
            }
            if spent >= schedule.ask {
                let asked = inquiry.get_or_insert_with(|| Inquiry::new(links, schedule, limit));
                asked.look(&wanted);
            }
            let verdict = inquiry.as_ref().filter(|_| spent >= limit);
            if let Some(ranks) = verdict.and_then(|asked| asked.verdict(&wanted, spent >= schedule.end)) {
                // Another rank may have come to its conclusion while this one asked.
                self.working(op)?;
                links.publish(Waits::in_vain(&ranks));
                let message = format!("{} did not arrive within {:.3} s", named(&ranks), spent.as_secs_f64());
                return Err(Error::new(Kind::Timeout, op, message).about(ranks));
            }
            slice = if spent < limit { look.min(limit - spent) } else { LATE };
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
        // Another rank may have been first; every rank ends with the same cause.
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
            // The rank that gave up may have died before it had sent its record to all.
            self.send_abort_to_all(&bytes);
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
        let in_flight = self.send_abort_to_all(&record::encode(error, self.rank()));
        let until = Instant::now() + ABORT_LIMIT;
        // A rank that has not come does not answer now, either.
        for (_, transfer) in in_flight.into_iter().filter(|(peer, _)| !error.ranks().contains(peer)) {
            if transfer.wait_for(until.saturating_duration_since(Instant::now())).is_none() {
                break;
            }
        }
    }

    /// Leaves a record with every rank that has none, this one first: its own waits then end, also those that sending to the others
    /// might need. Returns what is in flight to far ones.
    fn send_abort_to_all(&self, record: &[u8; RECORD]) -> Vec<(usize, Transfer)> {
        let mut in_flight = Vec::new();
        for places in 0..self.nranks() {
            let peer = (self.rank() + places) % self.nranks();
            match self.links.send_abort(peer, record) {
                Ok(sent) => in_flight.extend(sent.map(|sent| (peer, sent))),
                Err(reason) => tracing::debug!(peer, %reason, "could not be notified"),
            }
        }
        in_flight
    }

    /// Fails the team because this rank takes part no longer.
    pub(crate) fn revoke(&self) {
        let rank = self.rank();
        let error = Error::new(Kind::Canceled, "revoke", format!("rank {rank} revoked the communicator"));
        self.abort(&self.with_reason(error.about([rank])));
    }

    /// The ranks that cannot be reached any more, by this rank or by the rank whose record has failed the team: that
    /// may come before this one notices.
    pub(crate) fn dead(&self) -> Vec<usize> {
        let failure = self.failure().filter(|error| error.kind() == Kind::Disconnected);
        let is_named = |peer: usize| failure.as_ref().is_some_and(|error| error.ranks().contains(&peer));
        (0..self.nranks()).filter(|peer| is_named(*peer) || self.links.check(*peer).is_err()).collect()
    }

    /// The error of waiting for ranks of which some are gone, and whether one of them did not leave in order.
    fn gone(&self, op: &'static str, wanted: &[usize]) -> Option<(Error, bool)> {
        let (mut ranks, mut words, mut died) = (Vec::new(), Vec::new(), false);
        for peer in wanted.iter().copied().filter(|peer| *peer < self.nranks()) {
            let why = match self.links.check(peer) {
                _ if self.has_departed(peer) => match self.left_because_of(peer) {
                    Some(other) => {
                        ranks.push(other);
                        format!("it has left the group, after it had waited without success for rank {other}")
                    }
                    None => "it has left the group".to_owned(),
                },
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

    /// The rank for which one that has left had waited in vain.
    fn left_because_of(&self, peer: usize) -> Option<usize> {
        let left = self.links.region.load(self.links.layout.departed(peer)).ok()?;
        let other = (left >> 1) as usize;
        other.checked_sub(1).filter(|other| *other < self.nranks() && *other != self.rank())
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

    /// Shows that this rank waits for an access to that rank's memory, or that it does not any more.
    pub(crate) fn waits_for(&self, peer: usize, waits: AccessWait) {
        match waits {
            AccessWait::Lasts => self.links.held_up(&[peer]),
            AccessWait::Done => self.links.publish(Waits::NOBODY),
            AccessWait::InVain => self.links.publish(Waits::in_vain(&[peer])),
        }
    }

    /// [`waits_for`](Self::waits_for) of a task that has no thread, beside whatever threads of this rank wait for: what they
    /// show comes first.
    pub(crate) fn awaits(&self, peer: usize, waits: AccessWait) {
        let (nobody, this) = (Waits::NOBODY, Waits::on(&[peer]));
        match waits {
            AccessWait::Lasts => {
                self.links.replace(nobody, this);
                self.links.beat();
            }
            AccessWait::Done => self.links.replace(this, nobody),
            AccessWait::InVain => self.links.replace(this, Waits::in_vain(&[peer])),
        }
    }

    /// Waits for the end of a transfer to or from that rank, and shows that this one waits.
    pub(crate) fn wait_transfer(&self, peer: usize, transfer: &Transfer) -> towline::Result<()> {
        self.links.wait_for(peer, transfer)
    }

    /// Imports tickets of those ranks, in their order, and shows who does not answer.
    pub(crate) fn import(
        &self,
        endpoint: &Endpoint,
        routing: &Routing,
        within: Duration,
        tickets: Vec<(usize, Ticket)>,
    ) -> Result<Vec<towline::Result<Remote>>> {
        let (ranks, tickets): (Vec<usize>, Vec<Ticket>) = tickets.into_iter().unzip();
        let quickly = LOOK.min(within / 4);
        let mut remotes = endpoint.import_many_within(&tickets, routing, quickly)?;
        let is_late = |remote: &towline::Result<Remote>| {
            remote.as_ref().is_err_and(|error| error.kind() == Kind::Timeout)
        };
        let late: Vec<usize> = (0..ranks.len()).filter(|index| is_late(&remotes[*index])).collect();
        if late.is_empty() {
            return Ok(remotes);
        }
        let missing: Vec<usize> = late.iter().map(|index| ranks[*index]).collect();
        self.links.publish(Waits::silent(&missing));
        let again: Vec<Ticket> = late.iter().map(|index| tickets[*index].clone()).collect();
        let answers = endpoint.import_many_within(&again, routing, within - quickly)?;
        let failed: Vec<usize> = missing
            .into_iter()
            .zip(&answers)
            .filter(|(_, answer)| answer.as_ref().is_err_and(|error| is_missing(error.kind())))
            .map(|(rank, _)| rank)
            .collect();
        self.links.publish(if failed.is_empty() { Waits::NOBODY } else { Waits::in_vain(&failed) });
        for (index, answer) in late.into_iter().zip(answers) {
            remotes[index] = answer;
        }
        Ok(remotes)
    }

    /// Adds to what this rank says when it goes for whom it had waited in vain, if that is why.
    pub(crate) fn with_reason(&self, error: Error) -> Error {
        let blamed: Vec<usize> = self.in_vain().collect();
        if blamed.is_empty() {
            return error;
        }
        let message =
            format!("{}, after it had waited without success for {}", error.message(), named(&blamed));
        Error::new(error.kind(), error.op(), message).about(error.ranks().iter().copied().chain(blamed))
    }

    /// The ranks for which this one has waited in vain last.
    pub(super) fn in_vain(&self) -> impl Iterator<Item = usize> + use<> {
        let (waits, own, nranks) = (self.links.published(), self.rank(), self.nranks());
        waits.ranks().filter(move |peer| waits.is_in_vain() && *peer != own && *peer < nranks)
    }
}

/// How far the wait for an access is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessWait {
    Lasts,
    Done,
    InVain,
}

fn named(ranks: &[usize]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        many => {
            let names: Vec<String> = many.iter().map(usize::to_string).collect();
            format!("ranks {}", names.join(", "))
        }
    }
}
