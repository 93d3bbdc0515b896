//! A transport of one file, for tests alone: the owner's memory is read and written through `/proc/PID/mem`.
//!
//! It stands in no list. `make test-deep` puts it beside the others in a copy of the sources, adds its name to the list there, and
//! runs the laws: a transport takes nothing else. The unit tests have it too, so that it keeps up with the seam.
#![allow(unsafe_code, reason = "calls the kernel with raw addresses")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::layout::Piece;
use crate::memory::Place;
use crate::route::Capabilities;
use crate::session::GrantHandle;
use crate::transfer::{Op, Signal};
use crate::transport::direct::{Direct, DirectAttachment, misaligned};
use crate::transport::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result};

/// The transport through the memory file of the owner's process.
pub(crate) struct Sample;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &Sample;

fn memory_of(pid: i32) -> Result<File> {
    let opened = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
    opened.map_err(|error| {
        Error::new(Kind::Unavailable, "import", format!("/proc/{pid}/mem cannot be opened ({error})"))
    })
}

/// Checks that this is the owner's process as seen from here.
fn is_the_owner(pid: i32, addr: u64, nonce: &[u8; 16]) -> Result<()> {
    let mut found = [0; 16];
    // SAFETY: the local range is an array that outlives the call.
    let read = unsafe { move_all(Op::Read, &memory_of(pid)?, found.as_mut_ptr(), addr, found.len()) };
    if read.is_ok() && found == *nonce {
        return Ok(());
    }
    Err(Error::new(Kind::Unavailable, "import", format!("process {pid} is not the owner as seen from here")))
}

impl Transport for Sample {
    fn properties(&self) -> PathProperties {
        PathProperties::new(
            "sample",
            "the owner's memory is read and written as a file (/proc/PID/mem)",
            Capabilities::READ | Capabilities::WRITE | Capabilities::SIGNAL,
            Serves::HostMemory,
            Contact::Unix,
        )
    }

    fn probe(&self) -> Probe {
        match memory_of(std::process::id() as i32) {
            Ok(_) => Probe::Works("/proc/PID/mem can be opened".into()),
            Err(error) => {
                Probe::Missing { reason: error.message().to_owned(), mend: "mount /proc for writing".into() }
            }
        }
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        Ok(Arc::new(DirectAttachment(Arc::new(attached(offer)?))))
    }
}

fn attached(offer: &Offer<'_>) -> Result<Memory> {
    let Owner::There(handle) = offer.owner else {
        return Err(Error::new(Kind::Unavailable, "import", "the owner is in this process"));
    };
    if offer.grant.place != Place::Host {
        let message = format!("the bytes are on {}", offer.grant.place);
        return Err(Error::new(Kind::Unsupported, "import", message));
    }
    let pid = handle.session().process_to_copy_by(is_the_owner)?;
    Ok(Memory {
        handle: Arc::clone(handle),
        memory: memory_of(pid)?,
        offset: offer.grant.offset,
        end: offer.grant.offset.saturating_add(offer.grant.length),
    })
}

struct Memory {
    handle: Arc<GrantHandle>,
    /// The memory of that life of the process, also when another has its number later.
    memory: File,
    offset: u64,
    end: u64,
}

impl Direct for Memory {
    fn transport(&self) -> &'static dyn Transport {
        TRANSPORT
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        self.handle.pinned(op.name(), |row| {
            if row.len() < self.end {
                return Err(Error::protocol(op.name(), "the grant reaches beyond the region"));
            }
            let start = row.addr().wrapping_add(self.offset);
            for piece in pieces {
                let near = local.wrapping_add(piece.local as usize);
                let far = start.wrapping_add(piece.remote);
                // SAFETY: the local range is kept by the caller; the remote one is the kernel's to check.
                unsafe { move_all(op, &self.memory, near, far, piece.len as usize) }
                    .map_err(|error| self.failure(op, error))?;
            }
            Ok(())
        })
    }

    fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
        Err(Error::new(Kind::Unsupported, "atomic", "a file has no atomics").on(TRANSPORT.name()))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
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

impl Memory {
    fn failure(&self, op: Op, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let gone = Error::owner_gone(op.name(), "the owner's process has ended").caused_by(error);
            self.handle.session().fail(gone.clone());
            return gone;
        }
        Error::new(Kind::Stale, op.name(), "part of the memory is gone, in the owner or here")
            .caused_by(error)
    }
}

/// Moves all bytes between local memory and that place in the memory of a process.
///
/// # Safety
/// The local range is valid for the direction of `op` during the call.
unsafe fn move_all(op: Op, memory: &File, near: *mut u8, far: u64, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let (near, left, at) = (near.wrapping_add(done), len - done, far.wrapping_add(done as u64));
        let file = memory.as_raw_fd();
        // BYTES MOVE HERE
        // SAFETY: the caller's obligation.
        let moved = unsafe {
            match op {
                Op::Read => libc::pread(file, near.cast(), left, at as libc::off_t),
                _ => libc::pwrite(file, near.cast(), left, at as libc::off_t),
            }
        };
        match moved {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => done += moved as usize,
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, Instant};

    use super::*;
    use crate::fence::tests::alone_with_the_watcher;
    use crate::session::{Medium, Session};
    use crate::{Access, Endpoint, Routing, SystemStorage};

    #[test]
    fn a_transport_of_one_file_attaches_a_region_and_moves_its_bytes() {
        let _alone = alone_with_the_watcher();
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        region.write_at(192, b"bytes of the owner").unwrap();
        let ticket = region.ticket().unwrap().narrow().range(64, 4032).finish().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        let session =
            Session::connect(&user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap();
        let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        let (grant, handle) = imported.outcomes.pop().unwrap().unwrap();
        let (context, routing) = (&user.core().transports, &Routing::default());
        let offer = Offer { context, owner: Owner::There(&handle), grant: &grant, routing, until };
        assert_eq!(TRANSPORT.attach(&offer).unwrap().path(), "sample");

        let memory = attached(&offer).unwrap();
        let mut bytes = [0; 18];
        let pieces = [Piece { local: 0, remote: 128, len: 18 }];
        // SAFETY: the bytes are ours.
        unsafe { memory.copy(Op::Read, bytes.as_mut_ptr(), &pieces) }.unwrap();
        assert_eq!(&bytes, b"bytes of the owner");
        bytes.reverse();
        // SAFETY: the bytes are ours.
        unsafe { memory.copy(Op::Write, bytes.as_mut_ptr(), &pieces) }.unwrap();
        let mut written = [0; 18];
        region.read_at(192, &mut written).unwrap();
        assert_eq!(written, bytes);
        // Once it is revoked it moves nothing.
        drop(region);
        // SAFETY: the bytes are ours.
        let late = unsafe { memory.copy(Op::Read, bytes.as_mut_ptr(), &pieces) };
        assert_eq!(late.unwrap_err().kind(), Kind::Stale);
        assert_eq!(written, bytes);
    }
}
