//! The bodies that move bytes, count and notify.

use super::{MAX_BODY, MAX_PAYLOAD, WireError};
use crate::codec::{Reader, put_u32, put_u64};
use crate::element::{Dtype, ReduceOp};
use crate::{Result, room};

/// The most blocks that a sender puts into one frame, so that any mix of lengths fits a body.
pub const MAX_BLOCKS: usize = 65_536;
const _: () = assert!(MAX_BLOCKS * VARIED + 64 <= MAX_BODY as usize);

/// The longest message of a [`Notify`].
pub const MAX_NOTIFY: usize = 64 << 10;

// The forms of a list of blocks, and the bytes of one block in each.
const FORM_VARIED: u8 = 0;
const FORM_UNIFORM: u8 = 1;
const VARIED: usize = 12;
const UNIFORM: usize = 8;

/// Neighbouring bytes of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The first byte, counted from the start of the granted range.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
}

fn uniform(blocks: &[Block]) -> Option<u32> {
    let (first, rest) = blocks.split_first()?;
    rest.iter().all(|block| block.len == first.len).then_some(first.len)
}

fn put_blocks(out: &mut Vec<u8>, blocks: &[Block]) {
    put_u32(out, u32::try_from(blocks.len()).unwrap_or(u32::MAX));
    match uniform(blocks) {
        Some(len) => {
            out.reserve(5 + blocks.len() * UNIFORM);
            out.push(FORM_UNIFORM);
            put_u32(out, len);
            blocks.iter().for_each(|block| put_u64(out, block.offset));
        }
        None => {
            out.reserve(1 + blocks.len() * VARIED);
            out.push(FORM_VARIED);
            for block in blocks {
                put_u64(out, block.offset);
                put_u32(out, block.len);
            }
        }
    }
}

/// Reads the blocks, which are the last part of a body: the count must therefore fit exactly.
fn take_blocks(reader: &mut Reader<'_>) -> Result<Vec<Block>> {
    let count = reader.u32()? as usize;
    let form = reader.u8()?;
    let (size, len) = match form {
        FORM_VARIED => (VARIED, None),
        FORM_UNIFORM => (UNIFORM, Some(reader.u32()?)),
        other => return Err(reader.bad(format!("unknown form of blocks {other}"))),
    };
    if count.checked_mul(size) != Some(reader.remaining()) {
        return Err(reader.bad(format!("{count} blocks do not fit {} bytes", reader.remaining())));
    }
    let bytes = reader.rest();
    // Every chunk has its size, so nothing is missing; requests of thousands of blocks are decoded while others wait.
    let block = |chunk: &[u8]| Block {
        offset: chunk.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)),
        len: len.unwrap_or_else(|| chunk.last_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))),
    };
    // Judged before room is made for them: a list takes more room in memory than on the wire.
    let (mut total, mut first, mut equal) = (0u64, None, true);
    for chunk in bytes.chunks_exact(size) {
        let block = block(chunk);
        if block.offset.checked_add(u64::from(block.len)).is_none() {
            return Err(reader.bad("a block has no end"));
        }
        total = total.saturating_add(u64::from(block.len));
        equal &= *first.get_or_insert(block.len) == block.len;
    }
    if total > MAX_PAYLOAD {
        return Err(reader.bad(format!("the blocks hold {total} bytes, a frame at most {MAX_PAYLOAD}")));
    }
    if len.is_some() != (equal && first.is_some()) {
        return Err(reader.bad("the blocks are not in their shortest form"));
    }
    let mut blocks = room::list("receive", count)?;
    blocks.extend(bytes.chunks_exact(size).map(block));
    Ok(blocks)
}

/// A request for bytes; answered by [`Data`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// The transfer that this is a piece of.
    pub transfer: u64,
    /// The grant.
    pub handle: u32,
    /// Which bytes.
    pub blocks: Vec<Block>,
}

impl Read {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.transfer);
        put_u32(out, self.handle);
        put_blocks(out, &self.blocks);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Read> {
        let mut reader = Reader::new("read", body);
        let read = Read { transfer: reader.u64()?, handle: reader.u32()?, blocks: take_blocks(&mut reader)? };
        reader.finish()?;
        Ok(read)
    }
}

/// The reply to a [`Read`]; where it is good, the blocks' bytes follow as payload, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Data {
    /// Whether the bytes follow.
    pub outcome: Result<(), WireError>,
}

impl Data {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        WireError::put_outcome(out, &self.outcome, |_, ()| {});
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Data> {
        let mut reader = Reader::new("data", body);
        let outcome = WireError::take_outcome(&mut reader, |_| Ok(()))?;
        reader.finish()?;
        Ok(Data { outcome })
    }
}

/// Bytes to be stored; the payload holds them. Answered by [`Done`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The transfer that this is a piece of.
    pub transfer: u64,
    /// The grant.
    pub handle: u32,
    /// Where to.
    pub blocks: Vec<Block>,
}

impl Write {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.transfer);
        put_u32(out, self.handle);
        put_blocks(out, &self.blocks);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Write> {
        let mut reader = Reader::new("write", body);
        let write =
            Write { transfer: reader.u64()?, handle: reader.u32()?, blocks: take_blocks(&mut reader)? };
        reader.finish()?;
        Ok(write)
    }
}

/// Bytes to be combined with those that are there; the payload holds them. Answered by [`Done`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduce {
    /// The transfer that this is a piece of.
    pub transfer: u64,
    /// The grant.
    pub handle: u32,
    /// How to combine.
    pub op: ReduceOp,
    /// What the bytes are.
    pub dtype: Dtype,
    /// Where to.
    pub blocks: Vec<Block>,
}

