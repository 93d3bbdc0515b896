//! What `nixl_metadata` holds: the number of the operation and the tickets of its memory, behind a text form.
//!
//! `TOWC`, `u16` version 1, the operation's 16 bytes, `u16` count, and that many counted tickets. The text is `b64:` and
//! standard base64, or, for old readers, bare lower-case hex. To a peer it is opaque.

use data_encoding::{BASE64, HEXLOWER, HEXLOWER_PERMISSIVE};
use towline_proto::codec::{Reader, put_counted, put_u16};

use crate::ticket::MAX_TICKET;
use crate::wire::OperationId;
use crate::{Error, Kind, Result, Ticket};

/// The most descriptors in one operation. Moving more would be no trouble: what is in flight at a time, 64 MiB or, in a stream, all of it, is
/// one transfer. But each is a ticket of a few hundred bytes in metadata that travel by the user's own channel and that anybody may have made
/// up: longer metadata are refused before they are read. Blocks at equal distances need no descriptor each: one with a layout names all of
/// them.
pub const MAX_DESCRIPTORS: usize = 1024;

/// The longest envelope: [`MAX_DESCRIPTORS`] tickets of the length that full ones have, and some room.
const MAX_ENVELOPE: usize = 640 << 10;

/// The longest text of one, in its longer form.
pub(super) const MAX_TEXT: usize = 2 * MAX_ENVELOPE;

const OP: &str = "metadata";
const MAGIC: [u8; 4] = *b"TOWC";
const VERSION: u16 = 1;
const BASE64_PREFIX: &str = "b64:";

/// An operation's number and the tickets of its memory, in the order of its descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Envelope {
    pub(super) operation: OperationId,
    pub(super) tickets: Vec<Ticket>,
}

/// The two text forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Base64,
    Hex,
}

impl Envelope {
    pub(super) fn to_text(&self, form: Form) -> Result<String> {
        let mut bytes = MAGIC.to_vec();
        put_u16(&mut bytes, VERSION);
        bytes.extend_from_slice(&self.operation);
        put_u16(&mut bytes, u16::try_from(self.tickets.len()).unwrap_or(u16::MAX));
        for ticket in &self.tickets {
            put_counted(&mut bytes, &ticket.encode());
        }
        if bytes.len() > MAX_ENVELOPE {
            let message = format!("the tickets take {} bytes, at most {MAX_ENVELOPE} fit", bytes.len());
            return Err(Error::invalid(OP, message));
        }
        Ok(match form {
            Form::Base64 => format!("{BASE64_PREFIX}{}", BASE64.encode(&bytes)),
            Form::Hex => HEXLOWER.encode(&bytes),
        })
    }

    pub(super) fn from_text(text: &str) -> Result<Envelope> {
        if text.is_empty() {
            return Err(Error::invalid(OP, "nixl_metadata is empty"));
        }
        if text.len() > MAX_TEXT {
            let message = format!("nixl_metadata has {} bytes; at most {MAX_TEXT} are read", text.len());
            return Err(Error::protocol(OP, message));
        }
        let bytes = match text.strip_prefix(BASE64_PREFIX) {
            Some(rest) => BASE64.decode(rest.as_bytes()),
            None => HEXLOWER_PERMISSIVE.decode(text.as_bytes()),
        };
        let bytes = bytes.map_err(|error| {
            Error::protocol(
                OP,
                format!("nixl_metadata is neither base64 behind {BASE64_PREFIX:?} nor hex: {error}"),
            )
        })?;
        Envelope::decode(&bytes)
    }

    fn decode(bytes: &[u8]) -> Result<Envelope> {
        if !bytes.starts_with(&MAGIC) {
            return Err(foreign(bytes));
        }
        let mut reader = Reader::new(OP, bytes);
        reader.bytes(MAGIC.len())?;
        let version = reader.u16()?;
        if version != VERSION {
            return Err(
                reader.bad(format!("version {version} of Towline's metadata; this library reads {VERSION}"))
            );
        }
        let operation = reader.array()?;
        let count = usize::from(reader.u16()?);
        if count == 0 || count > MAX_DESCRIPTORS || count * 2 > reader.remaining() {
            return Err(reader.bad(format!("{count} tickets do not fit")));
        }
        let mut tickets = Vec::with_capacity(count.min(reader.remaining() / 128 + 1));
        for _ in 0..count {
            tickets.push(Ticket::decode(reader.counted(MAX_TICKET)?)?);
        }
        reader.finish()?;
        Ok(Envelope { operation, tickets })
    }
}

