//! Allocations of other processes that are open here, and who needs them.
#![allow(unsafe_code, reason = "opens and closes memory of other processes")]

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::words::{Answer, Form, Part};
use super::{NUMBER, OP, unavailable};
use crate::cuda::{Gpu, failed, not_given_back};
use crate::fence::pins::ProcessPin;
use crate::identity::Incarnation;
use crate::region::stale;
use crate::session::{Borrowing, GrantHandle};
use crate::wire::Grant;
use crate::{Error, Result, fork, runtime};

/// The owner wants the region back, or it was closed: the top bit of the count of what is in flight.
const RECALLED: usize = 1 << (usize::BITS - 1);

/// So many allocations stay open after the last remote that used them is gone: opening one takes half a millisecond.
const KEPT: usize = 32;

static LINGERING: Mutex<VecDeque<Arc<Borrow>>> = Mutex::new(VecDeque::new());

/// What is open, by its owner and CUDA's numbers of the memory.
static OPENED: Mutex<Option<HashMap<Key, Weak<Opened>>>> = Mutex::new(None);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    owner: Incarnation,
    memory: Memory,
}

/// Memory of a process, by numbers that it never gives to other memory: all of them, since what is made of several numbers may be
/// the same for others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Memory {
    Whole { buffer: u64, len: u64 },
    Parts(Vec<Part>),
}

impl Memory {
    /// None where the driver does not tell all numbers: the same addresses may have other memory the next time.
    fn of(answer: &Answer) -> Option<Memory> {
        match &answer.form {
            Form::Handle { buffer: 0, .. } => None,
            Form::Handle { buffer, .. } => Some(Memory::Whole { buffer: *buffer, len: answer.len }),
            Form::Descriptors { parts, .. } if parts.iter().any(|part| part.block == 0) => None,
            Form::Descriptors { parts, .. } => Some(Memory::Parts(parts.clone())),
        }
    }
}

/// An allocation of another process, open here; closed when it is dropped.
pub(super) struct Opened {
    pub(super) gpu: Arc<Gpu>,
    /// The address of its first byte.
    pub(super) base: u64,
    len: u64,
    /// The lengths of its parts, where it is mapped from descriptors.
    parts: Option<Vec<u64>>,
    users: Mutex<Users>,
}

#[derive(Default)]
struct Users {
    borrows: Vec<Weak<Borrow>>,
    /// The pin that keeps the owner from freeing the allocation, and whose it is.
    anchor: Option<(Weak<Borrow>, Arc<ProcessPin>)>,
}

impl Opened {
    /// Opens what the reply describes. The caller holds a pin on a region in it.
    fn open(gpu: &Arc<Gpu>, answer: &Answer, files: Vec<OwnedFd>) -> Result<Opened> {
        let entered = gpu.enter(OP)?;
        let users = Mutex::default();
        let opened = |base, parts| Opened { gpu: Arc::clone(gpu), base, len: answer.len, parts, users };
        let lengths = match &answer.form {
            Form::Handle { handle, .. } => {
                // SAFETY: the owner has just given the handle, and keeps the memory while the caller's pin is held.
                let base = unsafe { entered.open_ipc(handle) }.map_err(refused)?;
                let opened = opened(base, None);
                // Behind it may lie memory of this process.
                let facts = entered.cuda().pointer_facts(base).map_err(|error| failed(OP, error))?;
                let end =
                    facts.filter(|facts| facts.start <= base).map(|facts| facts.start.checked_add(facts.len));
                if end.flatten().is_none_or(|end| end - base < answer.len) {
                    return Err(Error::protocol(OP, "the owner's allocation is shorter than it says"));
                }
                return Ok(opened);
            }
            Form::Descriptors { parts, .. } => parts,
        };
        let sum = lengths.iter().try_fold(0u64, |sum, part| sum.checked_add(part.len));
        if files.len() != lengths.len() || sum != Some(answer.len) {
            return Err(Error::protocol(OP, "the parts of the owner's memory do not add up"));
        }
        let cuda = entered.cuda();
        let base = cuda.reserve_addresses(answer.len as usize).map_err(|error| failed(OP, error))?;
        // From here on the value undoes what was done.
        let mut opened = opened(base, Some(Vec::new()));
        let mut at = base;
        for (file, Part { len, .. }) in files.iter().zip(lengths) {
            let allocation = cuda.import_allocation(file.as_fd()).map_err(refused)?;
            // SAFETY: the addresses were reserved above, and nothing is mapped there yet.
            unsafe { allocation.map(at, *len as usize) }.map_err(refused)?;
            if let Some(parts) = &mut opened.parts {
                parts.push(*len);
            }
            entered.allow_access(at, *len as usize).map_err(|error| failed(OP, error))?;
            at += len;
        }
        Ok(opened)
    }

