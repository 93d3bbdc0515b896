//! What follows the pieces of a transfer: signals and notifications that wait until the last piece is applied, however
//! many connections the pieces took.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::allowance::Allowance;
use super::budget::Charge;
use crate::wire::Message;
use crate::{Error, Kind, Result, room};

/// Transfers of one peer whose pieces are counted at a time.
const MOST_COUNTED: usize = 1 << 16;

/// What waits for pieces of one peer's transfers takes at most about this many bytes.
const MOST_WAITING: usize = 64 << 20;

/// Something that follows the pieces of a transfer, and what gets its outcome.
pub struct Follower<A> {
    /// The signal or notification.
    pub message: Message,
    /// The waiter for the outcome.
    pub answer: Option<A>,
    /// How many pieces it follows.
    pieces: u32,
    /// What it takes while it waits.
    _charge: Option<Charge>,
}

impl<A> Follower<A> {
    /// Beside its message.
    const COST: usize = 2 * size_of::<Follower<A>>() + 64;

    /// A message that follows, and the waiter for its outcome.
    pub fn new(message: Message, answer: Option<A>) -> Follower<A> {
        Follower { message, answer, pieces: 0, _charge: None }
    }

    /// How much memory it takes.
    fn cost(&self) -> usize {
        let message = match &self.message {
            Message::Notify(notify) => notify.message.capacity(),
            _ => 0,
        };
        message + Self::COST
    }
}

/// What became of followers.
pub enum Due<A> {
    /// Their time has come.
    Act(Vec<Follower<A>>),
    /// A piece has failed, so it never comes.
    Drop(Vec<Follower<A>>),
}

struct Count<A> {
    applied: u32,
    failed: bool,
    waiting: Vec<Follower<A>>,
    /// None of those follows fewer pieces.
    least: u32,
    _charge: Charge,
}

/// The transfers of one peer whose pieces are counted.
pub struct Counting<A> {
    transfers: HashMap<u64, Count<A>>,
    /// What all followers that wait take.
    held: usize,
    allowance: Arc<Allowance>,
}

impl<A> Counting<A> {
    /// What the pieces of one transfer are counted in.
    const COUNT: usize = 4 * size_of::<(u64, Count<A>)>();

    /// None are counted yet; what they take is of that allowance.
    pub fn new(allowance: &Arc<Allowance>) -> Counting<A> {
        Counting { transfers: HashMap::new(), held: 0, allowance: Arc::clone(allowance) }
    }

    /// A piece was applied, or failed.
    pub fn piece(&mut self, transfer: u64, ok: bool) -> Result<Due<A>> {
        let count = self.count(transfer)?;
        count.applied += 1;
        count.failed |= !ok;
        let (applied, failed) = (count.applied, count.failed);
        let is_due = |follower: &Follower<A>| failed || applied >= follower.pieces;
        let mut due = Vec::new();
        if failed || applied >= count.least {
            let number = count.waiting.iter().filter(|follower| is_due(follower)).count();
            if number == count.waiting.len() {
                due = std::mem::take(&mut count.waiting);
            } else {
                due = room::list("serve", number)?;
                due.extend(count.waiting.extract_if(.., |follower| is_due(follower)));
            }
            count.least = count.waiting.iter().map(|follower| follower.pieces).min().unwrap_or(u32::MAX);
        }
        self.held -= due.iter().map(Follower::cost).sum::<usize>();
        Ok(if failed { Due::Drop(due) } else { Due::Act(due) })
    }

    /// Something is to follow that many pieces.
    pub fn follow(&mut self, transfer: u64, pieces: u32, follower: Follower<A>) -> Result<Due<A>> {
        if pieces == 0 {
            return Ok(Due::Act(vec![follower]));
        }
        let cost = follower.cost();
        if self.held + cost > MOST_WAITING {
            return Err(too_many());
        }
        let charge = Some(self.allowance.charge("serve", cost)?);
        let count = self.count(transfer)?;
        if count.failed {
            return Ok(Due::Drop(vec![follower]));
        }
        if count.applied >= pieces {
            return Ok(Due::Act(vec![follower]));
        }
        room::push("serve", &mut count.waiting, Follower { pieces, _charge: charge, ..follower })?;
        count.least = count.least.min(pieces);
        self.held += cost;
        Ok(Due::Act(Vec::new()))
    }

    /// Nothing more belongs to the transfer.
    pub fn forget(&mut self, transfer: u64) -> Due<A> {
        let dropped = self.transfers.remove(&transfer).map(|count| count.waiting).unwrap_or_default();
        self.held -= dropped.iter().map(Follower::cost).sum::<usize>();
        Due::Drop(dropped)
    }

