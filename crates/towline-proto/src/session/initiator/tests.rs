//! An owner that says what it likes, when it likes, over which connection it likes.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::wire::{Bye, Check, Data, Done, Granted, Header, Message, Pong, QueryReply, WireError};

const CONTROL: ConnectionId = ConnectionId(1);
const LANE: ConnectionId = ConnectionId(2);
const NAME: [u8; 32] = [4; 32];
const BYTES: Asks = Asks::Bytes { bytes: 64, checks: None };
const CHANGE: Asks = Asks::Change { on_gpu: false };

struct Move {
    id: u64,
    times: Mutex<Times>,
    repeated: AtomicUsize,
}

impl Transfer for Move {
    fn id(&self) -> u64 {
        self.id
    }

    fn times(&self) -> Times {
        *self.times.lock()
    }
}

/// A waiter that counts the holds on its memory.
struct Counting {
    of: Arc<Move>,
    memory: Rc<()>,
}

impl Waiter for Counting {
    type Transfer = Move;
    type Hold = Rc<()>;

    fn transfer(&self) -> Option<&Arc<Move>> {
        Some(&self.of)
    }

    fn hold(&self) -> Option<Rc<()>> {
        Some(Rc::clone(&self.memory))
    }

    fn repeated(&self) -> Option<&AtomicUsize> {
        Some(&self.of.repeated)
    }
}

struct Scene {
    rules: Initiator<Counting>,
    now: Instant,
    memory: Rc<()>,
    moved: Arc<Move>,
}

impl Scene {
    fn new(between_hosts: bool) -> Scene {
        let now = Instant::now();
        let settings = Settings { between_hosts, ends_lanes: between_hosts };
        let opened = |id, name| Opened { id, name, same_host: !between_hosts };
        let mut rules = Initiator::new(settings, opened(CONTROL, None), now);
        rules.opened(opened(LANE, Some(NAME)));
        let times = Times { started: now, stopped: None, no_progress: Duration::from_secs(5) };
        let moved = Arc::new(Move { id: 7, times: Mutex::new(times), repeated: AtomicUsize::new(0) });
        Scene { rules, now, memory: Rc::default(), moved }
    }

    fn waiter(&self) -> Counting {
        Counting { of: Arc::clone(&self.moved), memory: Rc::clone(&self.memory) }
    }

    fn ask(&mut self, over: ConnectionId, asks: Asks) -> u64 {
        let asked = self.rules.ask(over, asks, self.waiter(), self.now);
        asked.map_err(|(_, error)| error).unwrap().request
    }

    fn says(
        &mut self,
        over: ConnectionId,
        request: u64,
        message: impl Into<Message>,
    ) -> Result<Reply<Counting>> {
        let message = message.into();
        let frame = message.frame(request, 0, 0);
        let header = Header::decode(frame.first_chunk().unwrap()).unwrap();
        self.rules.frame(over, header, message, self.now)
    }

    fn sends(&mut self, over: ConnectionId, request: u64, len: u64) -> Result<Landing<Rc<()>>> {
        let body = { Message::from(Data { outcome: Ok(()) }) };
        let (mut bytes, frame) = (Vec::new(), body.frame(request, len, 0));
        body.encode(&mut bytes);
        self.rules.payload(over, Header::decode(frame.first_chunk().unwrap()).unwrap(), &bytes)
    }

    fn stop(&mut self) -> Actions<Counting> {
        self.moved.times.lock().stopped = Some(self.now);
        self.rules.stop(7, self.now)
    }

    fn later(&mut self, millis: u64) -> Actions<Counting> {
        self.now += Duration::from_millis(millis);
        self.rules.settle(self.now)
    }

    fn lane_ends(&mut self, how: Ended, unsent: &[u64]) -> Actions<Counting> {
        let error = Error::new(Kind::Disconnected, "session", "the lane is gone");
        self.rules.lane_closed(LANE, how, unsent, &error, self.now)
    }

    /// The session ends, and with it all that is open.
    fn ends(&mut self, here: bool) -> Actions<Counting> {
        assert!(self.rules.end(Error::new(Kind::Disconnected, "session", "over"), here));
        self.rules.bury(|_| FORSAKEN, false, self.now)
    }
}

