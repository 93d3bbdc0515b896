//! What a peer changes word by word, and what follows the pieces of its transfers.

use std::sync::Arc;
use std::time::Instant;

use towline_proto::session::owner::{Act, Refusal, Settling, Word};

use super::admitting::awaits;
use super::granting::{Granting, Hold};
use super::{Over, Serving, wanted_in_one_step};
use crate::notify::Notification;
use crate::region::Counted;
use crate::runtime::Device;
use crate::session::apply;
use crate::session::checks;
use crate::session::connection::Connection;
use crate::session::parts::{Sink, hung_up};
use crate::wire::{AtomicOp, Header, Reduce};
use crate::{Access, Error, Result};

/// Who has to bring the page of a word of lent memory, where this thread must not wait for it.
fn brings_page(word: &Word<Granting>) -> Option<Device> {
    let region = match word.admitted.hold() {
        Hold::Memory(using) => using.core(),
        Hold::Bounced(region, ..) => region,
    };
    awaits(region, word.admitted.ranges())
}

impl Serving {
    /// Changes a word, and answers with what was there.
    pub(super) fn atomic(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        op: AtomicOp,
        word: Result<Word<Granting>, Refusal<Granting>>,
    ) -> Result<()> {
        let act = move |look: &dyn Fn() -> bool, word| apply::atomic(look, word, op);
        if let Some(device) = word.as_ref().ok().and_then(brings_page) {
            return self.aside(device, connection, move |this, to| {
                let done = this.word(Some(to), word, act);
                this.answer(to, request, done)
            });
        }
        let done = self.word(Some(connection), word, act);
        self.answer(connection, request, done)
    }

    /// Combines what has come into a buffer with what is there, and answers.
    pub(super) fn reduce(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        header: Header,
        reduce: Reduce,
        mut sink: Sink,
        sent: Option<Vec<u32>>,
    ) -> Result<()> {
        let device = sink.lent_region().map(|region| region.brings_pages());
        let work = move |this: &Arc<Serving>, to: &Arc<Connection>| {
            let transfer = reduce.transfer;
            let outcome = sink.outcome("reduce_into").and_then(|()| {
                if let Some(sent) = &sent {
                    let arrived = checks::of_bytes(&reduce.blocks, &sink.buffer);
                    checks::compare("reduce_into", &reduce.blocks, sent, &arrived)?;
                }
                let admitted = this.admit(reduce.handle, Access::WRITE, reduce.blocks)?;
                let (_, memory, parts) = this.in_memory("reduce_into", admitted)?;
                let lent = memory.is_lent();
                let wanted = wanted_in_one_step("reduce_into", to, lent)?;
                let stands_by = || wanted.stands_by(parts.first().map(|part| part.ptr));
                match apply::reduce(&stands_by, &parts, lent, &sink.buffer, reduce.op, reduce.dtype)? {
                    true => Ok(()),
                    false => Err(hung_up("reduce_into")),
                }
            });
            // The memory is let go before the peer learns of it.
            drop(sink);
            this.applied(to, header, transfer, outcome)
        };
        match device {
            Some(device) => self.aside(device, connection, work),
            None => work(self, connection),
        }
    }

    /// An operation on one word of a region, for the waiter for its outcome; it gives none where the initiator does not stand by it
    /// any more.
    fn word(
        &self,
        awaited: Option<&Connection>,
        word: Result<Word<Granting>, Refusal<Granting>>,
        act: impl FnOnce(&dyn Fn() -> bool, apply::Word) -> Result<Option<u64>>,
    ) -> Result<u64> {
        let (offset, admitted) = match word {
            Ok(word) => (word.offset, Ok(word.admitted)),
            Err(refusal) => (0, Err(refusal)),
        };
        let (granting, memory, parts) = self.in_memory("atomic", self.target(Access::WRITE, admitted)?)?;
        let lent = memory.is_lent();
        let wanted = awaited.map(|connection| wanted_in_one_step("atomic", connection, lent)).transpose()?;
        let word = parts.first().map_or(std::ptr::null_mut(), |part| part.ptr);
        if word.is_null() || word.addr() % 8 != 0 {
            self.refused(&granting);
            return Err(Error::invalid(
                "atomic",
                format!("the word at offset {offset} is not aligned to 8 bytes"),
            ));
        }
        granting.count(Counted::Written(8));
        let stands_by = || wanted.as_ref().is_none_or(|wanted| wanted.stands_by(Some(word)));
        act(&stands_by, apply::Word { at: word, lent })?.ok_or_else(|| hung_up("atomic"))
    }

    /// Does what follows a transfer, or says that it will not be done.
    pub(super) fn settle(self: &Arc<Self>, mut settling: Settling<Over>) -> Result<()> {
        let forgives = settling.forgives();
        let settled = self.settle_all(&mut settling);
        if forgives { Ok(()) } else { settled }
    }

    fn settle_all(self: &Arc<Self>, settling: &mut Settling<Over>) -> Result<()> {
        loop {
            let next = self.rules().settle(settling, Instant::now());
            let Some(next) = next else { return Ok(()) };
            // A word of lent memory is changed by another thread, whether or not the peer waits for it.
            if let Ok(Act::Raise(word, _)) = &next.act
                && let Some(device) = brings_page(word)
            {
                let (act, forgives) = (next.act, settling.forgives());
                let (connection, request) = match &next.answer {
                    Some((over, request)) => (Some(over.connection()?), Some(*request)),
                    None => (self.control(), None),
                };
                let Some(connection) = connection else { continue };
                self.aside(device, &connection, move |this, to| {
                    let awaited = request.map(|_| &**to);
                    let outcome =
                        act.map_err(|refusal| this.refuse(refusal)).and_then(|act| this.act(act, awaited));
                    match request {
                        Some(request) => this.answer(to, request, outcome),
                        None if forgives => Ok(()),
                        None => outcome.map(drop),
                    }
                })?;
                continue;
            }
            let to = next.answer.map(|(over, request)| over.connection().map(|to| (to, request))).transpose();
            let outcome = next.act.map_err(|refusal| self.refuse(refusal)).and_then(|act| match (act, &to) {
                // Nobody is there any more who stands by it.
                (Act::Raise(..), Err(gone)) => Err(gone.clone()),
                (act, Ok(Some((connection, _)))) => self.act(act, Some(connection)),
                (act, _) => self.act(act, None),
            });
            match to? {
                Some((connection, request)) => self.answer(&connection, request, outcome)?,
                None => drop(outcome?),
            }
        }
    }

    fn act(&self, act: Act<Granting>, awaited: Option<&Connection>) -> Result<u64> {
        match act {
            Act::Deliver(message) => {
                let notification = Notification { from: self.peer.clone(), message };
                let charge = self.allowance.charge("notify", notification.cost())?;
                self.sessions()?.registry.deliver(notification, Some((&self.messages, charge))).map(|()| 0)
            }
            // A signal whose outcome the peer waits for is a change like a write.
            Act::Raise(word, add) => self.word(awaited, Ok(word), |look, word| match awaited {
                Some(_) => apply::signal_if(look, word, add),
                None => apply::signal(word, add).map(Some),
            }),
        }
    }
}
