//! The owner's private memory is copied by the kernel: batched `process_vm_readv` and `process_vm_writev`.
#![allow(unsafe_code, reason = "calls the kernel with raw addresses")]

use std::io;
use std::sync::Arc;

use super::direct::{Direct, DirectAttachment, misaligned};
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport};
use crate::layout::Piece;
use crate::memory::Place;
use crate::route::Capabilities;
use crate::session::GrantHandle;
use crate::transfer::{Op, Signal};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result};

/// The kernel takes this many ranges in one call.
const IOV_MAX: usize = 1024;

/// The kernel copies half as fast as a program does from memory that it has mapped: it finds the pages first.
const INLINE: u64 = 128 << 10;

/// The transport by cross-memory attach.
pub(crate) struct Cma;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &Cma;

impl Transport for Cma {
    fn properties(&self) -> PathProperties {
        PathProperties {
            mend: "run both workers as one user in one pid namespace; set kernel.yama.ptrace_scope to 0 or give \
                   the workers CAP_SYS_PTRACE; allow process_vm_readv in the seccomp profile",
            ..PathProperties::new(
                "cma",
                "the kernel copies between the two processes (process_vm_readv)",
                // Signals are raised by the owner, asked over the session; atomics and reductions need its cooperation.
                Capabilities::READ | Capabilities::WRITE | Capabilities::SIGNAL,
                Serves::HostMemory,
                Contact::Unix,
            )
        }
    }

    fn probe(&self) -> Probe {
        // Reading ourselves needs no permission, so this shows whether the system call exists and is not filtered.
        let source = *b"towline";
        let mut target = [0u8; 7];
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: both ranges are local arrays that outlive the call.
        let read = unsafe {
            process_vm(
                Op::Read,
                pid,
                &[iovec(target.as_mut_ptr(), 7)],
                &[iovec(source.as_ptr().cast_mut(), 7)],
            )
        };
        match read {
            Ok(7) if target == source => {
                Probe::Works("process_vm_readv works between processes of one user".into())
            }
            Ok(_) => {
                Probe::Missing { reason: "process_vm_readv copies short".into(), mend: "report it".into() }
            }
            Err(error) => Probe::Missing {
                reason: format!("process_vm_readv: {error}"),
                mend: "allow process_vm_readv and process_vm_writev in the container's seccomp profile"
                    .into(),
            },
        }
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let Owner::There(handle) = offer.owner else {
            return Err(Error::new(Kind::Unavailable, "import", "the owner is in this process"));
        };
        if offer.grant.place != Place::Host {
            let message = format!("the bytes are on {}", offer.grant.place);
            return Err(Error::new(Kind::Unsupported, "import", message));
        }
        let pid = handle.session().process_to_copy_by(probe_peer)?;
        Ok(Arc::new(DirectAttachment(Arc::new(Process {
            handle: Arc::clone(handle),
            pid,
            offset: offer.grant.offset,
            end: offer.grant.offset.saturating_add(offer.grant.length),
        }))))
    }
}

struct Process {
    handle: Arc<GrantHandle>,
    pid: i32,
    offset: u64,
    end: u64,
}

impl Direct for Process {
    fn transport(&self) -> &'static dyn Transport {
        &Cma
    }

    fn most_inline(&self) -> u64 {
        INLINE
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        self.handle.pinned(op.name(), |row| {
            // The address comes from the owner's table, read under the pin: never from a message.
            if row.len() < self.end {
                return Err(Error::protocol(op.name(), "the grant reaches beyond the region"));
            }
            // The owner can write anything there: an address that it has not is the kernel's to refuse.
            let remote = row.addr().wrapping_add(self.offset) as usize;
            let mut near = Vec::with_capacity(pieces.len().min(IOV_MAX));
            let mut far = Vec::with_capacity(pieces.len().min(IOV_MAX));
            for batch in pieces.chunks(IOV_MAX) {
                near.clear();
                far.clear();
                let mut bytes = 0;
                for piece in batch {
                    let len = piece.len as usize;
                    near.push(iovec(local.wrapping_add(piece.local as usize), len));
                    far.push(iovec(remote.wrapping_add(piece.remote as usize) as *mut u8, len));
                    bytes += len;
                }
                // SAFETY: the local ranges are kept by the caller; the remote ones are the kernel's to check.
                unsafe { process_vm_all(op, self.pid, &mut near, &mut far, bytes) }
                    .map_err(|error| self.failure(op, error))?;
            }
            Ok(())
        })
    }

    fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
        Err(Error::new(Kind::Unsupported, "atomic", "cma cannot do atomics").on("cma"))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // The owner raises it. What it would refuse is refused here, where the caller learns of it.
        self.handle.pinned("signal", |row| {
            if !row.addr().wrapping_add(self.offset).wrapping_add(signal.offset).is_multiple_of(8) {
                return Err(misaligned("signal", signal.offset));
            }
            self.handle.session().signal(&self.handle, signal)
        })
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        self.handle.session().notify(message)
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()
    }
}

