//! The engine that needs nothing installed: agents, metadata and transfers of NIXL's kind on an [`Endpoint`].
//!
//! An agent is an endpoint. Its metadata is a list of tickets, each with the range that it stands for: peers name memory by
//! the owner's addresses, as they do with NIXL, and the addresses are looked up in that list and never followed.

mod metadata;
mod peer;
mod request;
mod table;

use std::collections::HashMap;
use std::collections::hash_map;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

pub(super) use self::metadata::MAGIC;
use self::metadata::{Entry, Metadata};
use self::peer::{Peer, Region};
pub(super) use self::request::Request;
use self::table::{Ranged, Side, Table};
use super::list::{Range, RegDescList, XferDescList};
use super::transfer::{OptArgs, XferOp};
use super::wheel;
use crate::memory::{Storage, SystemStorage};
use crate::region::{RegisterError, Registered, Span};
use crate::{Access, Endpoint, Error, Kind, Notification, Result, interrupt, room};

/// The plug-ins of NIXL in whose place this engine can stand: those that move host memory between agents, and files.
pub(super) const STANDS_FOR: [&str; 4] = ["LIBFABRIC", "MOONCAKE", "POSIX", "UCX"];

/// An agent on this engine.
pub(super) struct Embedded {
    pub(super) endpoint: Endpoint,
    /// Something to import for a peer that only wants to send messages; it allows nothing else.
    door: Registered<SystemStorage>,
    registered: Mutex<Table<Arc<Local>>>,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
}

/// Something that is registered here.
struct Local {
    range: Range,
    span: Span,
    /// The same region as a peer sees it, for transfers of an agent with itself.
    looped: OnceLock<Arc<Region>>,
}

impl Ranged for Arc<Local> {
    fn range(&self) -> &Range {
        &self.range
    }
}

/// A registration and its place among the agent's. Dropping it takes the memory back before the storage goes.
pub(super) struct Kept<S: Storage> {
    engine: Arc<Embedded>,
    local: Arc<Local>,
    registered: Registered<S>,
}

impl<S: Storage> Kept<S> {
    pub(super) fn storage(&self) -> &S {
        self.registered.storage()
    }

    pub(super) fn is_registered(&self) -> bool {
        self.registered.is_registered()
    }

    /// Takes the memory back and gives the storage out, or itself with the reason.
    pub(super) fn into_storage(self, within: Option<Duration>) -> Result<S, RegisterError<Kept<S>>> {
        let Kept { engine, local, registered } = self;
        engine.forget(&local);
        let within = within.unwrap_or(engine.endpoint.limits().no_progress);
        registered.into_storage_within(within).map_err(|pinned| RegisterError {
            error: pinned.error,
            storage: Kept { engine, local, registered: pinned.registration },
        })
    }

    /// Drops it: revoked first, then freed, or parked while a peer is inside.
    pub(super) fn release(self) {
        self.engine.forget(&self.local);
        drop(self.registered);
    }
}

impl Embedded {
    pub(super) fn open(name: &str) -> Result<Arc<Embedded>> {
        let endpoint = Endpoint::open(name)?;
        let door = endpoint.register(SystemStorage::new(1)?, Access::NONE)?;
        Ok(Arc::new(Embedded { endpoint, door, registered: Mutex::default(), peers: Mutex::default() }))
    }

    pub(super) fn name(&self) -> &str {
        &self.endpoint.identity().name
    }

    pub(super) fn register<S: Storage>(
        self: &Arc<Embedded>,
        storage: S,
        range: &Range,
    ) -> Result<Kept<S>, RegisterError<S>> {
        let writable = storage.file().is_none_or(|file| file.is_writable());
        let access = if writable { Access::READ_WRITE } else { Access::READ };
        let registered = self.endpoint.register(storage, access)?;
        let local =
            Arc::new(Local { range: range.clone(), span: Span::from(&registered), looped: OnceLock::new() });
        self.registered.lock().insert(Arc::clone(&local));
        Ok(Kept { engine: Arc::clone(self), local, registered })
    }

