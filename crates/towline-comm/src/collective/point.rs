//! Messages between two ranks.
//!
//! A small message goes whole through the channel. A larger one begins with a note of where its bytes lie: from a window
//! or a registered buffer the receiver takes them itself, and says so to the sender by taking the closing message; any other
//! memory follows through the channel.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use towline::{Kind as ErrorKind, Limits, Remote, Ticket};
use towline::{room, start_scoped_thread};

use super::Collectives;
use super::direct::copy_here;
use super::run::{STEP, steps};
use crate::combine::Scratch;
use crate::memory::{BUFFER_BIT, Memory, PeerAccess};
use crate::team::{Incoming, Outgoing, Team};
use crate::{Error, Result, interrupt};

/// The longest message that goes whole: above, the note costs less than a copy into the channel and one out of it.
const WHOLE: usize = 64 << 10;

/// The length of a note: four numbers, and the ticket of a registered buffer.
const NOTE: usize = 1024;

/// Mixed into the digest of a message for the one that closes it.
const CLOSING: u64 = 0x636c_6f73_696e_6720;

/// The registered buffers of other ranks that this rank has taken messages from.
pub(super) type Sources = Mutex<HashMap<(usize, u64), Arc<Remote>>>;

/// A message to or from a rank.
pub(crate) struct Message {
    pub(crate) peer: usize,
    /// What must be equal on both sides.
    pub(crate) digest: u64,
    pub(crate) memory: Memory,
    /// Received where true, sent where false.
    pub(crate) incoming: bool,
}

impl Collectives {
    /// Sends and receives messages at the same time, so that ranks which send to each other in one group never wait for each other.
    ///
    /// How it progresses: the messages to one rank go in their order, and so do those from one rank; apart from that none
    /// waits for another. Where all are small, one loop moves whatever can be moved; otherwise each direction of each pair has
    /// a thread for the time of the call. Every message is finished before the error of a refused one is reported.
    ///
    /// # Errors
    /// `Invalid` on both sides of a message where they differ in size or type; the communicator stays usable.
    pub(crate) fn run_together(&self, team: &Team, messages: Vec<Message>) -> Result<()> {
        let _one_call = team.serialise();
        let own = team.rank();
        let (to_self, messages): (Vec<_>, Vec<_>) =
            messages.into_iter().partition(|message| message.peer == own);
        pass_to_self(own, &to_self)?;
        if messages.iter().all(|message| message.memory.len() <= WHOLE) {
            return whole(team, &messages);
        }
        let mut lanes: Vec<Vec<&Message>> = Vec::new();
        for message in &messages {
            let same = |lane: &&mut Vec<&Message>| {
                lane.first()
                    .is_some_and(|first| (first.peer, first.incoming) == (message.peer, message.incoming))
            };
            match lanes.iter_mut().find(same) {
                Some(lane) => lane.push(message),
                None => lanes.push(vec![message]),
            }
        }
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let (first, others) = match lanes.split_first() {
                Some(split) => split,
                None => return Vec::new(),
            };
            let threads: Vec<_> = others
                .iter()
                .map(|lane| {
                    let work = || in_order(self, team, lane);
                    start_scoped_thread(scope, "group_end", "towline-messages", work)
                })
                .collect();
            let mut outcomes = vec![in_order(self, team, first)];
            outcomes.extend(threads.into_iter().map(|thread| {
                match thread {
                    Ok(thread) => {
                        interrupt::join(thread, "group_end", |why| team.abort(&why.clone().about([own])))
                            .unwrap_or_else(|_| {
                                Err(Error::new(
                                    ErrorKind::Internal,
                                    "group_end",
                                    "a thread of the messages panicked",
                                ))
                            })
                    }
                    // Its peer waits for these messages, and would do so to its limit.
                    Err(error) => {
                        let error = Error::from(error);
                        team.abort(&error);
                        Err(error)
                    }
                }
            }));
            outcomes
        });
        outcomes.into_iter().collect()
    }
}

/// Copies what this rank sends to itself; sends and receives belong together in their order.
fn pass_to_self(rank: usize, messages: &[Message]) -> Result<()> {
    let of = |incoming: bool| messages.iter().filter(move |message| message.incoming == incoming);
    let (sends, receives) = (of(false).count(), of(true).count());
    if sends != receives {
        let message =
            format!("this rank sends itself {sends} messages and receives {receives} of them in one group");
        return Err(Error::invalid("send", message).about([rank]));
    }
    for (send, receive) in of(false).zip(of(true)) {
        if send.digest != receive.digest {
            return Err(
                Error::invalid("send", "a message to this rank itself differs in size or type").about([rank])
            );
        }
        copy_here(&send.memory, &receive.memory)?;
    }
    Ok(())
}

