//! What is registered with a communicator, buffers and windows, in a list that outlives it.
//!
//! A handle names a list and a place in it, and owns nothing: to count owners takes longer than the rest of a registration. Lists
//! and their places are never freed, but used again by later communicators, and numbers show whether a place is still the
//! handle's. While there is something in a list, the list keeps its communicator.
#![allow(unsafe_code, reason = "places are written by the thread inside their list")]

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use towline_sys::nccl::Slot;

use super::comm::Core;
use super::turn::Turn;
use crate::memory::Buffer;
use crate::{Error, Result};

/// NCCL takes one call at a time for a communicator: the thread inside the list may call.
pub(super) type List = &'static Turn<Registered>;

/// Lists that no communicator uses.
static FREE: Mutex<Vec<List>> = Mutex::new(Vec::new());

/// From so many on, one is used again also where it suits another thread better.
const MANY: usize = 64;

/// A list for a new communicator.
pub(super) fn list() -> List {
    let mut free = FREE.lock();
    let fits = free.iter().position(|list| list.suits());
    let fits = fits.or_else(|| (free.len() >= MANY).then_some(0));
    match fits {
        Some(at) => free.swap_remove(at),
        None => Box::leak(Box::new(Turn::new(Registered::default()))),
    }
}

/// Gives a list back; its communicator is gone, and nothing is in it.
pub(super) fn give_back(list: List) {
    FREE.lock().push(list);
}

/// A place in a list, for one registration after the other.
pub(super) struct Place {
    /// Of the registration that is here: even while it is open, one more while it is being closed, two more from then on.
    number: AtomicU64,
    list: List,
    held: UnsafeCell<Held>,
}

// SAFETY: what is held is reached through the place's list only, and one thread at a time is inside of that.
unsafe impl Sync for Place {}

/// What is registered.
#[derive(Default)]
struct Held {
    /// NCCL's handle.
    handle: usize,
    memory: Option<Buffer>,
    /// Where it is a window.
    window: Option<Shape>,
    /// Where NCCL writes the handle, if it did not come at once.
    late: Option<Slot>,
    /// The next place that is free, where this one is.
    next: Option<&'static Place>,
}

/// The memory of a window.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) addr: usize,
    pub(super) size: usize,
    pub(super) flags: u32,
}

/// Names a registration.
#[derive(Clone, Copy)]
pub(super) struct Key {
    place: &'static Place,
    number: u64,
}

impl Key {
    /// Whether nobody has begun to close it. Any thread, at any time.
    #[inline]
    pub(super) fn is_open(self) -> bool {
        self.place.number.load(Ordering::Acquire) == self.number
    }

    /// The list that it is in.
    #[inline]
    pub(super) fn list(self) -> List {
        self.place.list
    }
}

/// A key, or why there is none, in two registers. A `Result` of the two would go through memory.
#[must_use]
pub(super) struct Answer {
    place: Option<&'static Place>,
    /// The key's number, or the address of an error in a box.
    word: u64,
}

impl Answer {
    #[inline]
    pub(super) fn into_result(self) -> Result<Key> {
        match self.place {
            Some(place) => Ok(Key { place, number: self.word }),
            None => Err(self.into_error()),
        }
    }

    #[cold]
    #[inline(never)]
    fn into_error(self) -> Error {
        // SAFETY: a result without a place was made of such a box, and is taken apart once.
        unsafe { *Box::from_raw(ptr::with_exposed_provenance_mut::<Error>(self.word as usize)) }
    }
}

impl From<Key> for Answer {
    #[inline]
    fn from(key: Key) -> Answer {
        Answer { place: Some(key.place), word: key.number }
    }
}

impl From<Error> for Answer {
    #[cold]
    fn from(error: Error) -> Answer {
        Answer { place: None, word: Box::into_raw(Box::new(error)).expose_provenance() as u64 }
    }
}

impl From<Result<Key>> for Answer {
    fn from(made: Result<Key>) -> Answer {
        made.map_or_else(Answer::from, Answer::from)
    }
}

