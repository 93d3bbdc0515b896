//! Tickets: the wire form of a region, a capability that its holder can narrow and cannot widen.
//!
//! The bytes are described in `docs/reference/wire-format.md`.

mod caveat;
mod fields;
mod key;
mod narrow;
mod public;
mod reach;
mod text;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use crate::crypto::sha256;
use crate::identity::Identity;
use crate::layout::Layout;
use crate::place::Place;
use crate::{Access, Error, Kind, Result};

pub(crate) use caveat::Rights;
pub use caveat::{Caveat, MAX_CAVEATS};
pub use key::{RegionKey, Tag};
pub use narrow::Narrow;
pub use public::{Claims, PublicTicket, parse_public};
pub use reach::{MAX_REACH, Reach, socket_name};

/// The longest ticket, in bytes.
pub const MAX_TICKET: usize = 4096;

const OP: &str = "ticket";
const TAG_LEN: usize = 32;
const CHECK_LEN: usize = 4;
/// What follows the public bytes: the tag and the checksum.
const SEAL_LEN: usize = TAG_LEN + CHECK_LEN;

/// What the owner of a region says about it when it makes a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketBody {
    /// The owner.
    pub identity: Identity,
    /// The addresses where it can be reached, best first; at most 8.
    pub reach: Vec<Reach>,
    /// The region's row in the owner's table.
    pub row: u32,
    /// The row's generation.
    pub generation: u64,
    /// The region's length in bytes.
    pub length: u64,
    /// Where the region lives.
    pub place: Place,
    /// What the ticket allows before any caveat.
    pub access: Access,
    /// When the ticket was made: milliseconds since the owner's incarnation opened.
    pub issued_ms: u64,
    /// How the region is divided into blocks, where that was said.
    pub layout: Option<Layout>,
}

/// A region's ticket: who owns it, how to reach them, what is allowed, and the tag that proves it.
///
/// Everyone who holds a ticket may use it, and may [`narrow`](Ticket::narrow) it before passing it on. Its text
/// form ([`Display`](fmt::Display), [`FromStr`](std::str::FromStr), serde) is the whole capability: treat it
/// like a password. The [`Debug`](fmt::Debug) form never shows the tag and is safe to log.
///
/// ```
/// # use towline_proto as towline;
/// use std::time::Duration;
/// use towline::Place;
/// use towline::ticket::{RegionKey, TicketBody};
/// use towline::{Access, Identity, Incarnation, Reach, Ticket};
///
/// // An endpoint does this part when a region's ticket is asked for.
/// let key = RegionKey::derive(&[1; 32], 5, 1);
/// let body = TicketBody {
///     identity: Identity::new("prefill-0", Incarnation([7; 16]))?,
///     reach: vec![Reach::Unix],
///     row: 5,
///     generation: 1,
///     length: 1 << 20,
///     place: Place::Host,
///     access: Access::READ_WRITE,
///     issued_ms: 0,
///     layout: None,
/// };
/// let ticket = Ticket::mint(&body, &key)?;
///
/// // A holder passes on less than it has.
/// let less = ticket.narrow().range(4096, 100).access(Access::READ).lease(Duration::from_secs(60)).finish()?;
/// let text = less.to_string();
/// let received: Ticket = text.parse()?;
/// assert_eq!(received.range(), 4096..4196);
/// assert_eq!(received.access(), Access::READ);
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Ticket {
    bytes: Vec<u8>,
    body: TicketBody,
    caveats: Vec<Caveat>,
    rights: Rights,
}

impl Ticket {
    /// Makes the ticket of a region; only the owner has the key.
    pub fn mint(body: &TicketBody, key: &RegionKey) -> Result<Ticket> {
        let head = fields::write_head(body)?;
        let tag = key.sign(&head);
        // Read back, so that what the owner holds is what everyone else will see.
        Ticket::decode(&seal(head, &tag)).map_err(|error| Error::invalid(OP, error.message().to_owned()))
    }

    /// Returns what the owner said when it made the ticket.
    pub fn body(&self) -> &TicketBody {
        &self.body
    }

    /// Returns the caveats, in the order in which they were added.
    pub fn caveats(&self) -> &[Caveat] {
        &self.caveats
    }

    /// Returns the bytes that may be touched, counted from the start of the region.
    ///
    /// Offsets that a user of the imported ticket gives count from the start of this range.
    pub fn range(&self) -> Range<u64> {
        self.rights.range.clone()
    }

