//! Writes that end in the rarest moments: of an owner that is held up between its look at a peer and the copy of that peer's bytes, and of
//! an initiator that stops one while it is being sent.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::connection::Next;
use super::connection::moments::{self, Hold, Moment};
use crate::memory::{Dtype, ReduceOp, SharedStorage, SystemStorage};
use crate::runtime::rseq;
use crate::skip::skip;
use crate::{
    Access, Endpoint, Error, Kind, Limits, MemoryDescription, Registered, Remote, Routing, Transfer,
};

const LEN: usize = 1 << 20;
const WATCHDOG: Duration = Duration::from_secs(30);

const NO_RSEQ: &str = "this machine gives no restartable sequences";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Scene {
    _one: MutexGuard<'static, ()>,
    region: Registered<SharedStorage>,
    _local: Registered<SystemStorage>,
    transfer: Transfer,
    go_on: mpsc::Sender<()>,
    _ends: (Endpoint, Endpoint),
}

impl Drop for Scene {
    fn drop(&mut self) {
        moments::be_inexact(false);
        moments::hold_nobody();
    }
}

/// Shorter than the time between two heartbeats: what an owner says by them does not count.
const SHORT: Duration = Duration::from_millis(300);

/// A write whose owner is held up at that moment, and has not come back when the write ends.
fn held_up(path: &str, moment: Moment, inexact: bool) -> Scene {
    held_up_at(path, SHORT, moment, inexact, |user, remote, local| user.write(remote, local).start())
}

