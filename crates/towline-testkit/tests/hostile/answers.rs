//! An owner that answers what it was not asked, twice, too early, elsewhere or otherwise: each ends the session.

use std::thread;
use std::time::Duration;

use towline::{Access, Endpoint, Kind, Limits, MemoryAccess, SystemStorage, Transfer};
use towline_testkit::attacker::Medium;
use towline_testkit::bench::routing;
use towline_testkit::rogue::{Grant, Link, Rogue, check, data, done, frame, granted, kind, refused};
use towline_testkit::watchdog::{eventually, watch};

const LEN: usize = 8 << 20;
const STALL: Duration = Duration::from_secs(10);
const CANARY: u8 = 0xee;

const MEDIA: [(Medium, &str); 2] = [(Medium::Unix, "unix"), (Medium::Tcp, "tcp")];

/// A user of a rogue owner's region, and the control connection on which that one says what it likes.
struct Scene {
    rogue: Rogue,
    control: Link,
    user: Endpoint,
    remote: towline::Remote,
    local: towline::Registered<SystemStorage>,
}

impl Scene {
    fn open(medium: Medium, path: &str) -> Scene {
        Scene::open_with(medium, path, false)
    }

    fn open_with(medium: Medium, path: &str, checksums: bool) -> Scene {
        let rogue = Rogue::open(medium, LEN as u64);
        let limits = Limits { no_progress: STALL, ..Limits::default() };
        let options = Endpoint::options("user").limits(limits).routing(routing(path)).lanes(2);
        let user = options.checksums(checksums).open().unwrap();
        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let (remote, control) = thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let mut control = rogue.let_in();
                let import = control.hear_of(kind::IMPORT);
                control.send(&granted(import.id, &[Grant::whole(LEN as u64)], 0));
                control
            });
            let remote = user.import(rogue.ticket()).unwrap();
            (remote, owner.join().unwrap())
        });
        Scene { rogue, control, user, remote, local }
    }

    fn read(&self, bytes: u64) -> Transfer {
        self.user.read(&self.remote, &self.local).at(0, 0, bytes).start().unwrap()
    }

    fn write(&self, bytes: u64) -> Transfer {
        self.user.write(&self.remote, &self.local).at(0, 0, bytes).start().unwrap()
    }

    fn lanes(&self) -> [Link; 2] {
        [self.rogue.let_in(), self.rogue.let_in()]
    }

    /// The transfer ends with that, the session with it, and the local memory is free afterwards: nothing is written into it, and
    /// nothing is sent from it.
    fn ends(mut self, transfer: &Transfer, what: &str) {
        let error = transfer.wait().expect_err(what);
        assert_eq!(error.kind(), Kind::Protocol, "{what}: {error}");
        assert_eq!(self.remote.alive().expect_err(what).kind(), Kind::Protocol, "{what}");
        self.is_free(transfer, what);
    }

    fn is_free(&mut self, transfer: &Transfer, what: &str) {
        assert!(transfer.wait_quiet(STALL), "{what}: it does not become quiet");
        let local = std::mem::replace(
            &mut self.local,
            self.user.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap(),
        );
        let freed = local.into_storage_within(STALL).map_err(|pinned| pinned.error).unwrap();
        freed.write_at(0, &vec![CANARY; LEN]).unwrap();
        self.control.send(&data(1, &[7; 4096]));
        let (sent, _) = self.control.drain(Duration::from_millis(100));
        assert!(!sent.contains(&CANARY), "{what}: bytes of memory that was given back were sent");
        let mut left = vec![0; LEN];
        freed.read_at(0, &mut left).unwrap();
        assert!(left.iter().all(|byte| *byte == CANARY), "{what}: memory that was given back was written");
    }
}

/// For both sockets: a request on the control connection, and what the owner sends where it should answer.
fn refuses(what: &str, ask: fn(&Scene) -> Transfer, asked: u8, answers: &dyn Fn(u64) -> Vec<u8>) {
    for (medium, path) in MEDIA {
        let mut scene = Scene::open(medium, path);
        let transfer = ask(&scene);
        let request = scene.control.hear_of(asked);
        scene.control.send(&answers(request.id));
        scene.ends(&transfer, &format!("{what} over {path}"));
    }
}

fn small_read(scene: &Scene) -> Transfer {
    scene.read(4096)
}

fn small_write(scene: &Scene) -> Transfer {
    scene.write(4096)
}

