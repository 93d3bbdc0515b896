//! Whether an owner is applying what came over a connection right now, as the one who sent it sees it.
//!
//! An owner looks whether its peer still stands by a write, and then copies. A process can be stopped between the two for any
//! time. So it says so first, in a place of the [page](PinPage) that it shares with a peer on the same host; a peer that gives a
//! connection up says that first, and then looks. Whoever comes second sees the other: `protocol` has the order of it.

use std::sync::{Arc, Mutex};

use crate::fence::pins::{Applied, PLACES, PinPage};
use crate::fence::protocol::{self, APPLYING_BITS, Machine};
use crate::sync::lock;

/// The place of one connection, as either side sees it.
#[derive(Clone)]
pub(crate) struct Place {
    page: Arc<PinPage>,
    index: u32,
    number: u64,
}

impl Place {
    /// Initiator: the place that the owner has named for a connection that was just made.
    pub(crate) fn of(page: &Arc<PinPage>, index: u32) -> Option<Place> {
        let number =
            page.applied(index)?.applying.load(std::sync::atomic::Ordering::Acquire) >> APPLYING_BITS;
        (number != 0).then(|| Place { page: Arc::clone(page), index, number })
    }

    /// Initiator: gives the connection up.
    pub(crate) fn give_up(&self) {
        if let Some(words) = self.words() {
            protocol::give_up::<Machine>(&words.over, self.number);
        }
    }

    /// Initiator, after it has given the connection up: whether the owner is still in the middle of something that came over it.
    pub(crate) fn is_applying(&self) -> bool {
        self.words().is_some_and(|words| protocol::is_applying::<Machine>(&words.applying, self.number))
    }

    fn words(&self) -> Option<&Applied> {
        self.page.applied(self.index)
    }
}

/// The places that an owner gives to the connections of one peer.
#[derive(Default)]
pub(crate) struct Places(Mutex<Taken>);

#[derive(Default)]
struct Taken {
    places: u64,
    last: u64,
}

impl Places {
    /// A place for one more connection; none where all are taken.
    pub(crate) fn take(self: &Arc<Self>, page: &Arc<PinPage>) -> Option<Desk> {
        let mut taken = lock(&self.0);
        let index = (!taken.places).trailing_zeros();
        let words = page.applied(index).filter(|_| index < PLACES)?;
        taken.places |= 1 << index;
        taken.last += 1;
        // Nobody is at it: the desk that had it before went when its last user had.
        words.applying.store(taken.last << APPLYING_BITS, std::sync::atomic::Ordering::Release);
        let place = Place { page: Arc::clone(page), index, number: taken.last };
        Some(Desk { place, places: Arc::clone(self) })
    }
}

/// A connection's place on the owner's side; given back on drop.
pub(crate) struct Desk {
    place: Place,
    places: Arc<Places>,
}

impl Desk {
    /// Which place it is, for the initiator.
    pub(crate) fn index(&self) -> u32 {
        self.place.index
    }

    /// Says that what came over the connection is being applied, until the guard is dropped; none where the initiator has
    /// given the connection up.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Applying<'_>> {
        let words = self.place.words()?;
        let wanted = protocol::enter::<Machine>(&words.applying, &words.over, self.place.number);
        let applying = Applying(words);
        wanted.then_some(applying)
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        lock(&self.places.0).places &= !(1 << self.place.index);
    }
}

/// The owner applies something. Dropped when that is done.
pub(crate) struct Applying<'a>(&'a Applied);

impl Drop for Applying<'_> {
    #[inline]
    fn drop(&mut self) {
        protocol::leave::<Machine>(&self.0.applying);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pages() -> (Arc<PinPage>, Arc<PinPage>) {
        let mut page = PinPage::create().unwrap();
        let mapped = PinPage::map(page.take_fd().unwrap()).unwrap();
        (Arc::new(page), Arc::new(mapped))
    }

    #[test]
    fn what_was_given_up_is_not_entered_and_what_was_entered_is_seen() {
        let (owners, users) = pages();
        let places = Arc::new(Places::default());
        let (first, second) = (places.take(&owners).unwrap(), places.take(&owners).unwrap());
        let (one, two) =
            (Place::of(&users, first.index()).unwrap(), Place::of(&users, second.index()).unwrap());
        let inside = first.enter().unwrap();
        one.give_up();
        assert!(one.is_applying() && !two.is_applying());
        assert!(first.enter().is_none(), "entered once more");
        assert!(second.enter().is_some());
        assert!(one.is_applying(), "who was refused has taken the other's mark along");
        drop(inside);
        assert!(!one.is_applying());
    }

    #[test]
    fn a_place_that_serves_another_connection_says_nothing_about_the_one_before() {
        let (owners, users) = pages();
        let places = Arc::new(Places::default());
        let first = places.take(&owners).unwrap();
        let one = Place::of(&users, first.index()).unwrap();
        one.give_up();
        drop(first);
        let second = places.take(&owners).unwrap();
        let inside = second.enter().unwrap();
        assert!(!one.is_applying());
        let two = Place::of(&users, second.index()).unwrap();
        two.give_up();
        assert!(two.is_applying());
        drop(inside);
        assert!(!two.is_applying());
    }

    #[test]
    fn there_are_as_many_places_as_the_page_has() {
        let (owners, users) = pages();
        let places = Arc::new(Places::default());
        let desks: Vec<_> = std::iter::from_fn(|| places.take(&owners)).collect();
        assert_eq!(desks.len(), PLACES as usize);
        assert!(Place::of(&users, PLACES).is_none());
        drop(desks);
        assert!(places.take(&owners).is_some());
    }
}
