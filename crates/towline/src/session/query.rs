//! What a path asks of an owner before it is taken, and which grants it has borrowed since.

use std::sync::{Arc, Weak, mpsc};
use std::time::Instant;

use super::grant::GrantHandle;
use super::initiator::{Pending, Session};
use crate::sync::lock;
use crate::transport::{Borrowing, Told};
use crate::wire::{self, Message};
use crate::{Error, Kind, Result, runtime};

impl Session {
    /// Asks the owner about a path to one of its grants, and waits for the answer.
    pub(super) fn ask_path(&self, ask: wire::Ask, until: Instant) -> Result<Told> {
        runtime::may_block("import")?;
        let (asker, answer) = mpsc::sync_channel(1);
        let request = self.expect(Pending::Ask(asker))?;
        let told = self.ask_for_files(Message::from(ask).frame(request, 0, 0)).and_then(|()| {
            answer.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
                let message = "the owner did not answer about a path in time";
                Err(Error::new(Kind::Timeout, "import", message))
            })
        });
        self.give_up(request);
        told.map_err(|error| error.with_peer(self.peer_name()))
    }

    /// Remembers who must be told when the owner wants that grant back.
    pub(super) fn borrows(&self, grant: &GrantHandle, borrowing: Weak<dyn Borrowing>) {
        let late = {
            let mut all = lock(&self.borrowing);
            all.retain(|_, one| one.is_wanted());
            let borrowed = all.entry(grant.handle).or_default();
            borrowed.by.push((std::ptr::from_ref(grant).addr(), Weak::clone(&borrowing)));
            borrowed.recalled
        };
        // The owner has asked for it already, and asks once.
        if let Some(borrowing) = borrowing.upgrade().filter(|_| late) {
            borrowing.recalled();
        }
    }

    /// The owner wants that grant back.
    pub(in crate::session) fn recall(&self, handle: u32) {
        let by: Vec<_> = match lock(&self.borrowing).get_mut(&handle) {
            Some(borrowed) => {
                borrowed.recalled = true;
                borrowed.living().collect()
            }
            None => Vec::new(),
        };
        by.into_iter().for_each(Borrowing::recalled);
    }

    /// Whether nobody else has something under way, or may begin something, by the same grant.
    pub(in crate::session) fn others_have_let_go(&self, grant: &GrantHandle) -> bool {
        let me = std::ptr::from_ref(grant).addr();
        let others: Vec<_> = match lock(&self.borrowing).get(&grant.handle) {
            Some(borrowed) => borrowed.by.iter().filter(|(who, _)| *who != me).cloned().collect(),
            None => Vec::new(),
        };
        others.iter().filter_map(|(_, one)| one.upgrade()).all(|one| one.has_let_go())
    }

    /// Whether nothing is under way on a path that reaches the owner's memory by itself.
    pub(super) fn borrows_nothing(&self) -> bool {
        let all: Vec<_> = lock(&self.borrowing).values().flat_map(Borrowed::living).collect();
        all.iter().all(|one| one.is_idle())
    }
}

/// Who reaches the memory of one grant by itself: each by the address of its handle. All who import the same ticket have one grant.
#[derive(Default)]
pub(super) struct Borrowed {
    by: Vec<(usize, Weak<dyn Borrowing>)>,
    recalled: bool,
}

impl Borrowed {
    pub(super) fn living(&self) -> impl Iterator<Item = Arc<dyn Borrowing>> {
        self.by.iter().filter_map(|(_, one)| one.upgrade())
    }

    fn is_wanted(&mut self) -> bool {
        self.by.retain(|(_, one)| one.strong_count() > 0);
        !self.by.is_empty()
    }
}