/// What was registered, and is not in the list any more.
pub(super) struct Taken {
    handle: usize,
    late: Option<Slot>,
    pub(super) is_window: bool,
    pub(super) memory: Buffer,
}

impl Taken {
    /// NCCL's handle; 0 where there is none.
    pub(super) fn handle(&self) -> usize {
        self.late.as_ref().map_or(self.handle, Slot::handle)
    }
}

/// What is registered, by its places. A place is used again, and then has another number: a handle that was closed with its
/// communicator does not find a later one.
#[derive(Default)]
pub(super) struct Registered {
    places: Vec<&'static Place>,
    free: Option<&'static Place>,
    /// The communicator, from its first registration on and while others use it too.
    core: Option<Arc<Core>>,
    /// The same from when nobody uses it any more but through what is registered, and how much that is.
    left: Option<(Arc<Core>, usize)>,
    /// The free places, while there is no communicator: who finds a free one need not ask for that.
    spare: Option<&'static Place>,
}

impl Registered {
    /// Counted when it is asked for, and not at every registration.
    pub(super) fn len(&self) -> usize {
        self.used().count()
    }

    fn used(&self) -> impl Iterator<Item = &'static Place> {
        self.places.iter().copied().filter(|place| self.held(place).memory.is_some())
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        let key = |place: &'static Place| Key { place, number: place.number.load(Ordering::Relaxed) & !1 };
        self.used().map(key).collect()
    }

    #[inline]
    #[allow(clippy::unused_self, reason = "the thread that has the list is inside of it")]
    fn held(&self, place: &'static Place) -> &Held {
        // SAFETY: the place is one of this list, and the result lives as long as a borrow of what only one thread is inside of.
        unsafe { &*place.held.get() }
    }

    #[inline]
    #[allow(clippy::unused_self, reason = "as above")]
    fn held_mut(&mut self, place: &'static Place) -> &mut Held {
        // SAFETY: as above, and the list is borrowed mutably.
        unsafe { &mut *place.held.get() }
    }

    /// A place for one more, where there is one and a communicator.
    #[inline]
    pub(super) fn free(&self) -> Option<&'static Place> {
        self.free
    }

    /// A place for one more, to be filled before this thread leaves the list.
    #[inline]
    pub(super) fn room(&mut self, core: &Arc<Core>) -> &'static Place {
        match self.free {
            Some(place) => place,
            None => self.make_room(core),
        }
    }

    #[cold]
    #[inline(never)]
    fn make_room(&mut self, core: &Arc<Core>) -> &'static Place {
        self.core.get_or_insert_with(|| Arc::clone(core));
        self.free = self.spare.take();
        self.free.get_or_insert_with(|| {
            let (number, held) = (AtomicU64::new(0), UnsafeCell::default());
            let place: &'static Place = Box::leak(Box::new(Place { number, list: core.calling, held }));
            self.places.push(place);
            place
        })
    }

    /// Puts a buffer or a window into its place.
    #[inline]
    pub(super) fn fill(
        &mut self,
        place: &'static Place,
        handle: usize,
        memory: Buffer,
        window: Option<Shape>,
    ) -> Key {
        let held = self.held_mut(place);
        held.handle = handle;
        // There is none in a place that is free.
        if window.is_some() {
            held.window = window;
        }
        // Nor this.
        std::mem::forget(held.memory.replace(memory));
        self.free = self.held(place).next;
        Key { place, number: place.number.load(Ordering::Relaxed) }
    }

    /// Puts a window that is going to be registered into its place.
    pub(super) fn fill_later(
        &mut self,
        place: &'static Place,
        memory: Buffer,
        shape: Shape,
        slot: Slot,
    ) -> Key {
        self.held_mut(place).late = Some(slot);
        self.fill(place, 0, memory, Some(shape))
    }

    /// NCCL's handle of a buffer that is open, or 0.
    pub(super) fn handle(&self, key: Key) -> usize {
        if key.is_open() { self.held(key.place).handle } else { 0 }
    }

    /// The memory of what is open.
    pub(super) fn find(&self, key: Key) -> Option<&Buffer> {
        if key.is_open() { self.held(key.place).memory.as_ref() } else { None }
    }

    /// The windows that are there.
    pub(super) fn windows(&self) -> impl Iterator<Item = Shape> {
        self.used().filter_map(|place| self.held(place).window)
    }

    /// The communicator of what is registered, where others use it too.
    #[inline]
    pub(super) fn used_core(&self) -> Option<&Arc<Core>> {
        self.core.as_ref()
    }

    /// The communicator of what is registered.
    pub(super) fn core(&self) -> Option<&Arc<Core>> {
        self.core.as_ref().or(self.left.as_ref().map(|(core, _)| core))
    }

    /// Lets nobody use it any more; false where it is not there.
    pub(super) fn begin_to_close(&mut self, key: Key) -> bool {
        let number = &key.place.number;
        let here = number.load(Ordering::Relaxed) & !1 == key.number;
        if here {
            number.store(key.number + 1, Ordering::Release);
        }
        here
    }

    /// NCCL's handle, whether it is of a window (which a buffer is not asked), and the memory; once, and only where the handle came at
    /// once. The caller drops the memory: what need not be dropped where something unwinds is kept in registers.
    #[inline(always)]
    pub(super) fn take_now<const WINDOW: bool>(
        &mut self,
        key: Key,
    ) -> Option<(usize, bool, ManuallyDrop<Buffer>)> {
        let (place, free) = (key.place, self.free);
        let held = self.held_mut(place);
        if !key.is_open() || (WINDOW && held.late.is_some()) {
            return None;
        }
        let memory = held.memory.take();
        debug_assert!(memory.is_some(), "what is open is there");
        // SAFETY: a place that has the number of a key holds what the key names.
        let memory = ManuallyDrop::new(unsafe { memory.unwrap_unchecked() });
        let (handle, is_window) = (held.handle, WINDOW && held.window.take().is_some());
        held.next = free;
        self.free_again(key);
        Some((handle, is_window, memory))
    }

    #[inline]
    fn free_again(&mut self, key: Key) {
        key.place.number.store(key.number + 2, Ordering::Release);
        self.free = Some(key.place);
    }

    /// What was registered, once, and the communicator.
    pub(super) fn take(&mut self, key: Key) -> Option<(Taken, &Arc<Core>)> {
        if key.place.number.load(Ordering::Relaxed) & !1 != key.number {
            return None;
        }
        let free = self.free;
        let held = self.held_mut(key.place);
        let memory = held.memory.take()?;
        held.next = free;
        let (late, is_window) = (held.late.take(), held.window.take().is_some());
        let taken = Taken { handle: held.handle, late, is_window, memory };
        self.free_again(key);
        if let Some((_, len)) = &mut self.left {
            *len -= 1;
        }
        Some((taken, self.core()?))
    }

    /// Nobody uses the communicator any more; the result is dropped outside of the list.
    pub(super) fn leave(&mut self) -> Option<Arc<Core>> {
        let len = self.len();
        self.left = self.core.take().map(|core| (core, len));
        self.unused()
    }

    /// The communicator, where the list need not keep it any more; the result is dropped outside of the list.
    pub(super) fn unused(&mut self) -> Option<Arc<Core>> {
        let (core, _) = self.left.take_if(|(_, len)| *len == 0)?;
        self.spare = self.free.take();
        Some(core)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn an_answer_gives_back_the_error_it_was_made_of() {
        let answer = Answer::from(Error::new(Kind::Exhausted, "register_buffer", "no room on purpose"));
        let error = answer.into_result().err();
        let said = error.map(|error| (error.kind(), error.message().to_owned()));
        assert_eq!(said, Some((Kind::Exhausted, "no room on purpose".to_owned())));
    }
}
