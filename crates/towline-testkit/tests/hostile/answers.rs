//! An owner that answers what it was not asked, twice, too early, elsewhere or otherwise: each ends the session.

use std::thread;
use std::time::Duration;

use towline::{Access, Endpoint, Kind, Limits, MemoryAccess, SystemStorage, Transfer};
use towline_testkit::attacker::Medium;
use towline_testkit::bench::routing;
use towline_testkit::rogue::{Grant, Link, Rogue, check, data, done, frame, granted, kind, refused};
use towline_testkit::watchdog::{eventually, watch};

const LEN: usize = 8 << 20;
/// What goes over a lane, in one piece.
const ONE_UNIT: u64 = 1 << 20;
const STALL: Duration = Duration::from_secs(10);
const CANARY: u8 = 0xee;

const MEDIA: [(Medium, &str); 2] = [(Medium::Unix, "unix"), (Medium::Tcp, "tcp")];

/// A user of a rogue owner's region, and the control connection on which the owner says what it likes.
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
        Scene::let_in(medium, path, checksums, Rogue::let_in)
    }

    /// Over TCP, as between hosts, with an owner that knows of lanes that end and of reads that nobody wants any more.
    fn open_from_afar() -> Scene {
        Scene::let_in(Medium::Tcp, "tcp", false, Rogue::let_in_from_afar)
    }

    fn let_in(medium: Medium, path: &str, checksums: bool, let_in: fn(&Rogue) -> Link) -> Scene {
        let rogue = Rogue::open(medium, LEN as u64);
        let limits = Limits { no_progress: STALL, ..Limits::default() };
        let options = Endpoint::options("user").limits(limits).routing(routing(path)).lanes(2);
        let user = options.checksums(checksums).open().unwrap();
        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let (remote, control) = thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let mut control = let_in(&rogue);
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

    /// The session ends because of what the owner has said; the transfer too, and its memory is free.
    fn breaks(mut self, transfer: &Transfer, what: &str) {
        assert!(self.breaks_within(STALL), "{what}: the session goes on");
        transfer.wait().expect_err(what);
        self.is_free(transfer, what);
    }

    fn breaks_within(&self, time: Duration) -> bool {
        eventually(time, || self.remote.alive().is_err_and(|error| error.kind() == Kind::Protocol))
    }

    /// The session goes on: what is asked next is answered.
    fn goes_on(&mut self, what: &str) {
        let next = self.read(64);
        let asked = self.control.hear_of(kind::READ);
        self.control.send(&data(asked.id, &[8; 64]));
        next.wait().unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    /// A write over a lane which the owner ends without a word: the write, the other lane, and the number of the question whether nothing
    /// more of that lane will be applied.
    fn loses_a_lane(&mut self) -> (Transfer, Link, u64) {
        let transfer = self.write(ONE_UNIT);
        let [mut first, second] = self.lanes();
        first.hear_of(kind::WRITE);
        first.hang_up();
        (transfer, second, self.control.hear_of(kind::END_LANE).id)
    }

    /// A read over a lane that is cancelled, of which the owner is notified: the read, both lanes, and its number.
    fn withdraws_a_read(&self) -> (Transfer, [Link; 2], u64) {
        let transfer = self.read(ONE_UNIT);
        let [mut first, second] = self.lanes();
        let request = first.hear_of(kind::READ);
        transfer.cancel();
        assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Canceled);
        assert_eq!(first.hear_of(kind::WITHDRAW).id, request.id);
        (transfer, [first, second], request.id)
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
        assert!(scene.breaks_within(STALL), "over {path}");
        scene.is_free(&transfer, path);
    }
}

#[test]
fn a_write_whose_lane_is_lost_ends_with_the_owners_word_that_the_lane_is_over() {
    let _watchdog = watch("a_write_whose_lane_is_lost_ends_with_the_owners_word", STALL * 10);
    let mut scene = Scene::open_from_afar();
    let (transfer, _second, asked) = scene.loses_a_lane();
    scene.control.send(&done(asked, 0));
    assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Disconnected);
    assert!(transfer.wait_quiet(STALL), "the owner has said that it is");
    scene.goes_on("a lane that is over");
    scene.is_free(&transfer, "a lane that is over");
}

#[test]
fn a_write_whose_owner_does_not_say_that_its_lane_is_over_ends_and_is_quiet_when_it_does() {
    let _watchdog = watch("a_write_whose_owner_does_not_say_that_its_lane_is_over", STALL * 10);
    let mut scene = Scene::open_from_afar();
    let (transfer, _second, asked) = scene.loses_a_lane();
    transfer.wait().unwrap_err();
    assert!(!transfer.wait_quiet(Duration::ZERO), "the owner has not said so");
    scene.goes_on("an owner that says nothing of a lane");
    scene.control.send(&done(asked, 0));
    assert!(transfer.wait_quiet(STALL));
    let next = scene.read(4096);
    scene.control.hear_of(kind::READ);
    scene.control.send(&done(asked, 0));
    scene.ends(&next, "a lane that is over twice");
}

