//! What an endpoint is to the rest of the library.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use super::interfaces;
use super::operations::Operations;
use super::options::EndpointOptions;
use super::stats::{AllCounters, Stats};
use crate::fence::table::Table;
use crate::identity::{Identity, Incarnation};
use crate::notify::Notifications;
use crate::progress::{self, Interest, Readiness, Source};
use crate::region::{ParkingLot, RegionCore, stale};
use crate::route::Routing;
use crate::sync::lock;
use crate::ticket::{self, Claims, Reach, RegionKey};
use crate::transfer::Limits;
use crate::transport::tcp::{Listener, Serving, Session};
use crate::wire::handshake::Secret;
use crate::{Error, Kind, Result};

/// Endpoints of this process, by incarnation: their regions are reached without any socket.
static HERE: Mutex<Option<HashMap<Incarnation, Weak<EndpointCore>>>> = Mutex::new(None);

/// One endpoint.
pub(crate) struct EndpointCore {
    identity: Identity,
    opened: Instant,
    master_key: [u8; 32],
    secret: Option<Secret>,
    limits: Limits,
    routing: Routing,
    lanes: usize,
    reach: OnceLock<Vec<Reach>>,
    listeners: Mutex<Vec<Arc<Listener>>>,
    pub(crate) table: Table,
    pub(crate) regions: Regions,
    pub(crate) notifications: Notifications,
    /// What waits to be claimed by a peer, or to be done by it.
    pub(crate) operations: Operations,
    pub(crate) drains: Drains,
    pub(crate) parked: ParkingLot,
    pub(crate) counters: AllCounters,
    /// Connections to owners, by who is at the other end and over what.
    pub(crate) sessions: Mutex<HashMap<(Incarnation, &'static str), Arc<Session>>>,
    /// Connections of peers that use this endpoint's regions.
    pub(crate) serving: Mutex<Vec<Weak<Serving>>>,
    pub(crate) refused: AtomicU64,
    closed: AtomicBool,
    doorbell: OnceLock<Arc<Doorbell>>,
    /// The bytes that peers read to see whether the kernel lets them copy from this process.
    nonce: Box<[u8; 16]>,
}

impl EndpointCore {
    pub(super) fn open(options: EndpointOptions) -> Result<Arc<EndpointCore>> {
        let mut incarnation = [0u8; 16];
        let mut master_key = [0u8; 32];
        for bytes in [&mut incarnation[..], &mut master_key[..]] {
            getrandom::fill(bytes)
                .map_err(|error| Error::new(Kind::Native, "open", format!("no randomness: {error}")))?;
        }
        let identity = Identity::new(&options.name, Incarnation(incarnation))?;
        let table = Table::create(options.max_regions.saturating_add(1))?;
        let nonce = Box::new(incarnation);
        // The first row is nobody's region: it tells peers where the nonce is.
        table.claim(nonce.as_ptr() as u64, nonce.len() as u64)?;
        let core = Arc::new(EndpointCore {
            identity,
            opened: Instant::now(),
            master_key,
            secret: options.secret,
            limits: options.limits,
            routing: options.routing,
            lanes: options.lanes,
            reach: OnceLock::new(),
            listeners: Mutex::new(Vec::new()),
            table,
            regions: Regions::default(),
            notifications: Notifications::new(),
            operations: Operations::default(),
            drains: Drains::default(),
            parked: ParkingLot::default(),
            counters: AllCounters::default(),
            sessions: Mutex::new(HashMap::new()),
            serving: Mutex::new(Vec::new()),
            refused: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            doorbell: OnceLock::new(),
            nonce,
        });
        core.listen(&options.listen, &options.advertise)?;
        lock(&HERE).get_or_insert_default().insert(core.identity.incarnation, Arc::downgrade(&core));
        Ok(core)
    }

