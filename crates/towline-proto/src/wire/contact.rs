//! The bodies of contact: the handshake, the heartbeat, the end.

use super::WireError;
use crate::codec::{Reader, put_counted, put_identity, put_option, put_u16, put_u32, put_u64};
use crate::identity::{Identity, Incarnation, MAX_NAME};
use crate::ticket::MAX_TICKET;
use crate::{Error, Result};

/// The key that a client will prove to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyRef {
    /// The tag of the ticket with these public bytes.
    Ticket(Vec<u8>),
    /// The key of an earlier connection.
    Session(u64),
}

/// The client's first frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version that the client speaks.
    pub oldest: u16,
    /// The newest version that the client speaks.
    pub newest: u16,
    /// The client.
    pub identity: Identity,
    /// The life of the server that the client wants to talk to.
    pub target: Incarnation,
    /// Random, fresh.
    pub nonce: [u8; 32],
    /// The key that both have.
    pub key: KeyRef,
}

impl Hello {
    /// Reads the versions that a client speaks. Their place is the same in every version, for ever.
    pub fn versions(body: &[u8]) -> Result<(u16, u16)> {
        let mut reader = Reader::new("hello", body);
        let (oldest, newest) = (reader.u16()?, reader.u16()?);
        if oldest > newest {
            return Err(reader.bad(format!("the range of versions {oldest} to {newest} is empty")));
        }
        Ok((oldest, newest))
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u16(out, self.oldest);
        put_u16(out, self.newest);
        put_identity(out, &self.identity);
        out.extend_from_slice(&self.target.0);
        out.extend_from_slice(&self.nonce);
        match &self.key {
            KeyRef::Ticket(public) => {
                out.push(1);
                put_counted(out, public);
            }
            KeyRef::Session(id) => {
                out.push(2);
                put_u64(out, *id);
            }
        }
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Hello> {
        let (oldest, newest) = Hello::versions(body)?;
        let mut reader = Reader::new("hello", body);
        reader.bytes(4)?;
        let identity = reader.identity()?;
        let (target, nonce) = (Incarnation(reader.array()?), reader.array()?);
        let key = match reader.u8()? {
            1 => KeyRef::Ticket(reader.counted(MAX_TICKET)?.to_vec()),
            2 => KeyRef::Session(reader.u64()?),
            other => return Err(reader.bad(format!("unknown kind of key {other}"))),
        };
        reader.finish()?;
        Ok(Hello { oldest, newest, identity, target, nonce, key })
    }
}

/// The server's answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both will speak.
    pub version: u16,
    /// The server's life.
    pub incarnation: Incarnation,
    /// Random, fresh.
    pub nonce: [u8; 32],
    /// Whether the endpoint secret is part of the key.
    pub secret_required: bool,
    /// The server's proof.
    pub mac: [u8; 32],
}

impl Welcome {
    /// Appends the body without the proof: the part that the proof is about.
    pub(super) fn encode_unproven(&self, out: &mut Vec<u8>) {
        put_u16(out, self.version);
        out.extend_from_slice(&self.incarnation.0);
        out.extend_from_slice(&self.nonce);
        out.push(u8::from(self.secret_required));
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_unproven(out);
        out.extend_from_slice(&self.mac);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Welcome> {
        let mut reader = Reader::new("welcome", body);
        let welcome = Welcome {
            version: reader.u16()?,
            incarnation: Incarnation(reader.array()?),
            nonce: reader.array()?,
            secret_required: reader.bool()?,
            mac: reader.array()?,
        };
        reader.finish()?;
        Ok(welcome)
    }
}

/// No, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refuse {
    /// Why.
    pub error: WireError,
}

impl Refuse {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.error.put(out);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Refuse> {
        let mut reader = Reader::new("refuse", body);
        let error = WireError::take(&mut reader)?;
        reader.finish()?;
        Ok(Refuse { error })
    }
}

/// The client's proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prove {
    /// The proof.
    pub mac: [u8; 32],
}

impl Prove {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.mac);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Prove> {
        let mut reader = Reader::new("prove", body);
        let mac = reader.array()?;
        reader.finish()?;
        Ok(Prove { mac })
    }
}

/// The link is open.
///
/// With `local`, three descriptors ride with it: the table, the pin page, the doorbell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// The number under which the server keeps the session key.
    pub session: u64,
    /// The server's name.
    pub name: String,
    /// On one host: how many rows the server's table has. Over TCP: the port at which the server sees the client.
    pub local: Option<u32>,
}

impl Ready {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_u64(out, self.session);
        put_counted(out, self.name.as_bytes());
        put_option(out, self.local, put_u32);
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Ready> {
        let mut reader = Reader::new("ready", body);
        let session = reader.u64()?;
        let name = reader.text(MAX_NAME)?;
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err(reader.bad("the name of the endpoint cannot be shown"));
        }
        let ready = Ready { session, name: name.to_owned(), local: reader.option(Reader::u32)? };
        reader.finish()?;
        Ok(ready)
    }
}

/// The sender closes the link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bye {
    /// Why, where it is not the ordinary end.
    pub error: Option<WireError>,
}

impl Bye {
    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_option(out, self.error.as_ref(), |out, error| error.put(out));
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Bye> {
        let mut reader = Reader::new("bye", body);
        let error = reader.option(WireError::take)?;
        reader.finish()?;
        Ok(Bye { error })
    }
}

macro_rules! empty_bodies {
    ($($(#[$doc:meta])* $name:ident $op:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name {}

        impl $name {
            /// Appends the body, which is empty.
            pub fn encode(&self, _out: &mut Vec<u8>) {}

            /// Reads a body, which must be empty.
            pub fn decode(body: &[u8]) -> Result<$name> {
                if body.is_empty() { Ok($name {}) } else { Err(Error::protocol($op, "the body is not empty")) }
            }
        }
    )*};
}

empty_bodies! {
    /// The client's life page rides with this frame.
    Held "held";
    /// Nothing more belongs to the transfer with the frame's id.
    Cancel "cancel";
    /// The reply to the request with the frame's id is not wanted any more. Over the connection of the request.
    Withdraw "withdraw";
    /// Are you there?
    Ping "ping";
    /// Yes.
    Pong "pong";
}