#[test]
fn a_write_whose_owner_refuses_to_end_its_lane_ends_and_is_quiet_with_the_session() {
    let _watchdog = watch("a_write_whose_owner_refuses_to_end_its_lane", STALL * 10);
    let mut scene = Scene::open_from_afar();
    let (transfer, _second, asked) = scene.loses_a_lane();
    scene.control.send(&refused(kind::DONE, asked, 7));
    assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Disconnected);
    assert!(!transfer.wait_quiet(Duration::ZERO), "the owner has not said that the lane is over");
    scene.goes_on("an owner that does not end a lane");
    scene.control.hang_up();
    scene.is_free(&transfer, "an owner that did not end a lane, and ended the session");
}

#[test]
fn an_owner_that_lies_about_the_end_of_a_lane_ends_the_session() {
    let _watchdog = watch("an_owner_that_lies_about_the_end_of_a_lane_ends_the_session", STALL * 10);
    type Lie = fn(&mut Scene, &mut Link, u64);
    let lies: [(&str, Lie); 5] = [
        ("twice", |scene, _, asked| scene.control.send(&[done(asked, 0), done(asked, 0)].concat())),
        ("over a lane", |_, lane, asked| lane.send(&done(asked, 0))),
        ("by bytes", |scene, _, asked| scene.control.send(&data(asked, &[1; 64]))),
        ("by a grant", |scene, _, asked| scene.control.send(&granted(asked, &[Grant::whole(64)], 0))),
        ("of what was not asked yet", |scene, _, asked| scene.control.send(&done(asked + 1, 0))),
    ];
    for (what, lie) in lies {
        let mut scene = Scene::open_from_afar();
        let (transfer, mut lane, asked) = scene.loses_a_lane();
        lie(&mut scene, &mut lane, asked);
        scene.breaks(&transfer, what);
    }
}

/// What is said of a withdrawn read over its lane ends the session. Half a second after the withdrawal the lane is given up and nothing
/// is read from it: then once more.
fn breaks_over_the_lane(what: &str, lie: impl Fn(u64) -> Vec<u8>) {
    let broken = (0..20).any(|_| {
        let mut scene = Scene::open_from_afar();
        let (transfer, [mut first, _second], asked) = scene.withdraws_a_read();
        first.send(&lie(asked));
        assert!(first.drain(STALL).1, "{what}: neither the lane nor the session ends");
        let broken = scene.breaks_within(Duration::from_millis(500));
        scene.is_free(&transfer, what);
        broken
    });
    assert!(broken, "{what}: the session goes on");
}

#[test]
fn a_read_that_was_withdrawn_may_be_answered_once() {
    let _watchdog = watch("a_read_that_was_withdrawn_may_be_answered_once", STALL * 10);
    let bytes = |id| data(id, &[9; ONE_UNIT as usize]);
    type Answer<'a> = (&'a str, &'a dyn Fn(u64) -> Vec<u8>);
    let answers: [Answer<'_>; 3] = [
        ("bytes", &bytes),
        ("too many bytes", &|id| data(id, &[9; ONE_UNIT as usize + 7])),
        ("no bytes", &|id| refused(kind::DATA, id, 7)),
    ];
    for (what, answer) in answers {
        let mut scene = Scene::open_from_afar();
        let (transfer, [mut first, _second], asked) = scene.withdraws_a_read();
        first.send(&answer(asked));
        scene.goes_on(what);
        scene.is_free(&transfer, what);
        breaks_over_the_lane(&format!("{what}, twice"), |asked| [answer(asked), answer(asked)].concat());
    }
    let mut scene = Scene::open_from_afar();
    let small = scene.read(4096);
    let request = scene.control.hear_of(kind::READ);
    small.cancel();
    assert_eq!(scene.control.hear_of(kind::WITHDRAW).id, request.id);
    scene.control.send(&data(request.id, &[7; 4096]));
    scene.goes_on("over the control connection");
    scene.control.send(&data(request.id, &[7; 4096]));
    scene.breaks(&small, "over the control connection, twice");
}

#[test]
fn a_read_that_was_withdrawn_is_not_answered_elsewhere_or_otherwise() {
    let _watchdog = watch("a_read_that_was_withdrawn_is_not_answered_elsewhere_or_otherwise", STALL * 10);
    type Lie = fn(&mut Scene, &mut Link, u64);
    breaks_over_the_lane("by Done", |asked| done(asked, 0));
    let lies: [(&str, Lie); 2] = [
        ("over another lane", |_, second, asked| second.send(&data(asked, &[1; 64]))),
        ("over the control connection", |scene, _, asked| scene.control.send(&data(asked, &[1; 64]))),
    ];
    for (what, lie) in lies {
        let mut scene = Scene::open_from_afar();
        let (transfer, [_first, mut second], asked) = scene.withdraws_a_read();
        lie(&mut scene, &mut second, asked);
        scene.breaks(&transfer, what);
    }
}

#[test]
fn a_lane_over_which_a_withdrawn_read_is_not_answered_is_given_up() {
    let _watchdog = watch("a_lane_over_which_a_withdrawn_read_is_not_answered_is_given_up", STALL * 10);
    let mut scene = Scene::open_from_afar();
    let (transfer, [mut first, _second], asked) = scene.withdraws_a_read();
    let half = data(asked, &[9; ONE_UNIT as usize]);
    first.send(&half[..half.len() / 2]);
    assert!(first.drain(STALL).1, "it hangs up");
    scene.goes_on("half of an answer that nobody wants");
    scene.is_free(&transfer, "half of an answer that nobody wants");
}
