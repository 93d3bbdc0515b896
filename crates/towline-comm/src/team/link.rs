//! How one rank reaches another's control region: by plain stores where memory is shared, by transfers elsewhere.
//!
//! What a rank sends to another is always *bytes, then a counter*: a rank that sees the counter sees the bytes. A near link stores
//! the counter with release. A far one lets the owner raise it by the transfer's signal, which the core promises to do
//! after the bytes are visible; the order of the bytes within one write is not promised, so no sequence rides in them.
//! The transfers of one far link are small enough to take one connection, which keeps them in order.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline::{
    Endpoint, Kind, Limits, Pinned, Registered, Remote, SharedStorage, Span, Stretch, SystemStorage, Transfer,
};

use super::blame::{State, Waits};
use super::layout::{ABORTED, BELL, ENTRY_HEAD, Layout, RECORD, STATE, STATE_BEAT, STATE_LEN, STATE_WAITS};
use super::round::lost;
use super::waiting::LOOK;
use super::{PAYLOAD, farewell};
use crate::{Error, Result};

/// The most transfers of one far link that nobody has looked at yet.
const UNSEEN: usize = 256;

/// The most bytes that go through a ring in one transfer: far below what the core spreads over several connections.
const FAR_CHUNK: usize = 64 << 10;

/// How one rank is reached.
pub(super) enum Link {
    /// This rank itself.
    Own,
    Near {
        remote: Box<Remote>,
        pin: Pinned,
    },
    Far(Box<FarLink>),
}

impl Link {
    fn remote(&self) -> Option<&Remote> {
        match self {
            Link::Own => None,
            Link::Near { remote, .. } => Some(remote),
            Link::Far(far) => Some(&far.remote),
        }
    }
}

/// The link to a rank whose memory is not shared.
pub(super) struct FarLink {
    remote: Remote,
    /// Where in the staging memory the copy of its ring lies.
    ring: usize,
    unseen: Mutex<VecDeque<Transfer>>,
    broken: OnceLock<Error>,
}

/// Memory from which far writes go out.
struct Staging(Registered<SystemStorage>);

impl Staging {
    fn entry(round: u64) -> usize {
        Layout::entry_slot(round) * (ENTRY_HEAD + PAYLOAD)
    }

    const ZEROS: usize = 2 * (ENTRY_HEAD + PAYLOAD);
    const RECORD: usize = Staging::ZEROS + 64;

    /// Where the copies of the rings start.
    const RINGS: usize = (Staging::RECORD + RECORD).next_multiple_of(4096);
}

/// The links to all ranks.
pub(super) struct Links {
    pub(super) rank: usize,
    pub(super) layout: Layout,
    /// All of the region.
    pub(super) own: Span,
    pub(super) region: Registered<SharedStorage>,
    endpoint: Endpoint,
    links: Vec<Link>,
    staging: Option<Staging>,
    limits: Limits,
    /// What is published of whom this rank waits for.
    waits: AtomicU64,
}

impl Links {
    /// Pins what is near; the rest is far.
    pub(super) fn new(
        endpoint: &Endpoint,
        region: Registered<SharedStorage>,
        layout: Layout,
        rank: usize,
        remotes: Vec<Remote>,
        timeout: Duration,
    ) -> Result<Links> {
        let mut far = 0;
        let mut links = Vec::with_capacity(remotes.len());
        let mut rest = remotes.into_iter();
        while let Some(remote) = rest.next() {
            let peer = links.len();
            links.push(if peer == rank {
                Link::Own
            } else {
                match remote.pin() {
                    Ok(pin) => Link::Near { remote: Box::new(remote), pin },
                    Err(error) if error.kind() == Kind::Unsupported => {
                        far += 1;
                        Link::Far(Box::new(FarLink {
                            remote,
                            ring: Staging::RINGS + (far - 1) * layout.ring_len(),
                            unseen: Mutex::default(),
                            broken: OnceLock::new(),
                        }))
                    }
                    Err(error) => {
                        let error = lost("assemble", peer, &error.into());
                        let reached = links.iter().filter_map(Link::remote).chain(rest.as_slice());
                        return Err(farewell::part(endpoint, &region, &layout, rank, reached, error));
                    }
                }
            });
        }
        let staging = if far == 0 {
            None
        } else {
            let storage = SystemStorage::new(Staging::RINGS + far * layout.ring_len())?;
            Some(Staging(endpoint.register(storage, towline::Access::NONE)?))
        };
        Ok(Links {
            rank,
            layout,
            own: Span::from(&region),
            region,
            endpoint: endpoint.clone(),
            links,
            staging,
            limits: Limits::within(timeout),
            waits: AtomicU64::new(0),
        })
    }

