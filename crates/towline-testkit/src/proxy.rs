//! A TCP proxy that treats what passes through it badly, as its seed says.
//!
//! It stands between two endpoints where the owner advertises the proxy's address (or between the ranks of a meeting and
//! its root). Each direction of each connection has its own faults: after some bytes comes the next one. What a direction
//! does depends on the seed, the number of the connection and the direction alone.
//!
//! Corruption changes only what the receiver can notice without a checksum: kinds, flags and lengths in headers of frames,
//! and the first frames of a connection, whose bytes are all authenticated. A payload bit that the network flips arrives
//! flipped over plain TCP; `anywhere` is for links with a checksum or TLS, which must notice that too.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use towline::wire::{HEADER_LEN, Header};

use crate::random::{Random, mix};

/// How often a thread that waits for bytes looks whether the proxy is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// What is passed on at once.
const PORTION: usize = 64 << 10;

/// What a slow link passes on at once: so much is in it, and lands when its sender may have hung up.
const IN_THE_LINK: usize = 16 << 10;

/// The frames of a handshake: every byte of them is authenticated.
const HANDSHAKE: u32 = 1;

/// Which faults there are, and how often.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// After about so many bytes comes a fault; 0 means that nothing happens.
    pub every: u64,
    /// Bytes wait for at most this long: connections overtake each other.
    pub delay: Option<Duration>,
    /// The connection is cut, in the middle of whatever it carries.
    pub cut: bool,
    /// One direction ends, the other goes on.
    pub half_close: bool,
    /// A bit is changed in what is protected: see the module's text.
    pub corrupt: bool,
    /// A bit is changed anywhere.
    pub anywhere: bool,
    /// From then on about so many bytes pass in a second.
    pub throttle: Option<u64>,
    /// From then on bytes vanish without a notice.
    pub black_hole: bool,
    /// All connections share a link that carries so many bytes in a second, each way, and that has no room for many.
    pub slow: Option<u64>,
}

impl Faults {
    /// Everything that a network may do to plain TCP between two hosts.
    pub fn all(every: u64, delay: Duration) -> Faults {
        Faults {
            every,
            delay: Some(delay),
            cut: true,
            half_close: true,
            corrupt: true,
            anywhere: false,
            throttle: Some(2 << 20),
            black_hole: true,
            slow: None,
        }
    }

