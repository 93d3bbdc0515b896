//! Taking memory back while a peer is inside a copy: every step at a moment that the test chooses.

#![allow(clippy::unwrap_used, clippy::panic)]
#![allow(unsafe_code, reason = "describes memory of the test")]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::served::looked;
use super::{PeerPins, PeerProcess, Registered, Registry, StillPinned};
use crate::budget::{Budget, Charge};
use crate::fence::life::{LifePage, LifeView};
use crate::fence::pins::{PinPage, Side};
use crate::fence::table::TableView;
use crate::fence::tests::{PinnedByAChild, alone_with_the_watcher, until};
use crate::memory::{ExternalStorage, Place, SharedStorage, SystemStorage};
use crate::session::{GrantHandle, Medium, Session};
use crate::{Access, Endpoint, Kind, Result};

const LEN: usize = 4096;
const WATCHDOG: Duration = Duration::from_secs(20);

/// An owner, and a user that touches its memory directly.
struct Pair {
    owner: Endpoint,
    user: Endpoint,
    session: Option<Arc<Session>>,
    /// Sessions watch their peers, whose number the process shares.
    _alone: MutexGuard<'static, ()>,
}

impl Pair {
    fn open() -> Pair {
        let alone = alone_with_the_watcher();
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        Pair { owner, user, session: None, _alone: alone }
    }

    /// A region of the owner, its memory, and the user's handle on it.
    fn share(&mut self) -> (Registered<Arc<SharedStorage>>, Weak<SharedStorage>, Arc<GrantHandle>) {
        let storage = Arc::new(SharedStorage::new(LEN).unwrap());
        let memory = Arc::downgrade(&storage);
        let region = self.owner.register(storage, Access::READ_WRITE).unwrap();
        let (ticket, until) = (region.ticket().unwrap(), Instant::now() + WATCHDOG);
        let session = self.session.get_or_insert_with(|| {
            Session::connect(&self.user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap()
        });
        let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        let (_, handle) = imported.outcomes.pop().unwrap().unwrap();
        (region, memory, handle)
    }
}

/// The endpoint, and what a peer of it pays.
fn charged(owner: &Endpoint) -> (&Arc<Registry>, Charge) {
    (&owner.core().registry, Budget::new("tests", 1).account().charge("test", 0).unwrap())
}

fn is_stale<T>(result: Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == Kind::Stale)
}

/// A copy that must not begin.
fn never<T>(_: &crate::fence::table::Row) -> Result<T> {
    panic!("a copy of what is gone")
}

