//! The ordering-critical steps of the fence, written once for the machine's atomics and for loom's.
//!
//! Two races decide whether the fence holds, a third whether a sleeper is woken, a fourth whether a write that was given up is quiet, and all have the shape "each side stores one word and then
//! loads the other's", which only a full fence on *both* sides makes safe:
//!
//! | initiator | owner | must never happen |
//! | --- | --- | --- |
//! | slot := g, **fence**, load row | row := 0, **fence**, load slot | the pin succeeds and the scan sees none |
//! | slot := 0, **fence**, load draining | draining += 1, **fence**, load slot | the scan sees a pin and its release does not ring |
//! | flag := 1, **fence**, load sleepers | sleepers += 1, **fence**, load flag | the owner sleeps and nobody wakes it |
//! | over := n, **fence**, load applying | applying += 1, **fence**, load over | the owner applies bytes and the initiator takes it to be quiet |
//!
//! Nothing here touches a system call or a mapping, so that loom can run every interleaving of it.

use std::sync::atomic::Ordering;

/// An atomic word, the machine's or loom's.
pub(crate) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    /// Replaces `from` by `to`; whether it did.
    fn replace(&self, from: T, to: T) -> bool;
    /// Raises the word to at least `value`.
    fn raise(&self, value: T);
    /// Adds with wrap-around.
    fn add(&self, value: T);
}

/// A family of atomics and the full fence that goes with it.
pub(crate) trait Memory {
    type U64: Word<u64>;
    type U32: Word<u32>;

    /// Orders every access before it, loads and stores, before every access after it.
    fn full_fence();
}

macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $value {
                <$atomic>::load(self, order)
            }

            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value, order);
            }

            #[inline]
            fn replace(&self, from: $value, to: $value) -> bool {
                self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            }

            #[inline]
            fn raise(&self, value: $value) {
                self.fetch_max(value, Ordering::AcqRel);
            }

            #[inline]
            fn add(&self, value: $value) {
                self.fetch_add(value, Ordering::AcqRel);
            }
        }
    };
}

word!(std::sync::atomic::AtomicU64, u64);
word!(std::sync::atomic::AtomicU32, u32);

/// The machine's own memory.
pub(crate) struct Machine;

impl Memory for Machine {
    type U64 = std::sync::atomic::AtomicU64;
    type U32 = std::sync::atomic::AtomicU32;

