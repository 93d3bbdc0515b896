//! What an endpoint is to the rest of the library.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use super::interfaces;
use super::operations::Operations;
use super::options::EndpointOptions;
use super::stats::{AllCounters, Stats};
use crate::budget::{Account, Budget, Charge};
use crate::fence::table::Table;
use crate::identity::{Identity, Incarnation};
use crate::notify::{Notification, Notifications};
use crate::region::{Deed, Ledger, ParkingLot, RegionCore, stale};
use crate::route::Routing;
use crate::runtime::{self, Bell, Interest, Readiness, Source, Token};
use crate::session::{Listener, Quotas, Refusals, Serving, Session, Strangers};
use crate::sync::lock;
use crate::ticket::{self, Claims, Reach, RegionKey};
use crate::tls::Tls;
use crate::transfer::Limits;
use crate::transport::nixl;
use crate::wire::handshake::Secret;
use crate::{Error, Kind, Result, interrupt};

/// Endpoints of this process, by incarnation: their regions are reached without any socket.
static HERE: Mutex<Option<HashMap<Incarnation, Weak<EndpointCore>>>> = Mutex::new(None);

/// How often an endpoint that closes wakes those who wait for a signal.
const WAKE_AGAIN: Duration = Duration::from_millis(1);

/// One endpoint.
pub(crate) struct EndpointCore {
    identity: Identity,
    opened: Instant,
    master_key: [u8; 32],
    secret: Option<Secret>,
    limits: Limits,
    routing: Routing,
    lanes: usize,
    quotas: Quotas,
    /// The memory that peers cause this endpoint to hold.
    pub(crate) held: Arc<Budget>,
    /// The part of it that audits take, which stays when the peers are gone.
    pub(crate) remembered: Arc<Account>,
    tls: Option<Tls>,
    checksums: bool,
    share_between_containers: bool,
    /// Connections that have not proven themselves.
    pub(crate) strangers: Strangers,
    reach: OnceLock<Vec<Reach>>,
    listeners: Mutex<Vec<Arc<Listener>>>,
    pub(crate) table: Table,
    pub(crate) regions: Regions,
    pub(crate) notifications: Notifications,
    /// Rung when a peer or this process has let go of memory, or has sent a message.
    pub(crate) bell: Bell,
    listening: Mutex<(Option<Token>, bool)>,
    /// What waits to be claimed by a peer, or to be done by it.
    pub(crate) operations: Operations,
    pub(crate) parked: ParkingLot,
    pub(crate) counters: AllCounters,
    /// The agent of NIXL, once a transfer by it was asked for.
    pub(crate) nixl: nixl::Domain,
    /// Connections to owners, by who is at the other end and over what.
    pub(crate) sessions: Mutex<HashMap<(Incarnation, &'static str), Arc<Session>>>,
    /// Connections of peers that use this endpoint's regions.
    pub(crate) serving: Mutex<Vec<Weak<Serving>>>,
    pub(crate) refused: AtomicU64,
    /// Those that never became sessions.
    pub(crate) refusals: Refusals,
    /// Who used the regions, as far as this process can see.
    pub(crate) ledger: Ledger,
    closed: AtomicBool,
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
        options.nixl.check()?;
        let table = Table::create(options.max_regions.saturating_add(1))?;
        let nonce = Box::new(incarnation);
        // The first row is nobody's region: it tells peers where the nonce is.
        table.claim(nonce.as_ptr() as u64, nonce.len() as u64)?;
        let held = Budget::new("what it keeps", options.quotas.memory);
        let remembered = held.part(options.quotas.memory / 8);
        let core = Arc::new(EndpointCore {
            identity,
            opened: Instant::now(),
            master_key,
            secret: options.secret,
            limits: options.limits,
            routing: options.routing,
            lanes: options.lanes,
            quotas: options.quotas,
            ledger: Ledger::new(&remembered),
            held,
            remembered,
            tls: options.tls,
            checksums: options.checksums,
            share_between_containers: options.share_between_containers,
            strangers: Strangers::default(),
            reach: OnceLock::new(),
            listeners: Mutex::new(Vec::new()),
            table,
            regions: Regions::default(),
            notifications: Notifications::default(),
            bell: Bell::new()?,
            listening: Mutex::new((None, false)),
            operations: Operations::default(),
            parked: ParkingLot::default(),
            counters: AllCounters::default(),
            nixl: nixl::Domain::new(options.nixl),
            sessions: Mutex::new(HashMap::new()),
            serving: Mutex::new(Vec::new()),
            refused: AtomicU64::new(0),
            refusals: Refusals::default(),
            closed: AtomicBool::new(false),
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

    /// How what goes over TCP is encrypted.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Whether checksums go along with bytes over sockets.
    pub(crate) fn checksums(&self) -> bool {
        self.checksums
    }

    /// Whether memory is shared with processes of the same user in other pid and user namespaces, too.
    pub(crate) fn shares_between_containers(&self) -> bool {
        self.share_between_containers
    }

    /// How much strangers and peers may take.
    pub(crate) fn quotas(&self) -> Quotas {
        self.quotas
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

    #[inline]
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
            return Err(Error::owner_gone("import", "the ticket is of an earlier life of this endpoint"));
        }
        let tag = ticket.tag(&self.region_key(claims.row, claims.generation));
        if !tag.verify_proof(challenge, proof) {
            return Err(Error::new(
                Kind::PermissionDenied,
                "import",
                "the ticket's tag is not this endpoint's",
            ));
        }
        let region = self.check_current(&claims)?;
        Ok((region, claims))
    }

    /// Refuses a genuine ticket that is worth nothing any more: its lease has run out, or its region is gone.
    pub(crate) fn check_current(&self, claims: &Claims) -> Result<Arc<RegionCore>> {
        self.check_lease(claims)?;
        self.regions.find(claims.row, claims.generation).ok_or_else(|| stale("import"))
    }

    /// Counts a ticket that was refused.
    pub(crate) fn count_refused(&self, public: &[u8], peer: &Identity) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.blame(public, peer);
    }

    /// Writes a refused ticket down for the peer, also for the region that it names, where there is one.
    pub(crate) fn blame(&self, public: &[u8], peer: &Identity) {
        self.ledger.of(peer).count(Deed::Refused);
        if let Ok(ticket) = ticket::parse_public(public)
            && let claims = ticket.claims()
            && let Some(region) = self.regions.find(claims.row, claims.generation)
        {
            region.ledger.of(peer).count(Deed::Refused);
        }
    }

    /// Refuses a lease that has run out.
    pub(crate) fn check_lease(&self, claims: &Claims) -> Result<()> {
        match claims.expires_ms {
            Some(expires) if self.clock_ms() >= expires => {
                Err(Error::new(Kind::PermissionDenied, "access", "the ticket's lease has run out"))
            }
            _ => Ok(()),
        }
    }

    /// Delivers a message to this endpoint's user.
    pub(crate) fn deliver(
        &self,
        notification: Notification,
        from: Option<(&Arc<Account>, Charge)>,
    ) -> Result<()> {
        self.notifications.queue(notification, from.map(|(account, held)| (account, Some(held))))?;
        self.bell.ring();
        self.notifications.wake();
        Ok(())
    }

    /// The next message, waiting until then.
    pub(crate) fn receive(&self, within: Duration) -> Result<Notification> {
        runtime::may_block("receive")?;
        let until = runtime::later(Instant::now(), within);
        loop {
            let seen = self.bell.seen();
            if let Some(notification) = self.notifications.next()? {
                return Ok(notification);
            }
            if Instant::now() >= until {
                return Err(Error::new(
                    Kind::Timeout,
                    "receive",
                    format!("no notification came in {:.3} s", within.as_secs_f64()),
                ));
            }
            interrupt::check("receive")?;
            self.bell.wait(seen, until.min(runtime::later(Instant::now(), interrupt::turn(within))));
            self.rung();
        }
    }

    /// The bell has rung: does what nobody else may be waiting to do.
    pub(crate) fn rung(&self) {
        if self.parked.load().0 > 0 {
            self.parked.sweep();
            if self.is_closed() {
                self.retire();
            }
        }
        if self.notifications.awaited() {
            self.notifications.wake();
        }
    }

    /// Somebody has let go of memory that is being taken back.
    pub(crate) fn let_go(&self) {
        self.bell.ring();
        self.rung();
    }

    /// Lets the event loop listen for peers' rings: needed only while a future waits for a message or a storage is
    /// parked. Threads that wait listen themselves.
    pub(crate) fn listen_to_bell(self: &Arc<Self>) {
        let mut listening = lock(&self.listening);
        let (Ok(reactor), Some(event)) = (runtime::reactor(), self.bell.event()) else { return };
        match listening.0 {
            Some(token) if !listening.1 => {
                let _ = reactor.modify(token, event.as_fd(), Interest::READ);
            }
            Some(_) => {}
            None => {
                let weak: Weak<dyn Source> = Arc::downgrade(self) as Weak<dyn Source>;
                listening.0 = reactor.add(event.as_fd(), Interest::READ, weak).ok();
            }
        }
        listening.1 = true;
    }

    pub(crate) fn stats(&self) -> Stats {
        let serving: Vec<_> = lock(&self.serving).iter().filter_map(Weak::upgrade).collect();
        let in_flight = serving.iter().map(|peer| peer.in_flight());
        Stats {
            paths: self.counters.snapshot(),
            regions: self.regions.count(),
            operations: self.operations.count(),
            parked: self.parked.load(),
            refused: self.refused.load(Ordering::Relaxed),
            refused_handshakes: self.refusals.total(),
            peers: serving.len(),
            strangers: self.strangers.count(),
            peer_memory: self.held.used(),
            in_flight: in_flight.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1)),
            nixl: self.nixl.stats(),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends everything, then waits until nobody is inside the memory of any region. What is still used at the limit stays
    /// registered and revoked: it is waited for again by the next call, and parked where it is dropped.
    pub(crate) fn close(&self, within: Duration) -> Result<()> {
        let first = !self.closed.swap(true, Ordering::AcqRel);
        if first {
            self.leave();
            self.operations.end_all(&Error::new(Kind::Canceled, "close", "the endpoint was closed"));
        }
        let regions = self.regions.all();
        for region in &regions {
            region.revoke();
        }
        if first {
            self.hang_up();
        }
        runtime::may_block("close")?;
        self.drain(&regions, within)
    }

    /// From here on its tickets are worth nothing in this process.
    fn leave(&self) {
        self.identity.incarnation.end();
        if let Some(here) = lock(&HERE).as_mut() {
            here.remove(&self.identity.incarnation);
        }
    }

    fn drain(&self, regions: &[Arc<RegionCore>], within: Duration) -> Result<()> {
        let started = Instant::now();
        let mut left: Vec<_> = regions.iter().collect();
        loop {
            let seen = self.bell.seen();
            left.retain(|region| {
                region.wake_waiters();
                region.has_waiters() || !region.drained()
            });
            let Some(one) = left.first() else {
                self.retire();
                return Ok(());
            };
            let spent = started.elapsed();
            if spent >= within {
                return Err(Error::new(
                    Kind::Timeout,
                    "close",
                    format!(
                        "{} regions are still in use after {:.3} s, one of {} bytes by {}; close again to wait for them",
                        left.len(),
                        spent.as_secs_f64(),
                        one.len,
                        one.users()
                    ),
                ));
            }
            // Those who wait for a signal may go to sleep after they were woken: they are woken again soon.
            let waiting = left.iter().any(|region| region.has_waiters());
            interrupt::check("close")?;
            let left = within - spent;
            let look = if waiting { left.min(WAKE_AGAIN) } else { left };
            self.bell.wait(seen, runtime::later(Instant::now(), interrupt::turn(look)));
            self.rung();
        }
    }

    /// Of a closed endpoint: closes the bell once no peer rings it any more, because no memory is used by any.
    fn retire(&self) {
        if self.parked.load().0 == 0 && self.regions.all().iter().all(|region| region.drained()) {
            self.silence_bell();
        }
    }

    fn silence_bell(&self) {
        let token = lock(&self.listening).0.take();
        if let (Some(token), Ok(reactor), Some(event)) = (token, runtime::reactor(), self.bell.event()) {
            reactor.remove(token, event.as_fd());
        }
        self.bell.close();
    }

    fn hang_up(&self) {
        self.table.close();
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
        self.bell.ring();
    }
}

impl Drop for EndpointCore {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.leave();
            self.hang_up();
        }
        self.silence_bell();
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

impl Source for EndpointCore {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        self.bell.heard();
        self.rung();
        let mut listening = lock(&self.listening);
        if !self.notifications.awaited() && self.parked.load().0 == 0 {
            if let (Some(token), Ok(reactor), Some(event)) =
                (listening.0, runtime::reactor(), self.bell.event())
            {
                let _ = reactor.modify(token, event.as_fd(), Interest::NONE);
            }
            listening.1 = false;
        }
    }
}