    /// From now on this import needs it. The pin is kept where there is none yet.
    fn join(&self, borrow: &Arc<Borrow>, pin: Arc<ProcessPin>) {
        let mut users = self.users.lock();
        users.borrows.retain(|one| one.strong_count() > 0);
        users.borrows.push(Arc::downgrade(borrow));
        users.anchor.get_or_insert_with(|| (Arc::downgrade(borrow), pin));
    }

    /// That one needs it no more: another one's pin takes the place of its own. Gives back the pin that is to end when this
    /// process has the allocation closed, or another pin speaks for it.
    fn leave(&self, borrow: &Borrow) -> Option<Arc<ProcessPin>> {
        // Dropped behind the lock, which the drop of the last reference to one of them wants.
        let mut others: Vec<Arc<Borrow>> = Vec::new();
        let mut users = self.users.lock();
        users.borrows.retain(|one| one.strong_count() > 0 && !std::ptr::eq(one.as_ptr(), borrow));
        let anchored = |users: &Users| {
            users.anchor.as_ref().is_some_and(|(whose, _)| std::ptr::eq(whose.as_ptr(), borrow))
        };
        if !anchored(&users) {
            return None;
        }
        let (_, pin) = users.anchor.take()?;
        others.extend(users.borrows.iter().filter_map(Weak::upgrade));
        users.anchor = others
            .iter()
            .find_map(|other| other.handle.hold(OP).ok().map(|held| (Arc::downgrade(other), held)));
        drop(users);
        Some(pin)
    }
}

/// The driver does not open what the owner has described.
fn refused(error: towline_sys::Error) -> Error {
    let error = failed(OP, error);
    let message = format!("the owner's GPU memory cannot be opened here: {}", error.message());
    Error::new(error.kind(), OP, message).caused_by(error)
}

/// Drops it elsewhere, where its last reference may be at hand inside one of its own methods.
fn forget_later(borrow: Arc<Borrow>) {
    if let Err(refused) = runtime::pool().spawn(Box::new(move || drop(borrow))) {
        drop(refused);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        let closed = self.gpu.enter("close GPU memory").and_then(|entered| {
            let cuda = entered.cuda();
            // SAFETY: opened by this value; the copier keeps it alive.
            let closed = unsafe {
                match &self.parts {
                    None => entered.close_ipc(self.base),
                    Some(parts) => {
                        let mut at = self.base;
                        let unmapped = parts.iter().try_for_each(|len| {
                            let here = at;
                            at += len;
                            cuda.unmap(here, *len as usize)
                        });
                        unmapped.and_then(|()| cuda.free_addresses(self.base, self.len as usize))
                    }
                }
            };
            closed.map_err(|error| failed("close GPU memory", error))
        });
        if let Err(error) = closed {
            not_given_back("GPU memory of another process", &error);
        }
    }
}

/// One grant that needs an open allocation.
pub(super) struct Borrow {
    handle: Arc<GrantHandle>,
    in_flight: AtomicUsize,
    opened: Mutex<Option<Arc<Opened>>>,
    me: Weak<Borrow>,
}