/// Tries to take it back without waiting, which a peer that is inside does not allow.
fn still_pinned<S: crate::Storage>(region: Registered<S>) -> Registered<S> {
    let StillPinned { error, registration } = region.into_storage_within(Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    assert!(error.message().contains("peer user"), "{error}");
    registration
}

#[test]
fn a_copy_during_which_the_region_was_revoked_is_stale() {
    let mut pair = Pair::open();
    let (region, _, handle) = pair.share();
    handle.pinned("read", |_| Ok(())).unwrap();
    let copied = handle.pinned("read", |_| {
        assert!(region.core.revoke());
        Ok(())
    });
    assert!(is_stale(copied), "bytes that may be another's were given out");
}

#[test]
fn a_revoked_region_lets_nobody_in_while_others_are_still_inside() {
    let mut pair = Pair::open();
    let (region, _, handle) = pair.share();
    let mut revoked = None;
    let outer = handle.pinned("read", |row| {
        let region = still_pinned(region);
        assert_eq!(row.generation(), 0);
        assert!(is_stale(handle.pinned("read", never::<()>)));
        revoked = Some(still_pinned(region));
        Ok(())
    });
    assert!(is_stale(outer));
    assert!(is_stale(handle.pinned("read", never::<()>)));
    revoked.unwrap().into_storage_within(Duration::ZERO).unwrap();
}

#[test]
fn a_pin_of_the_process_counts_like_one_of_a_thread() {
    let mut pair = Pair::open();
    let (_kept, _, outer) = pair.share();
    let (region, _, inner) = pair.share();
    let mut revoked = None;
    // The outer copy has the thread's own slot, so the inner one takes one of the process.
    let copied = outer.pinned("read", |_| {
        inner.pinned("read", |_| {
            revoked = Some(still_pinned(region));
            Ok(())
        })
    });
    assert!(is_stale(copied));
    revoked.unwrap().into_storage_within(Duration::ZERO).unwrap();
}

#[test]
fn memory_that_is_dropped_under_a_peer_is_parked_until_the_peer_is_out() {
    let mut pair = Pair::open();
    let (region, memory, handle) = pair.share();
    let copied = handle.pinned("write", |_| {
        drop(region);
        assert_eq!(pair.owner.stats().parked, (1, LEN));
        assert!(memory.upgrade().is_some(), "freed under a peer");
        Ok(())
    });
    assert!(is_stale(copied));
    until("the memory is freed", || pair.owner.stats().parked == (0, 0));
    // What is not parked any more is gone.
    assert_eq!((memory.strong_count(), pair.owner.stats().regions), (0, 0));
}

#[test]
fn closing_a_region_asks_the_sessions_that_are_served_it_and_no_others() {
    let _alone = alone_with_the_watcher();
    let owner = Endpoint::open("owner").unwrap();
    let register = || owner.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap();
    let (few, many, gone) = (register(), register(), register());
    let path = crate::Routing::default().require("tcp").unwrap();
    let users: Vec<_> = (0..8).map(|number| Endpoint::open(&format!("user-{number}")).unwrap()).collect();
    let remotes: Vec<_> =
        users.iter().map(|user| user.import_with(&many.ticket().unwrap(), &path).unwrap()).collect();
    let two: Vec<_> =
        users[..2].iter().map(|user| user.import_with(&few.ticket().unwrap(), &path).unwrap()).collect();
    let released = users[0].import_with(&gone.ticket().unwrap(), &path).unwrap();
    drop(released);
    until("the grant is given back", || gone.core.streams.count() == 0);
    let looked_at = |region: Registered<SystemStorage>| {
        let before = looked::so_far();
        region.into_storage().unwrap();
        looked::so_far() - before
    };
    assert_eq!([looked_at(gone), looked_at(few), looked_at(many)], [0, 2, 8]);
    drop((two, remotes));
}

#[test]
fn a_pin_that_a_thread_has_left_behind_does_not_count_after_its_end() {
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap();
    let (row, generation) = (region.core.row, region.generation());
    let table = owner.core().registry.table.fd().unwrap().try_clone().unwrap();
    let table = TableView::map(table, owner.core().registry.table.rows()).unwrap();
    let page = Arc::new(PinPage::create().unwrap());
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let process = PeerProcess::of(process, None);
    let pins = PeerPins::new(Arc::clone(&page), "peer", process, charged(&owner));
    let life = LifePage::ours().unwrap().fd().try_clone_to_owned().unwrap();
    pins.lives(LifeView::map(life).unwrap());
    let (pinned, go) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slot = LifePage::thread_slot().unwrap();
            std::mem::forget(page.pin_thread(slot, table.row(row).unwrap(), generation).ok().unwrap());
            pinned.wait();
            go.wait();
        });
        pinned.wait();
        region.core.revoke();
        assert!(pins.holds(generation), "the thread lives");
        go.wait();
    });
    until("the pin is reclaimed", || !pins.holds(generation));
}

#[test]
fn the_pin_of_a_thread_counts_until_that_thread_has_died() {
    let owner = Endpoint::open("owner").unwrap();
    let (mut child, page, life) = PinnedByAChild::start();
    // A process that does not end: only the thread's own slot can tell.
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let process = PeerProcess::of(process, None);
    let pins = PeerPins::new(Arc::new(page), "peer", process, charged(&owner));
    let generation = child.generation;
    let holds = || pins.holds(generation);
    assert!(holds(), "nothing is known of its threads yet");
    pins.lives(life);
    assert!(holds() && holds(), "the thread lives");
    child.end_the_thread();
    until("the pin is reclaimed", || !holds());
}

/// Says on which thread it was dropped.
struct Noted(std::sync::mpsc::Sender<String>);