    /// Returns how many bytes may be touched: the length of [`range`](Ticket::range).
    pub fn length(&self) -> u64 {
        self.rights.range.end - self.rights.range.start
    }

    /// Returns what may be done with them.
    pub fn access(&self) -> Access {
        self.rights.access
    }

    /// Returns when the ticket ends, in milliseconds since the owner's incarnation opened.
    pub fn expires_ms(&self) -> Option<u64> {
        self.rights.expires_ms
    }

    /// Returns the region's layout, where it has one and the ticket covers the whole region.
    ///
    /// A layout counts from the start of the region, and offsets of a narrowed ticket from the start of its
    /// range: a ticket whose range is not the whole region therefore has no layout. The one that was signed
    /// is still in [`body`](Ticket::body).
    pub fn layout(&self) -> Option<&Layout> {
        let whole = self.rights.range == (0..self.body.length);
        self.body.layout.as_ref().filter(|_| whole)
    }

    /// Starts to build a ticket that allows less than this one.
    pub fn narrow(&self) -> Narrow {
        Narrow::new(self)
    }

    /// Returns the ticket as bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.bytes.clone()
    }

    /// Reads a ticket: any bytes give a ticket or a `Protocol` error.
    ///
    /// The checksum notices damage; only the owner can tell whether the tag is right.
    pub fn decode(bytes: &[u8]) -> Result<Ticket> {
        if bytes.len() > MAX_TICKET {
            return Err(Error::protocol(OP, "a ticket is at most 4096 bytes long"));
        }
        // The magic and the version come first: text of another kind, or a ticket of another version, should
        // not be called damaged.
        fields::head_len(bytes)?;
        let Some((sealed, check)) = bytes.split_last_chunk::<CHECK_LEN>() else {
            return Err(Error::protocol(OP, "the ticket is too short"));
        };
        if checksum(sealed) != *check {
            return Err(Error::protocol(OP, "the ticket is damaged: its checksum is wrong"));
        }
        let Some((public, _)) = sealed.split_last_chunk::<TAG_LEN>() else {
            return Err(Error::protocol(OP, "the ticket is too short"));
        };
        let PublicTicket { body, caveats, rights, .. } = parse_public(public)?;
        Ok(Ticket { bytes: bytes.to_vec(), body, caveats, rights })
    }

    /// Returns everything before the tag: what the owner is shown. The tag itself is never sent to anyone.
    pub fn public_bytes(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - SEAL_LEN]
    }

    /// Proves possession of the ticket to the owner, for one connection.
    pub fn proof(&self, challenge: &[u8]) -> [u8; 32] {
        self.tag().proof(challenge)
    }

    /// The tag, which is sent to nobody.
    #[doc(hidden)]
    pub fn tag(&self) -> Tag {
        let mut tag = [0; TAG_LEN];
        let at = self.bytes.len() - SEAL_LEN;
        tag.copy_from_slice(&self.bytes[at..at + TAG_LEN]);
        Tag(tag)
    }
}

impl PartialEq for Ticket {
    fn eq(&self, other: &Ticket) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Ticket {}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("owner", &self.body.identity.name)
            .field("incarnation", &self.body.identity.incarnation)
            .field("reach", &self.body.reach)
            .field("row", &self.body.row)
            .field("generation", &self.body.generation)
            .field("place", &self.body.place)
            .field("range", &self.rights.range)
            .field("access", &self.rights.access)
            .field("expires_ms", &self.rights.expires_ms)
            .finish_non_exhaustive()
    }
}

/// Puts the tag and the checksum behind the public bytes.
pub(crate) fn seal(mut public: Vec<u8>, tag: &Tag) -> Vec<u8> {
    public.extend_from_slice(&tag.0);
    let check = checksum(&public);
    public.extend_from_slice(&check);
    public
}

/// Refuses a lease that has run out by the owner's clock, which is looked at only where there is a lease.
pub fn check_lease(op: &'static str, expires_ms: Option<u64>, now_ms: impl FnOnce() -> u64) -> Result<()> {
    match expires_ms {
        Some(expires) if now_ms() >= expires => {
            Err(Error::new(Kind::PermissionDenied, op, "the ticket's lease has run out"))
        }
        _ => Ok(()),
    }
}

fn checksum(bytes: &[u8]) -> [u8; CHECK_LEN] {
    let [a, b, c, d, ..] = sha256(&[bytes]);
    [a, b, c, d]
}
