//! Who is to blame when a rank has waited in vain: not those that are themselves held up (pure).
//!
//! A rank that has waited for a while publishes for whom, and shows by a beat that it is not stopped. A rank that comes to its limit
//! follows these words from rank to rank, until it finds ranks that wait for nobody or give no reply. What the others say is
//! gathered while the wait lasts ([`inquiry`](super::inquiry)), so that the verdict costs no time beyond the limit.

use std::time::{Duration, Instant};

use super::layout::{STATE_BEAT, STATE_ROUND, STATE_WAITS};
use super::waiting::LOOK;

/// The shortest and the longest time in which the ranks that are asked must answer. One that does not is taken for stopped,
/// so that it is generous: on a machine with ten times as many threads as cores a living one takes most of a second.
const ANSWER: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(3));

/// For how long a rank that waits must not have beaten before it counts as stopped.
const STILL: Duration = LOOK.saturating_mul(6);

/// How much longer than to its limit a wait may last where the last ranks were found too late to have answered.
const GRACE: Duration = Duration::from_millis(250);

/// When a wait asks the others, and until when it knows whom it has waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    /// How long a rank has to answer.
    pub(super) answer: Duration,
    /// How long a wait has lasted when it begins to ask: early enough for a reply within its limit.
    pub(super) ask: Duration,
    /// How long it has lasted when it names whom it has to, whatever it knows.
    pub(super) end: Duration,
}

impl Schedule {
    pub(super) fn new(limit: Duration) -> Schedule {
        let answer = (limit / 2).clamp(ANSWER.0, ANSWER.1);
        let ask = limit.saturating_sub(answer + 2 * LOOK);
        // A limit below the shortest time for a reply is not enough to distinguish slow ranks from stopped ones.
        Schedule { answer, ask, end: (limit + GRACE).max(ask + STILL) }
    }
}

/// For whom a rank waits, as it is published in one word: the first few ranks, and whether it has given up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Waits(u64);

impl Waits {
    pub(super) const NOBODY: Waits = Waits(0);

    /// How many ranks find room, and in how many bits each.
    const ROOM: usize = 3;
    const BITS: u32 = 18;
    const IN_VAIN: u64 = 1 << 63;
    const SILENT: u64 = 1 << 62;

    /// A wait for those ranks; of more than a few, the first ones.
    pub(super) fn on(peers: &[usize]) -> Waits {
        let one = |(at, peer): (usize, &usize)| (*peer as u64 + 1) << (at as u32 * Waits::BITS);
        Waits(peers.iter().take(Waits::ROOM).enumerate().map(one).sum())
    }

    /// A wait that has ended without them.
    pub(super) fn in_vain(peers: &[usize]) -> Waits {
        Waits(Waits::on(peers).0 | Waits::IN_VAIN)
    }

    /// A wait for those ranks in which this one does not beat.
    pub(super) fn silent(peers: &[usize]) -> Waits {
        Waits(Waits::on(peers).0 | Waits::SILENT)
    }

    pub(super) fn from_word(word: u64) -> Waits {
        Waits(word)
    }

    pub(super) fn word(self) -> u64 {
        self.0
    }

    pub(super) fn is_in_vain(self) -> bool {
        self.0 & Waits::IN_VAIN != 0
    }

    /// Whether one that waits so shows that it is not stopped.
    fn beats(self) -> bool {
        self != Waits::NOBODY && self.0 & (Waits::IN_VAIN | Waits::SILENT) == 0
    }

    pub(super) fn ranks(self) -> impl Iterator<Item = usize> {
        let one = move |at: usize| self.0 >> (at as u32 * Waits::BITS) & ((1 << Waits::BITS) - 1);
        (0..Waits::ROOM).filter_map(move |at| (one(at) as usize).checked_sub(1))
    }
}

/// What a rank publishes about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct State {
    /// The round that it has entered last.
    round: u64,
    waits: Waits,
    /// Grows while it waits.
    beat: u64,
}

impl State {
    /// Puts a state together from its words.
    pub(super) fn of(word: impl Fn(usize) -> Option<u64>) -> Option<State> {
        let waits = Waits::from_word(word(STATE_WAITS)?);
        Some(State { round: word(STATE_ROUND)?, waits, beat: word(STATE_BEAT)? })
    }
}

/// What is known of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// When it was asked first.
    asked: Option<Instant>,
    /// What it said last, and when.
    said: Option<(State, Instant)>,
    /// When it first said so.
    since: Option<Instant>,
    /// It had said something else before.
    changed: bool,
}

impl Known {
    pub(super) fn ask(&mut self, now: Instant) {
        self.asked.get_or_insert(now);
    }