    fn kinds(&self) -> Vec<Fault> {
        let mut kinds = Vec::new();
        let mut add = |wanted: bool, kind: Fault| wanted.then(|| kinds.push(kind));
        // Delays are the rule, the others are exceptions.
        for _ in 0..4 {
            add(self.delay.is_some(), Fault::Delay);
        }
        add(self.cut, Fault::Cut);
        add(self.half_close, Fault::HalfClose);
        add(self.corrupt || self.anywhere, Fault::Corrupt);
        add(self.throttle.is_some(), Fault::Throttle);
        add(self.black_hole, Fault::BlackHole);
        kinds
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Delay,
    Cut,
    HalfClose,
    Corrupt,
    Throttle,
    BlackHole,
}

/// How often each thing has happened.
#[derive(Debug, Default)]
pub struct Happened {
    /// Connections that came.
    pub connections: AtomicU64,
    /// Bytes that were passed on.
    pub bytes: AtomicU64,
    /// Those of them that came from the target.
    pub answered: AtomicU64,
    /// Frames that were begun towards the target.
    pub asked: AtomicU64,
    /// Waits.
    pub delays: AtomicU64,
    /// Connections that were cut or half closed.
    pub cuts: AtomicU64,
    /// Bits that were changed.
    pub corruptions: AtomicU64,
    /// Directions in which bytes vanish.
    pub black_holes: AtomicU64,
    /// Directions in which bytes are held up.
    pub throttles: AtomicU64,
    /// How often a side of a connection spoke that had not spoken last: two of them are a round trip.
    pub turns: AtomicU64,
}

struct Shared {
    target: Mutex<SocketAddr>,
    faults: Faults,
    seed: u64,
    over: AtomicBool,
    /// Whether what comes from the target waits.
    held: AtomicBool,
    happened: Happened,
    open: Mutex<Vec<TcpStream>>,
    /// When a slow link is free again, each way.
    free: [Mutex<Instant>; 2],
}

/// A proxy; its connections end with it.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Listens on loopback for connections to be passed on to `target`, which [`aim`](Self::aim) can change.
    pub fn start(target: SocketAddr, seed: u64, faults: Faults) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            faults,
            seed,
            over: AtomicBool::new(false),
            held: AtomicBool::new(false),
            happened: Happened::default(),
            open: Mutex::default(),
            free: [(); 2].map(|()| Mutex::new(Instant::now())),
        });
        shared.narrow(&listener);
        let accepting = Arc::clone(&shared);
        thread::Builder::new().name("proxy".into()).spawn(move || accepting.accept(&listener)).unwrap();
        Proxy { address, shared }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes new connections on to that address.
    pub fn aim(&self, target: SocketAddr) {
        *self.shared.target.lock() = target;
    }

    /// What has happened so far.
    pub fn happened(&self) -> &Happened {
        &self.shared.happened
    }

    /// Keeps back what comes from the target, or lets it pass again. What is asked of the target passes meanwhile.
    pub fn hold_answers(&self, held: bool) {
        self.shared.held.store(held, Ordering::Release);
    }

    /// A device on the network path resets the oldest connection towards the side that opened it, and not towards the target.
    pub fn reset_oldest(&self) {
        let open = self.shared.open.lock();
        rustix::net::connect_unspec(&open[0]).unwrap();
    }

    /// Cuts all connections that are open now.
    pub fn cut_all(&self) {
        for stream in self.shared.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        self.cut_all();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    /// Keeps the kernel from taking much more for a slow link than there is room for in it: one segment of loopback.
    fn narrow(&self, socket: &impl AsFd) {
        if self.faults.slow.is_some() {
            set_socket_recv_buffer_size(socket, 4 * IN_THE_LINK).unwrap();
        }
    }

    /// Waits until so many bytes have gone through a slow link, behind those that are in it.
    fn carry(&self, direction: u64, bytes: usize) {
        let Some(rate) = self.faults.slow else { return };
        let through = {
            let mut free = self.free[direction as usize].lock();
            *free = (*free).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / rate as f64);
            *free
        };
        thread::sleep(through.saturating_duration_since(Instant::now()));
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for number in 0.. {
            let Ok((near, _)) = listener.accept() else { return };
            if self.over.load(Ordering::Acquire) {
                return;
            }
            let target = *self.target.lock();
            let Ok(far) = TcpStream::connect_timeout(&target, Duration::from_secs(2)) else { continue };
            self.happened.connections.fetch_add(1, Ordering::Relaxed);
            self.narrow(&far);
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            {
                let mut open = self.open.lock();
                open.extend([near.try_clone(), far.try_clone()].into_iter().flatten());
            }
            let speaker = Arc::new(AtomicU64::new(u64::MAX));
            for direction in 0..2u64 {
                let (from, to) = match direction {
                    0 => (near.try_clone(), far.try_clone()),
                    _ => (far.try_clone(), near.try_clone()),
                };
                let (Ok(from), Ok(to)) = (from, to) else { return };
                let seed = mix(self.seed) ^ mix(2 * number + direction + 1);
                let shared = Arc::clone(self);
                let mut pump = Pump {
                    from,
                    to,
                    direction,
                    speaker: Arc::clone(&speaker),
                    random: Random::from_seed(seed),
                    frames: Frames::default(),
                    rate: None,
                };
                let _ = thread::Builder::new().name("proxy".into()).spawn(move || pump.run(&shared));
            }
        }
    }
}

/// Where the headers are in a stream of frames.
#[derive(Default)]
struct Frames {
    /// The part of a header that has passed.
    header: Vec<u8>,
    /// Bytes of the frame that are still to come behind its header.
    left: u64,
    /// Frames that have begun.
    count: u32,
}

impl Frames {
    /// Takes note of what passes; returns the places of bytes that a change in is noticed by the receiver.
    fn pass(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut protected = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            if self.left > 0 {
                let step = (bytes.len() - at).min(usize::try_from(self.left).unwrap_or(usize::MAX));
                if self.count <= HANDSHAKE {
                    protected.extend(at..at + step);
                }
                self.left -= step as u64;
                at += step;
                continue;
            }
            // Kind, flags, descriptors and lengths; the id behind them says which request is meant, and nothing checks it.
            if self.header.len() < 16 {
                protected.push(at);
            }
            self.header.push(bytes[at]);
            at += 1;
            if let Some(whole) = self.header.first_chunk::<HEADER_LEN>() {
                if let Ok(header) = Header::decode(whole) {
                    self.left = header.rest() as u64 + header.payload_len;
                }
                self.count += 1;
                self.header.clear();
            }
        }
        protected
    }
}

