//! The moments that the event loop waits for: ordered, cancellable, pure.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Something that waits for a moment.
pub(crate) trait Timer: Send + Sync {
    /// Called once on the event loop's thread, without any of its locks; must not block.
    fn fired(self: Arc<Self>, key: u64);
}

/// Names one pending timer; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TimerId {
    when: Instant,
    sequence: u64,
}

/// A long sleep is cut here, which keeps every conversion of the timeout in range.
const LONGEST_SLEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Pending timers in order, and until when the loop's thread sleeps.
///
/// A tree rather than a heap: most timers are deadlines that are cancelled long before they are due, and
/// here a cancelled one is gone at once instead of lying in the heap until its time.
#[derive(Default)]
pub(super) struct Timers {
    pending: BTreeMap<(Instant, u64), (Weak<dyn Timer>, u64)>,
    next_sequence: u64,
    sleep: Sleep,
    /// The earliest moment of a timer that was cancelled since the thread slept until such a one.
    cancelled: Option<Instant>,
}

#[derive(Default, Clone, Copy)]
enum Sleep {
    /// The thread is working and looks at the timers before it sleeps again.
    #[default]
    Awake,
    Until(Instant),
    Forever,
}

impl Timers {
    /// Adds a timer; true means that the thread sleeps past it and must be woken.
    pub(super) fn insert(&mut self, when: Instant, timer: Weak<dyn Timer>, key: u64) -> (TimerId, bool) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.pending.insert((when, sequence), (timer, key));
        let wake = match self.sleep {
            Sleep::Awake => false,
            Sleep::Until(until) => when < until,
            Sleep::Forever => true,
        };
        if wake {
            self.sleep = Sleep::Awake;
        }
        (TimerId { when, sequence }, wake)
    }

    /// Takes a timer out; false where it has fired, or was cancelled, before.
    pub(super) fn cancel(&mut self, id: TimerId) -> bool {
        let found = self.pending.remove(&(id.when, id.sequence)).is_some();
        if found {
            self.cancelled = Some(self.cancelled.map_or(id.when, |earlier| earlier.min(id.when)));
        }
        found
    }

    /// How long the thread may sleep from `now`, `None` for ever; notes that it does.
    ///
    /// It sleeps no longer than a timer would have let it that was cancelled. Deadlines come one after the other, each as far
    /// away as the last: asleep for longer, the thread would have to be woken for every one, by the call that starts a transfer.
    /// So it wakes by itself for one of all those that came and went meanwhile, and for none once no more come.
    pub(super) fn fall_asleep(&mut self, now: Instant) -> Option<Duration> {
        self.cancelled = self.cancelled.filter(|when| *when > now);
        let first = self.pending.first_key_value().map(|((when, _), _)| *when);
        match first.into_iter().chain(self.cancelled).min() {
            None => {
                self.sleep = Sleep::Forever;
                None
            }
            Some(when) => {
                let length = when.saturating_duration_since(now).min(LONGEST_SLEEP);
                self.sleep = Sleep::Until(now + length);
                Some(length)
            }
        }
    }

    /// Notes that the thread is awake, and returns how many timers are pending.
    pub(super) fn wake_up(&mut self) -> usize {
        self.sleep = Sleep::Awake;
        self.pending.len()
    }

    /// How many are due later than that.
    #[cfg(test)]
    pub(super) fn after(&self, when: Instant) -> usize {
        self.pending.range((when, 0)..).count()
    }

    /// When the sleeping thread wakes by itself.
    #[cfg(test)]
    pub(super) fn sleeping_until(&self) -> Option<Instant> {
        match self.sleep {
            Sleep::Until(until) => Some(until),
            Sleep::Awake | Sleep::Forever => None,
        }
    }

    /// Takes the earliest timer, where it is due at `now`.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<(Weak<dyn Timer>, u64)> {
        let first = self.pending.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    struct Nobody;

    impl Timer for Nobody {
        fn fired(self: Arc<Self>, _key: u64) {}
    }

    fn nobody() -> Weak<dyn Timer> {
        Weak::<Nobody>::new()
    }

    #[test]
    fn due_timers_come_in_order_and_equal_moments_in_order_of_adding() {
        let mut timers = Timers::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for (ms, key) in [(30, 3), (10, 1), (20, 2), (10, 11), (40, 4)] {
            timers.insert(at(ms), nobody(), key);
        }
        let due: Vec<u64> = std::iter::from_fn(|| timers.pop_due(at(30)).map(|(_, key)| key)).collect();
        assert_eq!(due, [1, 11, 2, 3]);
        assert!(timers.pop_due(at(39)).is_none());
    }

    #[test]
    fn a_cancelled_timer_is_gone_at_once_and_only_once() {
        let mut timers = Timers::default();
        let now = Instant::now();
        let (first, _) = timers.insert(now, nobody(), 1);
        let (second, _) = timers.insert(now, nobody(), 2);
        assert!(timers.cancel(first));
        assert!(!timers.cancel(first));
        assert_eq!(timers.wake_up(), 1);
        assert_eq!(timers.pop_due(now).unwrap().1, 2);
        assert!(!timers.cancel(second));
    }

    #[test]
    fn only_a_timer_before_the_end_of_the_sleep_wakes_and_only_the_first() {
        let mut timers = Timers::default();
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        assert!(!timers.insert(at(50), nobody(), 0).1, "the thread is awake");
        assert_eq!(timers.fall_asleep(now), Some(Duration::from_millis(50)));
        assert!(!timers.insert(at(60), nobody(), 0).1);
        assert!(timers.insert(at(40), nobody(), 0).1);
        assert!(!timers.insert(at(30), nobody(), 0).1, "it is being woken already");
    }

    #[test]
    fn a_deadline_after_one_that_was_cancelled_wakes_nobody_and_the_sleep_ends_once() {
        let mut timers = Timers::default();
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        for round in 0..10 {
            let (id, woken) = timers.insert(at(5000 + round), nobody(), 0);
            assert!(!woken, "round {round}");
            assert!(timers.cancel(id));
            assert_eq!(timers.fall_asleep(at(round)), Some(Duration::from_millis(5000 - round)));
        }
        assert!(timers.insert(at(4999), nobody(), 1).1, "one that is due before that does wake it");
        assert!(timers.pop_due(at(4999)).is_some());
        timers.wake_up();
        assert_eq!(timers.fall_asleep(at(5000)), None, "nothing came since");
        assert!(timers.insert(at(10_000), nobody(), 0).1);
    }

    #[test]
    fn without_timers_the_sleep_has_no_end_and_a_far_one_is_cut() {
        let mut timers = Timers::default();
        let now = Instant::now();
        assert_eq!(timers.fall_asleep(now), None);
        assert!(timers.insert(now + Duration::from_secs(1 << 40), nobody(), 0).1);
        assert_eq!(timers.fall_asleep(now), Some(LONGEST_SLEEP));
    }
}