#[test]
fn an_answer_over_another_connection_ends_the_session() {
    let _watchdog = watch("an_answer_over_another_connection_ends_the_session", STALL * 10);
    for (medium, path) in MEDIA {
        for reads in [true, false] {
            for to_control in [true, false] {
                let mut scene = Scene::open(medium, path);
                let transfer = if reads { scene.read(LEN as u64) } else { scene.write(LEN as u64) };
                let [mut first, mut second] = scene.lanes();
                let request = first.hear();
                let answer = if reads { data(request.id, &[1; 4096]) } else { done(request.id, 0) };
                if to_control {
                    scene.control.send(&answer)
                } else {
                    second.send(&answer)
                }
                scene.ends(&transfer, &format!("reading: {reads}, to the control connection: {to_control}"));
            }
        }
    }
}

#[test]
fn a_done_before_all_of_the_write_was_sent_ends_the_session() {
    let _watchdog = watch("a_done_before_all_of_the_write_was_sent_ends_the_session", STALL * 10);
    for (medium, path) in MEDIA {
        let scene = Scene::open(medium, path);
        let transfer = scene.write(LEN as u64);
        let [mut first, _second] = scene.lanes();
        // More than what a socket holds follows the first, and nobody takes it.
        let request = first.hear_of(kind::WRITE);
        first.send(&done(request.id, request.payload));
        scene.ends(&transfer, path);
    }
}

#[test]
fn an_answer_of_the_other_kind_ends_the_session() {
    let _watchdog = watch("an_answer_of_the_other_kind_ends_the_session", STALL * 10);
    refuses("a Done to a read", small_read, kind::READ, &|id| done(id, 4096));
    refuses("a refusal of a read by Done", small_read, kind::READ, &|id| refused(kind::DONE, id, 7));
    refuses("a Data to a write", small_write, kind::WRITE, &|id| data(id, &[1; 4096]));
    refuses("a refusal of a write by Data", small_write, kind::WRITE, &|id| refused(kind::DATA, id, 7));
    refuses("a grant to a read", small_read, kind::READ, &|id| granted(id, &[Grant::whole(1)], 0));
    refuses("a Told to a write", small_write, kind::WRITE, &|id| frame(kind::TOLD, id, &[0, 0, 0], 0, 0));
}

