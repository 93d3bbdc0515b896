//! Requests that nobody here waits for any more, and that the owner may still answer: once each.
//!
//! A reply to anything else breaks the protocol. So what was given up is remembered until its reply has come, or until
//! the connection is gone over which it would.

use std::collections::BTreeMap;

use super::ConnectionId;
use crate::wire::FrameKind;

/// More than fit on their way into an owner that answers nothing. Of those before, answers are let pass.
const MOST: usize = 1 << 16;

/// The reply that a request gets.
#[derive(Clone, Copy)]
pub(super) struct Due {
    pub(super) kind: FrameKind,
    /// It comes over the connection of its request.
    pub(super) over: ConnectionId,
}

impl Due {
    /// Why this is not the reply, if it is not.
    pub(super) fn refusal(self, kind: FrameKind, over: ConnectionId) -> Option<&'static str> {
        if self.over != over {
            return Some("the owner sent its reply over another connection than the request came on");
        }
        (kind != self.kind).then_some("the owner's reply does not fit the request")
    }
}

/// What an owner owes.
#[derive(Default)]
pub(super) struct Owed {
    requests: BTreeMap<u64, Due>,
    /// The last request of which nothing is known any more.
    forgotten: u64,
}

impl Owed {
    pub(super) fn note(&mut self, request: u64, due: Due) {
        self.requests.insert(request, due);
        if self.requests.len() > MOST
            && let Some((oldest, _)) = self.requests.pop_first()
        {
            self.forgotten = oldest;
        }
    }

    /// The reply that the request gets; the outer `None` if it gets no reply, the inner if that is not known.
    pub(super) fn due(&self, request: u64) -> Option<Option<Due>> {
        match self.requests.get(&request) {
            Some(due) => Some(Some(*due)),
            None => (1..=self.forgotten).contains(&request).then_some(None),
        }
    }

    /// It has been answered, or never will be.
    pub(super) fn settle(&mut self, request: u64) {
        self.requests.remove(&request);
    }

    /// Nothing comes over that connection any more.
    pub(super) fn gone(&mut self, connection: ConnectionId) {
        self.requests.retain(|_, due| due.over != connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUE: Due = Due { kind: FrameKind::Data, over: ConnectionId(0) };

    #[test]
    fn an_owner_that_answers_nothing_does_not_fill_the_memory() {
        let mut owed = Owed::default();
        let last = MOST as u64 + 10;
        (1..=last).for_each(|request| owed.note(request, DUE));
        assert_eq!(owed.requests.len(), MOST);
        assert!(matches!(owed.due(10), Some(None)), "it may be answered, or not");
        assert!(matches!(owed.due(11), Some(Some(_))));
        assert!(owed.due(last + 1).is_none() && owed.due(0).is_none(), "no such request was sent");
    }

    #[test]
    fn a_request_is_answered_once() {
        let mut owed = Owed::default();
        owed.note(7, DUE);
        assert!(owed.due(7).is_some());
        owed.settle(7);
        assert!(owed.due(7).is_none());
    }
}
