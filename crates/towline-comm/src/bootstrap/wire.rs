//! What a rank and the root say to each other: pure encoding, with bounds.
//!
//! Hello and welcome, and the first fields of a join, are the same in every version, so that a rank of another version
//! is understood well enough to be refused by name.

use towline::crypto::{hmac_sha256, is_same};
use towline::{Kind, Ticket};

use super::MOST_RANKS;
use crate::{Error, Result};

/// The version of what follows the handshake.
pub(super) const VERSION: u16 = 1;
/// How many bytes a hello has.
pub(super) const HELLO_LEN: usize = 4 + 16 + 32;
/// How many bytes a welcome has.
pub(super) const WELCOME_LEN: usize = 4 + 32 + 32;
/// The most bytes of a sealed join.
pub(super) const MOST_JOIN: usize = 8 << 10;
/// The most bytes of a rank's ticket.
const MOST_TICKET: usize = 4096;
/// The most bytes of an error's text.
const MOST_TEXT: usize = 4096;
const TAG_LEN: usize = 32;

const HELLO: [u8; 4] = *b"TLm?";
const WELCOME: [u8; 4] = *b"TLm!";

/// Who speaks: what one side sealed cannot be played back to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Rank,
    Root,
}

/// The most bytes of a sealed reply in a group of that many.
pub(super) fn most_answer(nranks: usize) -> usize {
    TAG_LEN + 64 + MOST_TEXT + nranks.min(MOST_RANKS) * (MOST_TICKET + 8)
}

/// What one rank and the root share once they have greeted each other.
#[derive(Clone)]
pub(super) struct Session {
    key: [u8; 32],
}

impl Session {
    pub(super) fn new(secret: &[u8], nonce: &[u8; 16], rank: &[u8; 32], root: &[u8; 32]) -> Session {
        Session { key: hmac_sha256(secret, &[b"towline meeting", nonce, rank, root]) }
    }

    /// Binds it to the encrypted connection that carries it: an attacker with another one to each side gets nowhere.
    pub(super) fn bound_to(self, binding: Option<[u8; 32]>) -> Session {
        match binding {
            Some(binding) => Session { key: hmac_sha256(&self.key, &[b"binding", &binding]) },
            None => self,
        }
    }

    /// Shows that the root knows the secret.
    pub(super) fn proof(&self) -> [u8; 32] {
        hmac_sha256(&self.key, &[b"root"])
    }

    pub(super) fn proves(&self, proof: &[u8; 32]) -> bool {
        is_same(&self.proof(), proof)
    }

    /// Encrypts, then authenticates. Each side seals one message of a session: the key stream is never used twice.
    pub(super) fn seal(&self, side: Side, plain: &[u8]) -> Vec<u8> {
        let mut sealed = plain.to_vec();
        self.stream(side, &mut sealed);
        let tag = self.tag(side, &sealed);
        sealed.extend(tag);
        sealed
    }

    /// What was sealed; `None` where it was not sealed by that side with this secret.
    pub(super) fn unseal(&self, side: Side, sealed: &[u8]) -> Option<Vec<u8>> {
        let (hidden, tag) = sealed.split_at_checked(sealed.len().checked_sub(TAG_LEN)?)?;
        if !is_same(&self.tag(side, hidden), tag) {
            return None;
        }
        let mut plain = hidden.to_vec();
        self.stream(side, &mut plain);
        Some(plain)
    }

    fn tag(&self, side: Side, hidden: &[u8]) -> [u8; 32] {
        hmac_sha256(&self.key, &[b"tag", &[side as u8], hidden])
    }

    fn stream(&self, side: Side, bytes: &mut [u8]) {
        let key = hmac_sha256(&self.key, &[b"stream", &[side as u8]]);
        for (index, block) in bytes.chunks_mut(32).enumerate() {
            let pad = hmac_sha256(&key, &[&(index as u64).to_le_bytes()]);
            block.iter_mut().zip(pad).for_each(|(byte, pad)| *byte ^= pad);
        }
    }
}

