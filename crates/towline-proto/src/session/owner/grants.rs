//! The tickets that a peer has been granted, by their handles.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::Grant;
use crate::ticket::Claims;
use crate::{Error, Kind, Result};

struct Held<G> {
    grant: Arc<G>,
    /// By which number the ticket is found again.
    ticket: u64,
    /// How often it was granted and not given back.
    times: u32,
}

/// The grants of one session.
pub(super) struct Grants<G> {
    held: HashMap<u32, Held<G>>,
    /// The handle of each ticket, by a number that nobody else can foretell.
    tickets: HashMap<u64, u32>,
    hasher: RandomState,
    last: u32,
}

impl<G: Grant> Grants<G> {
    /// What one of them takes.
    pub(super) const COST: usize =
        size_of::<G>() + 4 * (size_of::<(u32, Held<G>)>() + size_of::<(u64, u32)>()) + 256;

    pub(super) fn new() -> Grants<G> {
        Grants { held: HashMap::new(), tickets: HashMap::new(), hasher: RandomState::new(), last: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.held.len()
    }

    pub(super) fn find(&self, handle: u32) -> Option<&Arc<G>> {
        self.held.get(&handle).map(|held| &held.grant)
    }

    pub(super) fn find_or_refuse(&self, op: &'static str, handle: u32) -> Result<&Arc<G>> {
        self.find(handle).ok_or_else(|| Error::new(Kind::NotFound, op, "there is no such grant"))
    }

    /// The handle that this ticket has already, once more.
    pub(super) fn again(&mut self, ticket: &[u8], claims: &Claims) -> Option<u32> {
        let handle = *self.tickets.get(&self.hasher.hash_one(ticket))?;
        let held = self.held.get_mut(&handle).filter(|held| held.grant.claims() == claims)?;
        held.times = held.times.checked_add(1)?;
        Some(handle)
    }

    /// Makes room for one more.
    pub(super) fn make_room(&mut self) -> Result<()> {
        let held = self.held.try_reserve(1);
        held.and_then(|()| self.tickets.try_reserve(1)).map_err(|cause| {
            let message = format!("no memory for {} grants", self.held.len() + 1);
            Error::new(Kind::Exhausted, "import", message).caused_by(cause)
        })
    }

    /// Adds a grant of a ticket under a handle of its own; there [is room](Self::make_room) for it.
    pub(super) fn add(&mut self, ticket: &[u8], grant: G) -> u32 {
        let handle = self.free_handle();
        let ticket = self.hasher.hash_one(ticket);
        self.tickets.insert(ticket, handle);
        self.held.insert(handle, Held { grant: Arc::new(grant), ticket, times: 1 });
        handle
    }

    /// A handle that is not in use: after 2^32 of them the first may still be.
    fn free_handle(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            if !self.held.contains_key(&self.last) {
                return self.last;
            }
        }
    }

    /// Gives one back; returns it where that was the last time that it was held.
    pub(super) fn release(&mut self, handle: u32) -> Option<Arc<G>> {
        let held = self.held.get_mut(&handle)?;
        held.times -= 1;
        if held.times > 0 {
            return None;
        }
        let held = self.held.remove(&handle)?;
        if self.tickets.get(&held.ticket) == Some(&handle) {
            self.tickets.remove(&held.ticket);
        }
        if self.held.len() * 4 < self.held.capacity() {
            let room = self.held.len() * 2;
            self.held.shrink_to(room);
            self.tickets.shrink_to(room);
        }
        Some(held.grant)
    }

    /// Takes all of them out.
    pub(super) fn take(&mut self) -> Vec<Arc<G>> {
        std::mem::replace(self, Grants::new()).held.into_values().map(|held| held.grant).collect()
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &G> {
        self.held.values().map(|held| &*held.grant)
    }

    /// The next handle will be this one, if it is free.
    pub(super) fn begin_at(&mut self, handle: u32) {
        self.last = handle.wrapping_sub(1);
    }
}
