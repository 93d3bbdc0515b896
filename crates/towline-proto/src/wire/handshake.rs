//! The handshake without its sockets: two ends prove to each other that they have the same key.
//!
//! ```text
//! client                                    server
//!   Hello   versions, who, to whom, nonce, which key
//!                    Welcome  version, incarnation, nonce, secret?, proof
//!   Prove   proof
//!                    Ready    (or Refuse, at either answer)
//! ```
//!
//! The key is the tag of a ticket, with the endpoint's secret where one is required, or the key of an earlier
//! connection. Neither the tag nor the secret is ever sent.

#[cfg(test)]
mod tests;

use std::fmt;

use super::{FrameKind, Hello, KeyRef, Message, OLDEST, Prove, Refuse, VERSION, Welcome, WireError, frame};
use crate::crypto::{hmac_sha256, is_hmac_sha256, is_same, sha256};
use crate::identity::{Identity, Incarnation};
use crate::ticket::{Tag, Ticket};
use crate::{Error, Kind, Result};

const OP: &str = "handshake";
const LINK: &[u8] = b"towline link";
const SERVER: &[u8] = b"towline server";
const CLIENT: &[u8] = b"towline client";
const SESSION: &[u8] = b"towline session";
const BINDING: &[u8] = b"towline binding";

/// An endpoint's secret: what a peer must know besides a ticket.
///
/// A ticket's holder can try secrets without asking anybody, so it should be long and random, not a word.
pub struct Secret([u8; 32]);

impl Secret {
    /// Makes a secret of any bytes.
    pub fn new(secret: impl AsRef<[u8]>) -> Secret {
        Secret(sha256(&[b"towline secret", secret.as_ref()]))
    }
}

impl From<&str> for Secret {
    fn from(secret: &str) -> Secret {
        Secret::new(secret)
    }
}

impl From<&[u8]> for Secret {
    fn from(secret: &[u8]) -> Secret {
        Secret::new(secret)
    }
}

/// The key of a link, from which its two proofs are made.
pub struct LinkKey([u8; 32]);

impl LinkKey {
    /// Derives the key from a ticket's tag and, where it is required, the secret.
    pub fn derive(tag: &Tag, secret: Option<&Secret>) -> LinkKey {
        let digest: &[u8] = secret.map_or(&[], |secret| &secret.0);
        LinkKey(hmac_sha256(&tag.0, &[LINK, digest]))
    }

    fn proves(&self, label: &[u8], transcript: &[u8; 32], proof: &[u8; 32]) -> bool {
        is_hmac_sha256(&self.0, &[label, transcript], proof)
    }

    fn proof(&self, label: &[u8], transcript: &[u8; 32]) -> [u8; 32] {
        hmac_sha256(&self.0, &[label, transcript])
    }
}

/// The key that a handshake leaves behind, with which the same two ends open further connections.
// Cloned because the server keeps one for the whole session and gives one to each handshake.
#[derive(Clone)]
pub struct SessionKey([u8; 32]);

impl SessionKey {
    /// Returns whether both are the same key, in constant time.
    pub fn is(&self, other: &SessionKey) -> bool {
        is_same(&self.0, &other.0)
    }
}

macro_rules! never_shown {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }
    )*};
}

never_shown!(Secret, LinkKey, SessionKey);

/// What a server finds for a [`KeyRef`].
#[derive(Debug)]
pub enum LinkBase {
    /// The tag that the holder of the ticket must have.
    Tag(Tag),
    /// The key of an earlier connection. A secret was part of it already and is not asked for again.
    Session(SessionKey),
}

impl LinkBase {
    fn link_key(&self, secret: Option<&Secret>) -> LinkKey {
        match self {
            LinkBase::Tag(tag) => LinkKey::derive(tag, secret),
            LinkBase::Session(key) => LinkKey(key.0),
        }
    }
}

/// What a client proves to have.
#[derive(Debug, Clone, Copy)]
pub enum ClientKey<'a> {
    /// A ticket.
    Ticket(&'a Ticket),
    /// The key of an earlier connection.
    Session {
        /// Its number, from `Ready`.
        id: u64,
        /// The key.
        key: &'a SessionKey,
    },
}

