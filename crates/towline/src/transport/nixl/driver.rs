//! Who asks NIXL how far things are: callers that wait, and one thread while something is in flight.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use towline_sys::nixl::Progress;

use super::attachment::{PATIENT_LOOKS, PinnedRegion};
use super::engine::Engine;
use super::lists::Key;
use super::of_nixl;
use super::peer::Asked;
use super::run::{Outcome, Run};
use crate::region::RegionUse;
use crate::transfer::Several;
use crate::{Error, runtime};

/// A transfer that was stopped gets this long for NIXL to end what it has begun, before it ends without being quiet.
const GRACE: Duration = Duration::from_millis(50);

/// NIXL's general error may mean that the peer has died: the connection shows it, but perhaps a little later.
const WHY: Duration = Duration::from_millis(500);

/// The thread stays this long without anything to do.
const LINGER: Duration = Duration::from_millis(200);

/// A caller that waits drives for this long without success before it sleeps.
const STAY: Duration = Duration::from_millis(2);

/// Rounds without success: first immediately, then behind the others that want the processor, then after a sleep.
const SPINS: u32 = 32;
const YIELDS: u32 = 1000;
/// A peer waits for what this agent does: others get the processor only now and then.
const HELPING_SPINS: u32 = 8;
const LEAST_SLEEP: Duration = Duration::from_micros(20);
const MOST_SLEEP: Duration = Duration::from_millis(1);

/// The thread looks this often where it only waits for NIXL to let go, or for what may still arrive.
const RARELY: Duration = Duration::from_millis(2);

/// What is in flight, and what the thread has to do besides.
#[derive(Default)]
pub(super) struct Driving {
    flights: Vec<Flight>,
    /// Until when a peer needs this agent to do its part.
    help_until: Option<Instant>,
    /// The core on which that peer's thread waits for it.
    asked_from: Option<u16>,
    /// What is called when the last bytes of a peer that is gone must have come.
    cooling: Vec<(Instant, Box<dyn FnOnce() + Send>)>,
    running: bool,
}

/// A request that NIXL is at.
pub(super) struct Flight {
    asked: Option<Asked>,
    key: Option<Key>,
    /// Of each of its parts.
    pinned: Option<Several<PinnedRegion>>,
    /// The local memory, where no transfer keeps it.
    keep: Option<RegionUse>,
    report: Option<(Arc<Run>, usize)>,
    /// The transfer has ended without waiting for this.
    left_behind: bool,
    looks: u32,
    stopping: Option<Instant>,
    failed: Option<(Error, Instant)>,
}

/// What a look at a flight shows.
enum Look {
    Flying,
    /// The transfer ends, though NIXL is still at it.
    Leave(Error),
    Landed(Outcome),
}

impl Flight {
    pub(super) fn new(
        asked: Asked,
        key: Option<Key>,
        pinned: Several<PinnedRegion>,
        keep: Option<RegionUse>,
        failed: Option<Error>,
    ) -> Flight {
        Flight {
            asked: Some(asked),
            key,
            pinned: Some(pinned),
            keep,
            report: None,
            left_behind: false,
            looks: 0,
            stopping: None,
            failed: failed.map(|error| (error, Instant::now())),
        }
    }

    pub(super) fn for_request(mut self, run: &Arc<Run>, request: usize) -> Flight {
        self.report = Some((Arc::clone(run), request));
        self
    }

    fn op(&self) -> &'static str {
        self.report.as_ref().map_or("transfer", |(run, _)| run.transfer.op.name())
    }

    fn look(&mut self, now: Instant) -> Look {
        let (Some(pinned), Some(asked)) = (&self.pinned, &mut self.asked) else {
            return Look::Landed(Outcome::of_all(Ok(())));
        };
        let attachment = &pinned.first().attachment;
        let engine = &attachment.engine;
        if let Some((error, since)) = &self.failed {
            // Who is gone, and what was taken back, comes before what NIXL calls an error.
            if let Err(gone) = attachment.handle.session().alive() {
                return Look::Landed(Outcome::of_all(Err(gone)));
            }
            return match Outcome::blamed(pinned, self.op()) {
                Some(outcome) => Look::Landed(outcome),
                None if attachment.peer.is_own() || now.duration_since(*since) >= WHY => {
                    Look::Landed(Outcome::of_all(Err(error.clone())))
                }
                None => Look::Flying,
            };
        }
        engine.counts.polls.fetch_add(1, Ordering::Relaxed);
        match asked.request().map(|request| request.progress()) {
            None | Some(Ok(Progress::Done)) => return Look::Landed(Outcome::of_all(Ok(()))),
            Some(Err(error)) => {
                self.failed = Some((of_nixl(error), now));
                return Look::Flying;
            }
            Some(Ok(Progress::InProgress)) => {}
        }
        self.looks = self.looks.saturating_add(1);
        match attachment.handle.session().alive() {
            Err(error) if !self.left_behind => return Look::Leave(error),
            Ok(()) if self.looks >= PATIENT_LOOKS => attachment.call_for_help(),
            _ => {}
        }
        if self.left_behind {
            return Look::Flying;
        }
        let Some((run, _)) = self.report.as_ref().filter(|(run, _)| run.transfer.is_stopped()) else {
            return Look::Flying;
        };
        if now.duration_since(*self.stopping.get_or_insert(now)) >= GRACE {
            return Look::Leave(run.transfer.stop_error());
        }
        Look::Flying
    }

    /// NIXL has let go: reports, unless that was done before.
    fn land(mut self, outcome: Outcome) {
        let op = self.op();
        let (asked, pinned) = (self.asked.take(), self.pinned.take());
        let outcome = match (&pinned, outcome.is_good()) {
            (Some(pinned), true) => {
                if let Some(asked) = asked {
                    pinned.first().attachment.keep(self.key, asked);
                }
                Outcome::checked(pinned, op)
            }
            (Some(pinned), false) => {
                if outcome.is_of_nixl() {
                    pinned.first().attachment.peer.broke();
                }
                drop(asked);
                outcome
            }
            (None, _) => outcome,
        };
        drop((pinned, self.keep.take()));
        if let Some((run, request)) = self.report.take() {
            run.landed();
            if !self.left_behind {
                run.ended(request, outcome);
            }
            run.work();
        }
    }
}