impl Drop for Noted {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().name().unwrap_or_default().to_owned());
    }
}

impl crate::memory::Holder for parking_lot::Mutex<std::sync::mpsc::Sender<String>> {
    fn segment_gone(self: Arc<Self>, _segment: u64) {
        drop(Noted(self.lock().clone()));
    }
}

/// Something that happens on the event loop.
struct Soon(parking_lot::Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl crate::runtime::Timer for Soon {
    fn fired(self: Arc<Self>, _key: u64) {
        if let Some(job) = self.0.lock().take() {
            job();
        }
    }
}

fn on_the_event_loop(job: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    let job = move || {
        assert_eq!(std::thread::current().name(), Some("towline-io"));
        job();
        done.send(()).unwrap();
    };
    let soon = Arc::new(Soon(parking_lot::Mutex::new(Some(Box::new(job)))));
    let timer: Weak<dyn crate::runtime::Timer> = Arc::downgrade(&(Arc::clone(&soon) as _));
    crate::runtime::reactor().unwrap().at(Instant::now(), timer, 0);
    ended.recv_timeout(WATCHDOG).unwrap();
}

/// On the thread that learns of peers' deaths.
fn on_the_watcher(job: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    let page = Arc::new(PinPage::create().unwrap());
    let job = move || {
        assert_eq!(std::thread::current().name(), Some("towline-watch"));
        job();
        done.send(()).unwrap();
    };
    // A thread that ends with the mutex in its hands, once it is watched.
    let (go, goes) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let _watch = std::thread::scope(|scope| {
        scope.spawn(|| {
            page.life(Side::Initiator).try_lock().unwrap();
            go.wait();
            goes.wait();
        });
        go.wait();
        let watched = crate::fence::watcher::watch(Arc::clone(&page), Side::Initiator, Box::new(job));
        goes.wait();
        watched.unwrap()
    });
    ended.recv_timeout(WATCHDOG).unwrap();
}

#[test]
fn what_ends_on_the_event_loop_or_the_watcher_is_dropped_elsewhere() {
    let _alone = alone_with_the_watcher();
    let owner = Endpoint::open("owner").unwrap();
    let (say, said) = std::sync::mpsc::channel();
    let elsewhere = |what: &str| {
        let name = said.recv_timeout(WATCHDOG).unwrap();
        assert!(name != "towline-io" && name != "towline-watch", "{what}: dropped on {name}");
    };
    let bytes: &'static mut [u8] = Box::leak(vec![0; 64].into_boxed_slice());
    let addr = bytes.as_mut_ptr().expose_provenance();
    let register = || {
        let owned: Box<dyn std::any::Any + Send + Sync> =
            Box::new(parking_lot::Mutex::new(Noted(say.clone())));
        // SAFETY: the bytes are never freed.
        let storage = unsafe { ExternalStorage::new(addr, 64, Place::Host, Some(owned)) }.unwrap();
        owner.register(storage, Access::READ).unwrap()
    };
    for (thread, on) in
        [("loop", on_the_event_loop as fn(Box<dyn FnOnce() + Send>)), ("watcher", on_the_watcher)]
    {
        let region = register();
        on(Box::new(move || drop(region)));
        elsewhere(&format!("a region, {thread}"));

        let region = register();
        let using = region.core.begin_use("test").unwrap();
        drop(region);
        let registry = Arc::clone(&owner.core().registry);
        on(Box::new(move || {
            drop(using);
            registry.let_go();
        }));
        elsewhere(&format!("what was parked, {thread}"));

        let region = owner.register(SharedStorage::new(1 << 20).unwrap(), Access::READ).unwrap();
        let holder = Arc::new(parking_lot::Mutex::new(say.clone()));
        let weak: Weak<dyn crate::memory::Holder> = Arc::downgrade(&(Arc::clone(&holder) as _));
        region.core.segment.as_ref().unwrap().segment.lent_to(weak);
        let span = region.span(0, 8).unwrap();
        drop(region.into_storage().unwrap());
        on(Box::new(move || drop(span)));
        elsewhere(&format!("the last one with a segment mapped, {thread}"));
    }
}