pub(super) fn hello(nonce: &[u8; 16], challenge: &[u8; 32]) -> [u8; HELLO_LEN] {
    let mut bytes = [0; HELLO_LEN];
    bytes[..4].copy_from_slice(&HELLO);
    bytes[4..20].copy_from_slice(nonce);
    bytes[20..].copy_from_slice(challenge);
    bytes
}

/// The rank's challenge, where the hello is for this meeting.
pub(super) fn parse_hello(bytes: &[u8; HELLO_LEN], nonce: &[u8; 16]) -> Option<[u8; 32]> {
    let ours = bytes[..4] == HELLO && is_same(&bytes[4..20], nonce);
    ours.then(|| bytes.last_chunk::<32>().copied()).flatten()
}

pub(super) fn welcome(challenge: &[u8; 32], proof: &[u8; 32]) -> [u8; WELCOME_LEN] {
    let mut bytes = [0; WELCOME_LEN];
    bytes[..4].copy_from_slice(&WELCOME);
    bytes[4..36].copy_from_slice(challenge);
    bytes[36..].copy_from_slice(proof);
    bytes
}

/// The root's challenge and proof.
pub(super) fn parse_welcome(bytes: &[u8; WELCOME_LEN]) -> Option<([u8; 32], [u8; 32])> {
    let challenge = bytes[4..36].first_chunk::<32>()?;
    (bytes[..4] == WELCOME).then_some((*challenge, *bytes.last_chunk::<32>()?))
}

/// What a rank says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Join {
    pub(super) version: u16,
    pub(super) nranks: usize,
    pub(super) rank: usize,
    /// What must be equal on all ranks.
    pub(super) digest: u64,
    /// How long the rank waits from now on.
    pub(super) timeout_ms: u64,
    pub(super) name: String,
    pub(super) ticket: Vec<u8>,
}

impl Join {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64 + self.ticket.len());
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.nranks as u32).to_le_bytes());
        bytes.extend((self.rank as u32).to_le_bytes());
        bytes.extend(self.digest.to_le_bytes());
        bytes.extend(self.timeout_ms.to_le_bytes());
        put_bytes(&mut bytes, self.name.as_bytes());
        put_bytes(&mut bytes, &self.ticket);
        bytes
    }

    /// Reads a join; of another version only what is the same in all of them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Join> {
        let mut reader = Reader(bytes);
        let version = reader.u16()?;
        let (nranks, rank) = (reader.u32()? as usize, reader.u32()? as usize);
        if version != VERSION {
            let (name, ticket) = (String::new(), Vec::new());
            return Ok(Join { version, nranks, rank, digest: 0, timeout_ms: 0, name, ticket });
        }
        let (digest, timeout_ms) = (reader.u64()?, reader.u64()?);
        let name = String::from_utf8_lossy(reader.bytes(256)?).into_owned();
        let ticket = reader.bytes(MOST_TICKET)?.to_vec();
        reader.end()?;
        Ok(Join { version, nranks, rank, digest, timeout_ms, name, ticket })
    }
}

/// The root's reply to every rank.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    /// The tickets of all ranks.
    List(Vec<Vec<u8>>),
    /// Why there is no group.
    Failed(Error),
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        match self {
            Reply::List(tickets) => {
                bytes.push(0);
                bytes.extend((tickets.len() as u32).to_le_bytes());
                for ticket in tickets {
                    put_bytes(&mut bytes, ticket);
                }
            }
            Reply::Failed(error) => {
                let kind = Kind::ALL.iter().position(|(kind, _)| *kind == error.kind()).unwrap_or(0);
                bytes.extend([1, kind as u8]);
                bytes.extend((error.ranks().len() as u32).to_le_bytes());
                for rank in error.ranks() {
                    bytes.extend((*rank as u32).to_le_bytes());
                }
                // Cut where it may: the reader takes what is not whole for what it is.
                let text = error.message().as_bytes();
                put_bytes(&mut bytes, &text[..text.len().min(MOST_TEXT)]);
            }
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Reply> {
        let mut reader = Reader(bytes);
        let version = reader.u16()?;
        if version != VERSION {
            return Err(bad(format!(
                "the root speaks version {version} of the meeting, this rank {VERSION}"
            )));
        }
        let reply = match reader.u8()? {
            0 => {
                let count = reader.u32()? as usize;
                if count > MOST_RANKS {
                    return Err(bad("the list is too long"));
                }
                let mut tickets = Vec::with_capacity(count);
                for _ in 0..count {
                    tickets.push(reader.bytes(MOST_TICKET)?.to_vec());
                }
                Reply::List(tickets)
            }
            1 => {
                let kind = Kind::ALL.get(usize::from(reader.u8()?)).map_or(Kind::Internal, |(kind, _)| *kind);
                let count = reader.u32()? as usize;
                if count > MOST_RANKS {
                    return Err(bad("the list is too long"));
                }
                let ranks = (0..count).map(|_| Ok(reader.u32()? as usize)).collect::<Result<Vec<_>>>()?;
                let text = String::from_utf8_lossy(reader.bytes(MOST_TEXT)?).into_owned();
                Reply::Failed(Error::new(kind, "init", text).about(ranks))
            }
            _ => return Err(bad("an unknown reply")),
        };
        reader.end()?;
        Ok(reply)
    }
}