impl Process {
    fn failure(&self, op: Op, error: io::Error) -> Error {
        match error.raw_os_error() {
            Some(libc::ESRCH) => {
                let gone = Error::owner_gone(op.name(), "the owner's process has ended").caused_by(error);
                self.handle.session().fail(gone.clone());
                gone
            }
            Some(libc::EFAULT) => Error::new(
                Kind::Stale,
                op.name(),
                "part of the memory is gone, in the owner or here, or does not allow the access; the process that registered it should \
                 close the region before it goes",
            )
            .caused_by(error),
            _ => Error::os(op.name(), "process_vm call", error),
        }
    }
}

/// Checks that this process may copy from and to that process: reads a nonce that only the right process holds.
pub(crate) fn probe_peer(pid: i32, addr: u64, nonce: &[u8; 16]) -> Result<()> {
    let mut found = [0u8; 16];
    // SAFETY: the local range is an array that outlives the call; the remote one is the kernel's to check.
    let read =
        unsafe { process_vm(Op::Read, pid, &[iovec(found.as_mut_ptr(), 16)], &[iovec(addr as *mut u8, 16)]) };
    match read {
        Ok(16) if found == *nonce => Ok(()),
        Ok(_) => Err(Error::new(
            Kind::Unavailable,
            "import",
            format!("process {pid} is not the owner as seen from here (another pid namespace)"),
        )),
        Err(error) => Err(Error::new(
            Kind::Unavailable,
            "import",
            format!(
                "process_vm_readv from process {pid} is refused ({error}); a container needs the same user, the same \
                 pid namespace and a seccomp profile and Yama setting that allow it"
            ),
        )),
    }
}

fn iovec(addr: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: addr.cast(), iov_len: len }
}

/// One call of the kernel; returns how many bytes it moved.
///
/// # Safety
/// The local ranges are valid for the direction of `op` during the call.
unsafe fn process_vm(op: Op, pid: i32, near: &[libc::iovec], far: &[libc::iovec]) -> io::Result<usize> {
    let call = match op {
        Op::Read => libc::process_vm_readv,
        _ => libc::process_vm_writev,
    };
    // BYTES MOVE HERE
    // SAFETY: the caller's obligation; the lengths are those of the slices.
    let moved = unsafe { call(pid, near.as_ptr(), near.len() as _, far.as_ptr(), far.len() as _, 0) };
    if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
}

/// Repeats the call until all bytes have moved.
///
/// # Safety
/// As for [`process_vm`].
unsafe fn process_vm_all(
    op: Op,
    pid: i32,
    near: &mut [libc::iovec],
    far: &mut [libc::iovec],
    mut bytes: usize,
) -> io::Result<()> {
    let mut start = 0;
    while bytes > 0 {
        // SAFETY: the caller's obligation; what has moved is skipped.
        let moved = match unsafe { process_vm(op, pid, &near[start..], &far[start..]) } {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            other => other?,
        };
        bytes -= moved;
        let mut skip = moved;
        while start < near.len() && skip >= near[start].iov_len {
            skip -= near[start].iov_len;
            start += 1;
        }
        if skip > 0 {
            for one in [&mut near[start], &mut far[start]] {
                one.iov_base = one.iov_base.wrapping_byte_add(skip);
                one.iov_len -= skip;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::time::{Duration, Instant};

    use super::*;
    use crate::fence::tests::alone_with_the_watcher;
    use crate::session::{Medium, Session};
    use crate::{Access, Endpoint, SystemStorage};

    #[test]
    fn addresses_that_an_owner_cannot_have_are_the_kernels_to_refuse() {
        let _alone = alone_with_the_watcher();
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        let (ticket, until) = (region.ticket().unwrap(), Instant::now() + Duration::from_secs(30));
        let session =
            Session::connect(&user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap();
        let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        let (grant, handle) = imported.outcomes.pop().unwrap().unwrap();
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let process = Process { handle, pid, offset: 64, end: 4096 };
        let mut bytes = [0; 8];
        let mut copy = |op| {
            let pieces = [Piece { local: 0, remote: 128, len: 8 }];
            // SAFETY: eight bytes of ours; the remote ones are the kernel's to check.
            unsafe { process.copy(op, bytes.as_mut_ptr(), &pieces) }
        };
        copy(Op::Read).unwrap();
        // The sums pass the end of all addresses with the grant's offset, or only with the piece's.
        for addr in [u64::MAX, u64::MAX - 60, u64::MAX - 100, 1 << 63, 1] {
            owner.core().registry.table.move_to(grant.row, addr);
            for op in [Op::Read, Op::Write] {
                assert_eq!(copy(op).unwrap_err().kind(), Kind::Stale, "{op:?} at {addr:#x}");
            }
            let signal = process.signal(Signal { part: 0, offset: u64::MAX - 1, add: 1 });
            assert_eq!(signal.unwrap_err().kind(), Kind::Invalid, "at {addr:#x}");
        }
    }
}