/// The error for bytes that are not ours. NIXL's own metadata is a zlib stream, whose first two bytes show it.
fn foreign(bytes: &[u8]) -> Error {
    let zlib = matches!(*bytes, [method, flags, ..]
        if method & 0x0f == 8 && method >> 4 <= 7 && u16::from_be_bytes([method, flags]).is_multiple_of(31));
    if zlib {
        return Error::new(
            Kind::Unsupported,
            OP,
            "nixl_metadata was made by NIXL (it is a zlib stream), and this endpoint does not speak to NIXL \
             agents: both sides must use Towline",
        );
    }
    Error::protocol(OP, "nixl_metadata was not made by Towline")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::ticket::{RegionKey, TicketBody};
    use crate::{Access, Identity, Incarnation, Place, Reach};
    use proptest::prelude::*;

    fn ticket(row: u32) -> Ticket {
        let body = TicketBody {
            identity: Identity::new("prefill-0", Incarnation([7; 16])).unwrap(),
            reach: vec![Reach::Unix],
            row,
            generation: 1,
            length: 4096,
            place: Place::Host,
            access: Access::READ,
            issued_ms: 0,
            layout: None,
        };
        Ticket::mint(&body, &RegionKey::derive(&[1; 32], row, 1)).unwrap()
    }

    fn envelope() -> Envelope {
        Envelope { operation: [9; 16], tickets: vec![ticket(1), ticket(2), ticket(3)] }
    }

    #[test]
    fn both_text_forms_come_back() {
        for form in [Form::Base64, Form::Hex] {
            let text = envelope().to_text(form).unwrap();
            assert_eq!(text.starts_with("b64:"), form == Form::Base64);
            assert_eq!(Envelope::from_text(&text).unwrap(), envelope());
        }
        let upper = envelope().to_text(Form::Hex).unwrap().to_uppercase();
        assert_eq!(Envelope::from_text(&upper).unwrap(), envelope());
    }

    #[test]
    fn what_nixl_made_is_recognised_and_refused() {
        // The zlib headers of all levels, and a stream of the default level.
        for start in
            [&[0x78, 0x01][..], &[0x78, 0x5e], &[0x78, 0x9c], &[0x78, 0xda], b"x\x9cKLJ\x06\x00\x02M\x01'"]
        {
            for text in [format!("b64:{}", BASE64.encode(start)), HEXLOWER.encode(start)] {
                let error = Envelope::from_text(&text).unwrap_err();
                assert_eq!(error.kind(), Kind::Unsupported);
                assert!(error.message().contains("NIXL"), "{error}");
            }
        }
    }

    #[test]
    fn hostile_text_is_refused_with_a_reason() {
        let good = envelope().to_text(Form::Hex).unwrap();
        let one_more = format!("{good}00");
        let later = good.replacen("544f57430100", "544f57430200", 1);
        let none = format!("{}0000", &good[..44]);
        let many = format!("{}ffff{}", &good[..44], &good[48..]);
        for (text, why) in [
            ("b64:", "not made by Towline"),
            ("b64:%%%", "neither base64"),
            ("b64", "neither base64"),
            ("zz", "neither base64"),
            ("00", "not made by Towline"),
            ("544f5743", "missing"),
            (&good[..good.len() - 2], "missing"),
            (&one_more, "too many"),
            (&later, "version 2"),
            (&none, "0 tickets"),
            (&many, "65535 tickets"),
        ] {
            let error = Envelope::from_text(text).unwrap_err();
            assert_eq!(error.kind(), Kind::Protocol, "{text}");
            assert!(error.message().contains(why), "{why}: {error}");
        }
        assert_eq!(Envelope::from_text("").unwrap_err().kind(), Kind::Invalid);
        let long = "0".repeat(MAX_TEXT + 1);
        assert!(Envelope::from_text(&long).unwrap_err().message().contains("at most"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn changed_cut_and_random_text_never_panics(
            noise in proptest::collection::vec(any::<u8>(), 0..200),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = HEXLOWER.decode(envelope().to_text(Form::Hex).unwrap().as_bytes()).unwrap();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            let cut = cut.index(bytes.len());
            for bytes in [&bytes[..], &bytes[..cut], &noise[..]] {
                for text in [format!("b64:{}", BASE64.encode(bytes)), HEXLOWER.encode(bytes)] {
                    if let Ok(envelope) = Envelope::from_text(&text) {
                        let again = envelope.to_text(Form::Hex).unwrap();
                        prop_assert_eq!(again, HEXLOWER.encode(bytes));
                    }
                }
            }
            let _ = Envelope::from_text(&String::from_utf8_lossy(&noise));
        }
    }
}
