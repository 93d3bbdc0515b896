//! The text form of a ticket, and serde on top of it.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE64URL_NOPAD;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{MAX_TICKET, OP, Ticket};
use crate::{Error, Result};

const PREFIX: &str = "towline1:";

/// The whole ticket as text, tag included: what the user's channel carries, not what a log should show.
impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        f.write_str(&BASE64URL_NOPAD.encode(&self.bytes))
    }
}

/// Reads the text form; white space around it is ignored.
impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Ticket> {
        let Some(code) = text.trim().strip_prefix(PREFIX) else {
            return Err(Error::protocol(OP, "the text of a ticket starts with towline1:"));
        };
        if code.len() > BASE64URL_NOPAD.encode_len(MAX_TICKET) {
            return Err(Error::protocol(OP, "a ticket is at most 4096 bytes long"));
        }
        let bytes = BASE64URL_NOPAD
            .decode(code.as_bytes())
            .map_err(|error| Error::protocol(OP, "the text of the ticket is damaged").caused_by(error))?;
        Ticket::decode(&bytes)
    }
}

impl Serialize for Ticket {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.bytes)
        }
    }
}

impl<'de> Deserialize<'de> for Ticket {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Ticket, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_str(TicketVisitor)
        } else {
            TicketVisitor::bytes(deserializer)
        }
    }
}

pub(super) struct TicketVisitor;

impl TicketVisitor {
    pub(super) fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Ticket, D::Error> {
        deserializer.deserialize_bytes(TicketVisitor)
    }
}

impl<'de> Visitor<'de> for TicketVisitor {
    type Value = Ticket;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a ticket as text or bytes")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Ticket, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Ticket, E> {
        Ticket::decode(bytes).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Ticket, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = items.next_element()? {
            if bytes.len() == MAX_TICKET {
                return Err(de::Error::custom("a ticket is at most 4096 bytes long"));
            }
            bytes.push(byte);
        }
        self.visit_bytes(&bytes)
    }
}