impl Engine {
    /// Sees to it that a thread asks how far that is.
    pub(super) fn add(self: &Arc<Self>, flight: Flight) {
        self.flying.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.lock();
        state.flights.push(flight);
        self.run_thread(&mut state);
    }

    /// Drives the agent for that long, for a peer's sake; `core` is where, on this host, that peer waits.
    pub(super) fn help(self: &Arc<Self>, time: Duration, core: Option<u16>) {
        self.counts.help_given.fetch_add(1, Ordering::Relaxed);
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        state.help_until = Some(state.help_until.map_or(until, |before| before.max(until)));
        state.asked_from = core;
        self.run_thread(&mut state);
    }

    /// Calls that at that time, and takes in what comes until then.
    pub(super) fn cool(self: &Arc<Self>, at: Instant, then: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.lock();
        state.cooling.push((at, then));
        self.run_thread(&mut state);
    }

    /// Something may have changed.
    pub(super) fn look(&self) {
        self.changed.notify_all();
    }

    fn run_thread(self: &Arc<Self>, state: &mut Driving) {
        if state.running {
            self.changed.notify_all();
            return;
        }
        let engine = Arc::clone(self);
        let driving = move || {
            let inside = Exiting::enter();
            engine.run();
            // Perhaps the last use of the agent: inside too, or never where NIXL may be taken apart already.
            match EXITING.load(Ordering::SeqCst) {
                true => std::mem::forget(engine),
                false => drop(engine),
            }
            drop(inside);
        };
        match runtime::start_thread("drive", "towline-nixl", driving) {
            Ok(_) => state.running = true,
            // Callers that wait drive too; the next one that comes tries again.
            Err(error) => tracing::warn!(%error, "no thread to drive NIXL"),
        }
    }

    /// Looks at everything once; says how much of it has landed, or `None` where another thread is looking.
    pub(super) fn drive(self: &Arc<Self>) -> Option<usize> {
        let _inside = Exiting::enter_unless_exiting()?;
        let looking = self.driving.try_lock()?;
        let mut flights = std::mem::take(&mut self.state.lock().flights);
        let now = Instant::now();
        let (mut landed, mut left) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < flights.len() {
            match flights[at].look(now) {
                Look::Flying => at += 1,
                Look::Leave(error) => {
                    flights[at].left_behind = true;
                    self.counts.unquiet.fetch_add(1, Ordering::Relaxed);
                    left.extend(flights[at].report.clone().map(|report| (report, error)));
                    at += 1;
                }
                Look::Landed(outcome) => landed.push((flights.swap_remove(at), outcome)),
            }
        }
        {
            let mut state = self.state.lock();
            flights.append(&mut state.flights);
            state.flights = flights;
        }
        drop(looking);
        // Not under a lock: what is notified may be the user's code.
        for ((run, request), error) in left {
            run.ended(request, Outcome::of_all(Err(error)));
            run.work();
        }
        let count = landed.len();
        self.flying.fetch_sub(count, Ordering::SeqCst);
        landed.into_iter().for_each(|(flight, outcome)| flight.land(outcome));
        Some(count)
    }

