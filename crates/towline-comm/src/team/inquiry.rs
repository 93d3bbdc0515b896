//! What a rank that waits learns from the others, while it waits: for whom they wait, and whether they answer at all.
//!
//! A near rank's state is read where it is. A far one is queried by a small read, and nobody waits for the reply: it is looked
//! for at the next look. One that stands still or is cut off therefore costs no time, and is known when the limit comes.

use std::time::{Duration, Instant};

use towline::{Registered, SystemStorage, Transfer};

use super::blame::{Chain, Known, Schedule};
use super::link::Links;

/// The shortest limit of a query. It may last beyond the wait: a read that is given up costs the
/// connection, and a rank that was only slow would be lost.
const QUERY_LIMIT: Duration = Duration::from_secs(5);

/// What one wait has learnt of the others.
pub(super) struct Inquiry<'l> {
    links: &'l Links,
    schedule: Schedule,
    known: Vec<Known>,
    /// The queries in flight, by rank.
    queries: Vec<Option<Transfer>>,
    landing: Option<Registered<SystemStorage>>,
    within: Duration,
}

impl<'l> Inquiry<'l> {
    pub(super) fn new(links: &'l Links, schedule: Schedule, limit: Duration) -> Inquiry<'l> {
        Inquiry {
            links,
            schedule,
            known: vec![Known::default(); links.nranks()],
            queries: (0..links.nranks()).map(|_| None).collect(),
            landing: links.landing(),
            within: limit.max(QUERY_LIMIT),
        }
    }

    /// Looks at the ranks that this one misses, and at those that they miss in turn.
    pub(super) fn look(&mut self, wanted: &[usize]) {
        let mut looked = vec![false; self.known.len()];
        loop {
            let now = Instant::now();
            let mut found = self.chain(wanted, now).found().to_vec();
            found.retain(|peer| !looked[*peer]);
            // What one says may lead to others.
            if found.is_empty() {
                return;
            }
            for peer in found {
                looked[peer] = true;
                self.look_at(peer, now);
            }
        }
    }

    fn look_at(&mut self, peer: usize, now: Instant) {
        let known = &mut self.known[peer];
        known.ask(now);
        if self.links.is_near(peer) {
            if let Some(state) = self.links.look_at(peer) {
                known.update(state, now);
            }
            return;
        }
        let Some(landing) = &self.landing else { return };
        match self.queries[peer].as_ref().map(Transfer::result) {
            Some(None) => return,
            Some(Some(Ok(()))) => {
                if let Some(state) = Links::reply_of(peer, landing) {
                    known.update(state, now);
                }
            }
            Some(Some(Err(_))) | None => {}
        }
        self.queries[peer] = self.links.query_state(peer, landing, self.within).ok();
    }

    fn chain(&self, wanted: &[usize], now: Instant) -> Chain<'_> {
        Chain::new(&self.known, self.links.rank, wanted, self.schedule.answer, now)
    }

    /// The ranks that have kept this rank waiting, of those that it misses and those that they miss in turn; `None` where that may be known
    /// a little later, unless this is the last moment.
    pub(super) fn verdict(&self, wanted: &[usize], last: bool) -> Option<Vec<usize>> {
        let own = self.links.look_at(self.links.rank).unwrap_or_default();
        let mut culprits = self.chain(wanted, Instant::now()).culprits(own, last)?;
        if culprits.is_empty() {
            culprits = wanted.iter().copied().filter(|peer| *peer < self.links.nranks()).collect();
        }
        // A rank that waits for something of its own as well is to blame for that itself.
        culprits.extend(wanted.iter().copied().filter(|peer| *peer == self.links.rank));
        culprits.sort_unstable();
        culprits.dedup();
        Some(culprits)
    }
}