/// The client's side, between its `Hello` and the server's `Welcome`.
#[derive(Debug)]
pub struct ClientHandshake {
    hello: Vec<u8>,
    target: Incarnation,
    base: LinkBase,
    secret: Option<Secret>,
    binding: Option<[u8; 32]>,
}

impl ClientHandshake {
    /// Starts: returns the frame to send. The nonce must be random and fresh.
    pub fn start(
        identity: &Identity,
        target: Incarnation,
        key: ClientKey<'_>,
        nonce: [u8; 32],
        secret: Option<&Secret>,
    ) -> (ClientHandshake, Vec<u8>) {
        let (key, base) = match key {
            ClientKey::Ticket(ticket) => {
                (KeyRef::Ticket(ticket.public_bytes().to_vec()), LinkBase::Tag(ticket.tag()))
            }
            ClientKey::Session { id, key } => (KeyRef::Session(id), LinkBase::Session(key.clone())),
        };
        let identity = identity.clone();
        let hello = Hello { oldest: OLDEST, newest: VERSION, identity, target, nonce, key };
        let mut body = Vec::new();
        hello.encode(&mut body);
        let first = frame(FrameKind::Hello, 0, &body, 0, 0);
        let secret = secret.map(|secret| Secret(secret.0));
        (ClientHandshake { hello: body, target, base, secret, binding: None }, first)
    }

    /// Binds the proofs to the encrypted connection that carries them: 32 bytes that both ends of it, and nobody else, can
    /// derive. Both ends must do so, or none.
    #[must_use]
    pub fn bound_to(mut self, binding: Option<[u8; 32]>) -> ClientHandshake {
        self.binding = binding;
        self
    }

    /// Checks the server's answer; returns the frame to send, the session's key and the import challenge.
    pub fn on_welcome(self, body: &[u8]) -> Result<(Vec<u8>, SessionKey, [u8; 32])> {
        let welcome = Welcome::decode(body).map_err(|error| error.during(OP))?;
        if !(OLDEST..=VERSION).contains(&welcome.version) {
            return Err(Error::protocol(
                OP,
                format!(
                    "the peer chose version {}, this library speaks {OLDEST} to {VERSION}",
                    welcome.version
                ),
            ));
        }
        if welcome.incarnation != self.target {
            return Err(Error::owner_gone(
                OP,
                "the owner of the ticket has restarted, another life of it answered",
            ));
        }
        let secret = match (&self.base, welcome.secret_required, &self.secret) {
            // The other direction of the same rule: who requires a secret of its peers does not trust an owner that has none.
            (LinkBase::Tag(_), false, Some(_)) => {
                return Err(Error::new(
                    Kind::PermissionDenied,
                    OP,
                    "this endpoint has a secret, and the owner has none: open the owner with the same secret",
                ));
            }
            (_, false, _) => None,
            (LinkBase::Tag(_), true, Some(secret)) => Some(secret),
            (LinkBase::Tag(_), true, None) => {
                return Err(Error::new(
                    Kind::PermissionDenied,
                    OP,
                    "the peer requires the endpoint secret: open this endpoint with the same secret",
                ));
            }
            (LinkBase::Session(_), true, _) => {
                return Err(Error::protocol(OP, "the peer asks for a secret on a session"));
            }
        };
        let key = self.base.link_key(secret);
        let transcript = transcript(&self.hello, &welcome, self.binding.as_ref());
        if !key.proves(SERVER, &transcript, &welcome.mac) {
            return Err(Error::new(
                Kind::PermissionDenied,
                OP,
                "the peer could not prove that it made the ticket, or the endpoint secrets differ",
            ));
        }
        let prove = Message::from(Prove { mac: key.proof(CLIENT, &transcript) });
        Ok((prove.frame(0, 0, 0), SessionKey(key.proof(SESSION, &transcript)), transcript))
    }
}

/// The server's side, between its `Welcome` and the client's `Prove`.
#[derive(Debug)]
pub struct ServerHandshake {
    client: Identity,
    key_ref: KeyRef,
    version: u16,
    key: LinkKey,
    transcript: [u8; 32],
}

