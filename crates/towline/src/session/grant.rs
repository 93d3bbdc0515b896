//! What an owner has granted, and what the same-host paths need of it: the mapped segment, the pin.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::initiator::Session;
use super::query::{Borrowing, QueryReply};
use crate::fence::life::LifePage;
use crate::fence::pins::{LONG_SLOTS, PinError, ProcessPin};
use crate::fence::table::Row;
use crate::memory::Mapping;
use crate::region::stale;
use crate::wire::{self, Grant, SegmentRef};
use crate::{Error, Kind, Place, Result, Ticket};

/// What an owner has granted; gives it back when dropped.
pub(crate) struct GrantHandle {
    pub(super) session: Arc<Session>,
    pub(super) handle: u32,
    pub(super) row: u32,
    pub(super) generation: u64,
    /// Whether the region is on a GPU: what is written there is not written in one step with the owner's look at this side.
    pub(super) on_gpu: bool,
    /// The ticket that it was granted for; none where that was claimed, which is done once.
    ticket: Option<Box<[u8]>>,
}

impl GrantHandle {
    pub(super) fn new(session: &Arc<Session>, grant: &Grant, ticket: Option<Box<[u8]>>) -> GrantHandle {
        GrantHandle {
            session: Arc::clone(session),
            handle: grant.handle,
            row: grant.row,
            generation: grant.generation,
            on_gpu: matches!(grant.place, Place::Cuda(_)),
            ticket,
        }
    }

    /// Whether it can be granted again over a new connection: its own broke, and the owner may be there.
    pub(crate) fn is_renewable(&self) -> bool {
        let broke = |error: &Error| error.kind() == Kind::Disconnected;
        self.ticket.is_some()
            && !self.session.is_open()
            && self.session.alive().err().as_ref().is_none_or(broke)
    }

    /// The same region granted again, over a new connection of the same kind. Blocks, at most until then.
    pub(crate) fn renewed(&self, until: Instant) -> Result<Arc<GrantHandle>> {
        let sessions = self.session.sessions.upgrade();
        let sessions = sessions.ok_or_else(|| Error::invalid("import", "the endpoint is closed"))?;
        let ticket = self.ticket.as_deref().map(Ticket::decode).transpose()?;
        let ticket = ticket.ok_or_else(|| Error::new(Kind::Internal, "import", "a claim is not renewed"))?;
        let session = sessions.contact(&ticket, self.session.medium, self.session.shares, (until, until))?;
        let mut imported = session.import(&[&ticket], None, until)?.wait()?;
        let granted = imported.outcomes.pop().unwrap_or_else(|| Err(stale("import")))?;
        Ok(granted.1)
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Sends the owner a query about the path of that number; the descriptors come from an owner on this host only. Blocks.
    pub(crate) fn query(&self, path: u8, body: Vec<u8>, until: Instant) -> Result<QueryReply> {
        self.session.query(wire::Query { handle: self.handle, path, body }, until)
    }

    /// Sends the owner a hint about the path of that number: it does not reply.
    pub(crate) fn hint(&self, path: u8, body: Vec<u8>) -> Result<()> {
        self.session.send_one_way(wire::Query { handle: self.handle, path, body })
    }

    /// Says to the owner that this side has nothing in flight on that path any more. That holds for all imports of the same ticket: the
    /// last of them to let go says it.
    pub(crate) fn give_back(&self, path: u8) -> Result<()> {
        if self.session.others_have_let_go(self) { self.hint(path, Vec::new()) } else { Ok(()) }
    }

    /// Notifies the borrower when the owner wants the region back.
    pub(crate) fn borrow_by(&self, borrowing: Weak<dyn Borrowing>) {
        self.session.borrows(self, borrowing);
    }

    /// Whether the owner has taken the region back; false also where that is not to be seen from here.
    pub(crate) fn is_revoked(&self) -> bool {
        self.row().is_some_and(|row| !row.shows(self.generation))
    }

    /// Refuses where owner and user do not share memory.
    pub(crate) fn local_fence(&self) -> Result<()> {
        self.session.local().map(|_| ())
    }

    /// The owner's segment, mapped here.
    pub(crate) fn mapping(&self, segment: &SegmentRef, writable: bool) -> Result<Arc<Mapping>> {
        let local = self.session.local()?;
        local.mappings.find(segment.id, writable).ok_or_else(|| {
            Error::new(Kind::Unavailable, "import", "the owner's shared memory could not be mapped here")
        })
    }

    /// Runs a copy while the owner's row is pinned: `Stale` where it was revoked before, or during the copy.
    pub(crate) fn pinned<T>(&self, op: &'static str, copy: impl FnOnce(&Row) -> Result<T>) -> Result<T> {
        let local = self.session.local()?;
        let row = local.table.row(self.row).ok_or_else(|| Error::protocol(op, "the grant names no row"))?;
        if let Some(slot) = LifePage::thread_slot() {
            match local.pins.pin_thread(slot, row, self.generation) {
                Ok(pin) => return self.copy(op, row, copy, || pin.still_valid(row)),
                Err(PinError::Stale) => return Err(stale(op)),
                Err(PinError::Busy) => {}
            }
        }
        match local.pins.pin_process(row, self.generation) {
            Ok(pin) => self.copy(op, row, copy, || pin.still_valid(row)),
            Err(PinError::Stale) => Err(stale(op)),
            Err(PinError::Busy) => Err(Error::new(Kind::Exhausted, op, "too many copies hold a pin at once")),
        }
    }

    /// The region's row in the owner's table, as far as owner and user share memory.
    #[inline]
    pub(crate) fn row(&self) -> Option<&Row> {
        self.session.shared()?.table.row(self.row)
    }

    /// Pins the owner's row for long. Holders of one region share a pin, which is released with the last of them.
    pub(crate) fn hold(&self, op: &'static str) -> Result<Arc<ProcessPin>> {
        let local = self.session.local()?;
        let row = self.row().ok_or_else(|| Error::protocol(op, "the grant names no row"))?;
        let mut held = local.held.lock();
        let pin = match held.get(&self.generation).and_then(Weak::upgrade) {
            // It was confirmed when it was made; the check is whether the region has been revoked since.
            Some(pin) if pin.still_valid(row) => pin,
            Some(_) => return Err(stale(op)),
            None => match local.pins.pin_long(row, self.generation) {
                Ok(pin) => {
                    let pin = Arc::new(pin);
                    held.retain(|_, pin| pin.strong_count() > 0);
                    held.insert(self.generation, Arc::downgrade(&pin));
                    pin
                }
                Err(PinError::Stale) => return Err(stale(op)),
                Err(PinError::Busy) => {
                    return Err(Error::new(
                        Kind::Exhausted,
                        op,
                        format!("{LONG_SLOTS} regions of this owner are pinned, which is the limit"),
                    ));
                }
            },
        };
        drop(held);
        // After the pin, as for a copy.
        self.session.alive()?;
        Ok(pin)
    }

    fn copy<T>(
        &self,
        op: &'static str,
        row: &Row,
        copy: impl FnOnce(&Row) -> Result<T>,
        still_valid: impl FnOnce() -> bool,
    ) -> Result<T> {
        // After the pin: a session that says goodbye has looked for pins after it was over.
        self.session.alive()?;
        let outcome = copy(row);
        if still_valid() { outcome } else { Err(stale(op)) }
    }
}

impl Drop for GrantHandle {
    fn drop(&mut self) {
        if !crate::fork::in_child() {
            let _ = self.session.send_one_way(wire::Release { handle: self.handle });
        }
    }
}
