//! Frames and messages between two endpoints: pure encoding and decoding, fuzzed.
//!
//! A frame is a header of 24 bytes, a body, padding and, on three kinds, a payload. Everything is little endian. The
//! tables are in `docs/reference/wire-format.md`. This module is not part of the public interface.

mod contact;
mod error;
pub mod fuzzing;
mod grant;
pub mod handshake;
mod message;
mod transfer;

#[cfg(test)]
mod tests;

pub use crate::codec::{OLDEST, VERSION};
pub use contact::{Bye, Cancel, Held, Hello, KeyRef, Ping, Pong, Prove, Ready, Refuse, Welcome, Withdraw};
pub use error::{MAX_ERROR, WireError};
pub use grant::{
    Finish, Grant, Granted, Import, ImportItem, MAX_ITEMS, MAX_QUERY, OperationId, Query, QueryReply, Recall,
    Release, SegmentRef, Unmap,
};
pub use message::Message;
pub use transfer::{
    Atomic, AtomicOp, Block, Check, Data, Done, EndLane, MAX_BLOCKS, MAX_NOTIFY, Notify, Read, Reduce,
    Signal, Write,
};

use crate::codec::Reader;
use crate::{Error, Result};

/// The length of a frame's header.
pub const HEADER_LEN: usize = 24;
/// Once the peer is authenticated, header and body are padded to a multiple of this: a payload then lies in the kernel's
/// buffers as it lies in memory, within a cache line, and is copied faster.
pub const ALIGNED: usize = 64;
/// The longest body once the peer is authenticated.
pub const MAX_BODY: u32 = 1 << 20;
/// The longest body before.
pub const MAX_HELLO: u32 = 8 << 10;
/// The longest payload.
pub const MAX_PAYLOAD: u64 = 64 << 20;
/// The most descriptors that can ride with one frame: the kernel's limit for one message.
pub const MAX_FILES: u8 = 253;

/// The most descriptors that an owner hands over for one path to one region.
pub const MAX_QUERY_FILES: u8 = 16;

const OP: &str = "frame";

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// The client's first frame.
    Hello = 1,
    /// The server's answer to it.
    Welcome = 2,
    /// No, and why; the connection ends.
    Refuse = 3,
    /// The client's proof.
    Prove = 4,
    /// The server's proof was accepted and the link is open.
    Ready = 5,
    /// The client's life page, on one host.
    Held = 6,
    /// Tickets to be turned into grants.
    Import = 16,
    /// The grants.
    Granted = 17,
    /// A grant is no longer needed.
    Release = 18,
    /// A segment of the owner is gone: nobody needs its mapping any more.
    Unmap = 19,
    /// What a path needs to know of a granted region before it can be taken.
    Query = 20,
    /// The reply.
    QueryReply = 21,
    /// The owner wants a region back that a path of the peer still reaches by itself.
    Recall = 22,
    /// A request for bytes.
    Read = 32,
    /// The bytes.
    Data = 33,
    /// Bytes to be stored.
    Write = 34,
    /// Bytes to be combined with those that are there.
    Reduce = 35,
    /// How a request ended.
    Done = 36,
    /// A 64-bit atomic.
    Atomic = 37,
    /// A counter to be raised once a transfer is applied.
    Signal = 38,
    /// A message to be delivered once a transfer is applied.
    Notify = 39,
    /// Nothing more belongs to the transfer with this frame's id.
    Cancel = 40,
    /// A claimed operation has ended.
    Finish = 41,
    /// The checksums of the blocks of the next frame.
    Check = 42,
    /// The reply to the request with this frame's id is not wanted any more.
    Withdraw = 43,
    /// Nothing more that came over a lane is to be applied.
    EndLane = 44,
    /// Are you there?
    Ping = 48,
    /// Yes.
    Pong = 49,
    /// The sender closes the link.
    Bye = 50,
}

impl FrameKind {
    /// Every kind, by number.
    pub const ALL: [FrameKind; 29] = {
        use FrameKind::*;
        [
            Hello, Welcome, Refuse, Prove, Ready, Held, Import, Granted, Release, Unmap, Query, QueryReply,
            Recall, Read, Data, Write, Reduce, Done, Atomic, Signal, Notify, Cancel, Finish, Check, Withdraw,
            EndLane, Ping, Pong, Bye,
        ]
    };