impl Reduce {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.transfer);
        put_u32(out, self.handle);
        out.push(self.op.code());
        out.push(self.dtype.code());
        put_blocks(out, &self.blocks);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Reduce> {
        let mut reader = Reader::new("reduce", body);
        let (transfer, handle, op, dtype) = (reader.u64()?, reader.u32()?, reader.u8()?, reader.u8()?);
        let Some(op) = ReduceOp::from_code(op) else {
            return Err(reader.bad(format!("unknown reduction {op}")));
        };
        let Some(dtype) = Dtype::from_code(dtype) else {
            return Err(reader.bad(format!("unknown element type {dtype}")));
        };
        let blocks = take_blocks(&mut reader)?;
        reader.finish()?;
        Ok(Reduce { transfer, handle, op, dtype, blocks })
    }
}

/// The CRC32C of each block of the next frame of that connection, which has the same id. Before a [`Read`] there are none:
/// it asks for those of the reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The checksums, in the order of the blocks.
    pub checks: Vec<u32>,
}

impl Check {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(4 * self.checks.len());
        self.checks.iter().for_each(|check| put_u32(out, *check));
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Check> {
        let (checks, rest) = body.as_chunks::<4>();
        if !rest.is_empty() || checks.len() > MAX_BLOCKS {
            let reader = Reader::new("check", body);
            return Err(reader.bad(format!("{} bytes are no list of checksums", body.len())));
        }
        let mut all = room::list("receive", checks.len())?;
        all.extend(checks.iter().map(|check| u32::from_le_bytes(*check)));
        Ok(Check { checks: all })
    }
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The old value of an atomic, the bytes applied of a write or reduction, otherwise 0.
    pub outcome: Result<u64, WireError>,
}

impl Done {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        WireError::put_outcome(out, &self.outcome, |out, value| put_u64(out, *value));
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Done> {
        let mut reader = Reader::new("done", body);
        let outcome = WireError::take_outcome(&mut reader, Reader::u64)?;
        reader.finish()?;
        Ok(Done { outcome })
    }
}

/// What an [`Atomic`] does to the 64-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, wrapping.
    Add(u64),
    /// Replaces the word where it has the expected value.
    CompareSwap {
        /// The value that it must have.
        expected: u64,
        /// The value that it gets.
        new: u64,
    },
}

/// A 64-bit atomic, performed by the owner. Answered by [`Done`] with the old value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Atomic {
    /// The grant.
    pub handle: u32,
    /// The word, counted from the start of the granted range.
    pub offset: u64,
    /// What to do.
    pub op: AtomicOp,
}

impl Atomic {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, self.handle);
        put_u64(out, self.offset);
        match self.op {
            AtomicOp::Add(value) => {
                out.push(1);
                put_u64(out, value);
            }
            AtomicOp::CompareSwap { expected, new } => {
                out.push(2);
                put_u64(out, expected);
                put_u64(out, new);
            }
        }
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Atomic> {
        let mut reader = Reader::new("atomic", body);
        let (handle, offset) = (reader.u32()?, reader.u64()?);
        let op = match reader.u8()? {
            1 => AtomicOp::Add(reader.u64()?),
            2 => AtomicOp::CompareSwap { expected: reader.u64()?, new: reader.u64()? },
            other => return Err(reader.bad(format!("unknown atomic {other}"))),
        };
        reader.finish()?;
        Ok(Atomic { handle, offset, op })
    }
}

/// A counter to be raised once all pieces of a transfer are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    /// The transfer.
    pub transfer: u64,
    /// How many pieces it has, over all connections.
    pub pieces: u32,
    /// The grant in which the counter lies.
    pub handle: u32,
    /// The counter, counted from the start of the granted range.
    pub offset: u64,
    /// How much to add.
    pub add: u64,
}

impl Signal {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.transfer);
        put_u32(out, self.pieces);
        put_u32(out, self.handle);
        put_u64(out, self.offset);
        put_u64(out, self.add);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Signal> {
        let mut reader = Reader::new("signal", body);
        let signal = Signal {
            transfer: reader.u64()?,
            pieces: reader.u32()?,
            handle: reader.u32()?,
            offset: reader.u64()?,
            add: reader.u64()?,
        };
        reader.finish()?;
        Ok(signal)
    }
}

/// A message to be delivered once all pieces of a transfer are applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notify {
    /// The transfer; with 0 pieces, none.
    pub transfer: u64,
    /// How many pieces it has, over all connections.
    pub pieces: u32,
    /// The message; at most 64 KiB.
    pub message: Vec<u8>,
}

impl Notify {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.transfer);
        put_u32(out, self.pieces);
        out.extend_from_slice(&self.message);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Notify> {
        let mut reader = Reader::new("notify", body);
        let (transfer, pieces) = (reader.u64()?, reader.u32()?);
        if reader.remaining() > MAX_NOTIFY {
            return Err(
                reader.bad(format!("a message of {} bytes is longer than 64 KiB", reader.remaining()))
            );
        }
        Ok(Notify { transfer, pieces, message: reader.rest().to_vec() })
    }
}

/// Nothing more that came over a lane is to be applied; answered by [`Done`] once that is so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndLane {
    /// The transcript of the lane's handshake, by which both sides know it.
    pub lane: [u8; 32],
}

impl EndLane {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.lane);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<EndLane> {
        let mut reader = Reader::new("end lane", body);
        let end = EndLane { lane: reader.array()? };
        reader.finish()?;
        Ok(end)
    }
}