    #[inline]
    fn full_fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Initiator: announces a pin in a slot that only this thread writes, and that it has found empty.
///
/// The store is a release although nothing is being released: a slot goes g1 → 0 → g2, and an owner that
/// waits for g1 and finds g2 must still have the copy under g1 before it. The fence of the release before
/// covers that for one thread, but a slot can pass from a thread that ended to a new one.
#[inline]
pub(crate) fn announce<M: Memory>(slot: &M::U64, index: u32, high: &M::U32, generation: u64) {
    raise_mark::<M>(high, index);
    slot.store(generation, Ordering::Release);
}

/// Initiator: announces a pin in a slot that any thread of the process may take; false when it is taken.
#[inline]
pub(crate) fn announce_shared<M: Memory>(slot: &M::U64, index: u32, high: &M::U32, generation: u64) -> bool {
    raise_mark::<M>(high, index);
    slot.replace(0, generation)
}

/// The mark is raised before the slot is written, so that the fence in `confirm` covers both: an owner whose
/// scan must see the pin also sees the mark that makes the scan reach it.
#[inline]
fn raise_mark<M: Memory>(high: &M::U32, index: u32) {
    if high.load(Ordering::Relaxed) <= index {
        high.raise(index + 1);
    }
}

/// Initiator: whether an announced pin holds. When it does not, the caller still has to `release` it: the
/// owner may have seen the announcement and be waiting for its end.
///
/// The acquire keeps the copy, its loads and its stores, behind the check.
#[inline]
pub(crate) fn confirm<M: Memory>(row: &M::U64, generation: u64) -> bool {
    M::full_fence();
    row.load(Ordering::Acquire) == generation
}

/// Initiator: whether the region was still live after everything this thread has done so far.
///
/// A read needs its loads before this load, a write its stores (non-temporal ones too) before it: the second
/// is a store followed by a load, so the fence is a full one.
#[inline]
pub(crate) fn revalidate<M: Memory>(row: &M::U64, generation: u64) -> bool {
    M::full_fence();
    row.load(Ordering::Acquire) == generation
}

/// Initiator: ends a pin; true when the owner waits and has to be rung.
#[inline]
#[must_use]
pub(crate) fn release<M: Memory>(slot: &M::U64, draining: &M::U32) -> bool {
    slot.store(0, Ordering::Release);
    M::full_fence();
    draining.load(Ordering::Relaxed) != 0
}

/// Initiator: ends a pin in a slot that any thread of the process may take; true when the owner has to be rung.
///
/// Only its own generation is taken out: after a reclaim the slot may be another pin's already.
#[inline]
#[must_use]
pub(crate) fn release_shared<M: Memory>(slot: &M::U64, generation: u64, draining: &M::U32) -> bool {
    slot.replace(generation, 0);
    M::full_fence();
    draining.load(Ordering::Relaxed) != 0
}

/// Owner: makes a row live. The release publishes the row's address and length with it.
#[inline]
pub(crate) fn publish<M: Memory>(row: &M::U64, generation: u64) {
    row.store(generation, Ordering::Release);
}

/// Owner: ends the region of a row. No announcement made after the fence is confirmed.
#[inline]
pub(crate) fn revoke<M: Memory>(row: &M::U64) {
    row.store(0, Ordering::SeqCst);
    M::full_fence();
}

/// Owner: from here on a release that a scan did not see rings.
#[inline]
pub(crate) fn drain_started<M: Memory>(draining: &M::U32) {
    draining.add(1);
    M::full_fence();
}

/// Owner: the pair of `drain_started`.
#[inline]
pub(crate) fn drain_ended<M: Memory>(draining: &M::U32) {
    draining.add(u32::MAX);
}

/// Owner: calls `found` with each slot that pins that generation, until it returns false.
///
/// The fence stands here too, and not only in `revoke`, so that each scan is right by itself. The loads
/// acquire: an owner that finds no pin has every finished copy before its next access to the bytes.
#[inline]
pub(crate) fn scan<'a, M: Memory>(
    slots: impl Iterator<Item = &'a M::U64>,
    high: &M::U32,
    generation: u64,
    mut found: impl FnMut(u32) -> bool,
) where
    M::U64: 'a,
{
    M::full_fence();
    let used = high.load(Ordering::Acquire);
    for (index, slot) in (0..used).zip(slots) {
        if slot.load(Ordering::Acquire) == generation && !found(index) {
            return;
        }
    }
}

/// Owner: clears the pin of a holder that is gone. Never clears a pin of another generation.
#[inline]
pub(crate) fn reclaim<M: Memory>(slot: &M::U64, generation: u64) -> bool {
    slot.replace(generation, 0)
}

/// Owner: from here on, a thread that changes something that this thread waits for wakes it.
///
/// Followed by a load of the bell, then by the check of what is waited for, then by a sleep that begins only if the
/// bell is still what was loaded. Why no wake-up is lost: of the fence here and the one in `wake_wanted` one comes
/// first. If this one does, the waker sees the sleeper and raises the bell: before the load of the bell, in which case
/// the load acquires what the waker has changed and the check sees it; or after, in which case the sleep does not
/// begin, or is ended by the wake call that follows. If the other one does, the check sees what was changed.
#[inline]
pub(crate) fn sleeper_came<M: Memory>(sleepers: &M::U32) {
    sleepers.add(1);
    M::full_fence();
}

/// Owner: the pair of `sleeper_came`.
#[inline]
pub(crate) fn sleeper_left<M: Memory>(sleepers: &M::U32) {
    sleepers.add(u32::MAX);
}

/// Any side, after a change that the owner may be waiting for: whether a thread may be asleep. If so, the bell is raised
/// (a release) and who sleeps on it is woken, in this order.
#[inline]
#[must_use]
pub(crate) fn wake_wanted<M: Memory>(sleepers: &M::U32) -> bool {
    M::full_fence();
    sleepers.load(Ordering::Relaxed) != 0
}