/// Moves small messages in one loop.
fn whole(team: &Team, messages: &[Message]) -> Result<()> {
    let mut bodies: Vec<Vec<u8>> = room::list("group_end", messages.len())?;
    for message in messages {
        let mut body = room::zeros("group_end", message.memory.len())?;
        if !message.incoming {
            message.memory.read_at(0, &mut body)?;
        }
        bodies.push(body);
    }
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for (message, body) in messages.iter().zip(&mut bodies) {
        let Message { peer, digest, .. } = *message;
        if message.incoming {
            receives.push(Incoming { peer, digest, into: body });
        } else {
            sends.push(Outgoing { peer, digest, bytes: body });
        }
    }
    let op = if sends.is_empty() { "recv" } else { "send" };
    team.exchange_messages(op, &sends, &mut receives)?;
    for (message, body) in messages.iter().zip(&bodies).filter(|(message, _)| message.incoming) {
        message.memory.write_at(0, body)?;
    }
    Ok(())
}

/// Moves the messages of one direction of one pair.
fn in_order(collectives: &Collectives, team: &Team, lane: &[&Message]) -> Result<()> {
    let mut outcome = Ok(());
    for message in lane {
        let ended = match (message.memory.len() <= WHOLE, message.incoming) {
            (true, _) => whole_of(team, message),
            (false, false) => send(team, message),
            (false, true) => receive(collectives, team, message),
        };
        if ended.is_err() && team.failure().is_some() {
            return outcome.and(ended);
        }
        outcome = outcome.and(ended.map_err(|error| refused(message, error)));
    }
    outcome
}

fn whole_of(team: &Team, message: &Message) -> Result<()> {
    let mut body = room::zeros("group_end", message.memory.len())?;
    if message.incoming {
        team.recv_message(message.peer, message.digest, &mut body)?;
        return message.memory.write_at(0, &body);
    }
    message.memory.read_at(0, &mut body)?;
    team.send_message(message.peer, message.digest, &body)
}

fn refused(message: &Message, error: Error) -> Error {
    if error.kind() != ErrorKind::Invalid {
        return error;
    }
    let (op, does) = if message.incoming { ("recv", "receives") } else { ("send", "sends") };
    let len = message.memory.len();
    let text = format!(
        "rank {} disagrees with this rank, which {does} {len} bytes: {}",
        message.peer,
        error.message()
    );
    Error::invalid(op, text).about([message.peer])
}

fn send(team: &Team, message: &Message) -> Result<()> {
    let Message { peer, digest, ref memory, .. } = *message;
    let note = Note::of(memory)?;
    team.send_message(peer, digest, &note.encode())?;
    if note.id != 0 {
        return team.send_message(peer, digest ^ CLOSING, &[]);
    }
    through(team, memory, |part, bytes| {
        // BYTES MOVE HERE
        memory.read_at(part, bytes)?;
        team.send(peer, bytes)
    })
}

fn receive(collectives: &Collectives, team: &Team, message: &Message) -> Result<()> {
    let Message { peer, digest, ref memory, .. } = *message;
    let mut bytes = [0; NOTE];
    team.recv_message(peer, digest, &mut bytes)?;
    let note = Note::decode(&bytes)?;
    if note.id != 0 {
        let taken = take(collectives, team, peer, &note, memory).map_err(|error| team.lost(peer, error));
        // Closing with another digest means to the sender that its bytes were not taken.
        let closing = if taken.is_ok() { digest ^ CLOSING } else { !digest };
        let closed = team.recv_message(peer, closing, &mut []);
        return taken.and(closed);
    }
    through(team, memory, |part, bytes| {
        team.recv(peer, bytes)?;
        // BYTES MOVE HERE
        memory.write_at(part, bytes)
    })
}

/// Moves a message in steps. One that stops halfway leaves the channel out of step, so that the team has failed.
fn through(team: &Team, memory: &Memory, mut step: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut scratch = Scratch::default();
    let moved = steps(memory.len(), STEP).try_for_each(|part| step(part.start, scratch.bytes(part.len())));
    moved.inspect_err(|error| team.abort(error))
}