impl ServerHandshake {
    /// Checks a client's first frame; returns the frame to send. The nonce must be random and fresh.
    ///
    /// `lookup` finds the key that the client says it has. Where this fails, [`refusal`] makes the reply.
    pub fn on_hello(
        body: &[u8],
        me: &Identity,
        nonce: [u8; 32],
        secret: Option<&Secret>,
        lookup: impl FnOnce(&KeyRef) -> Result<LinkBase, Error>,
    ) -> Result<(ServerHandshake, Vec<u8>), Error> {
        ServerHandshake::on_hello_over(body, me, nonce, secret, None, lookup)
    }

    /// [`on_hello`](Self::on_hello) on an encrypted connection, to which the proofs are bound.
    pub fn on_hello_over(
        body: &[u8],
        me: &Identity,
        nonce: [u8; 32],
        secret: Option<&Secret>,
        binding: Option<[u8; 32]>,
        lookup: impl FnOnce(&KeyRef) -> Result<LinkBase, Error>,
    ) -> Result<(ServerHandshake, Vec<u8>), Error> {
        // Versions first: the rest of a foreign Hello may look different.
        let (oldest, newest) = Hello::versions(body).map_err(|error| error.during(OP))?;
        let version = newest.min(VERSION);
        if version < oldest.max(OLDEST) {
            return Err(Error::protocol(
                OP,
                format!(
                    "no common version: the client speaks {oldest} to {newest}, this endpoint {OLDEST} to {VERSION}"
                ),
            ));
        }
        let hello = Hello::decode(body).map_err(|error| error.during(OP))?;
        if hello.target != me.incarnation {
            return Err(Error::owner_gone(
                OP,
                "the owner of the ticket has restarted, this is another life of it",
            ));
        }
        let base = lookup(&hello.key)?;
        let secret = secret.filter(|_| matches!(base, LinkBase::Tag(_)));
        let key = base.link_key(secret);
        let mut welcome = Welcome {
            version,
            incarnation: me.incarnation,
            nonce,
            secret_required: secret.is_some(),
            mac: [0; 32],
        };
        let transcript = transcript(body, &welcome, binding.as_ref());
        welcome.mac = key.proof(SERVER, &transcript);
        let answer = Message::from(welcome).frame(0, 0, 0);
        let handshake =
            ServerHandshake { client: hello.identity, key_ref: hello.key, version, key, transcript };
        Ok((handshake, answer))
    }

    /// Checks the client's proof; returns the session's key and the import challenge.
    pub fn on_prove(self, body: &[u8]) -> Result<(SessionKey, [u8; 32])> {
        let prove = Prove::decode(body).map_err(|error| error.during(OP))?;
        if !self.key.proves(CLIENT, &self.transcript, &prove.mac) {
            return Err(Error::new(
                Kind::PermissionDenied,
                OP,
                "the ticket is not genuine, or the endpoint secrets differ",
            ));
        }
        Ok((SessionKey(self.key.proof(SESSION, &self.transcript)), self.transcript))
    }

    /// Returns who the client says it is. Proven is only that it has the key.
    pub fn client(&self) -> &Identity {
        &self.client
    }

    /// Returns which key the client used.
    pub fn key_ref(&self) -> &KeyRef {
        &self.key_ref
    }

    /// Returns the version that both will speak.
    pub fn version(&self) -> u16 {
        self.version
    }
}

/// Makes the `Refuse` frame for an error of the handshake.
pub fn refusal(error: &Error) -> Vec<u8> {
    Message::from(Refuse { error: WireError::from(error) }).frame(0, 0, 0)
}

/// The hash of everything that was said before the proofs; both nonces make it unique to the connection. On an encrypted
/// connection, also of what its two ends alone can derive.
fn transcript(hello: &[u8], welcome: &Welcome, binding: Option<&[u8; 32]>) -> [u8; 32] {
    let mut said = Vec::new();
    welcome.encode_unproven(&mut said);
    let bound: [&[u8]; 2] = binding.map_or([&[], &[]], |binding| [BINDING, binding]);
    sha256(&[hello, &said, bound[0], bound[1]])
}
