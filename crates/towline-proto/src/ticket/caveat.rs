//! Caveats: what a holder has given up, and the rights that are left.

use std::ops::Range;

use super::OP;
use crate::codec::{Reader, put_u16, put_u64};
use crate::{Access, Result};

/// The most caveats that a ticket can carry.
pub const MAX_CAVEATS: usize = 16;

// Types from 0x20 to 0x7f stay unused for ever: they are the first letters of the labels under which a tag
// is used as a key, so that no proof can be taken for a caveat.
const RANGE: u8 = 1;
const ACCESS: u8 = 2;
const EXPIRY: u8 = 3;

/// One restriction that was added to a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Caveat {
    /// Only these bytes, counted from the start of the region.
    Range {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// Only these rights.
    Access(Access),
    /// Not after this moment of the owner's clock.
    Expiry {
        /// Milliseconds since the owner opened.
        ms: u64,
    },
}

impl Caveat {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Caveat::Range { offset, len } => {
                out.push(RANGE);
                put_u16(out, 16);
                put_u64(out, offset);
                put_u64(out, len);
            }
            Caveat::Access(access) => {
                out.push(ACCESS);
                put_u16(out, 1);
                out.push(access.bits());
            }
            Caveat::Expiry { ms } => {
                out.push(EXPIRY);
                put_u16(out, 8);
                put_u64(out, ms);
            }
        }
    }

    /// Reads one caveat. Unlike a field, an unknown one is always refused: nobody could honour it.
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Caveat> {
        let kind = reader.u8()?;
        let mut value = Reader::new(OP, reader.counted(usize::from(u16::MAX))?);
        let caveat = match kind {
            RANGE => Caveat::Range { offset: value.u64()?, len: value.u64()? },
            ACCESS => Caveat::Access(value.access()?),
            EXPIRY => Caveat::Expiry { ms: value.u64()? },
            other => return Err(reader.bad(format!("unknown caveat {other}"))),
        };
        value.finish()?;
        Ok(caveat)
    }
}

/// What a ticket allows after its caveats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) range: Range<u64>,
    pub(crate) access: Access,
    pub(crate) expires_ms: Option<u64>,
}

impl Rights {
    /// Takes away what the caveat takes away; says what it would widen, where it would.
    pub(crate) fn restrict(&mut self, caveat: Caveat) -> Result<(), &'static str> {
        match caveat {
            Caveat::Range { offset, len } => match offset.checked_add(len) {
                Some(end) if offset >= self.range.start && end <= self.range.end => self.range = offset..end,
                _ => return Err("the range is not inside the ticket's range"),
            },
            Caveat::Access(access) if self.access.contains(access) => self.access = access,
            Caveat::Access(_) => return Err("the access is more than the ticket's access"),
            Caveat::Expiry { ms } if self.expires_ms.is_none_or(|now| ms <= now) => {
                self.expires_ms = Some(ms)
            }
            Caveat::Expiry { .. } => return Err("the expiry is later than the ticket's expiry"),
        }
        Ok(())
    }
}
