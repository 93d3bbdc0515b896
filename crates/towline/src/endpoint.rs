//! The front door: open, register, import, read, write, notify.

pub(crate) mod claim;
mod core;
pub(crate) mod import;
mod metrics;
mod options;
mod part;
mod pinned;
mod program;
mod request;
mod stats;
mod stretch;

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) use self::core::EndpointCore;
pub use self::import::Remote;
pub use self::options::EndpointOptions;
pub use self::part::Part;
pub use self::pinned::Pinned;
pub use self::program::{Program, ProgramExplanation, ProgramPart};
pub use self::request::Request;
pub use self::stats::{PathStats, Stats};
pub use self::stretch::{Stretch, average, can_average, can_sum, sum};
use crate::memory::{Dtype, ReduceOp, Storage};
use crate::notify::{Inbox, NextNotification, Notification};
use crate::region::{Audit, RegisterError, Registered, Span};
use crate::route::Routing;
use crate::transfer::{Limits, Op, Transfer};
use crate::wire::AtomicOp;
use crate::{Access, Identity, Result, Ticket, fork, room};

/// This process on the fabric.
///
/// Cheap to clone. An endpoint lives until it is closed, or until the last of its handles and registrations is gone.
///
/// ```
/// use towline::{Access, Endpoint, SharedStorage, SystemStorage};
///
/// let prefill = Endpoint::open("prefill")?;
/// let source = prefill.register(SharedStorage::new(4096)?, Access::READ)?;
/// source.write_at(0, b"hello")?;
/// let ticket = source.ticket()?;                     // travels by your own channel
///
/// let decode = Endpoint::open("decode")?;            // usually another process
/// let remote = decode.import(&ticket)?;
/// let target = decode.register(SystemStorage::new(4096)?, Access::NONE)?;
/// decode.read(&remote, &target).start()?.wait()?;
///
/// let mut bytes = [0; 5];
/// target.read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Endpoint(Arc<EndpointCore>);

impl Endpoint {
    /// Opens an endpoint that is reachable from this host: by a Unix socket and by TCP on loopback.
    pub fn open(name: &str) -> Result<Endpoint> {
        Endpoint::options(name).open()
    }

    /// Everything that can be set before opening.
    pub fn options(name: &str) -> EndpointOptions {
        EndpointOptions::new(name)
    }

    pub(crate) fn from_core(core: Arc<EndpointCore>) -> Endpoint {
        Endpoint(core)
    }

    pub(crate) fn core(&self) -> &Arc<EndpointCore> {
        &self.0
    }

    /// Who this is: name, identity, incarnation.
    pub fn identity(&self) -> &Identity {
        self.0.identity()
    }

    /// Which paths imports may take where they do not say.
    pub fn routing(&self) -> &Routing {
        self.0.routing()
    }

    /// How long things may take where the call does not say.
    pub fn limits(&self) -> Limits {
        self.0.limits()
    }

    /// Makes a storage reachable. Touches none of its pages and sends nothing.
    ///
    /// The error holds both the cause and the storage.
    pub fn register<S: Storage>(
        &self,
        storage: S,
        access: Access,
    ) -> Result<Registered<S>, RegisterError<S>> {
        match fork::guard("register") {
            Ok(()) => {
                let keep = Arc::clone(&self.0) as Arc<dyn Any + Send + Sync>;
                Registered::new(&self.0.registry, keep, storage, access)
            }
            Err(error) => Err(RegisterError { error, storage }),
        }
    }

    /// Registers many storages: all of them, or none.
    pub fn register_many<S: Storage>(
        &self,
        storages: Vec<S>,
        access: Access,
    ) -> Result<Vec<Registered<S>>, RegisterError<Vec<S>>> {
        let mut registered = match room::list("register", storages.len()) {
            Ok(registered) => registered,
            Err(error) => return Err(RegisterError { error, storage: storages }),
        };
        let mut rest = storages.into_iter();
        while let Some(storage) = rest.next() {
            match self.register(storage, access) {
                Ok(region) => registered.push(region),
                Err(RegisterError { error, storage }) => {
                    // Nobody has a ticket to these yet, so taking them back does not wait.
                    let mut storages: Vec<S> =
                        registered.into_iter().filter_map(|region| region.into_storage().ok()).collect();
                    storages.push(storage);
                    storages.extend(rest);
                    return Err(RegisterError { error, storage: storages });
                }
            }
        }
        Ok(registered)
    }

    /// Makes a ticket usable here: first contact with its owner if there was none, then one round trip.
    pub fn import(&self, ticket: &Ticket) -> Result<Remote> {
        self.import_with(ticket, &self.0.routing().clone())
    }

