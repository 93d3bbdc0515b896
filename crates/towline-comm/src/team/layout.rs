//! Where everything lies in a rank's control region (pure).
//!
//! The region starts with what belongs to its owner: the bell on which it sleeps, the word that says that the team was
//! aborted, and its published state. Behind it every rank has a part into which only that rank writes. All ranks of a
//! team have the same layout, so a rank knows the offsets in every rank's region.

use super::PAYLOAD;
use crate::{Error, Result};

/// Words that different ranks write never share a cache line.
const LINE: usize = 64;

/// The word on which the owner sleeps.
pub(super) const BELL: usize = 0;
/// One more than the rank that aborted the team; zero while it works.
pub(super) const ABORTED: usize = LINE;
/// The owner's published state: see [`State`](super::blame::State).
pub(super) const STATE: usize = 2 * LINE;
/// Where the parts start.
const HEAD: usize = 4 * LINE;

/// The round that the owner has entered last.
pub(super) const STATE_ROUND: usize = STATE;
/// For whom the owner has waited for a while, or has waited in vain; zero when it does not wait.
pub(super) const STATE_WAITS: usize = STATE + 8;
/// Grows while the owner waits: one that does not move any more is stopped.
pub(super) const STATE_BEAT: usize = STATE + 16;
/// How many bytes of state are published.
pub(super) const STATE_LEN: usize = 24;

/// The head of an entry: sequence, digest, four words, length of the payload, start of the name.
pub(super) const ENTRY_HEAD: usize = LINE;

/// An abort record's room.
pub(super) const RECORD: usize = 512;

/// Offsets within a part: how often its rank has left a round.
const LEFT: usize = 0;
/// How many bytes its rank has put into the ring of this part.
const TAIL: usize = LINE;
/// How many bytes its rank has taken from the ring of the opposite direction.
const TAKEN: usize = 2 * LINE;
/// How many messages its rank has accepted and refused.
const ACCEPTED: usize = 3 * LINE;
const REFUSED: usize = ACCEPTED + 8;
/// Not zero once its rank has left the team; above the lowest bit, one more than the rank because of which it did.
const DEPARTED: usize = 4 * LINE;
/// Nobody reads it: far ranks write here what only exists to carry a signal.
const SCRATCH: usize = DEPARTED + 8;
/// The record behind an abort.
const ABORT_RECORD: usize = 5 * LINE;
const SIGNALS: usize = ABORT_RECORD + RECORD;

/// Rounds whose announcements exist at a time: a rank may be one ahead of another.
const ENTRIES: u64 = 2;

const MOST_RANKS: usize = 1 << 16;
const MOST_SIGNALS: u64 = 1 << 20;

/// All rings of a rank together take about this much, so that a large team does not take all memory.
const RINGS: usize = 4 << 20;
const LEAST_RING: usize = 16 << 10;
/// Measured on an all_reduce of 1 MiB of unregistered memory with 2 ranks, on 2 busy cores: rings of 256 KiB make
/// 2.5 GiB/s, of 512 KiB 3.9, of 1 MiB 4.4, of 2 MiB 4.4 and of 4 MiB 4.3.
const MOST_RING: usize = 1 << 20;
/// The most bytes that are put into a ring, or taken out of it, before the other side is notified.
const MOST_UNTOLD: usize = 64 << 10;

/// The layout of the control regions of one team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    nranks: usize,
    contexts: u32,
    signals: u32,
    entries: usize,
    rings: usize,
    ring: usize,
    part: usize,
}

impl Layout {
    pub(super) fn new(nranks: usize, contexts: u32, signals: u32) -> Result<Layout> {
        if nranks == 0 || nranks > MOST_RANKS {
            return Err(Error::invalid("team", format!("a team has 1 to {MOST_RANKS} ranks, not {nranks}")));
        }
        let counters = u64::from(contexts) * u64::from(signals);
        if counters > MOST_SIGNALS {
            return Err(Error::invalid(
                "team",
                format!("{contexts} contexts of {signals} signals are more than {MOST_SIGNALS} counters"),
            ));
        }
        let share = (RINGS / nranks).clamp(LEAST_RING, MOST_RING);
        let ring = 1 << share.ilog2();
        let entries = SIGNALS + (counters as usize * 8).next_multiple_of(LINE);
        let rings = entries + ENTRIES as usize * (ENTRY_HEAD + PAYLOAD);
        Ok(Layout { nranks, contexts, signals, entries, rings, ring, part: rings + ring })
    }

