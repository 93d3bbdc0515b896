//! What a path asks of an owner before it is taken, and which grants it has borrowed since.

use std::sync::{Weak, mpsc};
use std::time::Instant;

use super::session::{Pending, Session};
use crate::sync::lock;
use crate::transport::{Borrowing, Told};
use crate::wire::{self, Message};
use crate::{Error, Kind, Result, progress};

impl Session {
    /// Asks the owner about a path to one of its grants, and waits for the answer.
    pub(super) fn ask_path(&self, ask: wire::Ask, until: Instant) -> Result<Told> {
        progress::may_block("import")?;
        let (asker, answer) = mpsc::sync_channel(1);
        let request = self.expect(Pending::Ask(asker))?;
        let told = self.ask_for_files(Message::from(ask).frame(request, 0, 0)).and_then(|()| {
            answer.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
                let message = "the owner did not answer about a path in time";
                Err(Error::new(Kind::Timeout, "import", message))
            })
        });
        self.give_up(request);
        told.map_err(|error| error.on(self.medium().name()).with_peer(self.peer_name()))
    }

    /// Remembers who must be told when the owner wants that grant back.
    pub(super) fn borrows(&self, handle: u32, borrowing: Weak<dyn Borrowing>) {
        let mut all = lock(&self.borrowing);
        all.retain(|_, one| one.strong_count() > 0);
        all.insert(handle, borrowing);
    }

    /// Whether nothing is under way on a path that reaches the owner's memory by itself.
    pub(super) fn borrows_nothing(&self) -> bool {
        let all: Vec<_> = lock(&self.borrowing).values().filter_map(Weak::upgrade).collect();
        all.iter().all(|one| one.is_idle())
    }
}
