//! Messages between two processes on one host: a ring in shared memory with one writer and one reader.
//!
//! The writer is the peer (its threads take turns), the reader the owner. A message is a word with its length and the
//! words of its text. What does not fit goes over the socket instead. The reader trusts nothing that it finds: a ring
//! that makes no sense ends the session.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::fence::shared::{self, Mapping};
use crate::{Error, Result};

/// Words for messages.
const CAPACITY: u64 = 4096;

/// Where the parts lie, in words. Writer and reader have a cache line each.
const WRITTEN: usize = 0;
const READ: usize = 8;
const CLOSED: usize = 9;
const TEXT: usize = 16;
const LEN: usize = (TEXT + CAPACITY as usize) * 8;

/// The longest message that goes through the ring.
const LONGEST: usize = 8 << 10;

/// One side of a ring.
pub(crate) struct Mailbox {
    mapping: Mapping,
    /// Threads of this side take turns.
    turn: Mutex<()>,
}

impl Mailbox {
    /// How long it is.
    pub(crate) const LEN: usize = LEN;

    /// Makes a ring; the descriptor is for the other side.
    pub(crate) fn create() -> Result<(Mailbox, OwnedFd)> {
        let (file, mapping) = shared::create("towline-mail", LEN, "contact")?;
        shared::seal_size(std::os::fd::AsFd::as_fd(&file), "contact")?;
        Ok((Mailbox { mapping, turn: Mutex::new(()) }, file))
    }

    /// Maps a ring that the other side made.
    pub(crate) fn map(file: &OwnedFd) -> Result<Mailbox> {
        let mapping = shared::map_received(file, LEN, true, "contact")?;
        Ok(Mailbox { mapping, turn: Mutex::new(()) })
    }

    fn words(&self) -> &[AtomicU64] {
        self.mapping.lend(0, LEN / 8)
    }

    fn text(&self, position: u64) -> &AtomicU64 {
        &self.words()[TEXT + (position % CAPACITY) as usize]
    }

    /// Takes no more messages: a sender that puts one afterwards is sent to the socket, which is closed too.
    pub(crate) fn close(&self) {
        self.words()[CLOSED].store(1, Ordering::Release);
    }

    /// Puts a message in; false where it does not fit now, or nobody reads it any more.
    pub(crate) fn put(&self, message: &[u8]) -> bool {
        if message.len() > LONGEST {
            return false;
        }
        let _turn = self.turn.lock();
        let words = self.words();
        let written = words[WRITTEN].load(Ordering::Relaxed);
        let read = words[READ].load(Ordering::Acquire);
        let needed = 1 + message.len().div_ceil(8) as u64;
        let closed = words[CLOSED].load(Ordering::Acquire) != 0;
        if closed || needed > CAPACITY.saturating_sub(written.wrapping_sub(read)) {
            return false;
        }
        self.text(written).store(message.len() as u64, Ordering::Relaxed);
        for (index, bytes) in message.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            // BYTES MOVE HERE
            self.text(written + 1 + index as u64).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        words[WRITTEN].store(written.wrapping_add(needed), Ordering::Release);
        true
    }

    /// Takes the next message out.
    pub(crate) fn take(&self) -> Result<Option<Vec<u8>>> {
        let words = self.words();
        // Without the turn: most looks find nothing.
        if words[READ].load(Ordering::Relaxed) == words[WRITTEN].load(Ordering::Acquire) {
            return Ok(None);
        }
        let _turn = self.turn.lock();
        let read = words[READ].load(Ordering::Relaxed);
        let waiting = words[WRITTEN].load(Ordering::Acquire).wrapping_sub(read);
        if waiting == 0 {
            return Ok(None);
        }
        let len = self.text(read).load(Ordering::Relaxed);
        let needed = 1 + len.div_ceil(8);
        if waiting > CAPACITY || len > LONGEST as u64 || needed > waiting {
            return Err(Error::protocol("receive", "the peer's mailbox makes no sense"));
        }
        let mut message = Vec::with_capacity(needed as usize * 8);
        for index in 1..needed {
            message.extend_from_slice(&self.text(read + index).load(Ordering::Relaxed).to_le_bytes());
        }
        message.truncate(len as usize);
        words[READ].store(read.wrapping_add(needed), Ordering::Release);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Kind;

    fn pair() -> (Mailbox, Mailbox) {
        let (reader, file) = Mailbox::create().unwrap();
        (Mailbox::map(&file).unwrap(), reader)
    }

    #[test]
    fn messages_of_every_length_come_out_as_they_went_in_and_in_order() {
        let (writer, reader) = pair();
        for round in 0..40usize {
            let messages: Vec<Vec<u8>> = (0..4).map(|n| vec![n as u8; (round * 61 + n) % 2000]).collect();
            for message in &messages {
                assert!(writer.put(message));
            }
            for message in messages {
                assert_eq!(reader.take().unwrap(), Some(message));
            }
            assert_eq!(reader.take().unwrap(), None);
        }
    }

    #[test]
    fn a_full_ring_and_a_long_message_are_left_to_the_socket() {
        let (writer, reader) = pair();
        assert!(!writer.put(&vec![0; LONGEST + 1]));
        let mut put = 0;
        while writer.put(&[7; 1000]) {
            put += 1;
        }
        assert_eq!(put, CAPACITY as usize / 126);
        assert!(reader.take().unwrap().is_some());
        assert!(writer.put(&[8; 1000]));
    }

    #[test]
    fn a_closed_ring_takes_nothing_and_still_gives_what_is_in_it() {
        let (writer, reader) = pair();
        assert!(writer.put(b"before"));
        reader.close();
        assert!(!writer.put(b"after"));
        assert_eq!(reader.take().unwrap().as_deref(), Some(&b"before"[..]));
        assert_eq!(reader.take().unwrap(), None);
    }

    #[test]
    fn a_ring_that_makes_no_sense_is_an_error_and_no_harm() {
        for (index, value) in [(WRITTEN, CAPACITY + 1), (WRITTEN, u64::MAX), (TEXT, u64::MAX), (TEXT, 9000)] {
            let (writer, reader) = pair();
            assert!(writer.put(b"fine"));
            writer.words()[index].store(value, Ordering::Relaxed);
            assert_eq!(reader.take().unwrap_err().kind(), Kind::Protocol, "word {index} = {value}");
        }
    }

    #[test]
    fn two_threads_write_and_one_reads_without_losing_any() {
        let (writer, reader) = pair();
        std::thread::scope(|scope| {
            for thread in 0..2u8 {
                let writer = &writer;
                scope.spawn(move || {
                    for n in 0..2000u32 {
                        let message = [&[thread][..], &n.to_le_bytes()].concat();
                        while !writer.put(&message) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u32; 2];
            while next != [2000, 2000] {
                match reader.take().unwrap() {
                    Some(message) => {
                        let n = u32::from_le_bytes(message[1..].try_into().unwrap());
                        assert_eq!(n, next[usize::from(message[0])]);
                        next[usize::from(message[0])] += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
    }
}
