//! Whether a peer holds a ticket that is still good: without one it delivers no message.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::{Blame, Grant, Owner, Refusal, stale};
use crate::Result;
use crate::ticket::check_lease;

/// One ticket that a peer has proven to hold. Of several it is the one whose lease ends last.
pub struct Standing<R> {
    region: Weak<R>,
    expires_ms: Option<u64>,
    /// It has ended, and no other grant was any good when it did. Only a new grant changes that.
    was_last: bool,
}

impl<R> Standing<R> {
    /// A ticket to that region, and when its lease ends.
    pub fn new(region: Weak<R>, expires_ms: Option<u64>) -> Standing<R> {
        Standing { region, expires_ms, was_last: false }
    }

    fn check<G: Grant<Region = R>>(&self, now_ms: u64, spent: &mut Vec<Arc<R>>) -> Result<()> {
        check_lease("notify", self.expires_ms, || now_ms)?;
        let region = self.region.upgrade().ok_or_else(|| stale("notify"))?;
        let closed = G::is_closed(&region);
        spent.push(region);
        if closed { Err(stale("notify")) } else { Ok(()) }
    }
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// Refuses what needs no grant of its own where none of the peer's tickets is good any more. Costs a look at one of them; at
    /// all of them only when that request has ended.
    pub(super) fn check_standing(&mut self, now: Instant) -> Result<(), Refusal<G>> {
        let now_ms = self.clock_ms(now);
        let Err(ended) = self.standing.check::<G>(now_ms, &mut self.spent) else { return Ok(()) };
        if !self.standing.was_last {
            let of_grant = |grant: &G| Standing::new(Weak::clone(grant.region()), grant.claims().expires_ms);
            let spent = &mut self.spent;
            let good = self.grants.all().map(of_grant).filter(|one| one.check::<G>(now_ms, spent).is_ok());
            match good.max_by_key(|standing| standing.expires_ms.unwrap_or(u64::MAX)) {
                Some(good) => {
                    self.standing = good;
                    return Ok(());
                }
                None => self.standing.was_last = true,
            }
        }
        Err(Refusal { error: ended, blame: Blame::Peer })
    }

    /// The peer holds one grant more.
    pub(super) fn holds_another(&mut self, granted: Standing<G::Region>) {
        if self.standing.was_last {
            self.standing = granted;
        }
    }
}
