//! Whether an owner is applying what came over a connection right now, as the one who sent it sees it.
//!
//! An owner looks whether its peer still stands by a write, and then copies. A process can be stopped between the two for any
//! time. So it says so first, in a slot of the [page](PinPage) that it shares with a peer on the same host; a peer that gives a
//! connection up says that first, and then looks. The side that comes second sees the other: `protocol` has the order of it.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::fence::pins::{APPLY_SLOTS, Applied, PinPage};
use crate::fence::protocol::{self, APPLYING_BITS, Machine};

/// The slot of one connection, as either side sees it.
#[derive(Clone)]
pub(crate) struct ApplySlotView {
    page: Arc<PinPage>,
    index: u32,
    number: u64,
}

impl ApplySlotView {
    /// Initiator: the slot that the owner has named for a connection that was just made.
    pub(crate) fn of(page: &Arc<PinPage>, index: u32) -> Option<ApplySlotView> {
        let number =
            page.applied(index)?.applying.load(std::sync::atomic::Ordering::Acquire) >> APPLYING_BITS;
        (number != 0).then(|| ApplySlotView { page: Arc::clone(page), index, number })
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

/// The slots that an owner gives to the connections of one peer.
#[derive(Default)]
pub(crate) struct ApplySlots(Mutex<Taken>);

#[derive(Default)]
struct Taken {
    slots: u64,
    last: u64,
}

impl ApplySlots {
    /// A slot for one more connection; `None` if all are taken.
    pub(crate) fn take(self: &Arc<Self>, page: &Arc<PinPage>) -> Option<ApplySlot> {
        let mut taken = self.0.lock();
        let index = (!taken.slots).trailing_zeros();
        let words = page.applied(index).filter(|_| index < APPLY_SLOTS)?;
        taken.slots |= 1 << index;
        taken.last += 1;
        // Nobody uses it: the `ApplySlot` that had it before was dropped after its last user.
        words.applying.store(taken.last << APPLYING_BITS, std::sync::atomic::Ordering::Release);
        let slot = ApplySlotView { page: Arc::clone(page), index, number: taken.last };
        Some(ApplySlot { slot, slots: Arc::clone(self) })
    }
}

/// A connection's slot on the owner's side; given back on drop.
pub(crate) struct ApplySlot {
    slot: ApplySlotView,
    slots: Arc<ApplySlots>,
}

impl ApplySlot {
    /// The number of the slot, for the initiator.
    pub(crate) fn index(&self) -> u32 {
        self.slot.index
    }

    /// Says that what came over the connection is being applied, until the guard is dropped; `None` if the initiator has
    /// given the connection up.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Applying<'_>> {
        let words = self.slot.words()?;
        let wanted = protocol::enter::<Machine>(&words.applying, &words.over, self.slot.number);
        let applying = Applying(words);
        wanted.then_some(applying)
    }
}

impl Drop for ApplySlot {
    fn drop(&mut self) {
        self.slots.0.lock().slots &= !(1 << self.slot.index);
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
        let slots = Arc::new(ApplySlots::default());
        let (first, second) = (slots.take(&owners).unwrap(), slots.take(&owners).unwrap());
        let (one, two) = (
            ApplySlotView::of(&users, first.index()).unwrap(),
            ApplySlotView::of(&users, second.index()).unwrap(),
        );
        let inside = first.enter().unwrap();
        one.give_up();
        assert!(one.is_applying() && !two.is_applying());
        assert!(first.enter().is_none(), "entered once more");
        assert!(second.enter().is_some());
        assert!(one.is_applying(), "the refused one has taken the other's mark along");
        drop(inside);
        assert!(!one.is_applying());
    }

    #[test]
    fn a_slot_that_serves_another_connection_says_nothing_about_the_one_before() {
        let (owners, users) = pages();
        let slots = Arc::new(ApplySlots::default());
        let first = slots.take(&owners).unwrap();
        let one = ApplySlotView::of(&users, first.index()).unwrap();
        one.give_up();
        drop(first);
        let second = slots.take(&owners).unwrap();
        let inside = second.enter().unwrap();
        assert!(!one.is_applying());
        let two = ApplySlotView::of(&users, second.index()).unwrap();
        two.give_up();
        assert!(two.is_applying());
        drop(inside);
        assert!(!two.is_applying());
    }

    #[test]
    fn there_are_as_many_slots_as_the_page_has() {
        let (owners, users) = pages();
        let slots = Arc::new(ApplySlots::default());
        let all: Vec<_> = std::iter::from_fn(|| slots.take(&owners)).collect();
        assert_eq!(all.len(), APPLY_SLOTS as usize);
        assert!(ApplySlotView::of(&users, APPLY_SLOTS).is_none());
        drop(all);
        assert!(slots.take(&owners).is_some());
    }
}