    pub(super) fn update(&mut self, state: State, now: Instant) {
        match self.said {
            Some((before, _)) if before == state => {}
            before => (self.since, self.changed) = (Some(now), before.is_some()),
        }
        self.said = Some((state, now));
    }

    /// What it says; `None` where it has not answered for longer than it may take.
    pub(super) fn state(&self, answer: Duration, now: Instant) -> Option<State> {
        self.said.filter(|(_, at)| now.saturating_duration_since(*at) < answer).map(|(state, _)| state)
    }

    /// Whether it has answered, or has had the time to.
    fn is_sure(&self, answer: Duration, now: Instant) -> bool {
        let had_time = |asked: Instant| now.saturating_duration_since(asked) >= answer;
        self.state(answer, now).is_some() || self.asked.is_some_and(had_time)
    }

    /// Whether it beats; `None` where it was not looked at for long enough.
    fn beats(&self, now: Instant) -> Option<bool> {
        let same = now.saturating_duration_since(self.since?);
        if same >= STILL { Some(false) } else { self.changed.then_some(true) }
    }
}

/// What is known of the ranks for which this one waits, and of those for which they wait.
pub(super) struct Chain<'k> {
    known: &'k [Known],
    /// Those of the chain, in the order in which they were found.
    found: Vec<usize>,
    answer: Duration,
    now: Instant,
}