    /// A caller that waits drives until that is so, or until it has been fruitless for a while.
    pub(super) fn drive_until(self: &Arc<Self>, over: impl Fn() -> bool) {
        self.helpers.fetch_add(1, Ordering::SeqCst);
        let mut since = Instant::now();
        let mut rounds = 0;
        while !over() && since.elapsed() < STAY {
            if self.drive().is_some_and(|landed| landed > 0) {
                since = Instant::now();
                rounds = 0;
            }
            rounds += 1;
            if rounds > SPINS {
                std::thread::yield_now();
            }
        }
        self.helpers.fetch_sub(1, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// The thread: as long as something is in flight.
    fn run(self: &Arc<Self>) {
        let mut fruitless = 0_u32;
        let mut idle_since: Option<Instant> = None;
        loop {
            if EXITING.load(Ordering::SeqCst) {
                return;
            }
            let now = Instant::now();
            let (flying, alone, helping, cooled, cooling, asked_from) = {
                let mut state = self.state.lock();
                if state.help_until.is_some_and(|until| until <= now) {
                    state.help_until = None;
                }
                let cooled: Vec<_> = state.cooling.extract_if(.., |(at, _)| *at <= now).collect();
                let alone = state.flights.iter().all(|flight| flight.left_behind);
                let flying = self.flying.load(Ordering::SeqCst) > 0;
                let helping = state.help_until.is_some();
                (flying, alone, helping, cooled, !state.cooling.is_empty(), state.asked_from.take())
            };
            if let Some(core) = asked_from {
                step_aside(core);
            }
            cooled.into_iter().for_each(|(_, then)| then());
            if !flying && !helping && !cooling {
                let since = *idle_since.get_or_insert(now);
                let mut state = self.state.lock();
                self.changed.wait_for(&mut state, LINGER);
                let nothing =
                    state.flights.is_empty() && state.help_until.is_none() && state.cooling.is_empty();
                if nothing && self.flying.load(Ordering::SeqCst) == 0 && since.elapsed() >= LINGER {
                    state.running = false;
                    return;
                }
                continue;
            }
            idle_since = None;
            if self.helpers.load(Ordering::SeqCst) > 0 && !helping && !cooling {
                self.sleep(MOST_SLEEP);
                continue;
            }
            match self.drive() {
                Some(landed) if landed > 0 => fruitless = 0,
                _ => fruitless = fruitless.saturating_add(1),
            }
            if helping || cooling {
                // What this agent has to do for its peers is done in any call; messages it gets none.
                let _ = self.agent.notifications();
            }
            match fruitless {
                // A peer waits for every single look, unless a device does the work.
                _ if helping && !self.by_rdma() && !fruitless.is_multiple_of(HELPING_SPINS) => {
                    std::hint::spin_loop()
                }
                _ if helping && !self.by_rdma() => std::thread::yield_now(),
                0..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS if !alone || helping => std::thread::yield_now(),
                _ if alone && !helping => self.sleep(RARELY),
                _ => self.sleep((LEAST_SLEEP * (fruitless / YIELDS)).clamp(LEAST_SLEEP, MOST_SLEEP)),
            }
        }
    }

    fn sleep(&self, time: Duration) {
        let mut state = self.state.lock();
        self.changed.wait_for(&mut state, time);
    }
}

/// Leaves a core to the thread of a peer that waits there for this one.
///
/// The kernel wakes a thread near the one that asked for it. Both of them spin, so they would take turns on that core, each for
/// as long as the other lets it, while another core is idle; the kernel may leave it so for good.
fn step_aside(core: u16) {
    let core = usize::from(core);
    if rustix::thread::sched_getcpu() != core {
        return;
    }
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let mut others = allowed;
    if core < CpuSet::MAX_CPU {
        others.unset(core);
    }
    if others.count() == 0 {
        return;
    }
    // It moves at once. Afterwards it may run anywhere again, and stays where it is until there is a reason.
    if rustix::thread::sched_setaffinity(None, &others).is_ok() {
        let _ = rustix::thread::sched_setaffinity(None, &allowed);
    }
}

/// How long a process that ends waits for them: on a busy machine a thread needs a while to come out of a call.
const LEAVE: Duration = Duration::from_secs(2);

/// The process is ending: what UCX stands on is about to be taken apart.
static EXITING: AtomicBool = AtomicBool::new(false);
static INSIDE: AtomicUsize = AtomicUsize::new(0);

pub(super) struct Exiting;

impl Exiting {
    pub(super) fn enter() -> Exiting {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        Exiting
    }

    /// The same for a thread of any kind that posts or looks; `None` where the process is ending, and nobody may go in any more.
    pub(super) fn enter_unless_exiting() -> Option<Exiting> {
        // The process says that it ends and then counts who is inside; here it is the other way round, so that one sees the other.
        let inside = Exiting::enter();
        (!EXITING.load(Ordering::SeqCst)).then_some(inside)
    }
}

impl Drop for Exiting {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Gets the threads out of NIXL before a process that ends takes NIXL's libraries apart under them.
#[allow(unsafe_code, reason = "registers what is done at the end of the process")]
pub(super) fn leave_before_exit() {
    extern "C" fn leave() {
        EXITING.store(true, Ordering::SeqCst);
        let until = Instant::now() + LEAVE;
        while INSIDE.load(Ordering::SeqCst) > 0 && Instant::now() < until && !crate::fork::in_child() {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a function without arguments that neither unwinds nor touches what other handlers have freed.
        let _ = unsafe { libc::atexit(leave) };
    });
}