    /// [`import`](Self::import) over the paths that the caller allows.
    pub fn import_with(&self, ticket: &Ticket, routing: &Routing) -> Result<Remote> {
        self.import_within(ticket, routing, self.0.limits().no_progress)
    }

    /// [`import_with`](Self::import_with) a limit of its own: `Timeout` when the owner has not answered by then.
    pub fn import_within(&self, ticket: &Ticket, routing: &Routing, within: Duration) -> Result<Remote> {
        import::import_one(&self.0, ticket, routing, within)
    }

    /// Imports many tickets with one round trip per owner, to all owners at once. The outer error is for what concerns
    /// all of them.
    pub fn import_many(&self, tickets: &[Ticket]) -> Result<Vec<Result<Remote>>> {
        self.import_many_within(tickets, &self.0.routing().clone(), self.0.limits().no_progress)
    }

    /// [`import_many`](Self::import_many) with a routing and a limit of its own.
    pub fn import_many_within(
        &self,
        tickets: &[Ticket],
        routing: &Routing,
        within: Duration,
    ) -> Result<Vec<Result<Remote>>> {
        import::import(&self.0, tickets, routing, within)
    }

    /// [`import`](Self::import) as a future. It does nothing until it is polled; the waiting is then done by one of a bounded number of
    /// threads. The limit counts from the first poll, also where many contacts wait for a thread.
    pub fn import_async(&self, ticket: &Ticket) -> impl Future<Output = Result<Remote>> + Send + use<> {
        self.import_async_within(ticket, self.routing(), self.limits().no_progress)
    }

    /// [`import_async`](Self::import_async) with a routing and a limit of its own.
    pub fn import_async_within(
        &self,
        ticket: &Ticket,
        routing: &Routing,
        within: Duration,
    ) -> impl Future<Output = Result<Remote>> + Send + use<> {
        import::import_async(Arc::clone(&self.0), ticket.clone(), routing.clone(), within)
    }

    /// Asks for bytes of a remote region: `remote` to `local`.
    pub fn read<'a>(&'a self, remote: &'a Remote, local: impl Into<Span>) -> Request<'a> {
        Request::new(&self.0, Op::Read, Part::new(remote, local))
    }

    /// Asks for bytes of a remote region to be changed: `local` to `remote`.
    pub fn write<'a>(&'a self, remote: &'a Remote, local: impl Into<Span>) -> Request<'a> {
        Request::new(&self.0, Op::Write, Part::new(remote, local))
    }

    /// Asks for bytes of many regions of one peer, such as the layers of a cache, as one transfer: it has one end, one set of limits and
    /// one cancel, and what follows it (a [message](Request::notify), a [signal](Request::signal_in)) follows the bytes of all parts.
    /// One part that fails fails the whole: the error and [`failures`](Transfer::failures) name it.
    ///
    /// Parts may repeat a region and overlap; where bytes that are written overlap, which of them stay is not defined.
    ///
    /// ```
    /// # use towline::{Access, Endpoint, Layout, Part, SharedStorage};
    /// # let owner = Endpoint::open("owner")?;
    /// # let layer = || SharedStorage::new(64 << 10);
    /// # let kept = [owner.register(layer()?, Access::READ)?, owner.register(layer()?, Access::READ)?];
    /// # let endpoint = Endpoint::open("reader")?;
    /// # let remotes = [endpoint.import(&kept[0].ticket()?)?, endpoint.import(&kept[1].ticket()?)?];
    /// # let layers = [endpoint.register(layer()?, Access::NONE)?, endpoint.register(layer()?, Access::NONE)?];
    /// let pages = Layout::blocks(0, 4096, 16, 4096)?;
    /// let parts = remotes.iter().zip(&layers).map(|(remote, layer)| Part::new(remote, layer));
    /// endpoint
    ///     .read_parts(parts)
    ///     .blocks(&pages, &[3u32, 9, 10], &pages, &[0u32, 1, 2]) // the same blocks of each layer
    ///     .notify("taken")
    ///     .start()?
    ///     .wait()?;
    /// # assert_eq!(owner.receive(std::time::Duration::from_secs(5))?.message, b"taken");
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn read_parts<'a>(&'a self, parts: impl IntoIterator<Item = Part<'a>>) -> Request<'a> {
        Request::of_parts(&self.0, Op::Read, parts)
    }

