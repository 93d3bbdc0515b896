//! What has come over a connection and is not handled yet: bytes, and the descriptors of one frame.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::STAGING;
use crate::budget::{Account, Charge};
use crate::runtime::socket::Received;
use crate::session::channel::{Ahead, Channel};
use crate::session::parts::Sink;
use crate::wire::{Bye, FrameKind, HEADER_LEN, Header};
use crate::{Error, Result, room};

pub(super) struct Incoming {
    pub(super) staging: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) reading: Reading,
    /// Those of the frame that is being read.
    files: Vec<OwnedFd>,
    /// Frames may be there that were not looked at, because the lane was held up.
    pub(super) left_over: bool,
    /// How many frames are to come that may carry descriptors.
    expected: usize,
    /// What its session pays for a frame that is longer than usual; nothing where no peer causes it.
    charge: Option<Charge>,
}

#[allow(clippy::large_enum_variant, reason = "there is one for each connection, and most see payload")]
pub(super) enum Reading {
    Header,
    Body(Header),
    Payload { header: Header, sink: Sink, left: u64 },
}

/// What to receive next.
enum Piece {
    /// So many bytes, and so many descriptors with them.
    Take(usize, usize),
    Nothing(Received),
}

impl Default for Incoming {
    fn default() -> Incoming {
        Incoming {
            staging: vec![0; STAGING].into_boxed_slice(),
            start: 0,
            end: 0,
            reading: Reading::Header,
            files: Vec::new(),
            left_over: false,
            expected: 0,
            charge: None,
        }
    }
}

impl Incoming {
    /// Whether a frame has begun to come and has not ended.
    pub(super) fn is_in_a_frame(&self) -> bool {
        self.end > self.start || !matches!(self.reading, Reading::Header)
    }

    pub(super) fn paid_by(&mut self, account: &Arc<Account>) {
        self.charge = account.charge("receive", 0).ok();
    }

    pub(super) fn expect_files(&mut self) {
        self.expected += 1;
    }

    /// Takes what the socket has: of a peer that may send descriptors now the bytes of one frame, and the descriptors that its
    /// header names; of all others any number of bytes, and no descriptor.
    pub(super) fn receive(&mut self, socket: &Channel) -> Result<Received> {
        if self.start > 0 {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let (bytes, named) = match self.next_piece(socket)? {
            Piece::Take(bytes, named) => (bytes, named),
            Piece::Nothing(received) => return Ok(received),
        };
        let until = self.end.saturating_add(bytes).min(self.staging.len());
        let into = &mut self.staging[self.end..until];
        let received = socket.recv(&mut [IoSliceMut::new(into)], named, &mut self.files)?;
        if let Received::Bytes(bytes) = received {
            self.end += bytes;
        }
        Ok(received)
    }

    /// The goodbye among what has come and was not read, of a connection that is over: its end may have been noticed first by who
    /// had something to send. Descriptors that come now are not taken.
    pub(super) fn farewell(&mut self, socket: &Channel) -> Option<Bye> {
        if !matches!(self.reading, Reading::Header) {
            return None;
        }
        self.expected = 0;
        while self.end - self.start < self.staging.len()
            && matches!(self.receive(socket), Ok(Received::Bytes(_)))
        {}
        let mut rest = &self.staging[self.start..self.end];
        loop {
            let header = Header::decode(rest.first_chunk()?).ok()?;
            let (frame, behind) = rest[HEADER_LEN..].split_at_checked(header.rest())?;
            match header.kind {
                FrameKind::Bye => return Bye::decode(header.body(frame).ok()?).ok(),
                _ if header.payload_len > 0 => return None,
                _ => rest = behind,
            }
        }
    }

    fn next_piece(&self, socket: &Channel) -> Result<Piece> {
        if self.expected == 0 {
            return Ok(Piece::Take(usize::MAX, 0));
        }
        let there = self.end - self.start;
        Ok(match &self.reading {
            // A receive goes on behind a frame until there are descriptors: it has to end with this frame, whose header says so.
            Reading::Header if there == 0 => match socket.next_header(true)? {
                Ahead::Header(header) => Piece::Take(HEADER_LEN + header.rest(), header.files.into()),
                Ahead::Part(bytes) => Piece::Take(bytes, 0),
                Ahead::Nothing(received) => Piece::Nothing(received),
            },
            Reading::Header => Piece::Take(HEADER_LEN - there, 0),
            Reading::Body(header) => Piece::Take(header.rest() - there, 0),
            Reading::Payload { .. } => Piece::Take(usize::MAX, 0),
        })
    }

    /// The descriptors of a frame that is there as a whole.
    pub(super) fn take_files(&mut self, header: Header, socket: &Channel) -> Result<Vec<OwnedFd>> {
        if header.kind.max_files() > 0 {
            self.expected = self.expected.saturating_sub(1);
        }
        let files = std::mem::take(&mut self.files);
        if !socket.socket().has_taken(header.files, &files) {
            return Err(Error::protocol("receive", "descriptors that a frame names did not come"));
        }
        Ok(files)
    }

    /// Moves what has come into a buffer of that length, in which it fits.
    pub(super) fn resize(&mut self, len: usize) -> Result<()> {
        if let Some(charge) = &mut self.charge {
            charge.resize_briefly("receive", len.saturating_sub(STAGING) as u64)?;
        }
        let mut other = room::zeros("receive", len)?;
        let there = self.end - self.start;
        other[..there].copy_from_slice(&self.staging[self.start..self.end]);
        self.staging = other.into_boxed_slice();
        (self.start, self.end) = (0, there);
        Ok(())
    }
}