const FORSAKEN: Ended = Ended { is_applying: false, shows_what_is_applied: false, forsaken: true };

fn done() -> Done {
    Done { outcome: Ok(0) }
}

fn refused<T>(outcome: Result<T>, words: &str) {
    let error = outcome.err().expect("a hostile owner is believed");
    assert_eq!(error.kind(), Kind::Protocol);
    assert!(error.message().contains(words), "{error}");
}

/// What the actions are, in short.
fn names(actions: &Actions<Counting>) -> Vec<&'static str> {
    let name = |action: &Action<Counting>| match action {
        Action::Send(..) => "send",
        Action::Stopped(_) => "stopped",
        Action::Failed(..) => "failed",
        Action::Again(..) => "again",
        Action::Outstanding(_) => "outstanding",
        Action::OutstandingWhileApplied(..) => "applied",
        Action::Settled(_) => "settled",
        Action::NeverSettled(_) => "never settled",
        Action::Moved(..) => "moved",
        Action::Reset(..) => "reset",
        Action::SettleAt(_) => "settle at",
        Action::LookAt(_) => "look at",
    };
    actions.iter().map(name).collect()
}

fn sent(actions: &Actions<Counting>) -> Vec<Header> {
    let frame = |action: &Action<Counting>| match action {
        Action::Send(_, frame) => Some(Header::decode(frame.first_chunk().unwrap()).unwrap()),
        _ => None,
    };
    actions.iter().filter_map(frame).collect()
}

#[test]
fn only_the_reply_to_an_open_request_ends_it_and_only_once() {
    let mut scene = Scene::new(false);
    let request = scene.ask(LANE, CHANGE);
    refused(scene.says(LANE, request + 1, done()), "a reply to no request");
    refused(scene.says(LANE, 0, done()), "a reply to no request");
    refused(scene.says(CONTROL, request, done()), "another connection");
    refused(scene.says(LANE, request, Data { outcome: Ok(()) }), "does not fit the request");
    assert!(matches!(scene.says(LANE, request, done()), Ok(Reply::Done(_, Ok(0)))));
    refused(scene.says(LANE, request, done()), "a second reply");
}

#[test]
fn a_frame_that_no_owner_sends_is_refused() {
    let mut scene = Scene::new(false);
    refused(scene.says(CONTROL, 0, crate::wire::Cancel {}), "does not send");
    assert!(matches!(scene.says(CONTROL, 0, Pong {}), Ok(Reply::Nothing)));
    assert!(matches!(scene.says(CONTROL, 0, Bye { error: None }), Ok(Reply::Bye(_))));
}

#[test]
fn bytes_land_only_where_they_were_asked_for_and_hold_the_memory() {
    let mut scene = Scene::new(false);
    let (write, read) = (scene.ask(LANE, CHANGE), scene.ask(LANE, BYTES));
    refused(scene.sends(LANE, write, 64), "does not fit the request");
    refused(scene.sends(LANE, read, 63), "another number of bytes");
    refused(scene.sends(CONTROL, read, 64), "another connection");
    refused(scene.sends(LANE, read + 1, 64), "a reply to no request");
    let before = Rc::strong_count(&scene.memory);
    let landing = scene.sends(LANE, read, 64).unwrap();
    assert_eq!(Rc::strong_count(&scene.memory), before + 1);
    // The reply ends the request; the memory stays in use as long as something names it.
    drop(scene.rules.received(read, scene.now).unwrap());
    assert_eq!(Rc::strong_count(&scene.memory), before);
    drop(landing);
    assert_eq!(Rc::strong_count(&scene.memory), before - 1);
    refused(scene.sends(LANE, read, 64), "a second reply");
}

#[test]
fn an_owner_that_answers_a_read_without_bytes_ends_that_read() {
    let mut scene = Scene::new(false);
    let read = scene.ask(LANE, BYTES);
    let Ok(Reply::NoBytes(_, error)) = scene.says(LANE, read, Data { outcome: Ok(()) }) else { panic!() };
    assert_eq!(error.kind(), Kind::Protocol);
}