    /// Asks for bytes of many regions of one peer to be changed, as one transfer; see [`read_parts`](Self::read_parts).
    pub fn write_parts<'a>(&'a self, parts: impl IntoIterator<Item = Part<'a>>) -> Request<'a> {
        Request::of_parts(&self.0, Op::Write, parts)
    }

    /// Compiles a request over those parts, which all have one peer, to be started many times with nothing but indices.
    ///
    /// # Errors
    /// `Invalid` where there are no parts, a region is another endpoint's or another peer's, or a layout does not fit its region; the
    /// message names the part.
    pub fn program(&self, parts: impl IntoIterator<Item = ProgramPart>) -> Result<Program> {
        fork::guard("program")?;
        Program::compile(&self.0, parts)
    }

    /// Asks for `local` to be combined into a remote region, element by element; each element is updated atomically.
    pub fn reduce_into<'a>(
        &'a self,
        remote: &'a Remote,
        local: impl Into<Span>,
        op: ReduceOp,
        dtype: Dtype,
    ) -> Request<'a> {
        Request::new(&self.0, Op::Reduce(op, dtype), Part::new(remote, local))
    }

    /// Adds to a 64-bit word of a remote region; the transfer's [`value`](Transfer::value) is what it held before.
    pub fn fetch_add(&self, remote: &Remote, offset: u64, add: u64) -> Result<Transfer> {
        let op = AtomicOp::Add(add);
        Request::new(&self.0, Op::Atomic { offset, op }, Part::without_bytes(remote)).start()
    }

    /// Replaces a 64-bit word of a remote region if it holds `expected`; the transfer's
    /// [`value`](Transfer::value) is what it held before.
    pub fn compare_swap(&self, remote: &Remote, offset: u64, expected: u64, new: u64) -> Result<Transfer> {
        let op = AtomicOp::CompareSwap { expected, new };
        Request::new(&self.0, Op::Atomic { offset, op }, Part::without_bytes(remote)).start()
    }

    /// Raises a 64-bit counter of a remote region and wakes its waiters there.
    pub fn signal(&self, remote: &Remote, offset: u64, add: u64) -> Result<Transfer> {
        Request::new(&self.0, Op::Write, Part::without_bytes(remote)).signal(offset, add).start()
    }

    /// Hands the owner of a remote region a message.
    pub fn notify(&self, remote: &Remote, message: impl Into<Vec<u8>>) -> Result<Transfer> {
        Request::new(&self.0, Op::Write, Part::without_bytes(remote)).notify(message).start()
    }

    /// The next message from a peer, waiting for at most that long.
    pub fn receive(&self, within: Duration) -> Result<Notification> {
        fork::guard("receive")?;
        self.0.registry.receive(within)
    }

    /// The next message from a peer, if there is one.
    pub fn try_receive(&self) -> Result<Option<Notification>> {
        fork::guard("receive")?;
        self.0.registry.notifications.next()
    }

    /// The next message from a peer, as a future.
    pub fn next_notification(&self) -> NextNotification {
        NextNotification::of(Arc::downgrade(&self.0.registry) as Weak<dyn Inbox>)
    }

    /// What was moved, per peer and path, and what is held. Empty in a forked child.
    pub fn stats(&self) -> Stats {
        if fork::in_child() { Stats::default() } else { self.0.stats() }
    }

    /// All counters in the text form that Prometheus reads. Empty in a forked child.
    pub fn metrics(&self) -> String {
        if fork::in_child() { String::new() } else { self.0.metrics() }
    }

    /// Who used this endpoint's regions, all of them together, and who was refused.
    pub fn audit(&self) -> Audit {
        if fork::in_child() {
            return Audit::default();
        }
        Audit { unauthenticated: self.0.sessions.refusals.audit(), ..self.0.registry.ledger.audit() }
    }

    /// Revokes every region, ends every transfer and closes every connection, then waits until nobody touches the memory of
    /// any region any more: neither a peer nor a transfer of this endpoint. Waits for as long as nothing may move.
    ///
    /// Closing twice is harmless: the second call waits too. Does nothing in a forked child.
    ///
    /// # Errors
    /// `Timeout` when a peer is still inside at the limit, with its name. Everything else is closed then, and no new access can
    /// begin; the memory stays valid, is parked where it is dropped, and closing again waits again.
    pub fn close(&self) -> Result<()> {
        self.close_within(self.0.limits().no_progress)
    }

    /// [`close`](Self::close) with a limit of its own.
    pub fn close_within(&self, within: Duration) -> Result<()> {
        if fork::in_child() { Ok(()) } else { self.0.close(within) }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("identity", self.identity())
            .field("reach", &self.0.registry.reach())
            .finish()
    }
}