struct Pump {
    from: TcpStream,
    to: TcpStream,
    direction: u64,
    /// The direction of this connection in which bytes passed last.
    speaker: Arc<AtomicU64>,
    random: Random,
    frames: Frames,
    rate: Option<u64>,
}

impl Pump {
    fn run(&mut self, shared: &Shared) {
        let _ = self.from.set_read_timeout(Some(LOOK));
        let portion = if shared.faults.slow.is_some() { IN_THE_LINK } else { PORTION };
        let mut buffer = vec![0; portion];
        let mut until = self.next(&shared.faults);
        let mut vanish = false;
        while !shared.over.load(Ordering::Acquire) {
            let len = match self.from.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => len,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(_) => {
                    // A reset is passed on, so that nobody takes it for an end.
                    let _ = self.to.shutdown(Shutdown::Both);
                    break;
                }
            };
            let mut bytes = &mut buffer[..len];
            while !bytes.is_empty() {
                let now = bytes.len().min(usize::try_from(until).unwrap_or(usize::MAX));
                let (head, tail) = std::mem::take(&mut bytes).split_at_mut(now);
                if !vanish && !self.pass(head, shared, None) {
                    return self.end();
                }
                until -= now as u64;
                bytes = tail;
                if until > 0 {
                    continue;
                }
                until = self.next(&shared.faults);
                let fault = self.random.pick(&shared.faults.kinds());
                let happened = &shared.happened;
                match fault {
                    Fault::Delay => {
                        happened.delays.fetch_add(1, Ordering::Relaxed);
                        let most = shared.faults.delay.unwrap_or_default().as_micros() as u64;
                        thread::sleep(self.random.micros(most));
                    }
                    Fault::Cut => {
                        happened.cuts.fetch_add(1, Ordering::Relaxed);
                        return self.end();
                    }
                    Fault::HalfClose => {
                        happened.cuts.fetch_add(1, Ordering::Relaxed);
                        let _ = self.to.shutdown(Shutdown::Write);
                        vanish = true;
                    }
                    Fault::Corrupt if !vanish && !bytes.is_empty() => {
                        let all = std::mem::take(&mut bytes);
                        if !self.pass(all, shared, Some(shared.faults.anywhere)) {
                            return self.end();
                        }
                    }
                    Fault::Corrupt => {}
                    Fault::Throttle => {
                        happened.throttles.fetch_add(1, Ordering::Relaxed);
                        self.rate = shared.faults.throttle;
                    }
                    Fault::BlackHole => {
                        happened.black_holes.fetch_add(1, Ordering::Relaxed);
                        vanish = true;
                    }
                }
            }
        }
        let _ = self.to.shutdown(Shutdown::Write);
    }

    /// Bytes until the next fault.
    fn next(&mut self, faults: &Faults) -> u64 {
        if faults.every == 0 || faults.kinds().is_empty() {
            return u64::MAX;
        }
        1 + self.random.below(2 * faults.every)
    }

    /// Passes bytes on, one bit of them changed where that is asked for. False: there is nobody.
    fn pass(&mut self, bytes: &mut [u8], shared: &Shared, corrupt: Option<bool>) -> bool {
        let before = self.frames.count;
        let protected = self.frames.pass(bytes);
        if self.direction == 0 {
            let begun = self.frames.count - before;
            shared.happened.asked.fetch_add(u64::from(begun), Ordering::Relaxed);
        }
        while self.direction == 1
            && shared.held.load(Ordering::Acquire)
            && !shared.over.load(Ordering::Acquire)
        {
            thread::sleep(LOOK / 20);
        }
        if let Some(anywhere) = corrupt {
            let place = match (anywhere, protected.as_slice()) {
                (true, _) => Some(self.random.below(bytes.len() as u64) as usize),
                (false, []) => None,
                (false, places) => Some(self.random.pick(places)),
            };
            if let Some(place) = place {
                bytes[place] ^= 1 << self.random.below(8);
                shared.happened.corruptions.fetch_add(1, Ordering::Relaxed);
            }
        }
        shared.happened.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if self.direction == 1 {
            shared.happened.answered.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        shared.carry(self.direction, bytes.len());
        if self.speaker.swap(self.direction, Ordering::Relaxed) != self.direction {
            shared.happened.turns.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(rate) = self.rate {
            thread::sleep(Duration::from_secs_f64(bytes.len() as f64 / rate.max(1) as f64));
        }
        self.to.write_all(bytes).is_ok()
    }

    fn end(&self) {
        let _ = self.from.shutdown(Shutdown::Both);
        let _ = self.to.shutdown(Shutdown::Both);
    }
}
