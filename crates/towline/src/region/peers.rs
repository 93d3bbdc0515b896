//! The pins that peers on this host hold, and when they count no more.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::endpoint::EndpointCore;
use crate::fence::life::{LifeView, SlotState};
use crate::fence::pins::{Holder, PinPage};
use crate::progress::{self, Interest, Readiness, Source, Token};
use crate::sync::lock;

/// The pins of one peer process on this endpoint's regions.
pub(crate) struct PeerPins {
    pub(crate) page: Arc<PinPage>,
    pub(crate) peer: String,
    /// The peer's process as seen from here; none where it is in another pid namespace.
    process: Option<Pid>,
    /// The peer's life page: tells which of its threads have died.
    life: OnceLock<LifeView>,
    /// The connection has ended. The peer may not know yet, so its pins still count.
    ended: AtomicBool,
    /// The peer has exited, or has said that it holds no pin: none counts any more.
    gone: AtomicBool,
    exit: Mutex<Option<Arc<ExitWatch>>>,
    me: Weak<PeerPins>,
}

impl PeerPins {
    pub(crate) fn new(page: Arc<PinPage>, peer: &str, pid: i32) -> Arc<PeerPins> {
        Arc::new_cyclic(|me| PeerPins {
            page,
            peer: peer.to_owned(),
            process: Pid::from_raw(pid),
            life: OnceLock::new(),
            ended: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            exit: Mutex::new(None),
            me: me.clone(),
        })
    }

    /// The peer has shown which of its threads live.
    pub(crate) fn lives(&self, life: LifeView) {
        let _ = self.life.set(life);
    }

    /// The connection has ended.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// None of its pins counts any more.
    pub(crate) fn let_go(&self) {
        self.gone.store(true, Ordering::Release);
        drop(lock(&self.exit).take());
    }

    /// Whether none of its pins counts any more. Asks the kernel only about peers whose connection has ended.
    pub(super) fn is_gone(&self) -> bool {
        if !self.gone.load(Ordering::Acquire)
            && self.ended.load(Ordering::Acquire)
            && self.process.is_some_and(|process| test_kill_process(process) == Err(rustix::io::Errno::SRCH))
        {
            self.let_go();
        }
        self.gone.load(Ordering::Acquire)
    }

    /// Whether some copy of the peer may still be inside that generation's memory.
    pub(super) fn holds(&self, generation: u64, endpoint: &Arc<EndpointCore>) -> bool {
        if self.is_gone() {
            return false;
        }
        let held = self.page.holders(generation).into_iter().any(|holder| {
            let died = match holder {
                Holder::Thread(slot) => {
                    self.life.get().is_some_and(|life| life.slot_state(slot) == SlotState::Died)
                }
                Holder::Process(_) => false,
            };
            if died {
                self.page.reclaim(holder, generation);
            }
            !died
        });
        if held {
            self.watch_exit(endpoint);
        }
        held
    }

    /// Rings the bell when the process has exited. Only while it stands in the way: an idle peer costs no descriptor.
    fn watch_exit(&self, endpoint: &Arc<EndpointCore>) {
        let mut exit = lock(&self.exit);
        let Some(process) = self.process.filter(|_| exit.is_none()) else { return };
        let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return };
        let watch = Arc::new(ExitWatch {
            process,
            pins: self.me.clone(),
            endpoint: Arc::downgrade(endpoint),
            token: OnceLock::new(),
        });
        let weak: Weak<dyn Source> = Arc::downgrade(&watch) as Weak<dyn Source>;
        let watched =
            progress::reactor().and_then(|reactor| reactor.add(watch.process.as_fd(), Interest::READ, weak));
        match watched {
            Ok(token) => {
                let _ = watch.token.set(token);
                *exit = Some(watch);
            }
            Err(error) => tracing::debug!(%error, "the exit of a peer cannot be watched"),
        }
    }
}

/// Waits for a peer's process to exit.
struct ExitWatch {
    process: OwnedFd,
    pins: Weak<PeerPins>,
    endpoint: Weak<EndpointCore>,
    token: OnceLock<Token>,
}

impl Source for ExitWatch {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        if let Some(pins) = self.pins.upgrade() {
            pins.let_go();
        }
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.let_go();
        }
    }
}

impl Drop for ExitWatch {
    fn drop(&mut self) {
        if let (Some(token), Ok(reactor)) = (self.token.get(), progress::reactor()) {
            reactor.remove(*token, self.process.as_fd());
        }
    }
}