    /// The length of a control region.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub(super) fn len(&self) -> usize {
        HEAD + self.nranks * self.part
    }

    /// How many ranks the team has.
    pub(super) fn nranks(&self) -> usize {
        self.nranks
    }

    /// The bytes of one ring.
    pub(super) fn ring_len(&self) -> usize {
        self.ring
    }

    /// How many bytes of a ring one side moves before it notifies the other, which works on them meanwhile.
    pub(super) fn acknowledge_after(&self) -> usize {
        (self.ring / 4).min(MOST_UNTOLD)
    }

    fn part(&self, rank: usize) -> usize {
        HEAD + rank * self.part
    }

    pub(super) fn left(&self, rank: usize) -> usize {
        self.part(rank) + LEFT
    }

    pub(super) fn tail(&self, rank: usize) -> usize {
        self.part(rank) + TAIL
    }

    pub(super) fn taken(&self, rank: usize) -> usize {
        self.part(rank) + TAKEN
    }

    pub(super) fn accepted(&self, rank: usize) -> usize {
        self.part(rank) + ACCEPTED
    }

    pub(super) fn refused(&self, rank: usize) -> usize {
        self.part(rank) + REFUSED
    }

    pub(super) fn departed(&self, rank: usize) -> usize {
        self.part(rank) + DEPARTED
    }

    pub(super) fn scratch(&self, rank: usize) -> usize {
        self.part(rank) + SCRATCH
    }

    pub(super) fn abort_record(&self, rank: usize) -> usize {
        self.part(rank) + ABORT_RECORD
    }

    /// The counter of that context and index; `None` if it does not exist.
    #[inline]
    pub(super) fn signal(&self, rank: usize, context: u32, index: u32) -> Option<usize> {
        let exists = rank < self.nranks && context < self.contexts && index < self.signals;
        let number = u64::from(context) * u64::from(self.signals) + u64::from(index);
        exists.then(|| self.part(rank) + SIGNALS + number as usize * 8)
    }

    /// The entry of that rank for that round.
    pub(super) fn entry(&self, rank: usize, round: u64) -> usize {
        self.part(rank) + self.entries + Layout::entry_slot(round) * (ENTRY_HEAD + PAYLOAD)
    }

    /// Which of the entries a round uses.
    pub(super) fn entry_slot(round: u64) -> usize {
        (round % ENTRIES) as usize
    }

    /// What must be added to the sequence of an entry so that it names this round, its slot's next one.
    pub(super) fn entry_step(round: u64) -> u64 {
        round.min(ENTRIES)
    }

    pub(super) fn ring(&self, rank: usize) -> usize {
        self.part(rank) + self.rings
    }

    /// Where a position of the stream lies in a ring, and how many bytes follow it without a break.
    pub(super) fn ring_place(&self, position: u64) -> (usize, usize) {
        let at = (position % self.ring as u64) as usize;
        (at, self.ring - at)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    /// Every range that may be touched, by name.
    fn ranges(layout: &Layout) -> Vec<(String, usize, usize)> {
        let mut all = vec![
            ("bell".to_owned(), BELL, 8),
            ("aborted".to_owned(), ABORTED, 8),
            ("state".to_owned(), STATE, STATE_LEN),
        ];
        for rank in 0..layout.nranks {
            let mut add =
                |name: &str, at: usize, len: usize| all.push((format!("{name} of {rank}"), at, len));
            add("left", layout.left(rank), 8);
            add("tail", layout.tail(rank), 8);
            add("taken", layout.taken(rank), 8);
            add("accepted", layout.accepted(rank), 8);
            add("refused", layout.refused(rank), 8);
            add("departed", layout.departed(rank), 8);
            add("scratch", layout.scratch(rank), 8);
            add("record", layout.abort_record(rank), RECORD);
            for context in 0..layout.contexts {
                for index in 0..layout.signals {
                    add("signal", layout.signal(rank, context, index).unwrap(), 8);
                }
            }
            for round in 1..=ENTRIES {
                add("entry", layout.entry(rank, round), ENTRY_HEAD + PAYLOAD);
            }
            add("ring", layout.ring(rank), layout.ring_len());
        }
        all
    }

    proptest! {
        #[test]
        fn nothing_overlaps_and_everything_lies_within(nranks in 1usize..40, contexts in 0u32..4, signals in 0u32..9) {
            let layout = Layout::new(nranks, contexts, signals).unwrap();
            let mut all = ranges(&layout);
            all.sort_by_key(|(_, at, _)| *at);
            for pair in all.windows(2) {
                prop_assert!(pair[0].1 + pair[0].2 <= pair[1].1, "{:?} overlaps {:?}", pair[0], pair[1]);
            }
            let (name, at, len) = all.last().unwrap();
            prop_assert!(at + len <= layout.len(), "{name} lies outside");
            prop_assert!(all.iter().all(|(_, at, _)| at % 8 == 0));
        }

        #[test]
        fn steps_lead_every_slot_from_round_to_round(rounds in 1u64..100) {
            let mut slots = [0u64; ENTRIES as usize];
            for round in 1..=rounds {
                let slot = &mut slots[Layout::entry_slot(round)];
                *slot += Layout::entry_step(round);
                prop_assert_eq!(*slot, round);
            }
        }
    }

    #[test]
    fn a_large_team_has_smaller_rings() {
        let len = |nranks| Layout::new(nranks, 1, 1).unwrap().ring_len();
        assert_eq!((len(1), len(16), len(100), len(4000)), (1 << 20, 256 << 10, 32 << 10, 16 << 10));
    }

    #[test]
    fn what_cannot_be_laid_out_is_refused() {
        assert!(Layout::new(0, 1, 1).is_err());
        assert!(Layout::new(MOST_RANKS + 1, 1, 1).is_err());
        assert!(Layout::new(2, u32::MAX, u32::MAX).is_err());
        let layout = Layout::new(2, 2, 3).unwrap();
        assert_eq!(layout.signal(0, 2, 0), None);
        assert_eq!(layout.signal(0, 0, 3), None);
        assert_eq!(layout.signal(2, 0, 0), None);
    }
}
