//! Narrowing: a holder gives up part of a ticket without asking the owner.

use std::time::Duration;

use super::{Caveat, MAX_CAVEATS, MAX_TICKET, Ticket};
use crate::{Access, Error, Result};

const OP: &str = "narrow";

/// Builds a ticket that allows less; made by [`Ticket::narrow`].
///
/// The first restriction that is not one is reported by [`finish`](Narrow::finish), as `Invalid`.
/// A restriction that changes nothing adds nothing.
#[derive(Debug)]
#[must_use = "a narrowed ticket is made by finish()"]
pub struct Narrow {
    ticket: Result<Ticket>,
}

impl Narrow {
    pub(super) fn new(ticket: &Ticket) -> Narrow {
        Narrow { ticket: Ok(ticket.clone()) }
    }

    /// Keeps `len` bytes from `offset`, counted from the start of the present range.
    pub fn range(self, offset: u64, len: u64) -> Narrow {
        self.step(|ticket| {
            let present = ticket.range();
            match present.start.checked_add(offset) {
                Some(start) if start == present.start && len == ticket.length() => Ok(None),
                Some(offset) => Ok(Some(Caveat::Range { offset, len })),
                None => Err("the range is not inside the ticket's range"),
            }
        })
    }

    /// Keeps these rights, which must be among the present ones.
    pub fn access(self, access: Access) -> Narrow {
        self.step(|ticket| Ok((access != ticket.access()).then_some(Caveat::Access(access))))
    }

    /// Ends the ticket that long after it was issued, or when it ends already, whichever is earlier.
    ///
    /// The time counts from the moment at which the owner made the first ticket, by the owner's clock: the
    /// holder need not know that clock.
    pub fn lease(self, lease: Duration) -> Narrow {
        self.step(|ticket| {
            let lease_ms = u64::try_from(lease.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            let ms = ticket.body().issued_ms.saturating_add(lease_ms);
            Ok(ticket.expires_ms().is_none_or(|present| ms < present).then_some(Caveat::Expiry { ms }))
        })
    }

    /// Returns the narrowed ticket.
    pub fn finish(self) -> Result<Ticket> {
        self.ticket
    }

    fn step(self, plan: impl FnOnce(&Ticket) -> Result<Option<Caveat>, &'static str>) -> Narrow {
        let ticket = self.ticket.and_then(|mut ticket| {
            if let Some(caveat) = plan(&ticket).map_err(|why| Error::invalid(OP, why))? {
                ticket.push(caveat)?;
            }
            Ok(ticket)
        });
        Narrow { ticket }
    }
}

impl Ticket {
    fn push(&mut self, caveat: Caveat) -> Result<()> {
        self.rights.restrict(caveat).map_err(|why| Error::invalid(OP, why))?;
        if self.caveats.len() == MAX_CAVEATS {
            return Err(Error::invalid(OP, "a ticket carries at most 16 caveats"));
        }
        let mut bytes = Vec::with_capacity(19);
        caveat.encode(&mut bytes);
        if self.bytes.len() + bytes.len() > MAX_TICKET {
            return Err(Error::invalid(OP, "the ticket would be longer than 4096 bytes"));
        }
        let tag = self.tag().extend(&bytes);
        self.caveats.push(caveat);
        let mut public = self.public_bytes().to_vec();
        public.extend_from_slice(&bytes);
        self.bytes = super::seal(public, &tag);
        Ok(())
    }
}