impl Borrow {
    pub(super) fn new(handle: &Arc<GrantHandle>) -> Arc<Borrow> {
        Arc::new_cyclic(|me| Borrow {
            handle: Arc::clone(handle),
            in_flight: AtomicUsize::new(0),
            opened: Mutex::new(None),
            me: me.clone(),
        })
    }

    /// Hears when the owner wants the region back.
    pub(super) fn listen(&self) {
        let me: Weak<dyn Borrowing> = self.me.clone();
        self.handle.borrow_by(me);
    }

    /// Opens what the owner has described, unless it is open; where in it the grant begins.
    pub(super) fn open(
        self: &Arc<Self>,
        gpu: &Arc<Gpu>,
        answer: &Answer,
        files: Vec<OwnedFd>,
        grant: &Grant,
    ) -> Result<u64> {
        let start = answer.start.checked_add(grant.offset);
        let inside = |start: &u64| start.checked_add(grant.length).is_some_and(|end| end <= answer.len);
        let start = start
            .filter(inside)
            .ok_or_else(|| Error::protocol(OP, "the grant reaches beyond the owner's allocation"))?;
        // From the pin on the owner keeps the memory, until it is let go below or when it is closed.
        let pin = self.handle.hold(OP)?;
        let owner = self.handle.session().owner().incarnation;
        let key = Memory::of(answer).map(|memory| Key { owner, memory });
        let mut all = OPENED.lock();
        let known = all.get_or_insert_default();
        known.retain(|_, opened| opened.strong_count() > 0);
        let opened = match key.as_ref().and_then(|key| known.get(key)).and_then(Weak::upgrade) {
            Some(opened) => opened,
            None => {
                let opened = Arc::new(Opened::open(gpu, answer, files)?);
                if let Some(key) = key {
                    known.insert(key, Arc::downgrade(&opened));
                }
                opened
            }
        };
        opened.join(self, pin);
        drop(all);
        *self.opened.lock() = Some(opened);
        // A recall that came before found nothing to close.
        if self.in_flight.load(Ordering::SeqCst) & RECALLED != 0 {
            self.close();
            return Err(stale(OP));
        }
        Ok(start)
    }

    /// Begins a copy: what is open stays so until the second result is dropped.
    pub(super) fn enter(self: &Arc<Self>, op: &'static str) -> Result<(Arc<Opened>, Entered)> {
        let before = self.in_flight.fetch_add(1, Ordering::SeqCst);
        let entered = Entered(Arc::clone(self));
        if before & RECALLED != 0 {
            self.handle.session().alive()?;
            return Err(stale(op));
        }
        let opened = self.opened.lock().clone();
        opened.map(|opened| (opened, entered)).ok_or_else(|| unavailable("the memory is not open here"))
    }

    /// Nothing is in flight and nothing begins any more: closes, and notifies the owner. May take a while.
    fn close(&self) {
        let opened = self.opened.lock().take();
        if let Some(opened) = opened {
            let pin = opened.leave(self);
            // In this order: the owner may free the memory once the pin is gone.
            drop(opened);
            drop(pin);
        }
        let lingering = {
            let mut all = LINGERING.lock();
            let at = all.iter().position(|one| std::ptr::eq(Arc::as_ptr(one), self));
            at.and_then(|at| all.remove(at))
        };
        // Where it fails, the session has ended, and the loan with it.
        let _ = self.handle.give_back(NUMBER);
        if let Some(one) = lingering {
            forget_later(one);
        }
    }

    /// [`close`](Self::close) where this thread may not wait. Not on the pool: the owner waits for this, and what is queued there
    /// before it may take longer than the owner does.
    fn close_elsewhere(&self) {
        let Some(this) = self.me.upgrade() else { return };
        let here = Arc::clone(&this);
        if let Err(error) = runtime::start_thread("close", "towline-close", move || this.close()) {
            tracing::debug!(%error, "GPU memory is closed by the thread at hand");
            here.close();
        }
    }
}