/// The lower bits of the owner's word about a connection count the threads that are applying its bytes; the upper ones are its number.
pub(crate) const APPLYING_BITS: u32 = 16;

/// Owner: says that it is about to apply bytes of that connection; whether they are still wanted. Where they are not, the
/// caller still has to `leave`: the initiator may have seen the word.
///
/// The acquire keeps the stores of the copy behind the look.
#[inline]
pub(crate) fn enter<M: Memory>(applying: &M::U64, over: &M::U64, number: u64) -> bool {
    applying.add(1);
    M::full_fence();
    over.load(Ordering::Acquire) != number
}

/// Owner: the pair of `enter`. The release orders the copy before it.
#[inline]
pub(crate) fn leave<M: Memory>(applying: &M::U64) {
    applying.add(u64::MAX);
}

/// Initiator: gives a connection up. Nothing of it that has not been entered yet is applied.
#[inline]
pub(crate) fn give_up<M: Memory>(over: &M::U64, number: u64) {
    over.store(number, Ordering::Release);
    M::full_fence();
}

/// Initiator, after `give_up`: whether the owner is still applying bytes of that connection. A slot that serves another one by
/// now is not: the owner hands it on when all have left.
#[inline]
pub(crate) fn is_applying<M: Memory>(applying: &M::U64, number: u64) -> bool {
    let word = applying.load(Ordering::Acquire);
    word >> APPLYING_BITS == number && word & ((1 << APPLYING_BITS) - 1) != 0
}