    fn listen(self: &Arc<Self>, listen: &[SocketAddr], advertise: &[SocketAddr]) -> Result<()> {
        let mut listeners = vec![Listener::unix(self)?];
        let mut reach = vec![Reach::Unix];
        let loopback = [SocketAddr::from(([127, 0, 0, 1], 0))];
        let mut bound = Vec::new();
        for address in if listen.is_empty() { &loopback[..] } else { listen } {
            let listener = Listener::tcp(self, *address)?;
            bound.extend(interfaces::reachable(listener.address()?));
            listeners.push(listener);
        }
        let named = if advertise.is_empty() { &bound } else { advertise };
        reach.extend(named.iter().take(ticket::MAX_REACH - 1).copied().map(Reach::Tcp));
        let _ = self.reach.set(reach);
        *lock(&self.listeners) = listeners;
        Ok(())
    }

    /// The endpoint of this process with that incarnation.
    pub(crate) fn here(incarnation: &Incarnation) -> Option<Arc<EndpointCore>> {
        lock(&HERE).as_ref()?.get(incarnation)?.upgrade().filter(|core| !core.closed.load(Ordering::Acquire))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }

    pub(crate) fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn routing(&self) -> &Routing {
        &self.routing
    }

    /// How many connections a large transfer over sockets is spread over.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes
    }

    pub(crate) fn reach(&self) -> Vec<Reach> {
        self.reach.get().cloned().unwrap_or_default()
    }

    /// Milliseconds since the endpoint was opened: the clock in which leases are counted.
    pub(crate) fn clock_ms(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    pub(crate) fn region_key(&self, row: u32, generation: u64) -> RegionKey {
        RegionKey::derive(&self.master_key, row, generation)
    }

    pub(crate) fn check_open(&self, op: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::invalid(op, format!("the endpoint {} is closed", self.name())));
        }
        Ok(())
    }

    /// Verifies a ticket that a peer (or this process) presents: the region it names, and what it allows.
    pub(crate) fn verify(
        &self,
        public: &[u8],
        proof: &[u8; 32],
        challenge: &[u8],
    ) -> Result<(Arc<RegionCore>, Claims)> {
        let ticket = ticket::parse_public(public)?;
        let claims = ticket.claims();
        if claims.incarnation != self.identity.incarnation {
            return Err(Error::new(
                Kind::Stale,
                "import",
                "the ticket is of an earlier life of this endpoint",
            ));
        }
        let tag = ticket.tag(&self.region_key(claims.row, claims.generation));
        if !tag.verify_proof(challenge, proof) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Error::new(
                Kind::PermissionDenied,
                "import",
                "the ticket's tag is not this endpoint's",
            ));
        }
        self.check_lease(&claims)?;
        let region = self.regions.find(claims.row, claims.generation).ok_or_else(|| stale("import"))?;
        Ok((region, claims))
    }

    /// Refuses a lease that has run out.
    pub(crate) fn check_lease(&self, claims: &Claims) -> Result<()> {
        match claims.expires_ms {
            Some(expires) if self.clock_ms() >= expires => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(Kind::PermissionDenied, "access", "the ticket's lease has run out"))
            }
            _ => Ok(()),
        }
    }

    /// The descriptor by which peers say that they have let go of memory which is being taken back.
    pub(crate) fn doorbell(self: &Arc<Self>) -> Result<BorrowedFd<'_>> {
        if self.doorbell.get().is_none() {
            let doorbell = Doorbell::install(self)?;
            let _ = self.doorbell.set(doorbell);
        }
        match self.doorbell.get() {
            Some(doorbell) => Ok(doorbell.event.as_fd()),
            None => Err(Error::new(Kind::Internal, "contact", "no doorbell")),
        }
    }

    /// Stops serving bytes of that generation over sockets: a slow peer does not delay the taking back.
    pub(crate) fn break_streams_of(&self, generation: u64) {
        let serving: Vec<_> = lock(&self.serving).iter().filter_map(Weak::upgrade).collect();
        for peer in serving {
            peer.break_off(generation);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            paths: self.counters.snapshot(),
            regions: self.regions.count(),
            operations: self.operations.count(),
            parked: self.parked.load(),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(here) = lock(&HERE).as_mut() {
            here.remove(&self.identity.incarnation);
        }
        self.operations.end_all(&Error::new(Kind::Canceled, "close", "the endpoint was closed"));
        for region in self.regions.all() {
            region.revoke();
        }
        self.hang_up();
    }

    fn hang_up(&self) {
        for listener in lock(&self.listeners).drain(..) {
            listener.close();
        }
        let closed = || Error::new(Kind::Canceled, "close", "the endpoint was closed");
        let sessions: Vec<_> = lock(&self.sessions).drain().map(|(_, session)| session).collect();
        for session in sessions {
            session.close(closed());
        }
        let serving: Vec<_> = lock(&self.serving).drain(..).filter_map(|peer| peer.upgrade()).collect();
        for peer in serving {
            peer.close();
        }
        self.notifications.close();
    }
}

