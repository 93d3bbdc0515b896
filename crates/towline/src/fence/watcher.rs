//! The process's one liveness watcher: a thread that holds our life mutexes and sleeps on those of peers.
//!
//! A robust mutex belongs to the thread that locked it, so one thread that lives as long as the process locks
//! all of ours; it sleeps in `futex_waitv` on the peers' words and on one of its own, without timeouts. When a
//! peer is killed, the kernel marks the words of its watcher thread early in that thread's exit, long before
//! the memory of the process is freed and its sockets close.

#![allow(unsafe_code, reason = "blocks signals on the library's own thread, and asks for short turns for it")]

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::thread::{ClockId, futex};

use crate::fence::pins::{PinPage, Side};
use crate::fence::robust::{OWNER_DIED, TID_MASK, WAITERS};
use crate::fork::{guard, in_child};
use crate::runtime;
use crate::{Error, Kind, Result};

/// Watches at the same time in one process: the kernel waits for 128 words, and one is our own.
pub(crate) const MAX_WATCHES: usize = 127;
/// Holds at the same time in one process: the kernel walks at most 2048 of a thread's mutexes at its death.
pub(crate) const MAX_HOLDS: usize = 1900;
/// The watcher answers in microseconds; past this it is stuck in a callback.
const HOLD_WAIT: Duration = Duration::from_secs(1);

/// Our life mutex in a page, held by the watcher thread until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    id: u64,
}

/// A watch on the other side's life mutex; ends when dropped.
///
/// After the drop the callback does not start any more; one that has started may still be running.
#[derive(Debug)]
pub(crate) struct Watch {
    id: u64,
}

/// Has the watcher thread lock our mutex in that page; returns once it is held.
///
/// `Exhausted` past [`MAX_HOLDS`], `Invalid` when that side's mutex is held already, `Unavailable` where the C
/// library has no robust mutexes and in a forked child.
pub(crate) fn hold(page: Arc<PinPage>, side: Side) -> Result<Hold> {
    let (answer, answered) = sync_channel(1);
    let id = {
        let mut state = WATCHER.started()?;
        if state.thread == Some(std::thread::current().id()) {
            return Err(Error::invalid("connect", "a death callback cannot wait for the thread it runs on"));
        }
        if state.holds >= MAX_HOLDS {
            let message = format!("{MAX_HOLDS} same-host peers hold this process's life already");
            return Err(Error::new(Kind::Exhausted, "connect", message));
        }
        state.holds += 1;
        let id = state.next_id();
        state.requests.push_back(Request::Hold { id, page, side, answer });
        id
    };
    WATCHER.nudge();
    // From here on the drop takes the request back, whatever comes of it.
    let hold = Hold { id };
    match answered.recv_timeout(HOLD_WAIT) {
        Ok(result) => result.map(|()| hold),
        Err(RecvTimeoutError::Timeout) => {
            Err(Error::new(Kind::Timeout, "connect", "the liveness watcher did not answer within a second"))
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::new(Kind::Internal, "connect", "the liveness watcher lost the request"))
        }
    }
}

/// Calls `on_death` on the watcher thread when that side's process dies while it holds its mutex.
///
/// Either order of `hold` there and `watch` here will do, but a process that dies *before* it held is not
/// seen. A side that lets go in good order ends the watch without a call; one that holds and lets go before
/// a watch that was there first has noticed leaves it waiting for the next hold. The callback is short and
/// never blocks; no lock is held while it runs, and a panic in it is contained.
///
/// `Exhausted` past [`MAX_WATCHES`], `Unavailable` without `futex_waitv` (kernels before 5.16, some sandboxes)
/// and in a forked child: the caller then relies on a pidfd or on the end of the connection.
pub(crate) fn watch(page: Arc<PinPage>, side: Side, on_death: Box<dyn FnOnce() + Send>) -> Result<Watch> {
    let id = {
        let mut state = WATCHER.started()?;
        if !state.can_watch {
            return Err(Error::new(Kind::Unavailable, "connect", "the kernel has no futex_waitv"));
        }
        if state.watches.len() >= MAX_WATCHES {
            let message = format!("{MAX_WATCHES} same-host peers are watched already");
            return Err(Error::new(Kind::Exhausted, "connect", message));
        }
        let id = state.next_id();
        let mut seen_held = false;
        // Looked at here as well, so that a side that holds now and lets go at once ends the watch; whatever
        // the word says, the watcher thread acts on it.
        let _ = examine(page.life(side).word(), &mut seen_held);
        state.watches.insert(id, Entry { page, side, seen_held, on_death });
        id
    };
    WATCHER.nudge();
    Ok(Watch { id })
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !in_child() {
            WATCHER.state.lock().requests.push_back(Request::Release { id: self.id });
            WATCHER.nudge();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !in_child() {
            // Bound to a name: what the callback owns is dropped after the lock is given back.
            let ended = WATCHER.state.lock().watches.remove(&self.id);
            if ended.is_some() {
                WATCHER.nudge();
            }
        }
    }
}