#[cfg(all(test, loom))]
mod loom_tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::sync::{Arc, AtomicBool, AtomicU32, AtomicU64, fence, thread};

    word!(AtomicU64, u64);
    word!(AtomicU32, u32);

    struct Fenced;

    impl Memory for Fenced {
        type U64 = AtomicU64;
        type U32 = AtomicU32;

        fn full_fence() {
            fence(Ordering::SeqCst);
        }
    }

    /// The same protocol with the fence left out: loom has to find what then goes wrong.
    struct Unfenced;

    impl Memory for Unfenced {
        type U64 = AtomicU64;
        type U32 = AtomicU32;

        fn full_fence() {}
    }

    struct Page {
        row: AtomicU64,
        high: AtomicU32,
        slots: [AtomicU64; 2],
        draining: AtomicU32,
        rang: AtomicBool,
        bytes: AtomicU64,
    }

    impl Page {
        fn live(generation: u64) -> Arc<Page> {
            Arc::new(Page {
                row: AtomicU64::new(generation),
                high: AtomicU32::new(0),
                slots: [AtomicU64::new(0), AtomicU64::new(0)],
                draining: AtomicU32::new(0),
                rang: AtomicBool::new(false),
                bytes: AtomicU64::new(generation),
            })
        }

        fn pin<M: Memory<U64 = AtomicU64, U32 = AtomicU32>>(&self, slot: u32, generation: u64) -> bool {
            announce::<M>(&self.slots[slot as usize], slot, &self.high, generation);
            let pinned = confirm::<M>(&self.row, generation);
            if !pinned {
                self.unpin::<M>(slot);
            }
            pinned
        }

        fn unpin<M: Memory<U64 = AtomicU64, U32 = AtomicU32>>(&self, slot: u32) {
            if release::<M>(&self.slots[slot as usize], &self.draining) {
                self.rang.store(true, Ordering::Release);
            }
        }

        fn held<M: Memory<U64 = AtomicU64, U32 = AtomicU32>>(&self, generation: u64) -> bool {
            let mut held = false;
            scan::<M>(self.slots.iter(), &self.high, generation, |_| {
                held = true;
                false
            });
            held
        }
    }

    fn violated(model: impl Fn() + Sync + Send + 'static) -> bool {
        catch_unwind(AssertUnwindSafe(|| loom::model(model))).is_err()
    }

    fn pin_against_revoke<M: Memory<U64 = AtomicU64, U32 = AtomicU32> + 'static>() {
        let page = Page::live(7);
        let initiator = thread::spawn({
            let page = page.clone();
            move || page.pin::<M>(1, 7)
        });
        revoke::<M>(&page.row);
        let held = page.held::<M>(7);
        let pinned = initiator.join().unwrap();
        assert!(held || !pinned, "the pin succeeded and the scan saw none");
    }

    #[test]
    fn loom_a_pin_that_succeeds_is_seen_by_the_scan() {
        loom::model(pin_against_revoke::<Fenced>);
    }

    #[test]
    fn loom_without_the_fence_a_pin_escapes_the_scan() {
        assert!(violated(pin_against_revoke::<Unfenced>));
    }

    #[test]
    fn loom_two_threads_of_the_initiator_are_both_seen() {
        loom::model(|| {
            let page = Page::live(7);
            let pin = |slot| {
                let page = page.clone();
                thread::spawn(move || page.pin::<Fenced>(slot, 7))
            };
            let threads = [pin(0), pin(1)];
            revoke::<Fenced>(&page.row);
            let mut seen = [false; 2];
            scan::<Fenced>(page.slots.iter(), &page.high, 7, |slot| {
                seen[slot as usize] = true;
                true
            });
            for (thread, seen) in threads.into_iter().zip(seen) {
                assert!(seen || !thread.join().unwrap());
            }
        });
    }

    #[test]
    fn loom_a_mark_raised_by_another_thread_covers_this_threads_slot() {
        loom::model(|| {
            let page = Page::live(7);
            // The neighbour has the higher slot: the pin under test may find the mark already raised.
            let neighbour = thread::spawn({
                let page = page.clone();
                move || raise_mark::<Fenced>(&page.high, 1)
            });
            let initiator = thread::spawn({
                let page = page.clone();
                move || page.pin::<Fenced>(0, 7)
            });
            revoke::<Fenced>(&page.row);
            let held = page.held::<Fenced>(7);
            assert!(held || !initiator.join().unwrap());
            neighbour.join().unwrap();
        });
    }

    fn release_against_drain<M: Memory<U64 = AtomicU64, U32 = AtomicU32> + 'static>() {
        let page = Page::live(7);
        assert!(page.pin::<Fenced>(0, 7));
        let initiator = thread::spawn({
            let page = page.clone();
            move || page.unpin::<M>(0)
        });
        drain_started::<M>(&page.draining);
        revoke::<M>(&page.row);
        let held = page.held::<M>(7);
        initiator.join().unwrap();
        assert!(!held || page.rang.load(Ordering::Acquire), "the owner waits and nobody rings");
    }

    #[test]
    fn loom_a_release_that_the_scan_missed_rings() {
        loom::model(release_against_drain::<Fenced>);
    }

    #[test]
    fn loom_without_the_fence_a_doorbell_is_lost() {
        assert!(violated(release_against_drain::<Unfenced>));
    }

    #[test]
    fn loom_a_pin_that_fails_still_rings_when_the_scan_saw_it() {
        loom::model(|| {
            let page = Page::live(7);
            let initiator = thread::spawn({
                let page = page.clone();
                move || page.pin::<Fenced>(0, 7)
            });
            drain_started::<Fenced>(&page.draining);
            revoke::<Fenced>(&page.row);
            let held = page.held::<Fenced>(7);
            let pinned = initiator.join().unwrap();
            assert!(held || !pinned);
            assert!(
                !held || pinned || page.rang.load(Ordering::Acquire),
                "a failed pin left the owner waiting"
            );
        });
    }

    #[test]
    fn loom_bytes_are_not_reused_before_the_copy_has_ended() {
        loom::model(|| {
            let page = Page::live(7);
            let bytes = Arc::new(loom::cell::UnsafeCell::new(7_u64));
            let initiator = thread::spawn({
                let (page, bytes) = (page.clone(), bytes.clone());
                move || {
                    if page.pin::<Fenced>(0, 7) {
                        // Loom reports an access that is not ordered against the owner's write.
                        bytes.with(|_| ());
                        page.unpin::<Fenced>(0);
                    }
                    // The thread ends, the next one gets its slot: the owner finds 8 there, not 0.
                    thread::spawn(move || announce::<Fenced>(&page.slots[0], 0, &page.high, 8))
                        .join()
                        .unwrap();
                }
            });
            revoke::<Fenced>(&page.row);
            if !page.held::<Fenced>(7) {
                bytes.with_mut(|_| ());
            }
            initiator.join().unwrap();
        });
    }

    fn copy_against_reuse<M: Memory<U64 = AtomicU64, U32 = AtomicU32> + 'static>() {
        let page = Page::live(7);
        let initiator = thread::spawn({
            let page = page.clone();
            move || {
                // Without a pin: what the second check alone is worth.
                let copied = page.bytes.load(Ordering::Relaxed);
                assert!(!revalidate::<M>(&page.row, 7) || copied == 7, "stale bytes passed as valid");
            }
        });
        revoke::<M>(&page.row);
        page.bytes.store(8, Ordering::Relaxed);
        initiator.join().unwrap();
    }

    #[test]
    fn loom_a_copy_that_is_valid_afterwards_has_no_later_bytes() {
        loom::model(copy_against_reuse::<Fenced>);
    }

    #[test]
    fn loom_without_the_fence_later_bytes_pass_as_valid() {
        assert!(violated(copy_against_reuse::<Unfenced>));
    }

    #[test]
    fn loom_neither_a_reclaim_nor_a_late_release_clears_a_newer_pin() {
        loom::model(|| {
            let page = Page::live(8);
            assert!(announce_shared::<Fenced>(&page.slots[0], 0, &page.high, 7));
            let late = thread::spawn({
                let page = page.clone();
                move || release_shared::<Fenced>(&page.slots[0], 7, &page.draining)
            });
            let newer = thread::spawn({
                let page = page.clone();
                move || announce_shared::<Fenced>(&page.slots[0], 0, &page.high, 8)
            });
            reclaim::<Fenced>(&page.slots[0], 7);
            late.join().unwrap();
            let expected = if newer.join().unwrap() { 8 } else { 0 };
            assert_eq!(page.slots[0].load(Ordering::Acquire), expected);
        });
    }

    #[test]
    fn loom_a_shared_release_that_the_scan_missed_rings() {
        loom::model(|| {
            let page = Page::live(7);
            assert!(announce_shared::<Fenced>(&page.slots[0], 0, &page.high, 7));
            let initiator = thread::spawn({
                let page = page.clone();
                move || release_shared::<Fenced>(&page.slots[0], 7, &page.draining)
            });
            drain_started::<Fenced>(&page.draining);
            revoke::<Fenced>(&page.row);
            let held = page.held::<Fenced>(7);
            assert!(initiator.join().unwrap() || !held, "the owner waits and nobody rings");
        });
    }

    #[test]
    fn loom_a_shared_pin_that_succeeds_is_seen_by_the_scan() {
        loom::model(|| {
            let page = Page::live(7);
            let initiator = thread::spawn({
                let page = page.clone();
                move || {
                    announce_shared::<Fenced>(&page.slots[1], 1, &page.high, 7)
                        && confirm::<Fenced>(&page.row, 7)
                }
            });
            revoke::<Fenced>(&page.row);
            let held = page.held::<Fenced>(7);
            assert!(held || !initiator.join().unwrap());
        });
    }

    #[test]
    fn loom_one_shared_slot_is_taken_once() {
        loom::model(|| {
            let page = Page::live(7);
            let other = thread::spawn({
                let page = page.clone();
                move || announce_shared::<Fenced>(&page.slots[0], 0, &page.high, 7)
            });
            let mine = announce_shared::<Fenced>(&page.slots[0], 0, &page.high, 7);
            assert_ne!(mine, other.join().unwrap());
        });
    }

    /// The bell as the kernel treats it: a sleep begins only while it holds the value that was loaded, and the wake
    /// call comes after it was raised. So a thread that has not seen the change must find the bell raised in the end.
    fn sleep_against_wake<M: Memory<U64 = AtomicU64, U32 = AtomicU32> + 'static>() {
        let (sleepers, bell) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let flag = Arc::new(AtomicU64::new(0));
        let waker = thread::spawn({
            let (sleepers, bell, flag) = (sleepers.clone(), bell.clone(), flag.clone());
            move || {
                flag.store(1, Ordering::Release);
                if wake_wanted::<M>(&sleepers) {
                    bell.add(1);
                }
            }
        });
        sleeper_came::<M>(&sleepers);
        let rung = Word::load(&*bell, Ordering::Acquire);
        let seen = flag.load(Ordering::Acquire) == 1;
        waker.join().unwrap();
        assert!(
            seen || Word::load(&*bell, Ordering::Acquire) != rung,
            "the owner sleeps and nobody wakes it"
        );
        sleeper_left::<M>(&sleepers);
        assert!(!wake_wanted::<M>(&sleepers));
    }

    #[test]
    fn loom_no_wake_up_is_lost() {
        loom::model(sleep_against_wake::<Fenced>);
    }

    #[test]
    fn loom_without_the_fence_a_wake_up_is_lost() {
        assert!(violated(sleep_against_wake::<Unfenced>));
    }

    #[test]
    fn loom_a_sleeper_that_saw_the_bell_raised_sees_what_it_was_raised_for() {
        loom::model(|| {
            let words = Arc::new((AtomicU32::new(1), AtomicU32::new(0), AtomicU64::new(0)));
            let waker = thread::spawn({
                let words = words.clone();
                move || {
                    words.2.store(1, Ordering::Relaxed);
                    if wake_wanted::<Fenced>(&words.0) {
                        words.1.add(1);
                    }
                }
            });
            if Word::load(&words.1, Ordering::Acquire) == 1 {
                assert_eq!(words.2.load(Ordering::Relaxed), 1);
            }
            waker.join().unwrap();
        });
    }

    /// The owner looks and copies; the initiator gives up, and takes the bytes for its own if it sees nobody at work.
    fn apply_against_giving_up<M: Memory<U64 = AtomicU64, U32 = AtomicU32> + 'static>() {
        const NUMBER: u64 = 3;
        let words = Arc::new((AtomicU64::new(NUMBER << APPLYING_BITS), AtomicU64::new(2), AtomicU64::new(0)));
        let owner = thread::spawn({
            let words = words.clone();
            move || {
                if enter::<M>(&words.0, &words.1, NUMBER) {
                    words.2.store(7, Ordering::Relaxed);
                }
                leave::<M>(&words.0);
            }
        });
        give_up::<M>(&words.1, NUMBER);
        let quiet = !is_applying::<M>(&words.0, NUMBER);
        let then = words.2.load(Ordering::Relaxed);
        owner.join().unwrap();
        let later = words.2.load(Ordering::Relaxed);
        assert!(!quiet || then == later, "bytes landed behind a quiet end");
    }

    #[test]
    fn loom_nothing_lands_behind_an_end_that_was_seen_to_be_quiet() {
        loom::model(apply_against_giving_up::<Fenced>);
    }

    #[test]
    fn loom_without_the_fence_bytes_land_behind_a_quiet_end() {
        assert!(violated(apply_against_giving_up::<Unfenced>));
    }

    #[test]
    fn loom_two_reclaims_clear_once() {
        loom::model(|| {
            let page = Page::live(7);
            page.slots[0].store(7, Ordering::Relaxed);
            let other = thread::spawn({
                let page = page.clone();
                move || reclaim::<Fenced>(&page.slots[0], 7)
            });
            let mine = reclaim::<Fenced>(&page.slots[0], 7);
            assert_ne!(mine, other.join().unwrap());
        });
    }

    #[test]
    fn loom_a_published_row_shows_its_address() {
        loom::model(|| {
            let row = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
            let owner = thread::spawn({
                let row = row.clone();
                move || {
                    row.1.store(0x1000, Ordering::Relaxed);
                    publish::<Fenced>(&row.0, 9);
                }
            });
            if confirm::<Fenced>(&row.0, 9) {
                assert_eq!(row.1.load(Ordering::Relaxed), 0x1000);
            }
            owner.join().unwrap();
        });
    }
}