impl Drop for EndpointCore {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        if !self.closed.swap(true, Ordering::AcqRel) {
            if let Some(here) = lock(&HERE).as_mut() {
                here.remove(&self.identity.incarnation);
            }
            self.hang_up();
        }
        self.nonce.fill(0);
    }
}

/// The registered regions by row.
#[derive(Default)]
pub(crate) struct Regions(RwLock<Rows>);

#[derive(Default)]
struct Rows {
    rows: Vec<Option<Weak<RegionCore>>>,
    count: usize,
}

impl Regions {
    pub(crate) fn insert(&self, core: &Arc<RegionCore>) {
        let mut rows = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let row = core.row as usize;
        if rows.rows.len() <= row {
            rows.rows.resize(row + 1, None);
        }
        rows.rows[row] = Some(Arc::downgrade(core));
        rows.count += 1;
    }

    pub(crate) fn remove(&self, row: u32) {
        let mut rows = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = rows.rows.get_mut(row as usize)
            && slot.take().is_some()
        {
            rows.count -= 1;
        }
    }

    pub(crate) fn find(&self, row: u32, generation: u64) -> Option<Arc<RegionCore>> {
        let rows = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let core = rows.rows.get(row as usize)?.as_ref()?.upgrade()?;
        (core.generation == generation && !core.is_closed()).then_some(core)
    }

    fn all(&self) -> Vec<Arc<RegionCore>> {
        let rows = self.0.read().unwrap_or_else(PoisonError::into_inner);
        rows.rows.iter().flatten().filter_map(Weak::upgrade).collect()
    }

    fn count(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).count
    }
}

/// Wakes those who wait for memory to be let go.
#[derive(Default)]
pub(crate) struct Drains {
    rung: Mutex<u64>,
    changed: Condvar,
}

impl Drains {
    /// What to pass to [`wait`](Self::wait): read it before looking whether the memory was let go.
    pub(crate) fn seen(&self) -> u64 {
        *lock(&self.rung)
    }

    /// Waits until somebody has let go of something since `seen`, or for that long.
    pub(crate) fn wait(&self, seen: u64, time: Duration) {
        let until = Instant::now() + time;
        let mut rung = lock(&self.rung);
        while *rung == seen {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            rung = self.changed.wait_timeout(rung, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn ring(&self) {
        *lock(&self.rung) += 1;
        self.changed.notify_all();
    }
}

/// The eventfd that peers write to when they let go of memory that is being taken back.
struct Doorbell {
    event: OwnedFd,
    endpoint: Weak<EndpointCore>,
    token: OnceLock<progress::Token>,
}

impl Doorbell {
    fn install(endpoint: &Arc<EndpointCore>) -> Result<Arc<Doorbell>> {
        use rustix::event::{EventfdFlags, eventfd};
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::os("contact", "eventfd", error))?;
        let doorbell =
            Arc::new(Doorbell { event, endpoint: Arc::downgrade(endpoint), token: OnceLock::new() });
        let weak = Arc::downgrade(&doorbell);
        let token = progress::reactor()?.add(doorbell.event.as_fd(), Interest::READ, weak)?;
        let _ = doorbell.token.set(token);
        Ok(doorbell)
    }
}

impl Source for Doorbell {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.event, &mut count);
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.let_go();
        }
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        if let (Some(token), Ok(reactor)) = (self.token.get(), progress::reactor()) {
            reactor.remove(*token, self.event.as_fd());
        }
    }
}

impl EndpointCore {
    /// Somebody has let go of memory that is being taken back: frees what was parked and wakes who waits.
    pub(crate) fn let_go(&self) {
        self.parked.sweep();
        self.drains.ring();
    }
}