    pub(super) fn nranks(&self) -> usize {
        self.links.len()
    }

    pub(super) fn is_near(&self, peer: usize) -> bool {
        self.links.get(peer).is_some_and(|link| !matches!(link, Link::Far(_)))
    }

    pub(super) fn has_far(&self) -> bool {
        self.staging.is_some()
    }

    fn staging(&self) -> Result<&Staging> {
        self.staging
            .as_ref()
            .ok_or_else(|| Error::new(Kind::Internal, "team", "there is no staging memory for far ranks"))
    }

    /// Prepares an entry for far ranks. Those of the round that used the memory before have been waited for.
    pub(super) fn stage_entry(&self, round: u64, head: &[u8], payload: &[u8]) -> Result<()> {
        if let Some(staging) = &self.staging {
            staging.0.write_at(Staging::entry(round) + 8, head)?;
            staging.0.write_at(Staging::entry(round) + ENTRY_HEAD, payload)?;
        }
        Ok(())
    }

    /// Writes this rank's entry into a peer's region. A far peer's is in flight when this returns, from the staging
    /// memory, which must not change until the transfer has ended.
    pub(super) fn post_entry(
        &self,
        peer: usize,
        round: u64,
        head: &[u8],
        payload: &[u8],
    ) -> Result<Option<Transfer>> {
        let entry = self.layout.entry(self.rank, round);
        match &self.links[peer] {
            Link::Own => {
                self.region.write_at(entry + 8, head)?;
                self.region.write_at(entry + ENTRY_HEAD, payload)?;
                self.region.store(entry, round)?;
            }
            Link::Near { pin, .. } => {
                pin.write_at(entry + 8, head)?;
                pin.write_at(entry + ENTRY_HEAD, payload)?;
                pin.store(entry, round)?;
            }
            Link::Far(far) => {
                let len = ENTRY_HEAD - 8 + payload.len();
                let from = Staging::entry(round) + 8;
                let step = Layout::entry_step(round);
                return self.put(far, entry + 8, from, len, entry, step).map(Some);
            }
        }
        Ok(None)
    }

    /// Copies bytes out of a near rank's region, also after it has left: the pin keeps them.
    pub(super) fn read_home(&self, peer: usize, at: usize, into: &mut [u8]) -> Result<()> {
        // BYTES MOVE HERE
        match &self.links[peer] {
            Link::Own => self.region.read_at(at, into)?,
            Link::Near { pin, .. } => pin.read_at(at, into)?,
            Link::Far(_) => return Err(not_near()),
        }
        Ok(())
    }

    /// Sets one of this rank's counters in a peer's region, to `value`, which is `add` more than before, and wakes it.
    pub(super) fn advance(&self, peer: usize, counter: usize, value: u64, add: u64) -> Result<()> {
        self.set(peer, counter, value, add)?;
        self.wake(peer);
        Ok(())
    }

    /// [`advance`](Self::advance) without waking.
    pub(super) fn set(&self, peer: usize, counter: usize, value: u64, add: u64) -> Result<()> {
        match &self.links[peer] {
            Link::Own => self.region.store(counter, value)?,
            Link::Near { pin, .. } => pin.store(counter, value)?,
            Link::Far(far) => self.bump(peer, far, counter, add)?,
        }
        Ok(())
    }

    /// Adds to one of this rank's counters in a peer's region, however many threads do so.
    #[inline]
    pub(super) fn add(&self, peer: usize, counter: usize, add: u64) -> Result<()> {
        match &self.links[peer] {
            Link::Own => drop(self.region.fetch_add(counter, add)?),
            Link::Near { pin, .. } => drop(pin.fetch_add(counter, add)?),
            Link::Far(far) => self.bump(peer, far, counter, add)?,
        }
        self.wake(peer);
        Ok(())
    }

