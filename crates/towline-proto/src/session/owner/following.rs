//! What follows the pieces of a transfer, and what becomes of it.

use std::time::Instant;
use std::vec;

use super::super::counting::{Due, Follower};
use super::{Admitted, Grant, Owner, Refusal};
use crate::wire::{Block, Message};
use crate::{Access, Error, Kind, Result};

/// Followers whose time has come, or never comes: [`settle`](Owner::settle) says of one after the other what becomes of it.
pub struct Settling<C> {
    followers: vec::IntoIter<Follower<(C, u64)>>,
    act: bool,
    forgives: bool,
}

impl<C> Settling<C> {
    pub(super) fn new(due: Due<(C, u64)>) -> Settling<C> {
        let (followers, act) = match due {
            Due::Act(followers) => (followers, true),
            Due::Drop(followers) => (followers, false),
        };
        Settling { followers: followers.into_iter(), act, forgives: false }
    }

    fn nothing() -> Settling<C> {
        Settling::new(Due::Drop(Vec::new()))
    }

    /// Returns whether the session goes on though one of them fails for whose end nothing waits.
    pub fn forgives(&self) -> bool {
        self.forgives
    }
}

/// What becomes of one follower.
pub struct Settled<G: Grant, C> {
    /// What is to be done, or why nothing is.
    pub act: Result<Act<G>, Refusal<G>>,
    /// The connection and the request to answer. Where nobody waits, a failure ends the session.
    pub answer: Option<(C, u64)>,
}

/// What a follower does.
pub enum Act<G: Grant> {
    /// Delivers that message to the owner's user.
    Deliver(Vec<u8>),
    /// Raises a counter.
    Raise(Word<G>, u64),
}

/// A word of 8 bytes that may be changed.
pub struct Word<G: Grant> {
    /// The region is held, and the word is all that may be touched of it.
    pub admitted: Admitted<G>,
    /// Where the word lies in the granted range.
    pub offset: u64,
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// A piece of a transfer was applied, or not: returns what waited for it. To be settled before the piece is answered: once the user
    /// has the reply, it may say that nothing more belongs to this transfer.
    pub fn applied(&mut self, transfer: u64, ok: bool) -> Result<Settling<C>> {
        match transfer {
            0 => Ok(Settling::nothing()),
            _ => self.counting.piece(transfer, ok).map(Settling::new),
        }
    }

    /// Something is to follow the pieces of a transfer.
    pub(super) fn follow(
        &mut self,
        over: &C,
        request: u64,
        message: Message,
        (transfer, pieces): (u64, u32),
    ) -> Result<Settling<C>> {
        // Request 0 wants no reply; a signal that is refused then is not worth the session.
        let forgives = request == 0 && matches!(message, Message::Signal(_));
        let answer = (request != 0).then(|| (over.clone(), request));
        let due = self.counting.follow(transfer, pieces, Follower::new(message, answer))?;
        Ok(Settling { forgives, ..Settling::new(due) })
    }

    /// Returns what becomes of the next follower; nothing when there are no more. To be done before the next is asked for.
    pub fn settle(&mut self, settling: &mut Settling<C>, now: Instant) -> Option<Settled<G, C>> {
        if settling.act {
            let Follower { message, answer, .. } = settling.followers.next()?;
            return Some(Settled { act: self.act(message, now), answer });
        }
        let answer = settling.followers.find_map(|follower| follower.answer)?;
        let error = Error::new(Kind::Canceled, "signal", "the transfer before it failed");
        Some(Settled { act: Err(error.into()), answer: Some(answer) })
    }

    fn act(&mut self, message: Message, now: Instant) -> Result<Act<G>, Refusal<G>> {
        match message {
            Message::Notify(notify) => {
                self.check_standing(now)?;
                Ok(Act::Deliver(notify.message))
            }
            Message::Signal(signal) => {
                Ok(Act::Raise(self.word(signal.handle, signal.offset, now)?, signal.add))
            }
            other => Err(Error::new(Kind::Internal, "serve", format!("{:?} follows", other.kind())).into()),
        }
    }

    pub(super) fn word(&mut self, handle: u32, offset: u64, now: Instant) -> Result<Word<G>, Refusal<G>> {
        let block = Block { offset, len: 8 };
        Ok(Word { admitted: self.admit(handle, Access::WRITE, vec![block], now)?, offset })
    }
}
