//! What an agent on the embedded engine sends its peers: tickets, and the ranges that they stand for.
//!
//! ```text
//! magic[16]  flags:u8 (1: everything that is registered)
//! len:u32 ticket[len]                                                  the door
//! count:u32, then for each   kind:u8 device:u64 address:u64 size:u64   len:u32 ticket[len]
//! ```
//! Numbers are little-endian. Pure, and hostile input is expected.

use crate::memory::{MemType, NixlDescriptor, Place};
use crate::nixl::list::Range;
use crate::{Error, Kind, Result, Ticket, room};

/// What it begins with; the last byte is the version.
pub(in crate::nixl) const MAGIC: &[u8; 16] = b"towline-agent-\0\x01";

/// The least that one entry takes: its numbers and the length of its ticket.
const LEAST_ENTRY: usize = 29;

/// A region of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nixl) struct Entry {
    pub(in crate::nixl) range: Range,
    pub(in crate::nixl) ticket: Ticket,
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::nixl) struct Metadata {
    /// Whether it is all that the agent has registered.
    pub(in crate::nixl) complete: bool,
    pub(in crate::nixl) door: Ticket,
    pub(in crate::nixl) entries: Vec<Entry>,
}

const KINDS: [MemType; 6] =
    [MemType::Dram, MemType::Vram, MemType::Block, MemType::Object, MemType::File, MemType::Unknown];

impl Metadata {
    pub(in crate::nixl) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(self.complete.into());
        put_ticket(&mut out, &self.door);
        out.extend((self.entries.len() as u32).to_le_bytes());
        for Entry { range: Range(range), ticket } in &self.entries {
            out.push(range.mem_type as u8);
            for number in [range.device_id, range.addr, range.size as u64] {
                out.extend(number.to_le_bytes());
            }
            put_ticket(&mut out, ticket);
        }
        out
    }

    pub(in crate::nixl) fn decode(bytes: &[u8]) -> Result<Metadata> {
        let mut rest = bytes;
        if take(&mut rest, MAGIC.len())? != MAGIC {
            return Err(damaged("it does not start like metadata"));
        }
        let complete = match take(&mut rest, 1)? {
            [0] => false,
            [1] => true,
            _ => return Err(damaged("an unknown flag is set")),
        };
        let door = ticket(&mut rest)?;
        let count = number::<4>(&mut rest)? as usize;
        if count > rest.len() / LEAST_ENTRY {
            return Err(damaged("its count of regions is wrong"));
        }
        let mut entries = room::list("nixl", count)?;
        for _ in 0..count {
            let kind = number::<1>(&mut rest)? as usize;
            let mem_type = *KINDS.get(kind).ok_or_else(|| damaged("a kind of memory is not known"))?;
            let (device_id, addr) = (number::<8>(&mut rest)?, number::<8>(&mut rest)?);
            let size =
                usize::try_from(number::<8>(&mut rest)?).map_err(|_| damaged("a size is too large"))?;
            let range = Range(NixlDescriptor { addr, size, mem_type, device_id });
            let ticket = ticket(&mut rest)?;
            check(&door, &range, &ticket)?;
            entries.push(Entry { range, ticket });
        }
        if !rest.is_empty() {
            return Err(damaged("something follows it"));
        }
        Ok(Metadata { complete, door, entries })
    }
}

/// All tickets are of one agent, and each is of the range that it stands beside.
fn check(door: &Ticket, range: &Range, ticket: &Ticket) -> Result<()> {
    if ticket.body().identity != door.body().identity {
        return Err(damaged("a ticket is of another agent"));
    }
    let place = match ticket.body().place {
        Place::Host => range.0.mem_type == MemType::Dram,
        Place::Cuda(device) => range.0.mem_type == MemType::Vram && range.0.device_id == u64::from(device),
        Place::Disk => range.0.mem_type == MemType::File,
    };
    if !place || ticket.length() != range.0.size as u64 || range.0.size == 0 || range.end().is_none() {
        return Err(damaged("a ticket and its range are not the same"));
    }
    Ok(())
}

fn damaged(why: &str) -> Error {
    Error::new(Kind::Protocol, "load_remote_md", format!("not the metadata of an agent: {why}"))
}

fn put_ticket(out: &mut Vec<u8>, ticket: &Ticket) {
    let bytes = ticket.encode();
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len).ok_or_else(|| damaged("it ends too early"))?;
    *rest = left;
    Ok(taken)
}

fn number<const N: usize>(rest: &mut &[u8]) -> Result<u64> {
    let mut word = [0; 8];
    word[..N].copy_from_slice(take(rest, N)?);
    Ok(u64::from_le_bytes(word))
}

fn ticket(rest: &mut &[u8]) -> Result<Ticket> {
    let len = number::<4>(rest)? as usize;
    Ticket::decode(take(rest, len)?).map_err(|error| damaged(error.message()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::memory::{MemoryDescription, SystemStorage};
    use crate::region::RegisteredView;
    use crate::{Access, Endpoint};

    fn sample() -> (Metadata, Ticket) {
        let endpoint = Endpoint::open("metadata-sample").unwrap();
        let door = endpoint.register(SystemStorage::new(1).unwrap(), Access::NONE).unwrap();
        let region = endpoint.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        assert_eq!(region.size(), 4096);
        let other = Endpoint::open("metadata-other").unwrap();
        let foreign = other.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
        let entry = Entry { range: Range(region.descriptor()), ticket: region.ticket().unwrap() };
        let metadata = Metadata { complete: true, door: door.ticket().unwrap(), entries: vec![entry] };
        (metadata, foreign.ticket().unwrap())
    }

    #[test]
    fn metadata_survives_the_wire_and_every_cut_is_a_protocol_error() {
        let (metadata, _) = sample();
        let bytes = metadata.encode();
        assert_eq!(Metadata::decode(&bytes).unwrap(), metadata);
        for len in 0..bytes.len() {
            assert_eq!(Metadata::decode(&bytes[..len]).unwrap_err().kind(), Kind::Protocol);
        }
        let longer = [bytes.as_slice(), b"x"].concat();
        assert_eq!(Metadata::decode(&longer).unwrap_err().kind(), Kind::Protocol);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x81;
            if let Err(error) = Metadata::decode(&changed) {
                assert_eq!(error.kind(), Kind::Protocol, "{error}");
            }
        }
    }

    #[test]
    fn tickets_of_others_and_ranges_of_another_length_or_kind_are_refused() {
        let (metadata, foreign) = sample();
        let refused = |change: &dyn Fn(&mut Entry)| {
            let mut changed =
                Metadata { entries: metadata.entries.clone(), door: metadata.door.clone(), ..metadata };
            change(&mut changed.entries[0]);
            Metadata::decode(&changed.encode()).unwrap_err().kind() == Kind::Protocol
        };
        assert!(refused(&|entry| entry.ticket = foreign.clone()));
        assert!(refused(&|entry| entry.range.0.size = 4097));
        assert!(refused(&|entry| entry.range.0.addr = u64::MAX));
        assert!(refused(&|entry| entry.range.0.mem_type = MemType::File));
        assert!(refused(&|entry| entry.range.0.mem_type = MemType::Vram));
    }
}