    /// Writes into this rank's ring at a peer, and then moves its end. The range does not wrap around.
    pub(super) fn push(&self, peer: usize, position: u64, bytes: &[u8]) -> Result<()> {
        let (at, _) = self.layout.ring_place(position);
        let (ring, tail) = (self.layout.ring(self.rank), self.layout.tail(self.rank));
        let end = position + bytes.len() as u64;
        match &self.links[peer] {
            Link::Own => {
                self.region.write_at(ring + at, bytes)?;
                self.region.store(tail, end)?;
            }
            Link::Near { pin, .. } => {
                pin.write_at(ring + at, bytes)?;
                pin.store(tail, end)?;
            }
            Link::Far(far) => {
                // The staging memory is an image of the ring: where the peer has made room, it has the bytes.
                self.staging()?.0.write_at(far.ring + at, bytes)?;
                let sent = self.put(far, ring + at, far.ring + at, bytes.len(), tail, bytes.len() as u64)?;
                self.keep(peer, far, sent)?;
            }
        }
        self.wake(peer);
        Ok(())
    }

    /// Writes into this rank's ring at a near peer without moving its end. The range does not wrap around.
    pub(super) fn fill(&self, peer: usize, position: u64, bytes: &[u8]) -> Result<()> {
        let at = self.layout.ring(self.rank) + self.layout.ring_place(position).0;
        // BYTES MOVE HERE
        match &self.links[peer] {
            Link::Own => self.region.write_at(at, bytes)?,
            Link::Near { pin, .. } => pin.write_at(at, bytes)?,
            Link::Far(_) => return Err(not_near()),
        }
        Ok(())
    }

    /// [`fill`](Self::fill) with memory of this rank.
    pub(super) fn fill_from(&self, peer: usize, position: u64, from: &Span) -> Result<()> {
        let at = self.layout.ring(self.rank) + self.layout.ring_place(position).0;
        // BYTES MOVE HERE
        match &self.links[peer] {
            Link::Near { pin, .. } => Ok(pin.copy_from(at, from)?),
            Link::Own | Link::Far(_) => Err(not_near()),
        }
    }

