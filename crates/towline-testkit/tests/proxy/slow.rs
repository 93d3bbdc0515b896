//! A link that is slower than what is asked of it: what is given up there does not land later, and does not fill it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use towline::{Access, Endpoint, Kind, Limits, MemoryAccess, Registered, Remote, SystemStorage, Transfer};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::proxy::{Faults, Proxy};
use towline_testkit::watchdog::{eventually, stays, watch};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const LEN: usize = 8 * MIB;

/// About 1 Mbit/s.
const RATE: u64 = 128 << 10;

/// A cancelled transfer ends within two seconds, and one that has a limit here a second after it began; a busy machine is
/// given more.
const ENDED: Duration = Duration::from_secs(5);
const LONG: Duration = Duration::from_secs(60);

/// How long the user keeps its hands off before it asks whether something landed: longer than bytes are in the link.
const LATER: Duration = Duration::from_millis(400);

struct Pair {
    user: Endpoint,
    remote: Remote,
    buffer: Registered<SystemStorage>,
    region: Registered<SystemStorage>,
    owner: Endpoint,
    proxy: Proxy,
}

fn open() -> Pair {
    let faults = Faults { slow: Some(RATE), ..Faults::default() };
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = Proxy::start(listen, 1, faults);
    let owner = Endpoint::options("owner").listen(listen).advertise(proxy.address()).open().unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let limits = Limits { no_progress: LONG, total: LONG, ..Limits::default() };
    let user = Endpoint::options("user").limits(limits).routing(routing("tcp")).lanes(2).open().unwrap();
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let buffer = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    buffer.write_at(0, &vec![7; LEN]).unwrap();
    Pair { user, remote, buffer, region, owner, proxy }
}

impl Pair {
    fn look(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.region.storage().read_at(0, &mut bytes).unwrap();
        bytes
    }

    fn landed(&self) -> usize {
        self.look().iter().filter(|byte| **byte != 0).count()
    }

    fn answered(&self) -> u64 {
        self.proxy.happened().answered.load(Ordering::Relaxed)
    }

    /// Nothing of a transfer that has ended lands once it says that it is quiet.
    fn lands_nothing_when_quiet(&self, transfer: &Transfer) {
        assert!(transfer.wait_quiet(LONG), "it never becomes quiet");
        let before = self.look();
        stays(LATER, || self.look() == before);
        let late = before.iter().zip(self.look()).filter(|(before, now)| **before != *now).count();
        assert_eq!(late, 0, "so many bytes landed behind a quiet end");
    }
}

fn ended(transfer: &Transfer, kind: Kind) {
    let error = transfer.wait_for(ENDED).expect("a cancelled transfer ends").unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
}

#[test]
fn of_a_large_write_that_is_cancelled_nothing_lands_once_it_is_quiet() {
    let _watchdog = watch("of_a_large_write_that_is_cancelled_nothing_lands_once_it_is_quiet", LONG * 4);
    for _ in 0..3 {
        let pair = open();
        let transfer = pair.user.write(&pair.remote, &pair.buffer).start().unwrap();
        assert!(eventually(LONG, || pair.landed() > 0));
        transfer.cancel();
        ended(&transfer, Kind::Canceled);
        pair.lands_nothing_when_quiet(&transfer);
        assert!(pair.landed() < LEN / 2, "it was over before it could be cancelled");
        // The session lives, and so does the link.
        outcome(pair.user.write(&pair.remote, &pair.buffer).at(0, 0, 4096).start()).unwrap();
    }
}

#[test]
fn of_a_large_write_that_ran_out_of_time_nothing_lands_once_it_is_quiet() {
    let _watchdog = watch("of_a_large_write_that_ran_out_of_time_nothing_lands_once_it_is_quiet", LONG * 4);
    let pair = open();
    let limits = Limits { total: Duration::from_secs(1), no_progress: LONG, bytes_per_second: u64::MAX };
    let transfer = pair.user.write(&pair.remote, &pair.buffer).limits(limits).start().unwrap();
    ended(&transfer, Kind::Timeout);
    pair.lands_nothing_when_quiet(&transfer);
}

