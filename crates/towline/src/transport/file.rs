//! The owner's file is opened here: its descriptor was passed, and the workers read and write it under a pin.
#![allow(unsafe_code, reason = "implements the seam over raw local addresses")]

use std::borrow::Cow;
use std::sync::Arc;

use super::direct::{Direct, DirectAttachment};
use super::inproc::file::move_file_pieces;
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport, TransportContext};
use crate::layout::Piece;
use crate::memory::{FileSlice, Place};
use crate::region::no_words;
use crate::route::Capabilities;
use crate::runtime::Device;
use crate::session::{GrantHandle, Query, QueryReply, Ticketed};
use crate::transfer::{Op, Signal};
use crate::wire::AtomicOp;
use crate::{Access, Error, Kind, Result};

const OP: &str = "import";

/// The only question; an empty one would give back what was never lent.
const OPEN: &[u8] = b"open";

/// By which peers and owners speak of it.
const NUMBER: u8 = 3;

/// The transport over passed descriptors of files.
pub(crate) struct FilePath;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &FilePath;

fn unavailable(reason: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::Unavailable, OP, reason)
}

/// Whether the owner can be asked for a descriptor.
fn usable_owner<'a>(offer: &'a Offer<'_>) -> Result<&'a Arc<GrantHandle>> {
    let Owner::There(handle) = &offer.owner else {
        return Err(unavailable("the owner is in this process"));
    };
    if offer.grant.place != Place::Disk {
        let message = format!("the bytes are on {}", offer.grant.place);
        return Err(Error::new(Kind::Unsupported, OP, message));
    }
    handle.local_fence()?;
    Ok(handle)
}

/// Asks the owner for its file, from the start of the granted range on. Blocks. `Unavailable` where it cannot be handed over.
pub(super) fn opened(offer: &Offer<'_>, handle: &Arc<GrantHandle>) -> Result<FileSlice> {
    handle.local_fence()?;
    let reply = handle.query(NUMBER, OPEN.to_vec(), offer.until)?;
    let nonsense =
        || Error::protocol(OP, "the owner's reply does not say where in its file the region starts");
    let offset = u64::from_le_bytes(reply.reply.try_into().map_err(|_| nonsense())?);
    // The owner's word against overflow only: what lies there is its own file.
    offset.checked_add(offer.grant.length).ok_or_else(nonsense)?;
    let writable = offer.grant.access.contains(Access::WRITE);
    FileSlice::passed(reply.files, writable, offset, offer.grant.length)
}

impl Transport for FilePath {
    fn properties(&self) -> PathProperties {
        PathProperties {
            mend: "let both workers run as one user, and TMPDIR name a folder that can be written",
            ..PathProperties::new(
                "file",
                "the owner's file is open in this process, which reads and writes it",
                Capabilities::READ | Capabilities::WRITE,
                Serves::Files,
                Contact::Unix,
            )
        }
    }

    fn probe(&self) -> Probe {
        Probe::Works("for files of owners on this host".into())
    }

    fn blocks(&self, offer: &Offer<'_>) -> bool {
        usable_owner(offer).is_ok()
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let handle = usable_owner(offer)?;
        let file = opened(offer, handle)?;
        Ok(Arc::new(DirectAttachment(Arc::new(Opened { handle: Arc::clone(handle), file }))))
    }

    fn number(&self) -> Option<u8> {
        Some(NUMBER)
    }

    fn offers(&self, _context: &TransportContext, ticketed: &Ticketed<'_>) -> bool {
        ticketed.region.file.is_some()
    }

    fn answer_query(&self, _context: &TransportContext, query: &Query<'_>) -> Result<QueryReply> {
        if query.words != OPEN {
            return Err(Error::protocol(OP, "nothing else is asked about a file"));
        }
        let region = query.ticketed.region;
        let Some(file) = &region.file else {
            return Err(unavailable(format!("the bytes are on {}", region.place)));
        };
        if query.pins.is_none() {
            return Err(unavailable("the peer shares nothing with the owner"));
        }
        // A descriptor allows what it was opened for, whatever the ticket says: so it is opened anew.
        let files = file.opened_anew(query.ticketed.claims.access.contains(Access::WRITE))?;
        let reply = (file.offset() + query.ticketed.claims.range.start).to_le_bytes().to_vec();
        Ok(QueryReply { reply, files, loan: None })
    }
}

struct Opened {
    handle: Arc<GrantHandle>,
    /// From the start of the granted range on.
    file: FileSlice,
}

impl Direct for Opened {
    fn transport(&self) -> &'static dyn Transport {
        &FilePath
    }

    fn device(&self) -> Option<Device> {
        Some(self.file.device())
    }

    fn blocks(&self) -> bool {
        true
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        // SAFETY: the caller keeps the local range, and checked it.
        self.handle.pinned(op.name(), |_row| unsafe { move_file_pieces(op, &self.file, 0, local, pieces) })
    }

    fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
        Err(no_words("atomic", Place::Disk))
    }

    fn signal(&self, _signal: Signal) -> Result<()> {
        Err(no_words("signal", Place::Disk))
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        self.handle.session().notify(message)
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()
    }
}