    /// This rank's ring at a near peer, from that position on.
    pub(super) fn ring_at(&self, peer: usize, position: u64) -> Result<Stretch<'_>> {
        let at = self.layout.ring(self.rank) + self.layout.ring_place(position).0;
        match &self.links[peer] {
            Link::Near { pin, .. } => Ok(Stretch::Pinned(pin, at)),
            Link::Own | Link::Far(_) => Err(not_near()),
        }
    }

    /// The ring of a peer here, from that position on.
    pub(super) fn ring_of(&self, peer: usize, position: u64) -> Stretch<'_> {
        Stretch::Own(&self.own, self.layout.ring(peer) + self.layout.ring_place(position).0)
    }

    /// The most bytes that one push takes.
    pub(super) fn chunk(&self, peer: usize) -> usize {
        let chunk = self.layout.acknowledge_after();
        if self.is_near(peer) { chunk } else { chunk.min(FAR_CHUNK) }
    }

    /// Sends a peer the abort of the team, unless another rank has sent it already. Returns the transfer that is in flight.
    pub(super) fn send_abort(&self, peer: usize, record: &[u8; RECORD]) -> Result<Option<Transfer>> {
        let (at, mark) = (self.layout.abort_record(self.rank), self.rank as u64 + 1);
        let sent = match &self.links[peer] {
            Link::Own => {
                self.region.write_at(at, record)?;
                self.region.compare_swap(ABORTED, 0, mark)?;
                None
            }
            Link::Near { pin, .. } => {
                pin.write_at(at, record)?;
                pin.compare_swap(ABORTED, 0, mark)?;
                None
            }
            Link::Far(far) => {
                self.staging()?.0.write_at(Staging::RECORD, record)?;
                let scratch = self.layout.scratch(self.rank);
                let written = self.put(far, at, Staging::RECORD, RECORD, scratch, 1)?;
                self.keep(peer, far, written)?;
                Some(self.endpoint.compare_swap(&far.remote, ABORTED as u64, 0, mark)?)
            }
        };
        self.wake(peer);
        Ok(sent)
    }

    /// The memory for the replies to [`query_state`](Self::query_state), for all ranks; `None` if no rank is far.
    pub(super) fn landing(&self) -> Option<Registered<SystemStorage>> {
        self.has_far().then_some(())?;
        let storage = SystemStorage::new(self.nranks() * STATE_LEN).ok()?;
        self.endpoint.register(storage, towline::Access::NONE).ok()
    }

    /// Reads the state of a far rank into its place in the landing.
    pub(super) fn query_state(
        &self,
        peer: usize,
        landing: &Registered<SystemStorage>,
        within: Duration,
    ) -> Result<Transfer> {
        let Link::Far(far) = &self.links[peer] else { return Err(not_far()) };
        let at = (peer * STATE_LEN) as u64;
        let request = self.endpoint.read(&far.remote, landing).at(STATE as u64, at, STATE_LEN as u64);
        Ok(request.limits(Limits::within(within)).start()?)
    }

    /// The state of a far rank, from the reply.
    pub(super) fn reply_of(peer: usize, landing: &Registered<SystemStorage>) -> Option<State> {
        State::of(|at| landing.load(peer * STATE_LEN + at - STATE).ok())
    }

    /// The state of a rank where it is; `None` where it is far, or cannot be read.
    pub(super) fn look_at(&self, peer: usize) -> Option<State> {
        match &self.links[peer] {
            Link::Own => State::of(|at| self.region.load(at).ok()),
            Link::Near { pin, .. } => State::of(|at| pin.load(at).ok()),
            Link::Far(_) => None,
        }
    }

    /// Publishes for whom this rank waits.
    #[inline]
    pub(super) fn publish(&self, waits: Waits) {
        if self.waits.load(Ordering::Relaxed) != waits.word() {
            self.waits.store(waits.word(), Ordering::Relaxed);
            let _ = self.region.store(STATE_WAITS, waits.word());
        }
    }

    /// [`publish`](Self::publish) where that is what was published last.
    pub(super) fn replace(&self, before: Waits, after: Waits) {
        let (before, after) = (before.word(), after.word());
        let order = Ordering::Relaxed;
        if self.waits.compare_exchange(before, after, order, order).is_ok() {
            let _ = self.region.compare_swap(STATE_WAITS, before, after);
        }
    }

    /// What is published of whom this rank waits for.
    pub(super) fn published(&self) -> Waits {
        Waits::from_word(self.waits.load(Ordering::Relaxed))
    }

    /// Shows that this rank, which waits, is not stopped.
    pub(super) fn beat(&self) {
        let _ = self.region.fetch_add(STATE_BEAT, 1);
    }

    /// [`publish`](Self::publish) of a wait for those, again and again while it lasts.
    pub(super) fn held_up(&self, peers: &[usize]) {
        self.publish(Waits::on(peers));
        self.beat();
    }

    /// Wakes a peer that sleeps. That it is gone is seen elsewhere: it may have left in order after it got the message.
    #[inline]
    pub(super) fn wake(&self, peer: usize) {
        match &self.links[peer] {
            Link::Own => drop(self.region.wake(BELL)),
            Link::Near { pin, .. } => drop(pin.wake(BELL)),
            Link::Far(far) => drop(self.endpoint.signal(&far.remote, BELL as u64, 1)),
        }
    }

    /// Whether a peer can still be reached; the error is why it cannot.
    pub(super) fn check(&self, peer: usize) -> Result<()> {
        match &self.links[peer] {
            Link::Own => Ok(()),
            Link::Near { remote, pin } => {
                remote.alive()?;
                if pin.is_stale() {
                    return Err(Error::new(Kind::Disconnected, "team", "its control region is gone"));
                }
                Ok(())
            }
            Link::Far(far) => {
                far.look()?;
                Ok(far.remote.alive()?)
            }
        }
    }

    /// Waits until what was sent to far ranks has arrived, or until then.
    pub(super) fn settle(&self, until: Instant) {
        let far =
            || self.links.iter().filter_map(|link| if let Link::Far(far) = link { Some(far) } else { None });
        // Where bytes do not go by sockets, a transfer ends when its signal is in flight, and nobody has waited for the
        // mark of an abort. Both take the connection that this takes, so they are there when its reply is here.
        let answers: Vec<Transfer> = far()
            .filter_map(|far| self.endpoint.compare_swap(&far.remote, ABORTED as u64, 0, 0).ok())
            .collect();
        let unseen = far().flat_map(|far| std::mem::take(&mut *far.unseen.lock()));
        for transfer in unseen.chain(answers) {
            if transfer.wait_for(until.saturating_duration_since(Instant::now())).is_none() {
                return;
            }
        }
    }

    fn bump(&self, peer: usize, far: &FarLink, counter: usize, add: u64) -> Result<()> {
        // A signal rides on a write, since only a request takes the team's limits.
        let sent = self.put(far, self.layout.scratch(self.rank), Staging::ZEROS, 8, counter, add)?;
        self.keep(peer, far, sent)
    }

    /// Keeps a transfer until a caller has looked at how it ended.
    fn keep(&self, peer: usize, far: &FarLink, transfer: Transfer) -> Result<()> {
        let mut unseen = far.unseen.lock();
        unseen.push_back(transfer);
        while let Some(first) = unseen.front() {
            let ended = if unseen.len() > UNSEEN { Some(self.wait_for(peer, first)) } else { first.result() };
            match ended {
                None => break,
                Some(Ok(())) => drop(unseen.pop_front()),
                // It goes on, but nobody asks for it any more.
                Some(Err(error)) if error.kind() == Kind::Canceled => return Err(error.into()),
                Some(Err(error)) => {
                    unseen.pop_front();
                    let _ = far.broken.set(error.into());
                }
            }
        }
        drop(unseen);
        far.broken()
    }

    /// Waits for the end of a transfer to or from that rank, and shows that this one waits. Its limits bound the wait, and
    /// so does the end of the team.
    pub(super) fn wait_for(&self, peer: usize, transfer: &Transfer) -> towline::Result<()> {
        let mut held_up = false;
        let ended = loop {
            if let Some(ended) = transfer.wait_for(LOOK) {
                break ended;
            }
            if self.region.load(ABORTED)? != 0 {
                return Err(towline::Error::new(Kind::Canceled, "team", "the team was given up"));
            }
            self.held_up(&[peer]);
            held_up = true;
        };
        match &ended {
            Ok(()) if held_up => self.publish(Waits::NOBODY),
            Err(error) if is_missing(error.kind()) => self.publish(Waits::in_vain(&[peer])),
            _ => {}
        }
        ended
    }

    fn put(
        &self,
        far: &FarLink,
        to: usize,
        from: usize,
        len: usize,
        counter: usize,
        add: u64,
    ) -> Result<Transfer> {
        let sent = self
            .endpoint
            .write(&far.remote, &self.staging()?.0)
            .at(to as u64, from as u64, len as u64)
            .signal(counter as u64, add)
            .limits(self.limits)
            .start()?;
        Ok(sent)
    }
}

/// Whether an error of that kind means that a rank did not answer.
pub(super) fn is_missing(kind: Kind) -> bool {
    matches!(kind, Kind::Timeout | Kind::Disconnected)
}

fn not_far() -> Error {
    Error::new(Kind::Internal, "team", "a rank that shares its memory was asked over a socket")
}

fn not_near() -> Error {
    Error::new(Kind::Internal, "team", "bytes for a near rank were given to a far one")
}

impl FarLink {
    fn broken(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Looks at transfers that have ended.
    fn look(&self) -> Result<()> {
        let mut unseen = self.unseen.lock();
        while let Some(ended) = unseen.front().and_then(Transfer::result) {
            unseen.pop_front();
            if let Err(error) = ended {
                let _ = self.broken.set(error.into());
            }
        }
        drop(unseen);
        self.broken()
    }
}
