//! Two connectors and memory with known bytes.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use towline::connect::{Connector, Descriptor};
use towline::{Buffer, Endpoint, Limits, MemoryAccess, Routing, SharedStorage, SystemStorage};

/// Nothing here takes that long unless it hangs.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// The paths that two endpoints of one process can be made to take for host memory, where nobody has to opt in.
pub(crate) fn paths() -> Vec<&'static str> {
    let takes = |path: &towline::PathProperties| path.serves.has_words() && !path.apart && !path.opt_in;
    towline::path_properties().into_iter().filter(takes).map(|path| path.name).collect()
}

/// Those of them by which the owner is contacted.
pub(crate) fn paths_with_contact() -> Vec<&'static str> {
    let here = |name: &str| {
        let path = towline::path_properties().into_iter().find(|path| path.name == name);
        path.is_some_and(|path| path.contact == towline::Contact::Nothing)
    };
    paths().into_iter().filter(|path| !here(path)).collect()
}

/// A connector whose endpoint takes only that path.
pub(crate) fn over(path: &str, name: &str) -> Connector {
    limited(path, name, Limits::default())
}

pub(crate) fn limited(path: &str, name: &str, limits: Limits) -> Connector {
    let routing = Routing::default().require(path).unwrap();
    Connector::with_endpoint(Endpoint::options(name).routing(routing).limits(limits).open().unwrap())
}

/// A passive and an active side.
pub(crate) fn pair(path: &str) -> (Connector, Connector) {
    (over(path, "encode"), over(path, "decode"))
}

pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed)).collect()
}

/// Shared memory that holds a pattern.
pub(crate) fn filled(seed: u8, len: usize) -> Descriptor {
    let storage = SharedStorage::new(len).unwrap();
    storage.write_at(0, &pattern(seed, len)).unwrap();
    Descriptor::new(storage)
}

/// Private memory of zeros.
pub(crate) fn empty(len: usize) -> Descriptor {
    Descriptor::from(Buffer::new(SystemStorage::new(len).unwrap()))
}

/// Shared memory of zeros.
pub(crate) fn empty_shared(len: usize) -> Descriptor {
    Descriptor::new(SharedStorage::new(len).unwrap())
}

pub(crate) fn bytes(descriptor: &Descriptor) -> Vec<u8> {
    let mut bytes = vec![0; descriptor.capacity()];
    descriptor.storage().unwrap().read_at(0, &mut bytes).unwrap();
    bytes
}

pub(crate) fn regions(connector: &Connector) -> usize {
    connector.endpoint().unwrap().stats().regions
}

/// Waits until it holds; for what another thread does a moment later.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WATCHDOG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let started = Instant::now();
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        assert!(started.elapsed() < WATCHDOG, "the future hangs");
        std::thread::park_timeout(WATCHDOG);
    }
}
