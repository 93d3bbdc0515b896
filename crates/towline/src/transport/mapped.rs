//! The owner's shared memory is mapped here: plain copies under a pin, no system call.
#![allow(unsafe_code, reason = "copies between registered memory by address")]

use std::sync::Arc;

use super::direct::{Direct, DirectAttachment, Held, apply_atomic, misaligned, move_pieces};
use super::gpu::{CopyAddress, GpuAttachment, HostPart, OwnerMemory, Pinnable, PinnedRegion};
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport};
use crate::layout::Piece;
use crate::memory::{Mapping, Place, SharedStorage};
use crate::region::raise;
use crate::route::Capabilities;
use crate::session::GrantHandle;
use crate::transfer::{After, Op, Signal};
use crate::wire::AtomicOp;
use crate::{Access, Error, Kind, Result};

/// The transport over mapped shared memory.
pub(crate) struct Mapped;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &Mapped;

impl Transport for Mapped {
    fn properties(&self) -> PathProperties {
        PathProperties {
            shares_memory: true,
            mend: "run both workers as one user in one network namespace, and allow memfd_create",
            ..PathProperties::new(
                "mapped",
                "the owner's shared memory is mapped here: plain memory copies",
                Capabilities::ALL,
                Serves::SharedMemory,
                Contact::Unix,
            )
        }
    }

    fn probe(&self) -> Probe {
        match SharedStorage::new(4096) {
            Ok(_) => Probe::Works("memfd and sealing work".into()),
            Err(error) => Probe::Missing {
                reason: error.to_string(),
                mend: "allow memfd_create and raise the memory limit of this process".into(),
            },
        }
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let Owner::There(handle) = offer.owner else {
            return Err(Error::new(Kind::Unavailable, "import", "the owner is in this process"));
        };
        handle.local_fence()?;
        if offer.grant.place != Place::Host {
            let message = format!("the bytes are on {}", offer.grant.place);
            return Err(Error::new(Kind::Unsupported, "import", message));
        }
        let Some(segment) = &offer.grant.segment else {
            let message = "the owner's storage is private memory, not a SharedStorage that could be mapped";
            return Err(Error::new(Kind::Unavailable, "import", message));
        };
        let writable = offer.grant.access.contains(Access::WRITE);
        let mapping = handle.mapping(segment, writable)?;
        let start = segment.offset.checked_add(offer.grant.offset).filter(|start| {
            start.checked_add(offer.grant.length).is_some_and(|end| end <= mapping.len() as u64)
        });
        let Some(start) = start else {
            return Err(Error::protocol("import", "the grant reaches beyond the segment"));
        };
        Ok(Arc::new(DirectAttachment(Arc::new(Window {
            handle: Arc::clone(handle),
            mapping,
            start: start as usize,
        }))))
    }
}

#[derive(Clone)]
struct Window {
    handle: Arc<GrantHandle>,
    mapping: Arc<Mapping>,
    start: usize,
}

impl Window {
    fn base(&self) -> *mut u8 {
        self.mapping.ptr().wrapping_add(self.start)
    }

    fn word(&self, op: &'static str, offset: u64) -> Result<*mut u8> {
        let word = self.base().wrapping_add(offset as usize);
        if word.addr().is_multiple_of(8) { Ok(word) } else { Err(misaligned(op, offset)) }
    }
}

impl Direct for Window {
    fn transport(&self) -> &'static dyn Transport {
        &Mapped
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        self.handle.pinned(op.name(), |_row| {
            // SAFETY: the mapping is ours and sealed against shrinking; `attach` checked the grant against it and
            // the caller the pieces against the grant and the local region.
            unsafe { move_pieces(op, local, self.base(), pieces) }
        })
    }

    fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64> {
        let word = self.word("atomic", offset)?;
        // SAFETY: eight aligned bytes within the grant and the mapping.
        self.handle.pinned("atomic", |_row| Ok(unsafe { apply_atomic(word, op) }))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let word = self.word("signal", signal.offset)?;
        self.handle.pinned("signal", |row| {
            // SAFETY: eight aligned bytes within the grant and the mapping.
            unsafe { raise(word.cast(), signal.add, row.sleepers()) };
            Ok(())
        })
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        self.handle.session().notify(message)
    }

    fn hold(&self) -> Option<Result<Held>> {
        let held = self.handle.hold("pin").map(|pin| Held::There {
            pin,
            handle: Arc::clone(&self.handle),
            mapping: Arc::clone(&self.mapping),
            start: self.start,
        });
        Some(held)
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()
    }

    fn by_gpu(&self) -> Option<Arc<GpuAttachment>> {
        Some(GpuAttachment::new(Arc::new(self.clone())))
    }
}

impl OwnerMemory for Window {
    fn transport(&self) -> &'static dyn Transport {
        &Mapped
    }

    fn enter(&self, op: &'static str) -> Result<(PinnedRegion, CopyAddress)> {
        let pin = self.handle.hold(op)?;
        let start = self.mapping.ptr().expose_provenance() as u64;
        let host = HostPart {
            range: start..start + self.mapping.len() as u64,
            pinnable: Some(Pinnable::Mapping(Arc::clone(&self.mapping))),
        };
        let address = CopyAddress { address: start + self.start as u64, gpu: None, host: Some(host) };
        let pinned = PinnedRegion::There {
            _keep: Box::new(Arc::clone(&self.mapping)),
            pin,
            handle: Arc::clone(&self.handle),
        };
        Ok((pinned, address))
    }

    fn follow(&self, after: &After) -> Result<()> {
        Direct::after(self, after)
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()
    }
}
