//! The tickets that a peer has been granted, by their handles.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};

use crate::budget::Charge;
use crate::region::{Deed, Served};
use crate::session::reply::Lending;
use crate::sync::lock;
use crate::ticket::Claims;
use crate::{Error, Kind};

/// What a handle of the peer stands for.
pub(in crate::session) struct Granting {
    pub(in crate::session) served: Arc<Served>,
    pub(in crate::session) claims: Claims,
    pub(in crate::session) lent: Lending,
    pub(super) _charge: Charge,
}

/// What an owner keeps of a grant, besides what it keeps of the region for its session.
pub(super) const GRANT: usize =
    size_of::<Granting>() + 4 * (size_of::<(u32, Held)>() + size_of::<(u64, u32)>()) + 256;

impl Granting {
    pub(in crate::session) fn count(&self, deed: Deed) {
        self.served.count(deed);
    }
}

struct Held {
    granting: Arc<Granting>,
    /// By which number the ticket is found again.
    ticket: u64,
    /// How often it was granted and not given back.
    times: u32,
}

/// The grants of one session.
#[derive(Default)]
pub(super) struct Grants(Mutex<All>);

#[derive(Default)]
struct All {
    held: HashMap<u32, Held>,
    /// The handle of each ticket, by a number that nobody else can foretell.
    tickets: HashMap<u64, u32>,
    hasher: RandomState,
    last: u32,
}

impl All {
    /// A handle that is not in use: after 2^32 of them the first may still be.
    fn free_handle(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            if !self.held.contains_key(&self.last) {
                return self.last;
            }
        }
    }
}

impl Grants {
    pub(super) fn count(&self) -> usize {
        lock(&self.0).held.len()
    }

    pub(super) fn find(&self, handle: u32) -> Option<Arc<Granting>> {
        lock(&self.0).held.get(&handle).map(|held| Arc::clone(&held.granting))
    }

    /// The handle that this ticket has already, once more.
    pub(super) fn again(&self, ticket: &[u8], claims: &Claims) -> Option<u32> {
        let mut all = lock(&self.0);
        let handle = *all.tickets.get(&all.hasher.hash_one(ticket))?;
        let held = all.held.get_mut(&handle).filter(|held| held.granting.claims == *claims)?;
        held.times = held.times.checked_add(1)?;
        Some(handle)
    }

    /// Adds a grant of a ticket under a handle of its own.
    pub(super) fn add(&self, ticket: &[u8], granting: Granting) -> u32 {
        let mut all = lock(&self.0);
        let handle = all.free_handle();
        let ticket = all.hasher.hash_one(ticket);
        all.tickets.insert(ticket, handle);
        all.held.insert(handle, Held { granting: Arc::new(granting), ticket, times: 1 });
        handle
    }

    /// Gives one back; returns it where that was the last time that it was held.
    pub(super) fn release(&self, handle: u32) -> Option<Arc<Granting>> {
        let mut all = lock(&self.0);
        let held = all.held.get_mut(&handle)?;
        held.times -= 1;
        if held.times > 0 {
            return None;
        }
        let held = all.held.remove(&handle)?;
        if all.tickets.get(&held.ticket) == Some(&handle) {
            all.tickets.remove(&held.ticket);
        }
        if all.held.len() * 4 < all.held.capacity() {
            let room = all.held.len() * 2;
            all.held.shrink_to(room);
            all.tickets.shrink_to(room);
        }
        Some(held.granting)
    }

    /// Takes all of them out.
    pub(super) fn take(&self) -> Vec<Arc<Granting>> {
        let all = std::mem::take(&mut *lock(&self.0));
        all.held.into_values().map(|held| held.granting).collect()
    }

    /// The best of those that are worth something, as `look` sees it.
    pub(super) fn best<T>(
        &self,
        look: impl Fn(&Granting) -> Option<T>,
        rank: impl Fn(&T) -> u64,
    ) -> Option<T> {
        let all = lock(&self.0);
        all.held.values().filter_map(|held| look(&held.granting)).max_by_key(rank)
    }

    /// The next handle will be this one, if it is free.
    #[cfg(test)]
    pub(super) fn begin_at(&self, handle: u32) {
        lock(&self.0).last = handle.wrapping_sub(1);
    }
}

/// The error of a handle that stands for nothing.
pub(super) fn no_such_grant(op: &'static str) -> Error {
    Error::new(Kind::NotFound, op, "there is no such grant")
}
