//! What an endpoint is made of: what it has registered, its sessions, and what its transports keep.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::options::EndpointOptions;
use super::stats::{AllCounters, Stats};
use crate::budget::Budget;
use crate::identity::{Identity, Incarnation};
use crate::operations::Operations;
use crate::region::Registry;
use crate::route::Routing;
use crate::session::{OwnerPaths, Sessions};
use crate::transfer::Limits;
use crate::transport::TransportContext;
use crate::transport::nixl::Domain;
use crate::{Error, Kind, Result, runtime};

/// Endpoints of this process, by incarnation: their regions are reached without any socket.
static HERE: Mutex<Option<HashMap<Incarnation, Weak<EndpointCore>>>> = Mutex::new(None);

/// One endpoint.
pub(crate) struct EndpointCore {
    pub(crate) registry: Arc<Registry>,
    pub(crate) operations: Arc<Operations>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) transports: Arc<TransportContext>,
    limits: Limits,
    checksums: bool,
    pub(super) counters: AllCounters,
}

impl EndpointCore {
    pub(super) fn open(options: EndpointOptions) -> Result<Arc<EndpointCore>> {
        options.nixl.check()?;
        let memory = options.settings.quotas.memory;
        let held = Budget::new("what it keeps", memory);
        let registry = Registry::open(
            &options.name,
            options.max_regions,
            options.limits.no_progress,
            held.part(memory / 8),
        )?;
        let identity = registry.identity().clone();
        let transports = Arc::new(TransportContext {
            identity,
            routing: options.routing,
            nixl: Domain::new(options.nixl),
        });
        let operations = Operations::of(&registry);
        let paths = Arc::clone(&transports) as Arc<dyn OwnerPaths>;
        let sessions = Sessions::new(&registry, &operations, paths, held, options.settings);
        let core = Arc::new(EndpointCore {
            registry,
            operations,
            sessions,
            transports,
            limits: options.limits,
            checksums: options.checksums,
            counters: AllCounters::default(),
        });
        core.sessions.listen(&options.listen, &options.advertise)?;
        HERE.lock().get_or_insert_default().insert(core.identity().incarnation, Arc::downgrade(&core));
        Ok(core)
    }

    /// The endpoint of this process with that incarnation.
    pub(super) fn here(incarnation: &Incarnation) -> Option<Arc<EndpointCore>> {
        HERE.lock().as_ref()?.get(incarnation)?.upgrade().filter(|core| !core.registry.is_closed())
    }

    pub(super) fn identity(&self) -> &Identity {
        self.registry.identity()
    }

    pub(super) fn name(&self) -> &str {
        self.registry.name()
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn routing(&self) -> &Routing {
        &self.transports.routing
    }

    /// Whether checksums go along with bytes over sockets.
    pub(super) fn checksums(&self) -> bool {
        self.checksums
    }

    pub(super) fn stats(&self) -> Stats {
        let serving = self.sessions.serving();
        let in_flight = serving.iter().map(|peer| peer.in_flight());
        Stats {
            paths: self.counters.snapshot(),
            regions: self.registry.count(),
            operations: self.operations.count(),
            parked: self.registry.parked(),
            refused: self.registry.refused(),
            refused_handshakes: self.sessions.refusals.total(),
            peers: serving.len(),
            unauthenticated: self.sessions.unauthenticated(),
            peer_memory: self.sessions.held.used(),
            in_flight: in_flight.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1)),
            nixl: self.transports.nixl.stats(),
        }
    }

    /// Ends everything, then waits until nobody is inside the memory of any region. What is still used at the limit stays
    /// registered and revoked: it is waited for again by the next call, and parked where it is dropped.
    pub(super) fn close(&self, within: Duration) -> Result<()> {
        let first = self.leave();
        if first {
            self.operations.end_all(&Error::new(Kind::Canceled, "close", "the endpoint was closed"));
        }
        let regions = self.registry.revoke_all();
        if first {
            self.hang_up();
        }
        runtime::may_block("close")?;
        self.registry.drain(&regions, within)
    }

    /// From here on its tickets are worth nothing in this process; true for the call that did it.
    fn leave(&self) -> bool {
        let first = self.registry.shut();
        if first && let Some(here) = HERE.lock().as_mut() {
            here.remove(&self.identity().incarnation);
        }
        first
    }

    fn hang_up(&self) {
        self.registry.table.close();
        self.sessions.hang_up();
        self.registry.hang_up();
    }
}

impl Drop for EndpointCore {
    fn drop(&mut self) {
        if !crate::fork::in_child() && self.leave() {
            self.hang_up();
        }
    }
}
