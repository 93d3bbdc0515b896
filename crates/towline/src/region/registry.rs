//! What an endpoint has registered: its table and regions, who used them, and what keeps the memory of its user and of its peers apart.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::{Counted, Ledger, ParkingLot, RegionCore, stale};
use crate::budget::{Account, Charge};
use crate::fence::table::Table;
use crate::identity::{Identity, Incarnation};
use crate::notify::{Inbox, Notification, Notifications};
use crate::runtime::{self, Bell, Interest, Readiness, Source, Token};
use crate::ticket::{self, Claims, Reach, RegionKey};
use crate::{Error, Kind, Result, ended, interrupt};

/// How often an endpoint that closes wakes those who wait for a signal.
const WAKE_AGAIN: Duration = Duration::from_millis(1);

/// What one endpoint has registered, and the messages that it gets. Lives as long as the endpoint or one of its regions.
pub(crate) struct Registry {
    identity: Identity,
    opened: Instant,
    master_key: [u8; 32],
    /// How long taking a region back waits where the call does not say.
    no_progress: Duration,
    /// Where peers reach it.
    reach: OnceLock<Vec<Reach>>,
    pub(crate) table: Table,
    pub(super) regions: Regions,
    pub(crate) notifications: Notifications,
    /// Rung when a peer or this process has let go of memory, or has sent a message.
    pub(crate) bell: Bell,
    listening: Mutex<(Option<Token>, bool)>,
    pub(super) parked: ParkingLot,
    /// What audits take, which stays when the peers are gone.
    pub(super) remembered: Arc<Account>,
    refused: AtomicU64,
    /// Who used the regions, as far as this process can see.
    pub(crate) ledger: Ledger,
    closed: AtomicBool,
    /// The bytes that peers read to see whether the kernel lets them copy from this process.
    nonce: Box<[u8; 16]>,
}

impl Registry {
    pub(crate) fn open(
        name: &str,
        max_regions: u32,
        no_progress: Duration,
        remembered: Arc<Account>,
    ) -> Result<Arc<Registry>> {
        let mut incarnation = [0u8; 16];
        let mut master_key = [0u8; 32];
        for bytes in [&mut incarnation[..], &mut master_key[..]] {
            getrandom::fill(bytes)
                .map_err(|error| Error::new(Kind::Native, "open", format!("no random bytes: {error}")))?;
        }
        let identity = Identity::new(name, Incarnation(incarnation))?;
        let table = Table::create(max_regions.saturating_add(1))?;
        let nonce = Box::new(incarnation);
        // The first row is nobody's region: it shows peers where the nonce is.
        table.claim(nonce.as_ptr() as u64, nonce.len() as u64)?;
        Ok(Arc::new(Registry {
            identity,
            opened: Instant::now(),
            master_key,
            no_progress,
            reach: OnceLock::new(),
            table,
            regions: Regions::default(),
            notifications: Notifications::default(),
            bell: Bell::new()?,
            listening: Mutex::new((None, false)),
            parked: ParkingLot::default(),
            ledger: Ledger::new(&remembered),
            remembered,
            refused: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            nonce,
        }))
    }

    /// Whose regions they are.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }

    /// How long taking a region back waits where the call does not say.
    pub(crate) fn no_progress(&self) -> Duration {
        self.no_progress
    }

    /// Says once where peers reach it.
    pub(crate) fn is_reached_by(&self, reach: Vec<Reach>) {
        let _ = self.reach.set(reach);
    }

    pub(crate) fn reach(&self) -> Vec<Reach> {
        self.reach.get().cloned().unwrap_or_default()
    }