static WATCHER: Watcher = Watcher {
    state: Mutex::new(State {
        thread: None,
        can_watch: false,
        last_id: 0,
        holds: 0,
        requests: VecDeque::new(),
        watches: BTreeMap::new(),
    }),
    wake: AtomicU32::new(0),
};

struct Watcher {
    state: Mutex<State>,
    /// Changes with every change of the set; the thread sleeps on it together with the peers' words.
    wake: AtomicU32,
}

struct State {
    thread: Option<ThreadId>,
    can_watch: bool,
    last_id: u64,
    /// Holds that exist or are asked for.
    holds: usize,
    requests: VecDeque<Request>,
    watches: BTreeMap<u64, Entry>,
}

enum Request {
    Hold { id: u64, page: Arc<PinPage>, side: Side, answer: SyncSender<Result<()>> },
    Release { id: u64 },
}

struct Entry {
    page: Arc<PinPage>,
    side: Side,
    /// Tells "not yet held" from "let go".
    seen_held: bool,
    on_death: Box<dyn FnOnce() + Send>,
}

/// What a life word says.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Nothing new: sleep until the word is no longer this.
    Sleep(u32),
    Died,
    LetGo,
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

impl Watcher {
    /// The state, with the thread running.
    fn started(&'static self) -> Result<parking_lot::MutexGuard<'static, State>> {
        guard("connect")?;
        let mut state = self.state.lock();
        if state.thread.is_none() {
            state.can_watch = futex_waitv_works();
            let watching = runtime::start_thread("connect", "towline-watch", || self.run())?;
            state.thread = Some(watching.thread().id());
        }
        Ok(state)
    }

    fn nudge(&self) {
        self.wake.fetch_add(1, Ordering::Release);
        // It can only fail for an address that is not mapped.
        let _ = futex::wake(&self.wake, futex::Flags::PRIVATE, 1);
    }

    fn run(&self) {
        come_promptly();
        runtime::wait_for_nothing();
        let mut held = BTreeMap::new();
        loop {
            // Read before the set: a change after this makes the sleep return at once.
            let wake = self.wake.load(Ordering::Acquire);
            self.serve_requests(&mut held);
            let sleepers = self.examine_watches();
            self.sleep(wake, &sleepers);
        }
    }

    fn serve_requests(&self, held: &mut BTreeMap<u64, (Arc<PinPage>, Side)>) {
        loop {
            let Some(request) = self.state.lock().requests.pop_front() else { return };
            match request {
                Request::Hold { id, page, side, answer } => {
                    let result = page.life(side).try_lock();
                    if result.is_ok() {
                        // A peer that watched before this sleeps on a free word, which a lock does not wake.
                        let _ = futex::wake(page.life(side).word(), futex::Flags::empty(), i32::MAX as u32);
                        held.insert(id, (page, side));
                    }
                    // Nobody listens when the caller gave up: its release is in the queue.
                    let _ = answer.send(result);
                }
                Request::Release { id } => {
                    // The page goes only after the unlock: the kernel's walk of this thread's list must never
                    // meet an address that is no longer mapped.
                    if let Some((page, side)) = held.remove(&id) {
                        page.life(side).unlock();
                    }
                    self.state.lock().holds -= 1;
                }
            }
        }
    }

    /// Calls back for the dead, forgets who let go, and gives the words to sleep on with their pages.
    fn examine_watches(&self) -> Vec<(Arc<PinPage>, Side, u32)> {
        let mut sleepers = Vec::new();
        let mut ended = Vec::new();
        {
            let mut state = self.state.lock();
            let mut gone = Vec::new();
            for (id, entry) in &mut state.watches {
                match examine(entry.page.life(entry.side).word(), &mut entry.seen_held) {
                    Verdict::Sleep(value) => sleepers.push((entry.page.clone(), entry.side, value)),
                    verdict => gone.push((*id, verdict)),
                }
            }
            for (id, verdict) in gone {
                if let Some(entry) = state.watches.remove(&id) {
                    ended.push((entry, verdict));
                }
            }
        }
        for (entry, verdict) in ended {
            // Calling or dropping, both are the caller's code.
            let outcome = catch_unwind(AssertUnwindSafe(|| match verdict {
                Verdict::Died => (entry.on_death)(),
                Verdict::LetGo | Verdict::Sleep(_) => drop(entry.on_death),
            }));
            if outcome.is_err() {
                tracing::error!("a death callback panicked");
            }
        }
        sleepers
    }

    /// Sleeps until a word differs from what was seen. Whatever ends the sleep, all words are looked at again.
    fn sleep(&self, wake: u32, sleepers: &[(Arc<PinPage>, Side, u32)]) {
        let result = if sleepers.is_empty() {
            futex::wait(&self.wake, futex::Flags::PRIVATE, wake, None)
        } else {
            let own = waiter(&self.wake, wake, futex::WaitFlags::PRIVATE);
            let peers = sleepers.iter().map(|(page, side, value)| {
                waiter(page.life(*side).word(), *value, futex::WaitFlags::empty())
            });
            let waiters: Vec<futex::Wait> = std::iter::once(own).chain(peers).collect();
            futex::waitv(&waiters, futex::WaitvFlags::empty(), None, ClockId::Monotonic).map(drop)
        };
        match result {
            // A word changed before the sleep, a signal, or a wake: look again.
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                // Out of kernel memory is the one cause left; without a pause it would spin.
                tracing::warn!(%error, "the liveness watcher cannot sleep");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Reads a life word, and asks the kernel to wake us when it changes.
fn examine(word: &AtomicU32, seen_held: &mut bool) -> Verdict {
    loop {
        let value = word.load(Ordering::Acquire);
        if value & OWNER_DIED != 0 {
            return Verdict::Died;
        }
        if value & TID_MASK == 0 {
            // Never flagged while it is free: the C library's trylock takes only a word that is zero.
            return if *seen_held { Verdict::LetGo } else { Verdict::Sleep(value) };
        }
        *seen_held = true;
        let flagged = value | WAITERS;
        if value == flagged
            || word.compare_exchange(value, flagged, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return Verdict::Sleep(flagged);
        }
    }
}

fn waiter(word: &AtomicU32, value: u32, flags: futex::WaitFlags) -> futex::Wait {
    let mut waiter = futex::Wait::new();
    waiter.val = u64::from(value);
    waiter.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
    waiter.flags = flags | futex::WaitFlags::SIZE_U32;
    waiter
}

/// Whether the kernel has the call and the sandbox allows it: an empty list is a mistake only to a kernel
/// that knows the call.
fn futex_waitv_works() -> bool {
    futex::waitv(&[], futex::WaitvFlags::empty(), None, ClockId::Monotonic) == Err(Errno::INVAL)
}

/// Asks for short turns on the calling thread, which Linux gives sooner (from 6.12 on; before, nothing changes): this thread has
/// something to do for some microseconds when a process has died. Then others wait for it: when a peer has, to know, and when its
/// own process is killed, for it to leave, since the kernel lets go of its mutexes no sooner.
fn come_promptly() {
    /// The kernel's `struct sched_attr`, in the size of its first version.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    /// The shortest that the kernel takes.
    const TURN: u64 = 100_000;
    let size = size_of::<Attributes>() as u32;
    let mut attributes = Attributes { size, ..Attributes::default() };
    // SAFETY: the kernel fills at most `size` bytes of the structure, which is of that size and of plain numbers; both calls
    // are about this thread alone.
    unsafe {
        let read = libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0);
        if read == 0 && attributes.policy == libc::SCHED_OTHER as u32 {
            attributes.size = size;
            attributes.runtime = TURN;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_word_is_flagged_only_while_it_is_held() {
        let word = AtomicU32::new(0);
        let mut seen_held = false;
        assert_eq!(examine(&word, &mut seen_held), Verdict::Sleep(0));
        assert_eq!(word.load(Ordering::Relaxed), 0);
        word.store(4711, Ordering::Relaxed);
        assert_eq!(examine(&word, &mut seen_held), Verdict::Sleep(4711 | WAITERS));
        assert_eq!(examine(&word, &mut seen_held), Verdict::Sleep(4711 | WAITERS));
        word.store(0, Ordering::Relaxed);
        assert_eq!(examine(&word, &mut seen_held), Verdict::LetGo);
        word.store(OWNER_DIED | WAITERS, Ordering::Relaxed);
        assert_eq!(examine(&word, &mut seen_held), Verdict::Died);
        assert_eq!(examine(&word, &mut false), Verdict::Died, "dead before the watch began");
    }
}
