//! The buffers that are registered with a communicator, in a list that outlives it.
//!
//! A handle names a list and a place in it, and owns nothing: to count owners takes longer than the rest of a registration. Lists
//! are never freed, but used again by later communicators, and numbers tell whether a place is still the handle's. While there
//! is a buffer in a list, the list keeps its communicator.

use std::sync::{Arc, Mutex};

use super::comm::Core;
use super::turn::Turn;
use crate::memory::Buffer;
use crate::sync::lock;

/// NCCL takes one call at a time for a communicator: whoever is inside the list may call.
pub(super) type List = &'static Turn<Buffers>;

/// Lists that no communicator uses.
static FREE: Mutex<Vec<List>> = Mutex::new(Vec::new());

/// From so many on, one is used again also where it suits another thread better.
const MANY: usize = 64;

/// A list for a new communicator.
pub(super) fn list() -> List {
    let mut free = lock(&FREE);
    let fits = free.iter().position(|list| list.suits());
    let fits = fits.or_else(|| (free.len() >= MANY).then_some(0));
    match fits {
        Some(at) => free.swap_remove(at),
        None => Box::leak(Box::new(Turn::new(Buffers::default()))),
    }
}

/// Gives a list back; its communicator is gone, and nothing is in it.
pub(super) fn give_back(list: List) {
    lock(&FREE).push(list);
}

/// What is registered, by its places. A place is used again, and then has another number: a handle that was closed with its
/// communicator does not find a later one.
#[derive(Default)]
pub(super) struct Buffers {
    places: Vec<Place>,
    free: Vec<u32>,
    /// The communicator, from its first registration until nobody uses it and nothing is registered.
    core: Option<Arc<Core>>,
    /// Nobody uses the communicator any more but through what is registered.
    left: bool,
}

struct Place {
    number: u32,
    /// NCCL's handle.
    handle: usize,
    memory: Option<Buffer>,
}

#[derive(Clone, Copy)]
pub(super) struct Key {
    place: u32,
    number: u32,
}

impl Buffers {
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        let places = self.places.iter().enumerate().filter(|(_, place)| place.memory.is_some());
        places.map(|(at, place)| Key { place: at as u32, number: place.number }).collect()
    }

    #[inline]
    pub(super) fn add(&mut self, core: &Arc<Core>, handle: usize, buffer: Buffer) -> Key {
        if self.core.is_none() {
            self.core = Some(Arc::clone(core));
        }
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { number: 0, handle: 0, memory: None });
            (self.places.len() - 1) as u32
        });
        let slot = &mut self.places[place as usize];
        (slot.handle, slot.memory) = (handle, Some(buffer));
        Key { place, number: slot.number }
    }

    pub(super) fn find(&self, key: Key) -> Option<&Buffer> {
        let place = self.places.get(key.place as usize).filter(|place| place.number == key.number)?;
        place.memory.as_ref()
    }

    /// The communicator of what is registered.
    pub(super) fn core(&self) -> Option<&Arc<Core>> {
        self.core.as_ref()
    }

    /// NCCL's handle and the memory, once, and the communicator.
    #[inline]
    pub(super) fn take(&mut self, key: Key) -> Option<(usize, Buffer, &Arc<Core>)> {
        let core = self.core.as_ref()?;
        let place = self.places.get_mut(key.place as usize).filter(|place| place.number == key.number)?;
        let memory = place.memory.take()?;
        place.number = place.number.wrapping_add(1);
        self.free.push(key.place);
        Some((place.handle, memory, core))
    }

    /// Nobody uses the communicator any more; the answer is dropped outside of the list.
    pub(super) fn leave(&mut self) -> Option<Arc<Core>> {
        self.left = true;
        self.unused()
    }

    /// The communicator, where the list need not keep it any more; the answer is dropped outside of the list.
    #[inline]
    pub(super) fn unused(&mut self) -> Option<Arc<Core>> {
        if !self.left || self.len() > 0 {
            return None;
        }
        self.left = false;
        self.core.take()
    }
}
