//! Both endpoints live in this process: a plain copy, no system call.
#![allow(unsafe_code, reason = "copies between registered memory by address")]

pub(crate) mod file;

use std::sync::Arc;

use super::direct::{Direct, DirectAttachment, Held, apply_atomic, misaligned, move_pieces};
use super::gpu::{CopyAddress, GpuAttachment, OwnerMemory, PinnedRegion};
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport};
use crate::identity::Identity;
use crate::layout::Piece;
use crate::memory::{Dtype, Place, ReduceOp, lent};
use crate::notify::Notification;
use crate::region::{RegionCore, raise_own, stale};
use crate::route::Capabilities;
use crate::transfer::{After, Op, Signal};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result};

/// The transport between endpoints of one process.
pub(crate) struct InProc;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &InProc;

impl Transport for InProc {
    fn properties(&self) -> PathProperties {
        PathProperties {
            shares_memory: true,
            // One process is one trust domain; the library checks every access, as an owner would.
            enforced: true,
            ..PathProperties::new(
                "inproc",
                "the owner is in this process: plain memory copies",
                Capabilities::ALL,
                Serves::Anything,
                Contact::Nothing,
            )
        }
    }

    fn probe(&self) -> Probe {
        Probe::Works("always".into())
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let Owner::Here(region) = offer.owner else {
            return Err(Error::new(Kind::Unavailable, "import", "the owner is in another process"));
        };
        if let Some(file) = &region.file {
            return Ok(Arc::new(DirectAttachment(Arc::new(file::LocalFile {
                region: Arc::clone(region),
                file: file.clone(),
                offset: offer.grant.offset,
                from: offer.context.identity.clone(),
            }))));
        }
        let local = Arc::new(Local {
            region: Arc::clone(region),
            offset: offer.grant.offset as usize,
            from: offer.context.identity.clone(),
        });
        match region.place {
            Place::Cuda(_) => Ok(GpuAttachment::new(local)),
            _ => Ok(Arc::new(DirectAttachment(local))),
        }
    }
}

#[derive(Clone)]
struct Local {
    region: Arc<RegionCore>,
    offset: usize,
    from: Identity,
}

impl Local {
    /// Runs while the region is in use, so that its memory stays; fails if it was revoked meanwhile.
    fn inside<T>(&self, op: &'static str, body: impl FnOnce(*mut u8) -> Result<T>) -> Result<T> {
        self.region.enter(op)?;
        let outcome = body((self.region.addr + self.offset) as *mut u8);
        let revoked = self.region.is_closed();
        self.region.leave();
        if revoked { Err(stale(op)) } else { outcome }
    }

    fn word(&self, op: &'static str, offset: u64) -> Result<()> {
        if !(self.region.addr + self.offset + offset as usize).is_multiple_of(8) {
            return Err(misaligned(op, offset));
        }
        Ok(())
    }
}

impl Direct for Local {
    fn transport(&self) -> &'static dyn Transport {
        &InProc
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        self.inside(op.name(), |remote| {
            // SAFETY: `inside` keeps the remote region, the caller keeps the local one; the offsets were checked
            // against both.
            unsafe {
                match op {
                    Op::Reduce(op, dtype) if self.region.lent => {
                        reduce_lent(op, dtype, local, remote, pieces)
                    }
                    op => move_pieces(op, local, remote, pieces),
                }
            }
        })
    }

    fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64> {
        self.word("atomic", offset)?;
        self.inside("atomic", |remote| {
            // SAFETY: eight aligned bytes within the grant, kept by `inside`.
            unsafe {
                let word = remote.add(offset as usize);
                let _turn = self.region.turn(word.cast());
                Ok(apply_atomic(word, op))
            }
        })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.word("signal", signal.offset)?;
        self.inside("signal", |remote| {
            // SAFETY: eight aligned bytes within the grant, kept by `inside`.
            unsafe { raise_own(remote.add(signal.offset as usize).cast(), signal.add, self.region.lent) }
                .map(drop)
        })
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        let notification = Notification { from: self.from.clone(), message: message.to_vec() };
        self.region.registry.deliver(notification, None)
    }

    fn hold(&self) -> Option<Result<Held>> {
        let held = self.region.begin_use("pin").map(|used| Held::Here { used, offset: self.offset });
        Some(held)
    }

    fn alive(&self) -> Result<()> {
        owner_is_open(&self.region)
    }

    fn by_gpu(&self) -> Option<Arc<GpuAttachment>> {
        Some(GpuAttachment::new(Arc::new(self.clone())))
    }
}

impl OwnerMemory for Local {
    fn transport(&self) -> &'static dyn Transport {
        &InProc
    }

    fn enter(&self, op: &'static str) -> Result<(PinnedRegion, CopyAddress)> {
        let used = self.region.begin_use(op)?;
        let address = CopyAddress::of(&self.region, self.region.addr + self.offset)?;
        Ok((PinnedRegion::Here(used), address))
    }

    fn follow(&self, after: &After) -> Result<()> {
        Direct::after(self, after)
    }

    fn alive(&self) -> Result<()> {
        owner_is_open(&self.region)
    }
}

/// The owner's end is not the caller's mistake, which `Invalid` would say.
fn owner_is_open(region: &RegionCore) -> Result<()> {
    region
        .registry
        .check_open("use")
        .map_err(|_| Error::owner_gone("use", "the owner has closed its endpoint"))
}

/// Reduces the pieces into memory that was lent, in turn with all others that change such memory.
///
/// # Safety
/// As for [`move_pieces`].
unsafe fn reduce_lent(
    op: ReduceOp,
    dtype: Dtype,
    local: *mut u8,
    remote: *mut u8,
    pieces: &[Piece],
) -> Result<()> {
    for piece in pieces {
        // SAFETY: the caller's obligation.
        unsafe {
            let (near, far) = (local.add(piece.local as usize), remote.add(piece.remote as usize));
            lent::reduce(&|| true, far, near, piece.len as usize, op, dtype)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::region::Span;
    use crate::{Access, Endpoint, SystemStorage};

    #[test]
    fn a_copy_during_which_the_region_was_revoked_is_stale() {
        let endpoint = Endpoint::open("both").unwrap();
        let registered = endpoint.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap();
        let region = Arc::clone(Span::from(&registered).core());
        let local = Local { region, offset: 0, from: endpoint.identity().clone() };
        local.inside("read", |_| Ok(())).unwrap();
        let copied = local.inside("read", |_| {
            assert!(local.region.revoke());
            let pinned = registered.into_storage_within(std::time::Duration::ZERO).unwrap_err();
            assert!(pinned.error.message().contains("transfers of this process"), "{}", pinned.error);
            Ok(())
        });
        assert_eq!(copied.unwrap_err().kind(), Kind::Stale);
        assert_eq!(local.inside("read", |_| Ok(())).unwrap_err().kind(), Kind::Stale);
    }
}