#[test]
fn a_second_answer_ends_the_session() {
    let _watchdog = watch("a_second_answer_ends_the_session", STALL * 10);
    type Case = (&'static str, fn(&Scene) -> Transfer, u8, fn(u64) -> Vec<u8>);
    let cases: [Case; 4] = [
        ("bytes", small_read, kind::READ, |id| data(id, &[1; 4096])),
        ("a refusal to read", small_read, kind::READ, |id| refused(kind::DATA, id, 7)),
        ("a write that is done", small_write, kind::WRITE, |id| done(id, 4096)),
        ("a refusal to write", small_write, kind::WRITE, |id| refused(kind::DONE, id, 7)),
    ];
    for (medium, path) in MEDIA {
        for (what, ask, asked, answer) in &cases {
            let mut scene = Scene::open(medium, path);
            let first = ask(&scene);
            let request = scene.control.hear_of(*asked);
            scene.control.take(request.payload);
            scene.control.send(&answer(request.id));
            let _ = first.wait();
            let second = scene.read(4096);
            scene.control.hear_of(kind::READ);
            scene.control.send(&answer(request.id));
            scene.ends(&second, &format!("{what} over {path}"));
        }
    }
}

#[test]
fn an_answer_that_nobody_asked_for_ends_the_session() {
    let _watchdog = watch("an_answer_that_nobody_asked_for_ends_the_session", STALL * 10);
    // The import had the number 1, and was answered; the read has 2.
    refuses("bytes for nothing", small_read, kind::READ, &|_| data(400, &[1; 64]));
    refuses("a Done for nothing", small_read, kind::READ, &|_| done(3, 0));
    refuses("a Done for request 0", small_read, kind::READ, &|_| done(0, 0));
    refuses("a Told for nothing", small_read, kind::READ, &|_| frame(kind::TOLD, 9, &[0, 0, 0], 0, 0));
    refuses("a Told for request 0", small_read, kind::READ, &|_| refused(kind::TOLD, 0, 9));
    refuses("a grant for nothing", small_read, kind::READ, &|_| granted(9, &[Grant::whole(64)], 0));
    refuses("a second grant", small_read, kind::READ, &|_| granted(1, &[Grant::whole(64)], 0));
    refuses("checksums for nothing", small_read, kind::READ, &|_| check(400, &[0]));
    refuses("checksums that were not asked for", small_read, kind::READ, &|id| check(id, &[0]));
    refuses("checksums to a write", small_write, kind::WRITE, &|id| check(id, &[0]));
}

#[test]
fn another_number_of_grants_ends_the_session() {
    let _watchdog = watch("another_number_of_grants_ends_the_session", STALL * 10);
    for (medium, path) in MEDIA {
        for count in [0, 2] {
            let rogue = Rogue::open(medium, LEN as u64);
            let user = Endpoint::options("user").routing(routing(path)).open().unwrap();
            let hung_up = thread::scope(|scope| {
                let owner = scope.spawn(|| {
                    let mut control = rogue.let_in();
                    let import = control.hear_of(kind::IMPORT);
                    control.send(&granted(import.id, &vec![Grant::whole(LEN as u64); count], 0));
                    control.drain(STALL).1
                });
                let error = user.import(rogue.ticket()).expect_err("an import");
                assert_eq!(error.kind(), Kind::Protocol, "{error}");
                owner.join().unwrap()
            });
            assert!(hung_up, "{count} grants for one ticket over {path}");
        }
    }
}

#[test]
fn checksums_that_come_twice_or_in_another_number_or_elsewhere_end_the_session() {
    let _watchdog = watch("checksums_that_come_twice_or_in_another_number", STALL * 10);
    for (medium, path) in MEDIA {
        for sums in [&[][..], &[1, 2]] {
            let mut scene = Scene::open_with(medium, path, true);
            let transfer = scene.read(4096);
            let request = scene.control.hear_of(kind::READ);
            scene.control.send(&check(request.id, sums));
            scene.ends(&transfer, &format!("{} checksums for one block", sums.len()));
        }
        let mut scene = Scene::open_with(medium, path, true);
        let transfer = scene.read(4096);
        let request = scene.control.hear_of(kind::READ);
        scene.control.send(&[check(request.id, &[1]), check(request.id, &[1])].concat());
        scene.ends(&transfer, "checksums that come twice");
        let scene = Scene::open_with(medium, path, true);
        let transfer = scene.read(LEN as u64);
        let [mut first, mut second] = scene.lanes();
        let request = first.hear_of(kind::READ);
        second.send(&check(request.id, &[1]));
        scene.ends(&transfer, "checksums over another lane");
    }
}

#[test]
fn a_request_that_was_given_up_may_be_answered_once() {
    let _watchdog = watch("a_request_that_was_given_up_may_be_answered_once", STALL * 10);
    for (medium, path) in MEDIA {
        let mut scene = Scene::open(medium, path);
        let given_up = scene.read(4096);
        let request = scene.control.hear_of(kind::READ);
        given_up.cancel();
        assert_eq!(given_up.wait().unwrap_err().kind(), Kind::Canceled);
        // The answer crosses the cancel: that is no fault of the owner's.
        scene.control.send(&data(request.id, &[7; 4096]));
        let next = scene.read(64);
        let asked = scene.control.hear_of(kind::READ);
        scene.control.send(&data(asked.id, &[8; 64]));
        next.wait().unwrap();
        let last = scene.read(4096);
        scene.control.hear_of(kind::READ);
        scene.control.send(&data(request.id, &[9; 4096]));
        scene.ends(&last, &format!("a second answer to what was given up, over {path}"));
    }
}

#[test]
fn a_frame_that_makes_no_sense_on_a_lane_ends_the_session() {
    let _watchdog = watch("a_frame_that_makes_no_sense_on_a_lane_ends_the_session", STALL * 10);
    for (medium, path) in MEDIA {
        let mut scene = Scene::open(medium, path);
        let transfer = scene.read(LEN as u64);
        let [mut first, _second] = scene.lanes();
        first.hear_of(kind::READ);
        first.send(&[0xff; 64]);
        // A request that was just being sent may find the lane closed before the session is.
        transfer.wait().expect_err(path);
        let broken = || scene.remote.alive().is_err_and(|error| error.kind() == Kind::Protocol);
        assert!(eventually(STALL, broken), "over {path}");
        scene.is_free(&transfer, path);
    }
}