    /// When the endpoint was opened: leases count from there.
    pub(crate) fn opened(&self) -> Instant {
        self.opened
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
        if self.is_closed() {
            return Err(Error::invalid(op, format!("the endpoint {} is closed", self.name())));
        }
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
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
            let message = "the ticket's tag is not this endpoint's";
            return Err(Error::new(Kind::PermissionDenied, "import", message));
        }
        let region = self.check_current(&claims)?;
        Ok((region, claims))
    }

    /// Refuses a genuine ticket that is worth nothing any more: its lease has run out, or its region is gone.
    pub(crate) fn check_current(&self, claims: &Claims) -> Result<Arc<RegionCore>> {
        self.check_lease(claims)?;
        self.regions.find(claims.row, claims.generation).ok_or_else(|| stale("import"))
    }

    /// Refuses a lease that has run out.
    pub(crate) fn check_lease(&self, claims: &Claims) -> Result<()> {
        ticket::check_lease("access", claims.expires_ms, || self.clock_ms())
    }

    /// Counts something that was refused.
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts something that was refused to that peer.
    pub(crate) fn refuse(&self, peer: &Identity) {
        self.count_refused();
        self.ledger.of(peer).count(Counted::Refused);
    }

    /// Counts a ticket that was refused.
    pub(crate) fn refuse_ticket(&self, public: &[u8], peer: &Identity) {
        self.count_refused();
        self.blame(public, peer);
    }

    /// Writes a refused ticket down for the peer, also for the region that it names, where there is one.
    pub(crate) fn blame(&self, public: &[u8], peer: &Identity) {
        self.ledger.of(peer).count(Counted::Refused);
        if let Ok(ticket) = ticket::parse_public(public)
            && let claims = ticket.claims()
            && let Some(region) = self.regions.find(claims.row, claims.generation)
        {
            region.ledger.of(peer).count(Counted::Refused);
        }
    }

    /// How much was refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// How many regions there are.
    pub(crate) fn count(&self) -> usize {
        self.regions.0.read().count
    }

    /// How many storages of dropped regions are parked, and their bytes.
    pub(crate) fn parked(&self) -> (usize, usize) {
        self.parked.load()
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
                let message = format!("no notification arrived within {:.3} s", within.as_secs_f64());
                return Err(Error::new(Kind::Timeout, "receive", message));
            }
            interrupt::check("receive")?;
            self.bell.wait(seen, until.min(runtime::later(Instant::now(), interrupt::turn(within))));
            self.rung();
        }
    }

    /// The bell has rung: does what nobody else may be waiting to do.
    pub(super) fn rung(&self) {
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

    /// A peer has let go of memory that is being taken back.
    pub(crate) fn let_go(&self) {
        self.bell.ring();
        self.rung();
    }

    /// [`let_go`](Self::let_go) for callers that may hold locks: a storage's drop may be the user's code, and runs elsewhere.
    pub(crate) fn let_go_elsewhere(self: &Arc<Self>) {
        self.bell.ring();
        if self.parked.load().0 > 0 {
            let this = Arc::clone(self);
            let _ = runtime::pool().spawn(Box::new(move || this.parked.sweep()));
        }
    }

    /// Refuses everything from now on; true for the call that did it. From then on its tickets are worth nothing.
    pub(crate) fn shut(&self) -> bool {
        let first = !self.closed.swap(true, Ordering::AcqRel);
        if first {
            ended::remember(self.identity.incarnation);
        }
        first
    }

    /// Revokes every region, and returns them.
    pub(crate) fn revoke_all(&self) -> Vec<Arc<RegionCore>> {
        let regions = self.regions.all();
        for region in &regions {
            region.revoke();
        }
        regions
    }

    /// Takes no message any more, and no peer finds the table. Of one that was [shut](Self::shut).
    pub(crate) fn hang_up(&self) {
        self.notifications.close();
        self.bell.ring();
    }

    /// Waits until nobody is inside the memory of those regions, which were revoked.
    pub(crate) fn drain(&self, regions: &[Arc<RegionCore>], within: Duration) -> Result<()> {
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
                let message = format!(
                    "{} regions are still in use after {:.3} s, one of {} bytes by {}; close again to wait for them",
                    left.len(),
                    spent.as_secs_f64(),
                    one.len,
                    one.users()
                );
                return Err(Error::new(Kind::Timeout, "close", message));
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
            self.close_bell();
        }
    }

    fn close_bell(&self) {
        let token = self.listening.lock().0.take();
        if let (Some(token), Ok(reactor), Some(event)) = (token, runtime::reactor(), self.bell.event()) {
            reactor.remove(token, event.as_fd());
        }
        self.bell.close();
    }
}

impl Inbox for Registry {
    fn notifications(&self) -> &Notifications {
        &self.notifications
    }

    fn listen(self: Arc<Self>) {
        let mut listening = self.listening.lock();
        let (Ok(reactor), Some(event)) = (runtime::reactor(), self.bell.event()) else { return };
        match listening.0 {
            Some(token) if !listening.1 => {
                let _ = reactor.modify(token, event.as_fd(), Interest::READ);
            }
            Some(_) => {}
            None => {
                let weak: Weak<dyn Source> = Arc::downgrade(&self) as Weak<dyn Source>;
                listening.0 = reactor.add(event.as_fd(), Interest::READ, weak).ok();
            }
        }
        listening.1 = true;
    }
}

impl Source for Registry {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        self.bell.drain();
        self.rung();
        let mut listening = self.listening.lock();
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

impl Drop for Registry {
    fn drop(&mut self) {
        if !crate::fork::in_child() {
            self.close_bell();
            self.nonce.fill(0);
        }
    }
}

/// The registered regions by row.
#[derive(Default)]
pub(super) struct Regions(RwLock<Rows>);

#[derive(Default)]
struct Rows {
    rows: Vec<Option<Weak<RegionCore>>>,
    count: usize,
}

impl Regions {
    pub(super) fn insert(&self, core: &Arc<RegionCore>) {
        let mut rows = self.0.write();
        let row = core.row as usize;
        if rows.rows.len() <= row {
            rows.rows.resize(row + 1, None);
        }
        rows.rows[row] = Some(Arc::downgrade(core));
        rows.count += 1;
    }

    pub(super) fn remove(&self, row: u32) {
        let mut rows = self.0.write();
        if let Some(slot) = rows.rows.get_mut(row as usize)
            && slot.take().is_some()
        {
            rows.count -= 1;
        }
    }

    fn find(&self, row: u32, generation: u64) -> Option<Arc<RegionCore>> {
        let rows = self.0.read();
        let core = rows.rows.get(row as usize)?.as_ref()?.upgrade()?;
        (core.generation == generation && !core.is_closed()).then_some(core)
    }

    fn all(&self) -> Vec<Arc<RegionCore>> {
        let rows = self.0.read();
        rows.rows.iter().flatten().filter_map(Weak::upgrade).collect()
    }
}
