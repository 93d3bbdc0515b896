//! The part of a ticket that is shown: everything but the tag. This is what the owner gets to see.

use std::ops::Range;

use super::caveat::Rights;
use super::fields;
use super::{Caveat, MAX_CAVEATS, MAX_TICKET, OP, RegionKey, SEAL_LEN, Tag, TicketBody};
use crate::codec::Reader;
use crate::identity::Incarnation;
use crate::layout::Layout;
use crate::{Access, Error, Result};

/// A ticket without its tag, as a peer sends it: nothing in it is true until a proof was verified.
#[derive(Debug)]
pub struct PublicTicket<'a> {
    pub(super) body: TicketBody,
    pub(super) caveats: Vec<Caveat>,
    pub(super) rights: Rights,
    head: &'a [u8],
    caveat_bytes: &'a [u8],
}

/// What a ticket claims; true once a proof made with [`PublicTicket::tag`] was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The life of the owner that made it.
    pub incarnation: Incarnation,
    /// The row of the region in the owner's table.
    pub row: u32,
    /// The generation of that row.
    pub generation: u64,
    /// The bytes that may be touched, counted from the start of the region.
    pub range: Range<u64>,
    /// What may be done with them.
    pub access: Access,
    /// Until when, in milliseconds since the owner opened.
    pub expires_ms: Option<u64>,
    /// The layout that the owner put into the ticket.
    pub layout: Option<Layout>,
}

/// Parses the public bytes of a ticket.
pub fn parse_public(bytes: &[u8]) -> Result<PublicTicket<'_>> {
    if bytes.len() > MAX_TICKET - SEAL_LEN {
        return Err(Error::protocol(OP, "a ticket is at most 4096 bytes long"));
    }
    let head_len = fields::head_len(bytes)?;
    let Some((head, caveat_bytes)) = bytes.split_at_checked(head_len) else {
        return Err(Error::protocol(OP, "the ticket ends inside its header"));
    };
    let body = fields::parse_head(head)?;
    let mut rights = Rights { range: 0..body.length, access: body.access, expires_ms: None };
    let mut caveats = Vec::new();
    let mut reader = Reader::new(OP, caveat_bytes);
    while reader.remaining() > 0 {
        if caveats.len() == MAX_CAVEATS {
            return Err(reader.bad("a ticket carries at most 16 caveats"));
        }
        let caveat = Caveat::read(&mut reader)?;
        rights.restrict(caveat).map_err(|why| reader.bad(why))?;
        caveats.push(caveat);
    }
    Ok(PublicTicket { body, caveats, rights, head, caveat_bytes })
}

impl PublicTicket<'_> {
    /// Computes the tag that the holder of this ticket has, if the ticket is genuine.
    pub fn tag(&self, key: &RegionKey) -> Tag {
        let mut tag = key.sign(self.head);
        let mut rest = self.caveat_bytes;
        // Parsing has seen that the lengths add up; this walk only needs the boundaries.
        while let [_, low, high, ..] = *rest {
            let len = 3 + usize::from(u16::from_le_bytes([low, high]));
            let (caveat, after) = rest.split_at(len.min(rest.len()));
            tag = tag.extend(caveat);
            rest = after;
        }
        tag
    }

    /// Returns what the ticket claims.
    pub fn claims(&self) -> Claims {
        Claims {
            incarnation: self.body.identity.incarnation,
            row: self.body.row,
            generation: self.body.generation,
            range: self.rights.range.clone(),
            access: self.rights.access,
            expires_ms: self.rights.expires_ms,
            layout: self.body.layout.clone(),
        }
    }

    /// Returns what the owner is said to have signed.
    pub fn body(&self) -> &TicketBody {
        &self.body
    }
}