/// A copy is in flight.
pub(super) struct Entered(Arc<Borrow>);

impl Drop for Entered {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::SeqCst) == RECALLED + 1 {
            self.0.close_elsewhere();
        }
    }
}

impl Borrowing for Borrow {
    fn recalled(self: Arc<Self>) {
        if self.in_flight.fetch_or(RECALLED, Ordering::SeqCst) == 0 {
            self.close_elsewhere();
        }
    }

    /// Asked when the session is about to say goodbye: what is open is closed before.
    fn is_idle(&self) -> bool {
        match self.in_flight.compare_exchange(0, RECALLED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => {
                self.close();
                true
            }
            Err(in_flight) => in_flight & !RECALLED == 0 && self.opened.lock().is_none(),
        }
    }

    fn has_let_go(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == RECALLED && self.opened.lock().is_none()
    }
}

impl Drop for Borrow {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        if let Some(opened) = self.opened.lock().take() {
            let pin = opened.leave(self);
            drop(opened);
            drop(pin);
        }
    }
}

/// A remote's hold on what is open. When it is dropped, the last one for an allocation lingers for a while.
pub(super) struct Kept(pub(super) Arc<Borrow>);

impl Drop for Kept {
    fn drop(&mut self) {
        if fork::in_child() || self.0.handle.session().alive().is_err() {
            return;
        }
        let alone = match &*self.0.opened.lock() {
            Some(opened) => {
                opened.users.lock().borrows.iter().filter(|one| one.strong_count() > 0).count() == 1
            }
            None => false,
        };
        if !alone || self.0.in_flight.load(Ordering::SeqCst) & RECALLED != 0 {
            return;
        }
        let evicted = {
            let mut all = LINGERING.lock();
            all.push_back(Arc::clone(&self.0));
            if all.len() > KEPT { all.pop_front() } else { None }
        };
        drop(evicted);
        // A recall in between did not find it there.
        if self.0.in_flight.load(Ordering::SeqCst) & RECALLED != 0 {
            let mut all = LINGERING.lock();
            let gone = all.iter().position(|one| Arc::ptr_eq(one, &self.0)).and_then(|at| all.remove(at));
            drop(all);
            drop(gone);
        }
    }
}

impl std::fmt::Debug for Borrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Borrow").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(numbers: &[(u64, u64)]) -> Option<Memory> {
        let part = |&(buffer, block): &(u64, u64)| Part { len: 2 << 20, buffer, block };
        let (parts, all) = (numbers.iter().map(part).collect(), numbers.len() as u32);
        let (len, form) = ((numbers.len() as u64) << 21, Form::Descriptors { parts, all });
        Memory::of(&Answer { uuid: [0; 16], start: 0, len, form })
    }

    #[test]
    fn memory_of_other_parts_is_other_memory() {
        let parts = [(1, 7), (2, 8), (3, 9)];
        assert_eq!(memory(&parts), memory(&parts));
        for others in [&parts[..2], &[(1, 7), (2, 8), (3, 10)], &[(2, 8), (1, 7), (3, 9)]] {
            assert!(memory(others).is_some() && memory(others) != memory(&parts));
        }
    }

    #[test]
    fn parts_whose_numbers_mix_to_the_same_are_told_apart() {
        // One step of a usual way to mix numbers into 64 bits: the number of the block cancels that of the buffer.
        let mixed = |buffer: u64| {
            (0xcbf2_9ce4_8422_2325 ^ buffer).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29) ^ 0x5555
        };
        assert_ne!(memory(&[(1, mixed(1))]), memory(&[(2, mixed(2))]));
    }

    #[test]
    fn memory_with_a_part_that_has_no_number_is_not_known_again() {
        assert_eq!(memory(&[(1, 7), (2, 0), (3, 9)]), None);
    }
}
