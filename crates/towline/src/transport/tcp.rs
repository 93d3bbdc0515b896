//! Bytes over sockets.
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Attachment, Capabilities, Offer, Probe, Transport};
use crate::endpoint::EndpointCore;
use crate::fence::table::Row;
use crate::memory::Mapping;
use crate::transfer::Signal;
use crate::wire::{Grant, SegmentRef};
use crate::{Error, Kind, Result, Ticket};

pub(crate) struct Unix;
pub(crate) struct Tcp;
fn no() -> Error {
    Error::new(Kind::Unavailable, "import", "not built yet")
}
macro_rules! t {
    ($t:ident, $n:literal) => {
        impl Transport for $t {
            fn name(&self) -> &'static str {
                $n
            }
            fn summary(&self) -> &'static str {
                "sockets"
            }
            fn probe(&self) -> Probe {
                Probe::Works("".into())
            }
            fn capabilities(&self) -> Capabilities {
                Capabilities::ALL
            }
            fn enforced(&self) -> bool {
                true
            }
            fn attach(&self, _offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
                Err(no())
            }
        }
    };
}
t!(Unix, "unix");
t!(Tcp, "tcp");

#[derive(Clone, Copy)]
pub(crate) enum Medium {
    Unix,
    Tcp(SocketAddr),
}
impl Medium {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Medium::Unix => "unix",
            Medium::Tcp(_) => "tcp",
        }
    }
}
impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
pub(crate) struct Session;
impl Session {
    pub(crate) fn connect(
        _e: &Arc<EndpointCore>,
        _t: &Ticket,
        _m: Medium,
        _u: Instant,
    ) -> Result<Arc<Session>> {
        Err(no())
    }
    pub(crate) fn import(
        self: &Arc<Self>,
        _t: &[&Ticket],
        _u: Instant,
    ) -> Result<Vec<Result<(Grant, Arc<GrantHandle>)>>> {
        Err(no())
    }
    pub(crate) fn alive(&self) -> Result<()> {
        Err(no())
    }
    pub(crate) fn notify(&self, _m: &[u8]) -> Result<()> {
        Err(no())
    }
    pub(crate) fn signal(&self, _h: &GrantHandle, _s: Signal) -> Result<()> {
        Err(no())
    }
    pub(crate) fn cma_pid(&self) -> Result<i32> {
        Err(no())
    }
    pub(crate) fn peer_name(&self) -> &str {
        ""
    }
    pub(crate) fn close(&self, _e: Error) {}
}
pub(crate) struct GrantHandle(Arc<Session>);
impl GrantHandle {
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.0
    }
    pub(crate) fn local_fence(&self) -> Result<()> {
        Err(no())
    }
    pub(crate) fn mapping(&self, _s: &SegmentRef, _w: bool) -> Result<Arc<Mapping>> {
        Err(no())
    }
    pub(crate) fn pinned<T>(&self, _op: &'static str, _b: impl FnOnce(&Row) -> Result<T>) -> Result<T> {
        Err(no())
    }
}
pub(crate) struct Serving;
impl Serving {
    pub(crate) fn break_off(&self, _g: u64) {}
    pub(crate) fn close(&self) {}
}
pub(crate) struct Listener;
impl Listener {
    pub(crate) fn unix(_e: &Arc<EndpointCore>) -> Result<Arc<Listener>> {
        Ok(Arc::new(Listener))
    }
    pub(crate) fn tcp(_e: &Arc<EndpointCore>, _a: SocketAddr) -> Result<Arc<Listener>> {
        Ok(Arc::new(Listener))
    }
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::from(([127, 0, 0, 1], 1)))
    }
    pub(crate) fn close(&self) {}
}