#[test]
fn a_small_write_that_is_cancelled_ends_says_whether_it_is_quiet_and_leaves_the_session_alone() {
    let test = "a_small_write_that_is_cancelled_ends_says_whether_it_is_quiet_and_leaves_the_session_alone";
    let _watchdog = watch(test, LONG * 4);
    let pair = open();
    // Some over the control connection, which take longer than a cancelled one may.
    let write = |at: usize| {
        let at = (at * 256 * KIB) as u64;
        pair.user.write(&pair.remote, &pair.buffer).at(at, at, 250 * KIB as u64).start().unwrap()
    };
    let transfers: Vec<_> = (0..4).map(write).collect();
    assert!(eventually(LONG, || pair.landed() > 0));
    transfers.iter().for_each(Transfer::cancel);
    for transfer in &transfers {
        ended(transfer, Kind::Canceled);
    }
    assert!(transfers.iter().all(|transfer| transfer.wait_quiet(LONG)), "one never becomes quiet");
    pair.lands_nothing_when_quiet(&transfers[0]);
    outcome(pair.user.write(&pair.remote, &pair.buffer).at(0, 0, 4096).start()).unwrap();
}

/// Nobody asks the owner any more.
#[test]
fn a_large_write_in_flight_when_its_endpoint_is_closed_does_not_say_that_it_is_quiet() {
    let test = "a_large_write_in_flight_when_its_endpoint_is_closed_does_not_say_that_it_is_quiet";
    let _watchdog = watch(test, LONG * 4);
    let pair = open();
    let transfer = pair.user.write(&pair.remote, &pair.buffer).start().unwrap();
    assert!(eventually(LONG, || pair.landed() > 0));
    pair.user.close_within(LONG).unwrap();
    ended(&transfer, Kind::Canceled);
    assert!(!transfer.quiet(), "{} bytes have landed, and more may be on their way", pair.landed());
}

/// A reset says nothing of the owner: anybody on the way can send one, while the lanes go on.
#[test]
fn a_large_write_whose_session_somebody_on_the_way_resets_does_not_say_that_it_is_quiet() {
    let test = "a_large_write_whose_session_somebody_on_the_way_resets_does_not_say_that_it_is_quiet";
    let _watchdog = watch(test, LONG * 4);
    let pair = open();
    let transfer = pair.user.write(&pair.remote, &pair.buffer).start().unwrap();
    assert!(eventually(LONG, || pair.landed() > 0));
    pair.proxy.reset_oldest();
    ended(&transfer, Kind::Disconnected);
    assert!(!transfer.quiet(), "{} bytes have landed, and more may be on their way", pair.landed());
}

#[test]
fn what_is_left_of_a_large_read_that_ran_out_of_time_is_dropped_where_it_is() {
    let test = "what_is_left_of_a_large_read_that_ran_out_of_time_is_dropped_where_it_is";
    let _watchdog = watch(test, LONG * 4);
    let pair = open();
    let second = Duration::from_secs(1);
    let limits = Limits { total: second, no_progress: LONG, bytes_per_second: u64::MAX };
    let transfer = pair.user.read(&pair.remote, &pair.buffer).limits(limits).start().unwrap();
    ended(&transfer, Kind::Timeout);
    assert!(transfer.quiet());
    let before = pair.answered();
    // Over the lanes again.
    let next = 300 * KIB as u64;
    outcome(pair.user.read(&pair.remote, &pair.buffer).at(0, 0, next).start()).unwrap();
    let crossed = pair.answered() - before;
    assert!(crossed < next + 512 * KIB as u64, "{crossed} bytes crossed for {next}");
    assert_eq!(pair.owner.stats().in_flight.0, 0, "the owner is still at it");
}

#[test]
fn small_reads_that_ran_out_of_time_are_dropped_where_they_are() {
    let _watchdog = watch("small_reads_that_ran_out_of_time_are_dropped_where_they_are", LONG * 4);
    const READS: u64 = 24;
    let pair = open();
    let len = 250 * KIB as u64;
    let second = Duration::from_secs(1);
    let limits = Limits { total: second, no_progress: LONG, bytes_per_second: u64::MAX };
    let read = |_| pair.user.read(&pair.remote, &pair.buffer).at(0, 0, len).limits(limits).start().unwrap();
    let transfers: Vec<_> = (0..READS).map(read).collect();
    for transfer in &transfers {
        ended(transfer, Kind::Timeout);
    }
    let before = pair.answered();
    outcome(pair.user.read(&pair.remote, &pair.buffer).at(0, 0, 4096).start()).unwrap();
    let crossed = pair.answered() - before;
    // What the owner's kernel had taken already, and the rest of one reply, cross all the same.
    assert!(crossed < READS * len / 4, "{crossed} bytes crossed for 4096");
}

