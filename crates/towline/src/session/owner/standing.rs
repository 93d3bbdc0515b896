//! Whether a peer holds a ticket that is still good: without one it opens no session, and delivers no message.

use std::sync::{Arc, Weak};

use super::Serving;
use super::grants::Granting;
use crate::region::{RegionCore, stale};
use crate::session::Sessions;
use crate::sync::lock;
use crate::ticket::{self, Claims};
use crate::{Error, Kind, Result};

/// One ticket that a peer has proven to hold. Of several it is the one whose lease ends last.
pub(in crate::session) struct Standing {
    region: Weak<RegionCore>,
    expires_ms: Option<u64>,
    /// It has ended, and no other grant was any good when it did. Only a new grant changes that.
    was_last: bool,
}

impl Standing {
    /// Checks the ticket that a peer has just proven to hold.
    pub(in crate::session) fn of_ticket(sessions: &Sessions, public: &[u8]) -> Result<Standing> {
        let claims = ticket::parse_public(public)?.claims();
        let region = sessions.registry.check_current(&claims)?;
        Ok(Standing::new(&region, &claims))
    }

    pub(super) fn new(region: &Arc<RegionCore>, claims: &Claims) -> Standing {
        Standing { region: Arc::downgrade(region), expires_ms: claims.expires_ms, was_last: false }
    }

    fn of_grant(granting: &Granting) -> Standing {
        Standing {
            region: Weak::clone(granting.served.region()),
            expires_ms: granting.claims.expires_ms,
            was_last: false,
        }
    }

    fn check(&self, now_ms: u64) -> Result<()> {
        if self.expires_ms.is_some_and(|expires| now_ms >= expires) {
            return Err(Error::new(Kind::PermissionDenied, "notify", "the ticket's lease has run out"));
        }
        match self.region.upgrade() {
            Some(region) if !region.is_closed() => Ok(()),
            _ => Err(stale("notify")),
        }
    }
}

impl Serving {
    /// Refuses what needs no grant of its own where none of the peer's tickets is good any more. Costs a look at one of them; at
    /// all of them only when that one has ended.
    pub(super) fn check_standing(&self) -> Result<()> {
        let sessions = self.sessions()?;
        let now_ms = sessions.registry.clock_ms();
        let mut standing = lock(&self.standing);
        let Err(ended) = standing.check(now_ms) else { return Ok(()) };
        if !standing.was_last {
            let good = |granting: &Granting| {
                let standing = Standing::of_grant(granting);
                standing.check(now_ms).is_ok().then_some(standing)
            };
            match self.grants.best(good, |standing| standing.expires_ms.unwrap_or(u64::MAX)) {
                Some(good) => {
                    *standing = good;
                    return Ok(());
                }
                None => standing.was_last = true,
            }
        }
        drop(standing);
        sessions.registry.refuse(&self.peer);
        Err(ended)
    }

    /// The peer holds one grant more.
    pub(super) fn holds_another(&self, granted: Standing) {
        let mut standing = lock(&self.standing);
        if standing.was_last {
            *standing = granted;
        }
    }
}