    /// Forgets everything: the session is over.
    pub fn clear(&mut self) {
        self.transfers.clear();
        self.held = 0;
    }

    /// What the pieces of that transfer are counted in. It stays until the user says that nothing more belongs to it: a signal and a
    /// notification may both follow, and either may come after the last piece.
    fn count(&mut self, transfer: u64) -> Result<&mut Count<A>> {
        let Counting { transfers, allowance, .. } = self;
        let others = transfers.len();
        if !transfers.contains_key(&transfer) {
            if others >= MOST_COUNTED {
                return Err(too_many());
            }
            transfers.try_reserve(1).map_err(|cause| {
                let message = format!("no memory for the pieces of {} transfers", others + 1);
                Error::new(Kind::Exhausted, "serve", message).caused_by(cause)
            })?;
        }
        Ok(match transfers.entry(transfer) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let charge = allowance.charge("serve", Self::COUNT)?;
                let waiting = Vec::new();
                new.insert(Count { applied: 0, failed: false, waiting, least: u32::MAX, _charge: charge })
            }
        })
    }
}

fn too_many() -> Error {
    Error::new(Kind::Exhausted, "serve", "too many transfers wait for their last piece")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::session::Quotas;
    use crate::session::budget::Budget;
    use crate::wire::Notify;

    fn counting() -> Counting<()> {
        let budget = Budget::new("tests", Quotas::default().memory);
        Counting::new(&Allowance::new(Quotas::default(), budget.account()))
    }

    fn follower(name: &str) -> Follower<()> {
        let message = Notify { transfer: 1, pieces: 0, message: name.into() }.into();
        Follower::new(message, None)
    }

    fn acted(due: Due<()>) -> Vec<Vec<u8>> {
        let names = |followers: Vec<Follower<()>>| {
            followers
                .into_iter()
                .map(|follower| match follower.message {
                    Message::Notify(notify) => notify.message,
                    _ => Vec::new(),
                })
                .collect()
        };
        match due {
            Due::Act(followers) => names(followers),
            Due::Drop(followers) => {
                assert!(followers.is_empty());
                Vec::new()
            }
        }
    }

    #[test]
    fn a_follower_acts_with_the_last_piece_whichever_comes_first() {
        let mut counting = counting();
        assert!(acted(counting.piece(1, true).unwrap()).is_empty());
        assert!(acted(counting.follow(1, 2, follower("signal")).unwrap()).is_empty());
        assert_eq!(acted(counting.piece(1, true).unwrap()), [b"signal"]);
        assert_eq!(acted(counting.follow(1, 2, follower("notify")).unwrap()), [b"notify"]);
        assert_eq!(acted(counting.follow(2, 0, follower("alone")).unwrap()), [b"alone"]);
    }

    #[test]
    fn each_follower_acts_after_its_own_number_of_pieces() {
        let mut counting = counting();
        for (pieces, name) in [(3, "last"), (1, "first"), (2, "second")] {
            assert!(acted(counting.follow(1, pieces, follower(name)).unwrap()).is_empty());
        }
        assert_eq!(acted(counting.piece(1, true).unwrap()), [b"first"]);
        assert_eq!(acted(counting.piece(1, true).unwrap()), [b"second"]);
        assert_eq!(acted(counting.piece(1, true).unwrap()), [b"last"]);
        assert_eq!(acted(counting.follow(1, 3, follower("late")).unwrap()), [b"late"]);
    }

    #[test]
    fn nothing_follows_a_transfer_of_which_a_piece_failed() {
        let mut counting = counting();
        let _ = counting.follow(1, 2, follower("signal")).unwrap();
        assert!(matches!(counting.piece(1, false).unwrap(), Due::Drop(dropped) if dropped.len() == 1));
        assert!(
            matches!(counting.follow(1, 2, follower("notify")).unwrap(), Due::Drop(dropped) if dropped.len() == 1)
        );
        assert!(acted(counting.piece(1, true).unwrap()).is_empty());
    }

    #[test]
    fn what_is_forgotten_is_counted_anew_and_its_followers_are_dropped() {
        let mut counting = counting();
        let _ = counting.follow(1, 1, follower("signal")).unwrap();
        assert!(matches!(counting.forget(1), Due::Drop(dropped) if dropped.len() == 1));
        assert!(acted(counting.piece(1, true).unwrap()).is_empty());
    }

    #[test]
    fn what_waits_for_a_last_piece_is_bounded() {
        let mut counting = counting();
        let long = "x".repeat(64 << 10);
        let refused = (0..2000).find_map(|_| counting.follow(1, 2, follower(&long)).err()).unwrap();
        assert_eq!(refused.kind(), Kind::Exhausted);
        let _ = counting.forget(1);
        assert!(counting.follow(1, 2, follower(&long)).is_ok());
    }
}
