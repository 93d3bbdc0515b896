//! The bodies that turn tickets into grants.

use super::WireError;
use crate::codec::{Reader, put_counted, put_layout, put_option, put_place, put_u16, put_u32, put_u64};
use crate::layout::Layout;
use crate::place::Place;
use crate::ticket::MAX_TICKET;
use crate::{Access, Result};

/// The most tickets in one [`Import`], and answers in one [`Granted`].
pub const MAX_ITEMS: usize = 256;

// A body of many tiny items must not make much of little: all of them together stay within 64 KiB.
const _: () = assert!(MAX_ITEMS * size_of::<Result<Grant, WireError>>() <= 64 << 10);
const _: () = assert!(MAX_ITEMS * size_of::<ImportItem>() <= 64 << 10);

/// The number of an operation that waits to be claimed: random, chosen by its owner.
pub type OperationId = [u8; 16];

/// A ticket without its tag, and the proof that its sender has the tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportItem {
    /// The ticket's public bytes.
    pub ticket: Vec<u8>,
    /// The proof over the connection's challenge, and over the operation where one is claimed.
    pub proof: [u8; 32],
    /// The operation that its sender claims with the ticket.
    pub operation: Option<OperationId>,
}

/// Tickets to be turned into grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// The tickets; at most [`MAX_ITEMS`], and no more than fit a body.
    pub items: Vec<ImportItem>,
}

impl Import {
    /// How much memory it takes.
    pub fn memory(&self) -> usize {
        self.items.iter().map(|item| size_of::<ImportItem>() + item.ticket.capacity()).sum()
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.items.len());
        for item in &self.items {
            put_counted(out, &item.ticket);
            out.extend_from_slice(&item.proof);
            put_option(out, item.operation, |out, operation| out.extend_from_slice(&operation));
        }
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Import> {
        let mut reader = Reader::new("import", body);
        let items = take_items(&mut reader, 2 + 32 + 1, |reader| {
            Ok(ImportItem {
                ticket: reader.counted(MAX_TICKET)?.to_vec(),
                proof: reader.array()?,
                operation: reader.option(Reader::array)?,
            })
        })?;
        reader.finish()?;
        Ok(Import { items })
    }
}

/// The shared memory that a region lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentRef {
    /// The segment's number at its owner.
    pub id: u64,
    /// The segment's length.
    pub len: u64,
    /// Where the region starts in it.
    pub offset: u64,
    /// Whether its descriptor rides with this frame.
    pub attached: bool,
}

/// The owner's reply to a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The number by which later frames on this link name the grant.
    pub handle: u32,
    /// The region's row in the owner's table.
    pub row: u32,
    /// The row's generation.
    pub generation: u64,
    /// Where the granted range starts in the region.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// What may be done.
    pub access: Access,
    /// Where the region lives.
    pub place: Place,
    /// The region's layout.
    pub layout: Option<Layout>,
    /// The shared memory that it lies in, on one host.
    pub segment: Option<SegmentRef>,
    /// How long the ticket's lease still runs, in milliseconds. The owner checks it wherever it takes part; on the
    /// other paths the holder does.
    pub expires_in_ms: Option<u64>,
    /// The paths that the owner answers queries about: a bit for each, by its number.
    pub offers: u8,
}

impl Grant {
    fn put(&self, out: &mut Vec<u8>) {
        put_u32(out, self.handle);
        put_u32(out, self.row);
        put_u64(out, self.generation);
        put_u64(out, self.offset);
        put_u64(out, self.length);
        out.push(self.access.bits());
        put_place(out, self.place);
        put_option(out, self.layout.as_ref(), put_layout);
        put_option(out, self.segment, |out, segment| {
            put_u64(out, segment.id);
            put_u64(out, segment.len);
            put_u64(out, segment.offset);
            out.push(u8::from(segment.attached));
        });
        put_option(out, self.expires_in_ms, put_u64);
        out.push(self.offers);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Grant> {
        let grant = Grant {
            handle: reader.u32()?,
            row: reader.u32()?,
            generation: reader.u64()?,
            offset: reader.u64()?,
            length: reader.u64()?,
            access: reader.access()?,
            place: reader.place()?,
            layout: reader.option(Reader::layout)?,
            segment: reader.option(|reader| {
                Ok(SegmentRef {
                    id: reader.u64()?,
                    len: reader.u64()?,
                    offset: reader.u64()?,
                    attached: reader.bool()?,
                })
            })?,
            expires_in_ms: reader.option(Reader::u64)?,
            offers: reader.u8()?,
        };
        let Some(end) = grant.offset.checked_add(grant.length) else {
            return Err(reader.bad("the grant's range has no end"));
        };
        // The region lies at `segment.offset`, so the granted range must end inside the segment.
        if let Some(segment) = grant.segment
            && segment.offset.checked_add(end).is_none_or(|end| end > segment.len)
        {
            return Err(reader.bad("the grant's range is not inside its segment"));
        }
        Ok(grant)
    }
}

/// The replies to an [`Import`], in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// A grant or the reason why not, for each ticket.
    pub items: Vec<Result<Grant, WireError>>,
}