fn held_up_at(
    path: &str,
    no_progress: Duration,
    moment: Moment,
    inexact: bool,
    start: impl Fn(&Endpoint, &Remote, &Registered<SystemStorage>) -> crate::Result<Transfer>,
) -> Scene {
    let one = ONE_AT_A_TIME.lock();
    moments::be_inexact(inexact);
    let limits = Limits { no_progress, ..Limits::default() };
    let owner = Endpoint::open("owner").unwrap();
    let user = Endpoint::options("user").limits(limits).open().unwrap();
    let region = owner.register(SharedStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    local.write_at(0, &vec![7; LEN]).unwrap();
    let routing = Routing::default().require(path).unwrap();
    let remote = user.import_within(&region.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    let (go_on, arrived) = hold_at(moment, &region);
    let transfer = start(&user, &remote, &local).unwrap();
    arrived.recv_timeout(WATCHDOG).expect("the owner comes to that moment");
    let error = transfer.wait_for(WATCHDOG).expect("a write to an owner that stands still ends").unwrap_err();
    assert!(matches!(error.kind(), Kind::Timeout | Kind::Disconnected), "{error}");
    Scene { _one: one, region, _local: local, transfer, go_on, _ends: (owner, user) }
}

/// Holds the thread that comes to that moment of the region until it may go on; says when it has come.
fn hold_at(moment: Moment, region: &Registered<SharedStorage>) -> (mpsc::Sender<()>, mpsc::Receiver<()>) {
    let (go_on, wait) = mpsc::channel::<()>();
    let (there, arrived) = mpsc::channel();
    let wait = Mutex::new(wait);
    let act = Arc::new(move || {
        there.send(()).unwrap();
        // Until the test says so, or is gone.
        let _ = wait.lock().recv();
    });
    let base = region.addr();
    moments::hold(Hold { moment, memory: base..base + LEN, act });
    (go_on, arrived)
}

fn bytes(region: &Registered<SharedStorage>) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Looks for that long whether anything lands.
fn stays(region: &Registered<SharedStorage>, as_it_was: &[u8], time: Duration) {
    let until = Instant::now() + time;
    loop {
        let last = Instant::now() >= until;
        assert!(as_it_was == bytes(region), "bytes landed behind a quiet end");
        if last {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn nothing_lands_of(scene: &Scene) {
    assert!(scene.transfer.quiet());
    let before = bytes(&scene.region);
    scene.go_on.send(()).unwrap();
    stays(&scene.region, &before, Duration::from_millis(50));
}

#[test]
fn a_lane_waits_for_what_was_asked_over_it_and_for_nothing_else() {
    let _one = ONE_AT_A_TIME.lock();
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let region = owner.register(SharedStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let routing = Routing::default().require("unix").unwrap();
    let remote = user.import_within(&region.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    let (go_on, arrived) = hold_at(Moment::BeforeTheCopy, &region);
    let transfer = user.write(&remote, &local).start().unwrap();
    arrived.recv_timeout(WATCHDOG).expect("the owner comes to that moment");
    moments::hold_nobody();
    let session = user.core().sessions.to_owners.lock().values().next().cloned().unwrap();
    let lanes = session.open_lanes().unwrap();
    let waiting = |next: Next| lanes.iter().filter(|lane| lane.next() == next).count();
    assert_eq!((waiting(Next::More), waiting(Next::Nothing)), (1, lanes.len() - 1));
    go_on.send(()).unwrap();
    transfer.wait_for(WATCHDOG).expect("a write whose owner goes on ends").unwrap();
    assert_eq!(waiting(Next::Nothing), lanes.len());
}

#[test]
fn of_a_write_whose_owner_stands_between_look_and_copy_nothing_lands_any_more() {
    if !rseq::is_possible() {
        let test = "of_a_write_whose_owner_stands_between_look_and_copy_nothing_lands_any_more";
        return skip(test, "rseq", NO_RSEQ);
    }
    for path in ["unix", "tcp"] {
        nothing_lands_of(&held_up(path, Moment::BeforeTheCopy, false));
    }
}

#[test]
fn of_a_reduction_whose_owner_stands_between_look_and_change_nothing_is_changed_any_more() {
    if !rseq::is_possible() {
        let test = "of_a_reduction_whose_owner_stands_between_look_and_change_nothing_is_changed_any_more";
        return skip(test, "rseq", NO_RSEQ);
    }
    for path in ["unix", "tcp"] {
        let scene = held_up_at(path, SHORT, Moment::BeforeTheCopy, false, |user, remote, local| {
            user.reduce_into(remote, local, ReduceOp::Sum, Dtype::U8).start()
        });
        nothing_lands_of(&scene);
    }
}

#[test]
fn where_look_and_copy_are_two_steps_a_write_is_not_quiet_until_the_copy_between_them_is_made() {
    let scene = held_up("unix", Moment::BeforeTheCopy, true);
    assert!(!scene.transfer.quiet(), "the owner is about to copy, and the user believes it is quiet");
    assert!(!scene.transfer.wait_quiet(Duration::from_millis(50)));
    let before = bytes(&scene.region);
    scene.go_on.send(()).unwrap();
    assert!(scene.transfer.wait_quiet(WATCHDOG), "it never becomes quiet");
    let quiet = bytes(&scene.region);
    assert_ne!(before, quiet, "the moment was not the one before the copy");
    stays(&scene.region, &quiet, Duration::from_millis(20));
}

#[test]
fn of_a_write_whose_owner_stands_before_its_look_nothing_lands_any_more() {
    for path in ["unix", "tcp"] {
        nothing_lands_of(&held_up(path, Moment::BeforeTheLook, true));
    }
}

#[test]
fn an_owner_that_is_heard_and_never_says_what_became_of_a_write_does_not_keep_it() {
    for path in ["unix", "tcp"] {
        let limit = Duration::from_secs(1);
        let scene = held_up_at(path, limit, Moment::BeforeTheLook, true, |user, remote, local| {
            user.write(remote, local).start()
        });
        nothing_lands_of(&scene);
    }
}

/// Waits for who asks for that memory to have looked whether the transfer was stopped.
fn looked(memory: std::ops::Range<usize>) -> impl Fn() + Send + Sync {
    let (say, received) = mpsc::channel();
    let act = Arc::new(move || say.send(()).unwrap_or_default());
    moments::hold(Hold { moment: Moment::Looked, memory, act });
    let received = Mutex::new(received);
    move || received.lock().recv_timeout(WATCHDOG).expect("it looks")
}

#[test]
fn a_write_that_is_stopped_while_it_is_being_sent_ends_whoever_takes_its_requests_back() {
    // As many as are asked for at once over one lane: the first is on its way, and the others wait behind it.
    const PIECES: usize = 4;
    for path in ["unix", "tcp"] {
        let _one = ONE_AT_A_TIME.lock();
        let owner = Endpoint::open("owner").unwrap();
        let user = Endpoint::options("user").lanes(1).open().unwrap();
        let region = owner.register(SharedStorage::new(PIECES * LEN).unwrap(), Access::READ_WRITE).unwrap();
        let local = user.register(SystemStorage::new(PIECES * LEN).unwrap(), Access::NONE).unwrap();
        let routing = Routing::default().require(path).unwrap();
        let remote = user.import_within(&region.ticket().unwrap(), &routing, WATCHDOG).unwrap();
        // So that the lane is there.
        user.write(&remote, &local).start().unwrap().wait().unwrap();
        // The owner stands at the first piece, and does not read what is behind it.
        let (owner_goes_on, owner_waits) = mpsc::channel::<()>();
        let owner_waits = Mutex::new(owner_waits);
        let piece = |base: usize, index: usize| base + index * LEN..base + (index + 1) * LEN;
        let act = Arc::new(move || {
            let _ = owner_waits.lock().recv();
        });
        moments::hold(Hold { moment: Moment::BeforeTheCopy, memory: piece(region.addr(), 0), act });
        // The thread that sends has queued the last request and not looked yet …
        let (asked, received) = mpsc::channel();
        let (sender_goes_on, sender_waits) = mpsc::channel::<()>();
        let sender_waits = Mutex::new(sender_waits);
        let act = Arc::new(move || {
            asked.send(()).unwrap();
            let _ = sender_waits.lock().recv();
        });
        moments::hold(Hold { moment: Moment::Asked, memory: piece(local.addr(), PIECES - 1), act });
        // … when the transfer is stopped; and it looks before the thread that stops it does.
        let looked = looked(piece(local.addr(), PIECES - 1));
        let sender_goes_on = Mutex::new(sender_goes_on);
        let act = Arc::new(move || {
            sender_goes_on.lock().send(()).unwrap();
            looked();
        });
        moments::hold(Hold { moment: Moment::Stopping, memory: piece(local.addr(), 0), act });
        let transfer = user.write(&remote, &local).start().unwrap();
        received.recv_timeout(WATCHDOG).expect("the last request is queued");
        transfer.cancel();
        moments::hold_nobody();
        drop(owner_goes_on);
        let error = transfer.wait_for(WATCHDOG).expect("a write that was stopped ends").unwrap_err();
        assert_eq!(error.kind(), Kind::Canceled, "{error}");
        // None of them was waited for in vain, until its lane was reset.
        for failure in transfer.failures() {
            assert_eq!(failure.error.kind(), Kind::Canceled, "{}", failure.error);
        }
        user.write(&remote, &local).start().unwrap().wait().unwrap();
    }
}

#[test]
fn a_read_that_is_stopped_while_it_is_being_asked_for_does_not_end_before_the_bytes_that_are_coming_go_nowhere()
 {
    for path in ["unix", "tcp"] {
        let _one = ONE_AT_A_TIME.lock();
        let owner = Endpoint::open("owner").unwrap();
        let user = Endpoint::options("user").lanes(1).open().unwrap();
        let region = owner.register(SharedStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        let routing = Routing::default().require(path).unwrap();
        let remote = user.import_within(&region.ticket().unwrap(), &routing, WATCHDOG).unwrap();
        user.read(&remote, &local).start().unwrap().wait().unwrap();
        let memory = local.addr()..local.addr() + LEN;
        let (say, received) = mpsc::channel();
        let held_at = |moment| {
            let (go_on, waits) = mpsc::channel::<()>();
            let (say, waits) = (say.clone(), Mutex::new(waits));
            let act = Arc::new(move || {
                say.send(()).unwrap();
                let _ = waits.lock().recv();
            });
            moments::hold(Hold { moment, memory: memory.clone(), act });
            go_on
        };
        // The thread that asks has not looked yet whether it was stopped, and the first bytes are there.
        let (asker, receiver) = (held_at(Moment::Asked), held_at(Moment::Landing));
        let transfer = user.read(&remote, &local).start().unwrap();
        for _ in 0..2 {
            received.recv_timeout(WATCHDOG).expect("it is asked for and answered");
        }
        let looked = looked(memory.clone());
        let asker = Mutex::new(Some(asker));
        let act = Arc::new(move || {
            drop(asker.lock().take());
            looked();
        });
        moments::hold(Hold { moment: Moment::Stopping, memory: memory.clone(), act });
        std::thread::scope(|scope| {
            scope.spawn(|| transfer.cancel());
            let early = transfer.wait_for(Duration::from_millis(200));
            if early.is_some() {
                local.write_at(0, &vec![9; LEN]).unwrap();
            }
            drop(receiver);
            // All of it may have come before the stop got hold of it.
            if let Err(error) = transfer.wait_for(WATCHDOG).expect("a read that was stopped ends") {
                assert_eq!(error.kind(), Kind::Canceled, "{error}");
            }
            local.write_at(0, &vec![9; if early.is_some() { 0 } else { LEN }]).unwrap();
        });
        moments::hold_nobody();
        // Whatever was on its way has been dealt with when this is answered.
        let other = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        user.read(&remote, &other).start().unwrap().wait().unwrap();
        let mut bytes = vec![0; LEN];
        local.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 9), "a cancelled read landed late");
    }
}

#[test]
fn what_was_not_sent_of_a_write_goes_over_other_lanes_when_its_own_break() {
    const UNITS: usize = 8;
    let _one = ONE_AT_A_TIME.lock();
    let owner = Endpoint::open("owner").unwrap();
    let user = Endpoint::options("user").lanes(2).open().unwrap();
    let region = owner.register(SharedStorage::new(UNITS * LEN).unwrap(), Access::READ_WRITE).unwrap();
    let local = user.register(SystemStorage::new(UNITS * LEN).unwrap(), Access::NONE).unwrap();
    let routing = Routing::default().require("tcp").unwrap();
    let remote = user.import_within(&region.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    user.write(&remote, &local).start().unwrap().wait().unwrap();
    let session = user.core().sessions.to_owners.lock().values().next().cloned().unwrap();
    let lanes = session.open_lanes().unwrap();
    lanes.iter().for_each(|lane| moments::stand_still(lane));
    local.write_at(0, &vec![7; UNITS * LEN]).unwrap();
    let transfer = user.write(&remote, &local).start().unwrap();
    let began = std::time::Instant::now();
    while lanes.iter().map(|lane| lane.unsent().len()).sum::<usize>() < UNITS {
        assert!(began.elapsed() < WATCHDOG, "not every request waits in a lane");
        std::thread::sleep(Duration::from_millis(1));
    }
    for lane in &lanes {
        lane.close(Error::new(Kind::Disconnected, "test", "the lane breaks"));
    }
    transfer.wait_for(WATCHDOG).expect("it ends").unwrap();
    let mut bytes = vec![0; UNITS * LEN];
    region.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
}