    /// Returns the kind with that number.
    #[inline]
    pub fn from_code(code: u8) -> Option<FrameKind> {
        FrameKind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns whether a payload may follow the body.
    #[inline]
    pub fn has_payload(self) -> bool {
        matches!(self, FrameKind::Data | FrameKind::Write | FrameKind::Reduce)
    }

    /// Returns how many descriptors may ride with it.
    #[inline]
    pub fn max_files(self) -> u8 {
        match self {
            FrameKind::Ready => 4,
            FrameKind::Held => 1,
            FrameKind::QueryReply => MAX_QUERY_FILES,
            FrameKind::Granted => MAX_FILES,
            _ => 0,
        }
    }

    /// Returns whether it is a request, whose id comes again in its reply, or what goes ahead of one.
    #[inline]
    pub fn is_answered(self) -> bool {
        use FrameKind::*;
        matches!(self, Import | Query | Read | Write | Reduce | Atomic | Signal | Check)
    }

    /// Returns whether header and body are padded: not in the handshake.
    fn is_padded(self) -> bool {
        self as u8 >= FrameKind::Import as u8
    }

    /// Returns whether it may be received before, and after, the peer is authenticated.
    fn allowed(self) -> (bool, bool) {
        match self {
            FrameKind::Hello | FrameKind::Welcome | FrameKind::Prove => (true, false),
            // A server that did not like the proof says so to a client that has already accepted the server.
            FrameKind::Refuse => (true, true),
            _ => (false, true),
        }
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: FrameKind,
    /// None are defined in version 1; always 0.
    pub flags: u8,
    /// How many descriptors ride with it; Unix sockets only.
    pub files: u8,
    /// How many zeros follow the body, fewer than [`ALIGNED`].
    pub pad: u8,
    /// The length of the body.
    pub body_len: u32,
    /// The length of the payload behind them.
    pub payload_len: u64,
    /// The request that this frame belongs to; a reply carries the id of its request.
    pub id: u64,
}

impl Header {
    /// Returns the header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2] = self.files;
        out[3] = self.pad;
        out[4..8].copy_from_slice(&self.body_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.payload_len.to_le_bytes());
        out[16..24].copy_from_slice(&self.id.to_le_bytes());
        out
    }

    /// Reads a header; [`check`](Header::check) it before reading on.
    #[inline]
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Header> {
        let mut reader = Reader::new(OP, bytes);
        let code = reader.u8()?;
        let Some(kind) = FrameKind::from_code(code) else {
            return Err(reader.bad(format!("unknown frame {code}")));
        };
        let (flags, files, pad) = (reader.u8()?, reader.u8()?, reader.u8()?);
        if flags != 0 {
            return Err(reader.bad(format!("unknown flags on {kind:?}")));
        }
        let (body_len, payload_len, id) = (reader.u32()?, reader.u64()?, reader.u64()?);
        reader.finish()?;
        Ok(Header { kind, flags, files, pad, body_len, payload_len, id })
    }

    /// Refuses what this kind may not carry, or may not carry yet, before anything is allocated for it.
    #[inline]
    pub fn check(&self, authenticated: bool) -> Result<()> {
        let kind = self.kind;
        let (before, after) = kind.allowed();
        if !(if authenticated { after } else { before }) {
            let when = if authenticated { "after" } else { "before" };
            return Err(Error::protocol(OP, format!("{kind:?} came {when} authentication")));
        }
        if usize::from(self.pad) >= ALIGNED || (self.pad != 0 && !kind.is_padded()) {
            return Err(Error::protocol(OP, format!("{} bytes of padding on {kind:?}", self.pad)));
        }
        let most = if authenticated { MAX_BODY } else { MAX_HELLO };
        if self.body_len > most {
            return Err(Error::protocol(
                OP,
                format!("a body of {} bytes on {kind:?}; at most {most} are allowed", self.body_len),
            ));
        }
        let most = if kind.has_payload() { MAX_PAYLOAD } else { 0 };
        if self.payload_len > most {
            return Err(Error::protocol(
                OP,
                format!("a payload of {} bytes on {kind:?}; at most {most} are allowed", self.payload_len),
            ));
        }
        if self.files > kind.max_files() {
            return Err(Error::protocol(OP, format!("{} descriptors on {kind:?}", self.files)));
        }
        Ok(())
    }

    /// Returns how many bytes lie between the header and the payload: the body and its padding.
    #[inline]
    pub fn rest(&self) -> usize {
        self.body_len as usize + usize::from(self.pad)
    }

    /// Cuts the padding off the body.
    #[inline]
    pub fn body<'a>(&self, rest: &'a [u8]) -> Result<&'a [u8]> {
        let (body, pad) = rest
            .split_at_checked(self.body_len as usize)
            .ok_or_else(|| Error::protocol(OP, format!("{:?} is cut short", self.kind)))?;
        if pad.iter().any(|byte| *byte != 0) {
            return Err(Error::protocol(OP, format!("{:?} is padded with something", self.kind)));
        }
        Ok(body)
    }
}

/// Writes header and body into one buffer; a payload of `payload_len` bytes is sent behind it.
pub fn frame(kind: FrameKind, id: u64, body: &[u8], payload_len: u64, files: u8) -> Vec<u8> {
    // A body that does not fit the field is announced as too long, and refused by the receiver.
    let body_len = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let len = HEADER_LEN + body.len();
    let padded = if kind.is_padded() { len.next_multiple_of(ALIGNED) } else { len };
    let pad = (padded - len) as u8;
    let header = Header { kind, flags: 0, files, pad, body_len, payload_len, id };
    let mut out = Vec::with_capacity(padded);
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(body);
    out.resize(padded, 0);
    out
}