#[test]
fn bytes_that_are_acknowledged_are_progress() {
    let _watchdog = watch("bytes_that_are_acknowledged_are_progress", LONG * 4);
    let pair = open();
    let stall = Duration::from_millis(1500);
    let started = Instant::now();
    let write = pair.user.write(&pair.remote, &pair.buffer).at(0, 0, MIB as u64).stall_within(stall);
    outcome(write.start()).unwrap();
    assert!(started.elapsed() > stall, "the link is not slow");
}

/// Passes frames on between a user and an owner of a former version: such an owner does not say where it sees its user, and does not know
/// some kinds of frames.
fn former(mut user: TcpStream, mut owner: TcpStream, unknown: Arc<AtomicU64>) {
    const READY: u8 = 5;
    const UNKNOWN: std::ops::Range<u8> = 43..48;
    let (mut answers, mut to_user) = (owner.try_clone().unwrap(), user.try_clone().unwrap());
    let frames = |from: &mut TcpStream, pass: &mut dyn FnMut(Vec<u8>, Vec<u8>, u64) -> bool| {
        loop {
            let mut header = vec![0; 24];
            if from.read_exact(&mut header).is_err() {
                return;
            }
            let rest = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize + header[3] as usize;
            let mut body = vec![0; rest];
            let payload = u64::from_le_bytes(header[8..16].try_into().unwrap());
            if from.read_exact(&mut body).is_err() || !pass(header, body, payload) {
                return;
            }
        }
    };
    let back = thread::spawn(move || {
        let mut source = answers.try_clone().unwrap();
        frames(&mut answers, &mut |mut header, mut body, payload| {
            if header[0] == READY {
                assert_eq!(body[body.len() - 5], 1, "it says where it sees the user");
                body.truncate(body.len() - 5);
                body.push(0);
                let len = body.len() as u32;
                header[4..8].copy_from_slice(&len.to_le_bytes());
            }
            let mut payload = (&mut source as &mut dyn Read).take(payload);
            to_user.write_all(&header).and_then(|()| to_user.write_all(&body)).is_ok()
                && std::io::copy(&mut payload, &mut to_user).is_ok()
        });
        let _ = to_user.shutdown(std::net::Shutdown::Both);
    });
    let mut source = user.try_clone().unwrap();
    frames(&mut user, &mut |header, body, payload| {
        unknown.fetch_add(u64::from(UNKNOWN.contains(&header[0])), Ordering::SeqCst);
        let mut payload = (&mut source as &mut dyn Read).take(payload);
        owner.write_all(&header).and_then(|()| owner.write_all(&body)).is_ok()
            && std::io::copy(&mut payload, &mut owner).is_ok()
    });
    let _ = owner.shutdown(std::net::Shutdown::Both);
    let _ = back.join();
}

#[test]
fn an_owner_that_does_not_know_of_what_is_not_wanted_is_not_told() {
    let _watchdog = watch("an_owner_that_does_not_know_of_what_is_not_wanted_is_not_told", LONG * 4);
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let faults = Faults { slow: Some(RATE), ..Faults::default() };
    let proxy = Proxy::start(door.local_addr().unwrap(), 1, faults);
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let owner = Endpoint::options("owner").listen(listen).advertise(proxy.address()).open().unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let unknown = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&unknown);
    thread::spawn(move || {
        for user in door.incoming().flatten() {
            let (owner, unknown) = (TcpStream::connect(listen).unwrap(), Arc::clone(&counted));
            thread::spawn(move || former(user, owner, unknown));
        }
    });
    let user = Endpoint::options("user").routing(routing("tcp")).lanes(2).open().unwrap();
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let buffer = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    for write in [false, true] {
        let request = if write { user.write(&remote, &buffer) } else { user.read(&remote, &buffer) };
        let transfer = request.start().unwrap();
        thread::sleep(LATER);
        transfer.cancel();
        ended(&transfer, Kind::Canceled);
        // Such an owner cannot say when nothing more of the write lands.
        assert_eq!(transfer.quiet(), !write);
    }
    assert_eq!(unknown.load(Ordering::SeqCst), 0, "frames that it does not know");
}