#[test]
fn grants_come_for_as_many_tickets_as_were_shown() {
    let mut scene = Scene::new(false);
    let request = scene.ask(CONTROL, Asks::Grants(2));
    refused(scene.says(CONTROL, request, Granted { items: Vec::new() }), "another number of tickets");
    refused(scene.says(CONTROL, request, QueryReply { outcome: Ok(Vec::new()) }), "does not fit the request");
}

#[test]
fn checksums_come_once_for_who_asked_and_as_many_as_were_asked_for() {
    let mut scene = Scene::new(false);
    let plain = scene.ask(LANE, BYTES);
    let checked = scene.ask(LANE, Asks::Bytes { bytes: 64, checks: Some(2) });
    let sums = |count| Check { checks: vec![1; count] };
    refused(scene.says(LANE, plain, sums(1)), "not requested");
    refused(scene.says(LANE, checked, sums(1)), "another number");
    refused(scene.says(CONTROL, checked, sums(2)), "another connection");
    refused(scene.says(LANE, 99, sums(2)), "not requested");
    assert!(scene.says(LANE, checked, sums(2)).is_ok());
    refused(scene.says(LANE, checked, sums(2)), "twice");
    assert_eq!(scene.rules.received(checked, scene.now).unwrap().1, Some(vec![1, 1]));
}

#[test]
fn a_read_that_was_stopped_ends_at_once_and_its_bytes_go_nowhere() {
    let mut scene = Scene::new(false);
    let read = scene.ask(LANE, BYTES);
    assert_eq!(names(&scene.stop()), ["stopped"]);
    assert!(matches!(scene.sends(LANE, read, 64), Ok(Landing::Nowhere)));
    assert!(scene.rules.received(read, scene.now).is_none());
    refused(scene.sends(LANE, read, 64), "a second reply");
    assert_eq!(Rc::strong_count(&scene.memory), 1);
}

#[test]
fn between_hosts_the_owner_is_told_and_a_lane_is_not_left_to_what_is_not_wanted() {
    let mut scene = Scene::new(true);
    scene.ask(LANE, BYTES);
    let actions = scene.stop();
    assert_eq!(names(&actions), ["send", "stopped", "settle at"]);
    assert_eq!(sent(&actions)[0].kind, FrameKind::Withdraw);
    assert_eq!(names(&scene.later(400)), ["settle at"]);
    assert_eq!(names(&scene.later(101)), ["reset"]);
}

#[test]
fn a_lane_with_a_write_on_it_is_worth_more_than_the_time_of_an_unwanted_read() {
    let mut scene = Scene::new(true);
    scene.ask(LANE, BYTES);
    drop(scene.stop());
    scene.moved = Arc::new(Move {
        id: 8,
        times: Mutex::new(Times { started: scene.now, stopped: None, no_progress: Duration::from_secs(5) }),
        repeated: AtomicUsize::new(0),
    });
    scene.ask(LANE, CHANGE);
    assert_eq!(names(&scene.later(600)), ["settle at"]);
}

#[test]
fn a_write_that_was_stopped_waits_for_the_owners_reply() {
    let mut scene = Scene::new(false);
    let write = scene.ask(LANE, CHANGE);
    assert_eq!(names(&scene.stop()), ["settle at"]);
    assert!(matches!(scene.says(LANE, write, done()), Ok(Reply::Done(..))));
    assert!(scene.later(10_000).is_empty());
}

#[test]
fn a_write_whose_owner_says_nothing_is_quiet_with_the_reset_of_its_lane() {
    let mut scene = Scene::new(false);
    scene.ask(LANE, CHANGE);
    drop(scene.stop());
    assert_eq!(names(&scene.later(1399)), ["settle at"], "however long its own limit is");
    assert_eq!(names(&scene.later(1)), ["reset"]);
    // On one host the owner's kernel knows of it: nothing is outstanding.
    assert_eq!(names(&scene.lane_ends(FORSAKEN, &[])), ["failed"]);
}

#[test]
fn an_owner_that_says_everything_but_what_became_of_a_write_does_not_keep_it() {
    let mut scene = Scene::new(false);
    scene.ask(LANE, CHANGE);
    drop(scene.stop());
    for _ in 0..13 {
        assert!(scene.says(CONTROL, 0, Pong {}).is_ok());
        assert_eq!(names(&scene.later(100)), ["settle at"]);
    }
    assert_eq!(names(&scene.later(100)), ["reset"]);
}