impl<'k> Chain<'k> {
    /// Follows from rank to rank what they say, from those that this one (`own`) misses on.
    pub(super) fn new(
        known: &'k [Known],
        own: usize,
        wanted: &[usize],
        answer: Duration,
        now: Instant,
    ) -> Chain<'k> {
        let mut chain = Chain { known, found: Vec::new(), answer, now };
        let mut next: Vec<usize> = wanted.to_vec();
        next.sort_unstable();
        let mut at = 0;
        while let Some(peer) = next.get(at).copied() {
            at += 1;
            if peer < known.len() && peer != own && !chain.found.contains(&peer) {
                chain.found.push(peer);
                next.extend(chain.state(peer).into_iter().flat_map(|state| state.waits.ranks()));
            }
        }
        chain
    }

    /// The ranks of the chain.
    pub(super) fn found(&self) -> &[usize] {
        &self.found
    }

    fn state(&self, peer: usize) -> Option<State> {
        self.known[peer].state(self.answer, self.now)
    }

    fn those(&self, which: impl Fn(usize) -> bool) -> Vec<usize> {
        self.found.iter().copied().filter(|peer| which(*peer)).collect()
    }

    /// The ranks that have kept this rank waiting; `None` where that may be known a little later. Empty where nobody is to blame more
    /// than the others.
    pub(super) fn culprits(&self, own: State, last: bool) -> Option<Vec<usize>> {
        if !last && !self.found.iter().all(|peer| self.known[*peer].is_sure(self.answer, self.now)) {
            return None;
        }
        // The ranks that wait for nobody, or give no reply.
        let ends = self.those(|peer| self.state(peer).is_none_or(|state| state.waits == Waits::NOBODY));
        if !ends.is_empty() {
            return Some(ends);
        }
        // Every rank says that it waits: one that was stopped in a wait says so for ever, but does not beat.
        let beats = |peer: usize| self.known[peer].beats(self.now);
        let beating = self.those(|peer| self.state(peer).is_some_and(|state| state.waits.beats()));
        if !last && beating.iter().any(|peer| beats(*peer).is_none()) {
            return None;
        }
        let still: Vec<usize> = beating.into_iter().filter(|peer| beats(*peer) != Some(true)).collect();
        Some(if still.is_empty() { self.laggards(own) } else { still })
    }

    /// Of ranks that all wait for each other: those that have given up, else those furthest behind. Empty where there are none.
    fn laggards(&self, own: State) -> Vec<usize> {
        let these = |which: &dyn Fn(State) -> bool| self.those(|peer| self.state(peer).is_some_and(which));
        let gave_up = these(&|state| state.waits.is_in_vain());
        let least = |of: &[usize]| of.iter().filter_map(|peer| Some(self.state(*peer)?.round)).min();
        if !gave_up.is_empty() {
            // One that gives up because of another does so at about the same time as this rank.
            let behind = least(&gave_up);
            return these(&|state| state.waits.is_in_vain() && Some(state.round) == behind);
        }
        let behind = least(&self.found);
        these(&|state| Some(state.round) == behind && state.round < own.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_ranks_of_a_wait_are_published(peers in proptest::collection::vec(0usize..65536, 0..6)) {
            let first: Vec<usize> = peers.iter().copied().take(3).collect();
            for (waits, in_vain) in [(Waits::on(&peers), false), (Waits::in_vain(&peers), true)] {
                let waits_read = Waits::from_word(waits.word());
                prop_assert_eq!(waits_read.ranks().collect::<Vec<_>>(), first.clone());
                prop_assert_eq!(waits_read.is_in_vain(), in_vain);
            }
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    /// Ranks that have been asked for a second and say that; each beats or does not.
    fn known(now: Instant, states: &[Option<(u64, Waits, bool)>]) -> Vec<Known> {
        let one = |state: &Option<(u64, Waits, bool)>| {
            let mut known = Known::default();
            known.ask(now - SECOND);
            for (beat, at) in [(1, now - SECOND), (2, now - SECOND / 10)] {
                if let Some((round, waits, beats)) = *state {
                    known.update(State { round, waits, beat: if beats { beat } else { 1 } }, at);
                }
            }
            known
        };
        states.iter().map(one).collect()
    }

    /// Whom the last rank blames, which waits for the first.
    fn blamed(states: &[Option<(u64, Waits, bool)>], last: bool) -> Option<Vec<usize>> {
        let now = Instant::now() + 10 * SECOND;
        let mut known = known(now, states);
        let own = known.len();
        known.push(Known::default());
        let chain = Chain::new(&known, own, &[0], SECOND / 2, now);
        chain.culprits(State { round: 5, waits: Waits::on(&[0]), beat: 0 }, last)
    }

    fn waits(round: u64, peer: usize) -> Option<(u64, Waits, bool)> {
        Some((round, Waits::on(&[peer]), true))
    }

    fn gave_up(round: u64, peer: usize) -> Option<(u64, Waits, bool)> {
        Some((round, Waits::in_vain(&[peer]), true))
    }

    #[test]
    fn of_ranks_in_a_circle_who_gave_up_comes_before_who_is_behind() {
        assert_eq!(blamed(&[waits(5, 1), waits(4, 2), gave_up(5, 0)], false), Some(vec![2]));
        assert_eq!(blamed(&[gave_up(5, 1), gave_up(4, 0)], false), Some(vec![1]));
        assert_eq!(blamed(&[waits(5, 1), waits(4, 2), waits(5, 0)], false), Some(vec![1]));
        assert_eq!(blamed(&[waits(5, 1), waits(5, 0)], false), Some(vec![]));
    }

    #[test]
    fn a_chain_ends_with_who_waits_for_nobody() {
        let idle = Some((3, Waits::NOBODY, false));
        assert_eq!(blamed(&[waits(5, 1), waits(4, 2), idle], false), Some(vec![2]));
    }

    #[test]
    fn a_chain_ends_with_who_gives_no_answer() {
        assert_eq!(blamed(&[waits(5, 1), None], false), Some(vec![1]));
    }

    #[test]
    fn one_that_waits_but_does_not_beat_is_taken_for_stopped() {
        let stopped = Some((5, Waits::on(&[0]), false));
        assert_eq!(blamed(&[waits(5, 1), stopped], false), Some(vec![1]));
    }

    #[test]
    fn nobody_is_blamed_for_an_answer_that_had_no_time_to_come_unless_it_is_the_last_moment() {
        let now = Instant::now() + 10 * SECOND;
        let mut known = known(now, &[waits(5, 1), None]);
        known[1] = Known::default();
        known[1].ask(now - SECOND / 10);
        known.push(Known::default());
        let own = State { round: 5, waits: Waits::on(&[0]), beat: 0 };
        let chain = Chain::new(&known, 2, &[0], SECOND / 2, now);
        assert_eq!(chain.culprits(own, false), None);
        assert_eq!(chain.culprits(own, true), Some(vec![1]));
    }

    #[test]
    fn an_answer_that_is_too_old_is_none() {
        let now = Instant::now() + 10 * SECOND;
        let known = known(now, &[waits(5, 1), waits(5, 0)]);
        assert!(known[0].state(SECOND / 2, now).is_some());
        assert!(known[0].state(SECOND / 2, now + SECOND).is_none());
    }

    proptest! {
        #[test]
        fn whoever_is_asked_can_answer_within_the_limit(millis in 1000u64..100_000) {
            let limit = Duration::from_millis(millis);
            let schedule = Schedule::new(limit);
            prop_assert!(schedule.ask + schedule.answer <= limit);
            prop_assert!(schedule.ask + STILL <= limit);
            prop_assert_eq!(schedule.end, limit + GRACE);
        }

        #[test]
        fn a_short_limit_is_overrun_by_no_more_than_it_takes_to_tell_the_slow_from_the_stopped(millis in 0u64..1000) {
            let limit = Duration::from_millis(millis);
            prop_assert!(Schedule::new(limit).end <= limit + STILL);
        }
    }
}