/// Takes the bytes of a message from where the sender has them.
fn take(collectives: &Collectives, team: &Team, peer: usize, note: &Note, into: &Memory) -> Result<()> {
    let offset = note.offset as usize;
    let remote = if note.id & BUFFER_BIT == 0 {
        let window = collectives.memory.windows().find(note.id).ok_or_else(|| {
            Error::new(ErrorKind::Stale, "recv", "the message lies in a window that is closed here")
                .about([peer])
        })?;
        match window.access(peer, "recv")? {
            // BYTES MOVE HERE
            PeerAccess::Near(pinned) => {
                pinned.copy_to(offset, into.span()?)?;
                // What was copied counts only if the window was open to the end.
                return window.access(peer, "recv").map(drop);
            }
            PeerAccess::Far(remote) => remote,
        }
    } else {
        source(collectives, team, peer, note)?
    };
    let request = collectives.memory.endpoint().read(&remote, into.span()?.clone()).at(
        note.offset,
        0,
        into.len() as u64,
    );
    // BYTES MOVE HERE
    Ok(team.wait_transfer(peer, &request.limits(Limits::within(collectives.timeout)).start()?)?)
}

/// A registered buffer of another rank; imported once.
fn source(collectives: &Collectives, team: &Team, peer: usize, note: &Note) -> Result<Arc<Remote>> {
    /// A peer that registers for every message would otherwise grow this for ever.
    const MOST_SOURCES: usize = 256;
    let known = || collectives.sources.lock();
    if let Some(remote) = known().get(&(peer, note.id)) {
        return Ok(Arc::clone(remote));
    }
    let ticket = Ticket::decode(&note.ticket)?;
    let (routing, within) = (collectives.memory.routing(), collectives.timeout);
    let imported = team.import(collectives.memory.endpoint(), routing, within, vec![(peer, ticket)])?;
    let unanswered = || Err(towline::Error::new(ErrorKind::Internal, "recv", "no reply"));
    let remote = Arc::new(imported.into_iter().next().unwrap_or_else(unanswered)?);
    let mut known = known();
    // What its owner has closed is never named again, and would stay mapped here.
    known.retain(|_, remote| {
        remote.alive().is_ok() && !remote.pin().is_err_and(|error| error.kind() == ErrorKind::Stale)
    });
    if known.len() >= MOST_SOURCES {
        known.clear();
    }
    known.insert((peer, note.id), Arc::clone(&remote));
    Ok(remote)
}

/// Where the bytes of a message lie.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Note {
    /// The window or registered buffer; 0 where the bytes come through the channel.
    id: u64,
    offset: u64,
    /// Of a registered buffer.
    ticket: Vec<u8>,
}

impl Note {
    fn of(memory: &Memory) -> Result<Note> {
        let Some((id, offset)) = memory.window() else { return Ok(Note::default()) };
        let ticket = memory.buffer().map(|buffer| buffer.ticket("send")).transpose()?;
        let ticket = ticket.map(|ticket| ticket.encode()).unwrap_or_default();
        if ticket.len() > NOTE - 24 {
            return Ok(Note::default());
        }
        Ok(Note { id, offset: offset as u64, ticket })
    }

    fn encode(&self) -> [u8; NOTE] {
        let mut bytes = [0; NOTE];
        for (index, word) in [self.id, self.offset, self.ticket.len() as u64].into_iter().enumerate() {
            bytes[8 * index..8 * index + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[24..24 + self.ticket.len()].copy_from_slice(&self.ticket);
        bytes
    }

    fn decode(bytes: &[u8; NOTE]) -> Result<Note> {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
            u64::from_le_bytes(word)
        };
        let len = usize::try_from(word(2)).unwrap_or(usize::MAX);
        let ticket =
            bytes[24..].get(..len).ok_or_else(|| Error::protocol("recv", "a note is longer than a note"))?;
        Ok(Note { id: word(0), offset: word(1), ticket: ticket.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_note_comes_back_as_it_was() {
        for note in [Note::default(), Note { id: 7, offset: 4096, ticket: vec![9; 300] }] {
            assert_eq!(Note::decode(&note.encode()).unwrap(), note);
        }
    }

    #[test]
    fn a_note_with_a_false_length_is_refused() {
        let mut bytes = Note::default().encode();
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(Note::decode(&bytes).unwrap_err().kind(), ErrorKind::Protocol);
    }
}