#[test]
fn between_hosts_the_owners_word_about_a_lane_makes_its_writes_quiet() {
    let mut scene = Scene::new(true);
    scene.ask(LANE, CHANGE);
    drop(scene.stop());
    assert_eq!(names(&scene.later(1400)), ["reset"]);
    let actions = scene.lane_ends(FORSAKEN, &[]);
    assert_eq!(names(&actions), ["send", "settle at"], "it has not ended yet");
    let end_lane = sent(&actions)[0];
    assert_eq!(end_lane.kind, FrameKind::EndLane);
    refused(scene.says(LANE, end_lane.id, done()), "another connection");
    let Ok(Reply::Settled(actions)) = scene.says(CONTROL, end_lane.id, done()) else { panic!() };
    assert_eq!(names(&actions), ["failed"]);
    refused(scene.says(CONTROL, end_lane.id, done()), "a second reply");
}

#[test]
fn without_that_word_a_write_ends_without_being_quiet_until_it_comes() {
    let mut scene = Scene::new(true);
    scene.ask(LANE, CHANGE);
    drop(scene.stop());
    drop(scene.later(1400));
    let end_lane = sent(&scene.lane_ends(FORSAKEN, &[]))[0].id;
    assert_eq!(names(&scene.later(400)), ["outstanding", "failed"]);
    assert!(scene.later(10_000).is_empty());
    let Ok(Reply::Settled(actions)) = scene.says(CONTROL, end_lane, done()) else { panic!() };
    assert_eq!(names(&actions), ["settled"]);
}

#[test]
fn an_owner_that_refuses_to_end_a_lane_leaves_its_writes_outstanding() {
    let mut scene = Scene::new(true);
    scene.ask(LANE, CHANGE);
    let end_lane = sent(&scene.lane_ends(FORSAKEN, &[]))[0].id;
    let no = WireError::from(&Error::new(Kind::Exhausted, "end lane", "too many"));
    let Ok(Reply::Settled(actions)) = scene.says(CONTROL, end_lane, Done { outcome: Err(no) }) else {
        panic!()
    };
    assert_eq!(names(&actions), ["outstanding", "failed"]);
    assert_eq!(names(&scene.ends(false)), ["settled"], "the owner has ended the session");
}

#[test]
fn a_session_that_this_side_gives_up_leaves_changes_outstanding_for_ever() {
    // Between hosts, or on one; ended by this side, or by the owner, which has then applied all that it will.
    let cases: [(bool, bool, &[&str]); 4] = [
        (true, true, &["outstanding", "failed"]),
        (true, false, &["failed"]),
        (false, true, &["failed"]),
        (false, false, &["failed"]),
    ];
    for (between_hosts, here, expected) in cases {
        let mut scene = Scene::new(between_hosts);
        scene.ask(CONTROL, CHANGE);
        assert_eq!(names(&scene.ends(here)), expected, "between hosts {between_hosts}, here {here}");
    }
}

#[test]
fn an_owner_that_is_seen_in_the_middle_of_a_write_is_waited_for() {
    let mut scene = Scene::new(false);
    scene.ask(LANE, CHANGE);
    let how = Ended { is_applying: true, shows_what_is_applied: true, forsaken: true };
    assert_eq!(names(&scene.lane_ends(how, &[])), ["applied", "failed"]);
}

#[test]
fn a_write_to_a_gpu_that_nobody_sees_applied_is_outstanding() {
    let mut scene = Scene::new(false);
    scene.ask(LANE, Asks::Change { on_gpu: true });
    assert_eq!(names(&scene.lane_ends(FORSAKEN, &[])), ["outstanding", "failed"]);
}

#[test]
fn what_was_not_sent_is_asked_again_whatever_it_is() {
    let mut scene = Scene::new(true);
    let write = scene.ask(LANE, CHANGE);
    assert_eq!(names(&scene.lane_ends(FORSAKEN, &[write])), ["again"]);
    let Err((waiter, error)) = scene.rules.ask(LANE, CHANGE, scene.waiter(), scene.now) else { panic!() };
    assert_eq!(error.kind(), Kind::Disconnected);
    assert!(matches!(scene.rules.not_sent(waiter, error), Action::Again(..)));
}

