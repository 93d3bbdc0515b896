//! The head of a ticket: the fixed header and the fields behind it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::{MAX_REACH, MAX_TICKET, OP, Reach, SEAL_LEN, TicketBody};
use crate::codec::{OLDEST, VERSION};
use crate::codec::{Reader, put_layout, put_place, put_u16, put_u32, put_u64};
use crate::identity::{EndpointId, Identity, Incarnation};
use crate::{Error, Result};

/// The length of the fixed part.
pub(super) const FIXED_LEN: usize = 80;

const MAGIC: &[u8; 4] = b"TOWL";
const CRITICAL: u8 = 0x80;

// Fields. One type for each kind of address: a reader that does not know a new kind skips it.
const NAME: u8 = 1;
const REACH_UNIX: u8 = 2;
const REACH_TCP4: u8 = 3;
const REACH_TCP6: u8 = 4;
const LAYOUT: u8 = 5;

/// Writes the fixed header and the fields.
pub(super) fn write_head(body: &TicketBody) -> Result<Vec<u8>> {
    check(body).map_err(|why| Error::invalid(OP, why))?;
    let mut out = Vec::with_capacity(512);
    out.extend_from_slice(MAGIC);
    put_u16(&mut out, VERSION);
    put_u16(&mut out, 0);
    out.extend_from_slice(&body.identity.id.0);
    out.extend_from_slice(&body.identity.incarnation.0);
    put_u32(&mut out, body.row);
    put_u64(&mut out, body.generation);
    put_u64(&mut out, body.length);
    put_place(&mut out, body.place);
    out.push(body.access.bits());
    out.extend_from_slice(&[0; 6]);
    put_u64(&mut out, body.issued_ms);

    put_field(&mut out, NAME, body.identity.name.as_bytes());
    for reach in &body.reach {
        match reach {
            Reach::Unix => put_field(&mut out, REACH_UNIX, &[]),
            Reach::Tcp(SocketAddr::V4(address)) => {
                let mut value = address.ip().octets().to_vec();
                put_u16(&mut value, address.port());
                put_field(&mut out, REACH_TCP4, &value);
            }
            Reach::Tcp(SocketAddr::V6(address)) => {
                let mut value = address.ip().octets().to_vec();
                put_u16(&mut value, address.port());
                put_u32(&mut value, address.scope_id());
                put_field(&mut out, REACH_TCP6, &value);
            }
        }
    }
    if let Some(layout) = &body.layout {
        let mut value = Vec::new();
        put_layout(&mut value, layout);
        put_field(&mut out, LAYOUT, &value);
    }
    match u16::try_from(out.len()) {
        Ok(len) if out.len() <= MAX_TICKET - SEAL_LEN => out[6..8].copy_from_slice(&len.to_le_bytes()),
        _ => return Err(Error::invalid(OP, "the ticket would be longer than 4096 bytes")),
    }
    Ok(out)
}

fn put_field(out: &mut Vec<u8>, kind: u8, value: &[u8]) {
    out.push(kind);
    crate::codec::put_counted(out, value);
}

/// Reads how long the head is, after seeing that this is a ticket of a version that we speak.
pub(super) fn head_len(bytes: &[u8]) -> Result<usize> {
    let mut reader = Reader::new(OP, bytes);
    if reader.array::<4>()? != *MAGIC {
        return Err(reader.bad("this is not a ticket"));
    }
    let version = reader.u16()?;
    if !(OLDEST..=VERSION).contains(&version) {
        return Err(reader.bad(format!(
            "the ticket has version {version}, this library reads versions {OLDEST} to {VERSION}"
        )));
    }
    Ok(usize::from(reader.u16()?))
}

/// Reads the fixed header and the fields; `head` is exactly them.
pub(super) fn parse_head(head: &[u8]) -> Result<TicketBody> {
    if head.len() < FIXED_LEN {
        return Err(Error::protocol(OP, "the header is too short"));
    }
    let mut reader = Reader::new(OP, head);
    reader.bytes(8)?;
    let id = EndpointId(reader.array()?);
    let incarnation = Incarnation(reader.array()?);
    let (row, generation, length) = (reader.u32()?, reader.u64()?, reader.u64()?);
    let (place, access) = (reader.place()?, reader.access()?);
    if reader.array::<6>()? != [0; 6] {
        return Err(reader.bad("reserved bytes are not zero"));
    }
    let issued_ms = reader.u64()?;

    let (mut name, mut reach, mut layout) = (None, Vec::new(), None);
    while reader.remaining() > 0 {
        let kind = reader.u8()?;
        let mut value = Reader::new(OP, reader.counted(MAX_TICKET)?);
        match kind {
            NAME if name.is_none() => {
                let text =
                    std::str::from_utf8(value.rest()).map_err(|_| reader.bad("the name is not UTF-8"))?;
                name = Some(text.to_owned());
            }
            LAYOUT if layout.is_none() => layout = Some(value.layout()?),
            NAME | LAYOUT => return Err(reader.bad(format!("field {kind} comes twice"))),
            REACH_UNIX => reach.push(Reach::Unix),
            REACH_TCP4 => {
                let ip = IpAddr::from(Ipv4Addr::from(value.array::<4>()?));
                reach.push(Reach::Tcp(SocketAddr::new(ip, value.u16()?)));
            }
            REACH_TCP6 => {
                let ip = Ipv6Addr::from(value.array::<16>()?);
                let (port, scope) = (value.u16()?, value.u32()?);
                reach.push(Reach::Tcp(SocketAddrV6::new(ip, port, 0, scope).into()));
            }
            unknown if unknown & CRITICAL != 0 => {
                return Err(reader.bad(format!("unknown critical field {unknown:#04x}")));
            }
            // Optional and of a later version: skipped here, kept in the ticket's bytes.
            _ => drop(value.rest()),
        }
        value.finish()?;
        if reach.len() > MAX_REACH {
            return Err(reader.bad("a ticket names at most 8 addresses of its owner"));
        }
    }
    let Some(name) = name else {
        return Err(reader.bad("the ticket does not name its owner"));
    };
    let identity = Identity { id, incarnation, name };
    let body = TicketBody { identity, reach, row, generation, length, place, access, issued_ms, layout };
    check(&body).map_err(|why| Error::protocol(OP, why))?;
    Ok(body)
}

/// Says what no ticket may contain, wherever it comes from.
fn check(body: &TicketBody) -> Result<(), &'static str> {
    body.identity.check()?;
    if body.reach.len() > MAX_REACH {
        return Err("a ticket names at most 8 addresses of its owner");
    }
    for reach in &body.reach {
        reach.check()?;
    }
    match &body.layout {
        Some(layout) if layout.extent() > body.length => Err("the layout reaches beyond the region"),
        _ => Ok(()),
    }
}