impl Granted {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_count(out, self.items.len());
        for item in &self.items {
            WireError::put_outcome(out, item, |out, grant| grant.put(out));
        }
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Granted> {
        let mut reader = Reader::new("granted", body);
        // The shortest item is an error without a message.
        let items =
            take_items(&mut reader, 1 + 1 + 2, |reader| WireError::take_outcome(reader, Grant::take))?;
        reader.finish()?;
        Ok(Granted { items })
    }
}

/// A grant is no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The grant.
    pub handle: u32,
}

impl Release {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, self.handle);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Release> {
        let mut reader = Reader::new("release", body);
        let handle = reader.u32()?;
        reader.finish()?;
        Ok(Release { handle })
    }
}

/// The longest query about a path, and the longest reply.
pub const MAX_QUERY: usize = 48 << 10;

/// A query about a granted region, which a path makes before it is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// The grant.
    pub handle: u32,
    /// The path's number.
    pub path: u8,
    /// What is asked, in the path's own form.
    pub body: Vec<u8>,
}

impl Query {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, self.handle);
        out.push(self.path);
        put_counted(out, &self.body);
    }

    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Query> {
        let mut reader = Reader::new("query", bytes);
        let (handle, path) = (reader.u32()?, reader.u8()?);
        let body = reader.counted(MAX_QUERY)?.to_vec();
        reader.finish()?;
        Ok(Query { handle, path, body })
    }
}

/// The reply to a [`Query`]; descriptors may come with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryReply {
    /// The reply in the path's own form, or an error.
    pub outcome: Result<Vec<u8>, WireError>,
}

impl QueryReply {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        WireError::put_outcome(out, &self.outcome, |out, reply| put_counted(out, reply));
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<QueryReply> {
        let mut reader = Reader::new("query reply", body);
        let outcome = WireError::take_outcome(&mut reader, |reader| Ok(reader.counted(MAX_QUERY)?.to_vec()))?;
        reader.finish()?;
        Ok(QueryReply { outcome })
    }
}

/// The owner wants a region back that a path of the peer reaches without its help: the peer begins nothing new there, and
/// once nothing of it is in flight any more it says so, by a [`Query`] with an empty body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recall {
    /// The grant.
    pub handle: u32,
}

impl Recall {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, self.handle);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Recall> {
        let mut reader = Reader::new("recall", body);
        let handle = reader.u32()?;
        reader.finish()?;
        Ok(Recall { handle })
    }
}

/// A segment of the owner is gone: nobody needs its mapping any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmap {
    /// The segment's number.
    pub segment: u64,
}

impl Unmap {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.segment);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Unmap> {
        let mut reader = Reader::new("unmap", body);
        let segment = reader.u64()?;
        reader.finish()?;
        Ok(Unmap { segment })
    }
}

/// The claimer of an operation has done its part, or could not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    /// The operation.
    pub operation: OperationId,
    /// How it ended.
    pub outcome: Result<(), WireError>,
}

impl Finish {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.operation);
        WireError::put_outcome(out, &self.outcome, |_, ()| {});
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Finish> {
        let mut reader = Reader::new("finish", body);
        let operation = reader.array()?;
        let outcome = WireError::take_outcome(&mut reader, |_| Ok(()))?;
        reader.finish()?;
        Ok(Finish { operation, outcome })
    }
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    put_u16(out, u16::try_from(count).unwrap_or(u16::MAX));
}

fn take_items<'a, T>(
    reader: &mut Reader<'a>,
    shortest: usize,
    mut take: impl FnMut(&mut Reader<'a>) -> Result<T>,
) -> Result<Vec<T>> {
    let count = usize::from(reader.u16()?);
    if count > MAX_ITEMS || count * shortest > reader.remaining() {
        return Err(reader.bad(format!("{count} items are more than fit")));
    }
    let mut items = Vec::with_capacity(count);
    for _ in 0..count {
        items.push(take(reader)?);
    }
    Ok(items)
}
