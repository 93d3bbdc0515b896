//! Who is to blame when a rank has waited in vain: not those that are themselves held up.
//!
//! A rank that has waited for a while publishes for whom, and shows by a beat that it is not stopped. Who comes to its limit
//! follows these words from rank to rank, until it finds ranks that wait for nobody or give no answer.

use std::thread;
use std::time::Duration;

use super::Team;
use super::waiting::LOOK;

/// The shortest and the longest time in which the ranks that are asked must answer. One that does not is taken for stopped,
/// so that it is generous: on a machine with ten times as many threads as cores a living one takes most of a second.
const ASK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(3));

/// How often a rank that waits is given time to beat before it counts as stopped.
const BEATS: usize = 6;

/// For whom a rank waits, as it is published in one word: the first few ranks, and whether it has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    /// The round that it has entered last.
    round: u64,
    waits: Waits,
    /// Grows while it waits.
    beat: u64,
}

impl State {
    pub(super) fn new(round: u64, waits: u64, beat: u64) -> State {
        State { round, waits: Waits::from_word(waits), beat }
    }
}

/// What is known of the ranks for which this one waits, and of those for which they wait.
struct Chain {
    /// By rank; outside: not asked, inside: no answer.
    states: Vec<Option<Option<State>>>,
    /// Those that were asked, in the order in which they were found.
    found: Vec<usize>,
}

impl Chain {
    /// The ranks that wait for nobody, or give no answer.
    fn ends(&self) -> Vec<usize> {
        let ends = |peer: &usize| self.state(*peer).is_none_or(|state| state.waits == Waits::NOBODY);
        self.found.iter().copied().filter(ends).collect()
    }

    fn state(&self, peer: usize) -> Option<State> {
        self.states[peer].flatten()
    }

    /// Those that wait still, as far as they say, and would beat.
    fn beating(&self) -> Vec<usize> {
        let beats = |peer: &usize| self.state(*peer).is_some_and(|state| state.waits.beats());
        self.found.iter().copied().filter(beats).collect()
    }

    /// Of ranks that all wait for each other: who has given up, else who is the furthest behind. Empty where nobody is.
    fn laggards(&self, own: State) -> Vec<usize> {
        let these = |which: &dyn Fn(State) -> bool| -> Vec<usize> {
            self.found.iter().copied().filter(|peer| self.state(*peer).is_some_and(which)).collect()
        };
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

impl Team {
    /// Who has kept this rank waiting, of those that it misses and those that they miss in turn. Takes a while where
    /// somebody does not answer.
    pub(super) fn culprits(&self, wanted: &[usize]) -> Vec<usize> {
        let chain = self.chain(wanted);
        let mut culprits = chain.ends();
        if culprits.is_empty() {
            culprits = self.break_circle(&chain);
        }
        if culprits.is_empty() {
            culprits = wanted.iter().copied().filter(|peer| *peer < self.nranks()).collect();
        }
        // Who waits for something of its own as well has itself to blame for that.
        culprits.extend(wanted.iter().copied().filter(|peer| *peer == self.rank()));
        culprits.sort_unstable();
        culprits.dedup();
        culprits
    }

    fn chain(&self, wanted: &[usize]) -> Chain {
        let mut chain = Chain { states: vec![None; self.nranks()], found: Vec::new() };
        chain.states[self.rank()] = Some(None);
        let mut next: Vec<usize> = wanted.to_vec();
        loop {
            next.sort_unstable();
            next.dedup();
            next.retain(|peer| *peer < self.nranks() && chain.states[*peer].is_none());
            if next.is_empty() || self.failure().is_some() {
                return chain;
            }
            for (peer, state) in next.iter().zip(self.states_of(&next)) {
                chain.states[*peer] = Some(state);
                chain.found.push(*peer);
            }
            let waits = |peer: usize| chain.state(peer).map(|state| state.waits.ranks());
            next = next.iter().filter_map(|peer| waits(*peer)).flatten().collect();
        }
    }

    fn states_of(&self, peers: &[usize]) -> Vec<Option<State>> {
        let within = (self.options.timeout / 2).clamp(ASK.0, ASK.1);
        self.links.states_of(peers, within, || self.links.beat())
    }

    /// Who is to blame where everybody says that it waits: one that was stopped in a wait says so for ever, but does not
    /// beat.
    fn break_circle(&self, chain: &Chain) -> Vec<usize> {
        let mut still = chain.beating();
        for _ in 0..BEATS {
            if still.is_empty() || self.failure().is_some() {
                break;
            }
            thread::sleep(LOOK);
            self.links.beat();
            let now = self.states_of(&still);
            let same = |peer: usize, now: Option<State>| {
                now.zip(chain.state(peer)).is_none_or(|(now, then)| now == then)
            };
            still = still
                .iter()
                .zip(now)
                .filter(|(peer, now)| same(**peer, *now))
                .map(|(peer, _)| *peer)
                .collect();
        }
        if !still.is_empty() {
            return still;
        }
        self.links.own_state().map(|own| chain.laggards(own)).unwrap_or_default()
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
                let told = Waits::from_word(waits.word());
                prop_assert_eq!(told.ranks().collect::<Vec<_>>(), first.clone());
                prop_assert_eq!(told.is_in_vain(), in_vain);
            }
        }
    }

    fn chain(states: &[(u64, Waits)]) -> Chain {
        let state =
            |(round, waits): &(u64, Waits)| Some(Some(State { round: *round, waits: *waits, beat: 0 }));
        Chain { states: states.iter().map(state).collect(), found: (0..states.len()).collect() }
    }

    #[test]
    fn of_ranks_in_a_circle_who_gave_up_comes_before_who_is_behind() {
        let own = State { round: 5, waits: Waits::on(&[0]), beat: 0 };
        let on = |peer: usize| Waits::on(&[peer]);
        assert_eq!(chain(&[(5, on(1)), (4, on(2)), (5, Waits::in_vain(&[0]))]).laggards(own), [2]);
        assert_eq!(chain(&[(5, Waits::in_vain(&[1])), (4, Waits::in_vain(&[0]))]).laggards(own), [1]);
        assert_eq!(chain(&[(5, on(1)), (4, on(2)), (5, on(0))]).laggards(own), [1]);
        assert_eq!(chain(&[(5, on(1)), (5, on(0))]).laggards(own), [0; 0]);
    }

    #[test]
    fn a_chain_ends_with_who_waits_for_nobody() {
        let on = |peer: usize| Waits::on(&[peer]);
        assert_eq!(chain(&[(5, on(1)), (4, on(2)), (3, Waits::NOBODY)]).ends(), [2]);
    }
}
