//! Who has come to a meeting, and whether it can end: pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use towline::Kind;

use super::MOST_RANKS;
use super::wire::{Join, Reply, VERSION};
use crate::Error;

const OP: &str = "init";
/// The longest that any rank is waited for, whatever a rank asks.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Who has come so far.
#[derive(Default)]
pub(super) struct Meeting {
    seats: BTreeMap<usize, Join>,
    deadline: Option<Instant>,
    opened: Option<Instant>,
    /// When it ends where no peer has connected by then.
    unjoined: Option<Instant>,
}

impl Meeting {
    /// A meeting to which a rank should come by then.
    pub(super) fn by(unjoined: Instant) -> Meeting {
        Meeting { unjoined: Some(unjoined), ..Meeting::default() }
    }

    /// When a rank's patience is over, or the root's, because no rank joins.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.or(self.unjoined)
    }

    /// A rank has come. The reply, where the meeting ends with it.
    pub(super) fn arrive(&mut self, join: Join, now: Instant) -> Option<Reply> {
        let rank = join.rank;
        if join.version != VERSION {
            let why = format!("a rank speaks version {} of the meeting, the root {VERSION}", join.version);
            return Some(failed(Kind::Protocol, why, [rank]));
        }
        if join.nranks == 0 || join.nranks > MOST_RANKS || rank >= join.nranks {
            let why = format!("there is no rank {rank} among {}", join.nranks);
            return Some(failed(Kind::Invalid, why, [rank]));
        }
        if self.seats.contains_key(&rank) {
            return Some(failed(Kind::Invalid, "two ranks joined with the same number".into(), [rank]));
        }
        self.opened.get_or_insert(now);
        let patience = now + Duration::from_millis(join.timeout_ms).min(LONGEST);
        self.deadline = Some(self.deadline.map_or(patience, |deadline| deadline.min(patience)));
        self.seats.insert(rank, join);
        if let Some(reply) = self.differing("sizes of the group", |join| join.nranks as u64) {
            return Some(reply);
        }
        if let Some(reply) = self.differing("settings", |join| join.digest) {
            return Some(reply);
        }
        let complete = self.seats.values().next().is_some_and(|first| first.nranks == self.seats.len());
        complete.then(|| Reply::List(self.seats.values().map(|join| join.ticket.clone()).collect()))
    }

    /// A rank that had come is gone.
    pub(super) fn depart(&self, rank: usize) -> Reply {
        failed(Kind::Disconnected, "a rank left before all ranks had joined".into(), [rank])
    }

    /// Ends the meeting where the patience of a rank is over.
    pub(super) fn expire(&self, now: Instant) -> Option<Reply> {
        self.deadline().filter(|deadline| *deadline <= now)?;
        let Some(first) = self.seats.values().next() else {
            let why = "no rank joined in time: an id is valid for as long as its options say";
            return Some(failed(Kind::Timeout, why.into(), []));
        };
        let nranks = first.nranks;
        let missing: Vec<usize> = (0..nranks).filter(|rank| !self.seats.contains_key(rank)).collect();
        let waited = self.opened.map_or(Duration::ZERO, |opened| now - opened).as_secs_f64();
        let why = format!("{} of {nranks} ranks did not join within {waited:.3} s", missing.len());
        Some(failed(Kind::Timeout, why, missing))
    }

    /// Refuses where the ranks do not all say the same: names those that differ from most.
    fn differing(&self, what: &str, of: impl Fn(&Join) -> u64) -> Option<Reply> {
        let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
        for join in self.seats.values() {
            *votes.entry(of(join)).or_default() += 1;
        }
        if votes.len() < 2 {
            return None;
        }
        let most = votes.values().max()?;
        let usual = *votes.iter().find(|(_, count)| *count == most)?.0;
        let differ = self.seats.iter().filter(|(_, join)| of(join) != usual).map(|(rank, _)| *rank);
        Some(failed(Kind::Invalid, format!("the ranks' {what} differ"), differ))
    }
}

fn failed(kind: Kind, why: String, ranks: impl IntoIterator<Item = usize>) -> Reply {
    Reply::Failed(Error::new(kind, OP, why).about(ranks))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn rank(rank: usize, nranks: usize) -> Join {
        Join {
            version: VERSION,
            nranks,
            rank,
            digest: 1,
            timeout_ms: 1000,
            name: String::new(),
            ticket: vec![rank as u8],
        }
    }

    fn error(reply: Option<Reply>) -> Error {
        match reply {
            Some(Reply::Failed(error)) => error,
            other => panic!("no error: {other:?}"),
        }
    }

    #[test]
    fn the_list_is_complete_when_the_last_rank_comes_and_in_order() {
        let (mut meeting, now) = (Meeting::default(), Instant::now());
        assert!(meeting.arrive(rank(2, 3), now).is_none());
        assert!(meeting.arrive(rank(0, 3), now).is_none());
        let Some(Reply::List(tickets)) = meeting.arrive(rank(1, 3), now) else { panic!("not complete") };
        assert_eq!(tickets, [[0], [1], [2]]);
    }

    #[test]
    fn missing_ranks_are_named_when_the_first_loses_patience() {
        let (mut meeting, now) = (Meeting::default(), Instant::now());
        assert!(meeting.arrive(rank(1, 4), now).is_none());
        assert!(meeting.expire(now).is_none());
        let error = error(meeting.expire(now + Duration::from_secs(2)));
        assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[0, 2, 3][..]));
    }

    #[test]
    fn duplicate_outside_and_differing_ranks_end_the_meeting_by_name() {
        let now = Instant::now();
        let mut meeting = Meeting::default();
        assert!(meeting.arrive(rank(1, 3), now).is_none());
        assert_eq!(error(meeting.arrive(rank(1, 3), now)).ranks(), [1]);
        assert_eq!(error(Meeting::default().arrive(rank(7, 3), now)).ranks(), [7]);
        let mut meeting = Meeting::default();
        assert!(meeting.arrive(rank(0, 3), now).is_none());
        assert!(meeting.arrive(rank(1, 3), now).is_none());
        assert_eq!(error(meeting.arrive(rank(2, 4), now)).ranks(), [2]);
        let other = Join { digest: 2, ..rank(1, 3) };
        let mut meeting = Meeting::default();
        assert!(meeting.arrive(rank(0, 3), now).is_none());
        assert_eq!(error(meeting.arrive(other, now)).kind(), Kind::Invalid);
    }

    #[test]
    fn a_rank_of_another_version_is_named_to_everybody() {
        let other = Join { version: VERSION + 1, ..rank(2, 3) };
        let error = error(Meeting::default().arrive(other, Instant::now()));
        assert_eq!((error.kind(), error.ranks()), (Kind::Protocol, &[2][..]));
    }
}