/// The tickets of a list.
pub(super) fn tickets(list: &[Vec<u8>]) -> Result<Vec<Ticket>> {
    list.iter().map(|bytes| Ok(Ticket::decode(bytes)?)).collect()
}

fn put_bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    into.extend((bytes.len() as u16).to_le_bytes());
    into.extend(bytes);
}

fn bad(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::protocol("init", why)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len).ok_or_else(|| bad("the message is too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.first_chunk().copied().ok_or_else(|| bad("the message is too short"))
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bytes(&mut self, most: usize) -> Result<&'a [u8]> {
        let len = usize::from(self.u16()?);
        if len > most {
            return Err(bad("a field is too long"));
        }
        self.take(len)
    }

    fn end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(bad("bytes follow the message")) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use proptest::prelude::*;

    use super::*;

    fn session(byte: u8) -> Session {
        Session::new(&[byte; 32], &[1; 16], &[2; 32], &[3; 32])
    }

    #[test]
    fn only_the_other_side_with_the_same_secret_reads_what_was_sealed() {
        let plain = vec![7; 100];
        let sealed = session(1).seal(Side::Rank, &plain);
        assert_eq!(session(1).unseal(Side::Rank, &sealed).unwrap(), plain);
        assert!(session(2).unseal(Side::Rank, &sealed).is_none());
        assert!(session(1).unseal(Side::Root, &sealed).is_none());
        assert!(!sealed.windows(8).any(|window| window == [7; 8]));
        assert!(session(1).proves(&session(1).proof()) && !session(1).proves(&session(2).proof()));
    }

    #[test]
    fn a_join_of_another_version_still_says_who_it_is() {
        let join = Join {
            version: VERSION,
            nranks: 4,
            rank: 3,
            digest: 9,
            timeout_ms: 5,
            name: "comm".into(),
            ticket: vec![1; 300],
        };
        assert_eq!(Join::decode(&join.encode()).unwrap(), join);
        let other = Join::decode(&Join { version: 9, ..join }.encode()).unwrap();
        assert_eq!((other.version, other.nranks, other.rank), (9, 4, 3));
    }

    #[test]
    fn an_answer_survives_the_wire() {
        let list = Reply::List(vec![vec![1, 2], vec![]]);
        let Reply::List(tickets) = Reply::decode(&list.encode()).unwrap() else { panic!("a list") };
        assert_eq!(tickets, [vec![1, 2], vec![]]);
        let error = Error::new(Kind::Timeout, "init", "nobody came").about([2, 5]);
        let Reply::Failed(read) = Reply::decode(&Reply::Failed(error).encode()).unwrap() else {
            panic!("an error")
        };
        assert_eq!((read.kind(), read.ranks(), read.message()), (Kind::Timeout, &[2, 5][..], "nobody came"));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_and_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Join::decode(&bytes);
            let _ = Reply::decode(&bytes);
            prop_assert!(session(1).unseal(Side::Rank, &bytes).is_none());
        }
    }
}
