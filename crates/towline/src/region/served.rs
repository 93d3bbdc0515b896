//! The sessions over which a region is served, so that taking it back asks these and no others.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::RegionCore;
use super::audit::{Counted, Entry};
use crate::budget::Charge;

/// A session over which bytes of regions go.
pub(crate) trait Stream: Send + Sync {
    /// Its number, used once in the life of the process.
    fn id(&self) -> u64;

    /// Stops serving that generation: what comes in goes nowhere, what is not sent yet is answered with `Stale`.
    fn break_off(&self, generation: u64);
}

/// One session that is served a region. Lives as long as a grant or a request of it.
pub(crate) struct Served {
    region: Weak<RegionCore>,
    session: u64,
    stream: Weak<dyn Stream>,
    /// Where the peer's accesses are counted: for the region, and for the endpoint.
    entries: [Arc<Entry>; 2],
    _charge: Charge,
}

/// What an owner keeps of a session that is served a region; a `Weak` keeps the region's own place after its end.
pub(crate) const SERVED: usize =
    size_of::<Served>() + 4 * size_of::<(u64, Weak<Served>)>() + size_of::<RegionCore>() + 128;

impl Served {
    pub(crate) fn region(&self) -> &Weak<RegionCore> {
        &self.region
    }

    pub(crate) fn count(&self, what: Counted) {
        self.entries.iter().for_each(|entry| entry.count(what));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(region) = self.region.upgrade() {
            let mut all = region.streams.0.lock();
            // Another may have come in its place.
            if all.get(&self.session).is_some_and(|one| one.strong_count() == 0) {
                all.remove(&self.session);
            }
        }
    }
}

/// The sessions over which one region is served.
#[derive(Default)]
pub(super) struct Streams(Mutex<HashMap<u64, Weak<Served>>>);

#[cfg(test)]
impl Streams {
    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

impl RegionCore {
    /// That session is served this region from now on; or already was.
    pub(crate) fn serve_over<S: Stream + 'static>(
        self: &Arc<Self>,
        stream: &Arc<S>,
        entries: impl FnOnce() -> [Arc<Entry>; 2],
        charge: Charge,
    ) -> Arc<Served> {
        let mut all = self.streams.0.lock();
        let known = all.get(&stream.id()).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let weak = Arc::downgrade(stream);
            let served = Arc::new(Served {
                region: Arc::downgrade(self),
                session: stream.id(),
                stream: weak,
                entries: entries(),
                _charge: charge,
            });
            all.insert(stream.id(), Arc::downgrade(&served));
            served
        })
    }

    /// Stops serving its bytes over sockets: a slow peer does not delay the taking back.
    pub(super) fn break_streams(&self) {
        // Let go of without the lock, which the last of them takes when it goes.
        let all: Vec<_> = self.streams.0.lock().values().filter_map(Weak::upgrade).collect();
        for stream in all.iter().filter_map(|served| served.stream.upgrade()) {
            #[cfg(test)]
            looked::at_one();
            stream.break_off(self.generation);
        }
    }
}

/// Counts the sessions that are looked at when regions are taken back by this thread.
#[cfg(test)]
pub(super) mod looked {
    use std::cell::Cell;

    thread_local! {
        static AT: Cell<usize> = const { Cell::new(0) };
    }

    pub(in crate::region) fn at_one() {
        AT.set(AT.get() + 1);
    }

    pub(in crate::region) fn so_far() -> usize {
        AT.get()
    }
}