#[test]
fn of_what_was_sent_over_a_lane_that_is_lost_reads_are_asked_again_and_changes_are_not() {
    for (asks, expected) in [(BYTES, "again"), (CHANGE, "failed")] {
        let mut scene = Scene::new(false);
        scene.ask(LANE, asks);
        assert_eq!(names(&scene.lane_ends(FORSAKEN, &[])), [expected], "{asks:?}");
    }
}

#[test]
fn nothing_is_asked_again_that_was_stopped_or_refused_or_whose_session_is_over() {
    let gone = || Error::new(Kind::Disconnected, "session", "the lane is gone");
    let mut scene = Scene::new(false);
    let again = |scene: &Scene, error| scene.rules.not_sent(scene.waiter(), error);
    assert!(matches!(again(&scene, gone()), Action::Again(..)));
    let refused = Error::new(Kind::PermissionDenied, "session", "no");
    assert!(matches!(again(&scene, refused), Action::Failed(..)));
    drop(scene.stop());
    assert!(matches!(again(&scene, gone()), Action::Failed(..)));
    scene.moved.times.lock().stopped = None;
    assert!(scene.rules.end(gone(), true));
    assert!(matches!(again(&scene, gone()), Action::Failed(..)));
}

#[test]
fn a_transfer_whose_lanes_are_lost_over_and_over_ends() {
    let scene = Scene::new(false);
    let gone = Error::new(Kind::Disconnected, "session", "the lane is gone");
    let lost = || scene.rules.not_sent(scene.waiter(), gone.clone());
    let again = std::iter::repeat_with(lost).take_while(|action| matches!(action, Action::Again(..)));
    assert_eq!(again.take(1000).count(), lost::MOST_REPEATED);
}

#[test]
fn nothing_is_asked_over_a_session_that_is_over() {
    let mut scene = Scene::new(false);
    scene.ask(CONTROL, BYTES);
    assert_eq!(names(&scene.ends(false)), ["failed"]);
    assert!(!scene.rules.end(Error::new(Kind::Canceled, "session", "again"), true));
    let waiter = Counting { of: Arc::clone(&scene.moved), memory: Rc::clone(&scene.memory) };
    assert!(scene.rules.ask(CONTROL, BYTES, waiter, scene.now).is_err());
    assert_eq!(Rc::strong_count(&scene.memory), 1, "all holds are gone");
}

#[test]
fn an_owner_that_never_says_what_became_of_changes_loses_the_session() {
    let mut scene = Scene::new(true);
    let mut resets = 0;
    for _ in 0..1030 {
        scene.ask(CONTROL, CHANGE);
        let mut actions = scene.stop();
        actions.append(&mut scene.later(1400));
        resets += names(&actions).iter().filter(|name| **name == "reset").count();
    }
    assert!(resets > 0 && resets < 10, "{resets}");
}

#[test]
fn an_owners_host_is_looked_at_as_long_as_something_is_open() {
    let mut scene = Scene::new(true);
    let write = scene.ask(LANE, CHANGE);
    let (now, soon) = (scene.now, scene.now + HEARTBEAT);
    let Look::There(actions) = scene.rules.look_at_host(soon, Some(soon), &[(LANE, soon)]) else { panic!() };
    assert_eq!(names(&actions), ["moved", "send", "look at"]);
    assert!(scene.says(LANE, write, done()).is_ok());
    let Look::There(actions) = scene.rules.look_at_host(soon + HEARTBEAT, None, &[]) else { panic!() };
    assert!(actions.is_empty(), "nothing is in flight any more");
    scene.now = now + Duration::from_secs(60);
    scene.ask(LANE, CHANGE);
    let mut when = scene.now;
    let gone = loop {
        when += HEARTBEAT;
        if let Look::Gone(error) = scene.rules.look_at_host(when, None, &[]) {
            break error;
        }
        assert!(when < scene.now + 2 * GONE);
    };
    assert!(when >= scene.now + GONE && gone.message().contains("host is gone"));
}