    fn forget(&self, local: &Arc<Local>) {
        self.registered.lock().remove(&local.range, |one| Arc::ptr_eq(one, local));
    }

    /// The metadata of everything that is registered.
    pub(super) fn metadata(&self) -> Result<Vec<u8>> {
        let locals: Vec<_> = self.registered.lock().iter().cloned().collect();
        self.describe(true, &locals)
    }

    /// The metadata of what covers these ranges, and of nothing else.
    pub(super) fn partial_metadata(&self, list: &RegDescList) -> Result<Vec<u8>> {
        let Side { regions, .. } = self.local(list.ranges())?;
        self.describe(false, &regions)
    }

    fn describe(&self, complete: bool, locals: &[Arc<Local>]) -> Result<Vec<u8>> {
        let mut entries = Vec::with_capacity(locals.len());
        for local in locals {
            match local.span.core().ticket(None) {
                Ok(ticket) => entries.push(Entry { range: local.range.clone(), ticket }),
                // Taken back at this very moment.
                Err(error) if error.kind() == Kind::Stale && complete => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Metadata { complete, door: self.door.ticket()?, entries }.encode())
    }

    pub(super) fn load(&self, bytes: &[u8]) -> Result<String> {
        if bytes.starts_with(wheel::SERIAL) {
            let message = format!(
                "this is the metadata of an agent of NIXL, and agent {} runs on the embedded engine; both sides need the same",
                self.name()
            );
            return Err(Error::new(Kind::Unsupported, "load_remote_md", message));
        }
        let metadata = Metadata::decode(bytes)?;
        let identity = &metadata.door.body().identity;
        if identity.incarnation == self.endpoint.identity().incarnation || identity.name == self.name() {
            let message = format!("{} is this agent's own name; it needs no metadata of itself", self.name());
            return Err(Error::invalid("load_remote_md", message));
        }
        let name = identity.name.clone();
        match self.peers.lock().entry(name.clone()) {
            hash_map::Entry::Occupied(known) if known.get().is(identity) => known.get().learn(metadata),
            // It is new, or was started again: what it had before is gone.
            hash_map::Entry::Occupied(mut known) => {
                known.insert(Arc::new(Peer::new(metadata))).invalidate();
            }
            hash_map::Entry::Vacant(place) => {
                place.insert(Arc::new(Peer::new(metadata)));
            }
        }
        Ok(name)
    }

    pub(super) fn knows(&self, peer: &str, list: Option<&XferDescList>) -> bool {
        if peer == self.name() {
            return list.is_none_or(|list| self.local(list.ranges()).is_ok());
        }
        self.peer(peer).is_ok_and(|peer| list.is_none_or(|list| peer.find(list.ranges()).is_ok()))
    }

    fn peer(&self, name: &str) -> Result<Arc<Peer>> {
        self.peers.lock().get(name).cloned().ok_or_else(|| {
            Error::new(Kind::NotFound, "nixl", format!("the metadata of agent {name} is not here"))
                .with_peer(name)
        })
    }

    pub(super) fn invalidate(&self, peer: &str) -> Result<()> {
        self.peer(peer)?.invalidate();
        self.peers.lock().remove(peer);
        Ok(())
    }

    pub(super) fn invalidate_all(&self) {
        let all = std::mem::take(&mut *self.peers.lock());
        all.into_values().for_each(|peer| peer.invalidate());
    }

    pub(super) fn connect(&self, peer: &str) -> Result<()> {
        if peer == self.name() {
            return Ok(());
        }
        self.peer(peer)?.door(&self.endpoint).map(|_| ())
    }

    fn local(&self, ranges: impl ExactSizeIterator<Item = Range>) -> Result<Side<Arc<Local>>> {
        self.registered.lock().find(ranges, |range| {
            Error::invalid("nixl", format!("{range:?} is not registered with agent {}", self.name()))
        })
    }

    /// One side of transfers, looked up; the local one where there is no peer.
    pub(super) fn prepare(&self, peer: Option<&str>, list: &XferDescList) -> Result<Prepared> {
        Ok(match peer {
            None => Prepared::Local(self.local(list.ranges())?.map(|local| local.span.clone())),
            Some(name) if name == self.name() => {
                let side = self.local(list.ranges())?;
                let regions = side
                    .regions
                    .iter()
                    .map(|local| {
                        if let Some(looped) = local.looped.get() {
                            return Ok(Arc::clone(looped));
                        }
                        let ticket = local.span.core().ticket(None)?;
                        let region = Region::new(Entry { range: local.range.clone(), ticket });
                        Ok(Arc::clone(local.looped.get_or_init(|| Arc::new(region))))
                    })
                    .collect::<Result<Vec<_>>>()?;
                Prepared::Remote(None, Side { regions, parts: side.parts })
            }
            Some(name) => {
                let peer = self.peer(name)?;
                let side = peer.find(list.ranges())?;
                Prepared::Remote(Some(peer), side)
            }
        })
    }

    /// Makes a transfer of parts of two prepared sides; contact with the peer is made here if there was none.
    pub(super) fn request(
        self: &Arc<Embedded>,
        op: XferOp,
        local: (&Prepared, Option<&[i32]>),
        remote: (&Prepared, Option<&[i32]>),
        opt: Option<&OptArgs>,
    ) -> Result<Request> {
        let (Prepared::Local(near), Prepared::Remote(peer, far)) = (local.0, remote.0) else {
            return Err(Error::invalid("nixl", "a list was prepared for the other side"));
        };
        let message = opt.and_then(OptArgs::notification);
        let message = message.map(|message| room::copy("create_xfer_req", message)).transpose()?;
        let remotes = peer::imported(&self.endpoint, peer.as_ref(), &far.regions)?;
        Request::new(
            self,
            op,
            (near.chosen(local.1)?, &near.regions),
            (far.chosen(remote.1)?, &remotes),
            peer.clone(),
            message,
        )
    }

    pub(super) fn notify(&self, peer: &str, message: &[u8]) -> Result<()> {
        let door = if peer == self.name() {
            Arc::new(self.endpoint.import(&self.door.ticket()?)?)
        } else {
            self.peer(peer)?.door(&self.endpoint)?
        };
        let transfer = self.endpoint.notify(&door, room::copy("send_notification", message)?)?;
        loop {
            if let Some(ended) = transfer.wait_for(interrupt::turn(Duration::MAX)) {
                return ended;
            }
            interrupt::check("send_notification")?;
        }
    }

    /// Takes the messages that have come.
    pub(super) fn notifications(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut came = Vec::new();
        while let Some(Notification { from, message }) = self.endpoint.try_receive()? {
            came.push((from.name, message));
        }
        Ok(came)
    }

    /// The same, waiting for the first one.
    pub(super) fn wait_notifications(&self, within: Duration) -> Result<Vec<(String, Vec<u8>)>> {
        let came = self.notifications()?;
        if !came.is_empty() {
            return Ok(came);
        }
        match self.endpoint.receive(within) {
            Ok(Notification { from, message }) => {
                let first = (from.name, message);
                Ok(std::iter::once(first).chain(self.notifications()?).collect())
            }
            Err(error) if error.kind() == Kind::Timeout => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

/// One side of many transfers, looked up once.
pub(super) enum Prepared {
    Local(Side<Span>),
    /// Of a peer, or of this agent itself.
    Remote(Option<Arc<Peer>>, Side<Arc<Region>>),
}

impl Prepared {
    pub(super) fn len(&self) -> usize {
        match self {
            Prepared::Local(side) => side.parts.len(),
            Prepared::Remote(_, side) => side.parts.len(),
        }
    }
}

/// Decodes bytes as metadata; what is accepted is the same after another journey.
pub(super) fn fuzz_metadata(data: &[u8]) {
    if let Ok(metadata) = Metadata::decode(data) {
        assert_eq!(Metadata::decode(&metadata.encode()).ok(), Some(metadata));
    }
}
