//! The ends of lanes, of the session, and of a peer that says nothing any more.

use super::*;

const SOON: Duration = Duration::from_millis(1);

impl Scene {
    /// The peer asks for the end of a lane, on which a thread is at work or not.
    fn end_lane(&mut self, id: u64, lane: u8, is_applying: bool) -> Result<LaneEnd> {
        match self.frame(CONTROL, id, EndLane { lane: [lane; 32] })? {
            Action::EndLane(found) => {
                assert_eq!(found, lane);
                self.rules.lane_ends(found, id, is_applying, self.now)
            }
            Action::Answer(Message::Done(Done { outcome: Ok(0) })) => Ok(LaneEnd::Over),
            _ => panic!("it is neither ended nor over"),
        }
    }
}

#[test]
fn a_lane_that_nobody_is_at_work_on_and_one_that_is_not_there_are_over() {
    let mut scene = Scene::open();
    assert!(matches!(scene.end_lane(1, LANE, false).unwrap(), LaneEnd::Over));
    assert!(matches!(scene.end_lane(2, 99, true).unwrap(), LaneEnd::Over));
    assert!(scene.rules.look_at_lanes(|_| true, scene.now).0.is_empty());
}

#[test]
fn a_lane_is_asked_about_twice_and_both_learn_of_its_end() {
    let mut scene = Scene::open();
    let LaneEnd::Later(Some(at)) = scene.end_lane(1, LANE, true).unwrap() else { panic!("no time") };
    assert_eq!(at, scene.now + SOON);
    // A look is planned already.
    assert!(matches!(scene.end_lane(2, LANE, true).unwrap(), LaneEnd::Later(None)));
    let (over, next) = scene.rules.look_at_lanes(|_| true, at);
    assert_eq!((over, next), (Vec::new(), Some(at + 2 * SOON)));
    let (over, next) = scene.rules.look_at_lanes(|_| false, at);
    assert_eq!((over, next), (vec![1, 2], None));
}

#[test]
fn it_is_looked_at_lanes_less_and_less_often_and_soon_again_when_one_more_is_to_end() {
    let mut scene = Scene::open();
    let LaneEnd::Later(Some(mut at)) = scene.end_lane(1, LANE, true).unwrap() else { panic!("no time") };
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let next = scene.rules.look_at_lanes(|_| true, at).1.unwrap();
        pauses.push((next - at).as_millis());
        at = next;
    }
    assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 100, 100, 100]);
    assert!(matches!(scene.end_lane(2, OTHER, true).unwrap(), LaneEnd::Later(None)));
    let (over, next) = scene.rules.look_at_lanes(|lane| *lane == LANE, at);
    assert_eq!((over, next), (vec![2], Some(at + 2 * SOON)));
}

#[test]
fn more_lanes_than_there_may_be_do_not_end_at_a_time() {
    let mut scene = Scene::open();
    for id in 1..=64 {
        assert!(matches!(scene.end_lane(id, LANE, true).unwrap(), LaneEnd::Later(_)));
    }
    let error = scene.end_lane(65, OTHER, true).unwrap_err();
    assert!(error.kind() == Kind::Exhausted && error.message().contains("64 lanes"), "{error}");
    // What needs no waiting is answered all the same.
    assert!(matches!(scene.end_lane(66, OTHER, false).unwrap(), LaneEnd::Over));
    let (over, _) = scene.rules.look_at_lanes(|_| false, scene.now);
    assert!(over.into_iter().eq(1..=64));
    assert!(matches!(scene.end_lane(67, OTHER, true).unwrap(), LaneEnd::Later(Some(_))));
}

#[test]
fn a_lane_that_was_closed_is_known_as_long_as_somebody_has_it() {
    let mut scene = Scene::open();
    let broken = Error::new(Kind::Disconnected, "test", "it is gone");
    assert_eq!(scene.rules.gone(&LANE, &broken, |_| true), Gone { ends: false, broken: false });
    assert!(matches!(scene.end_lane(1, LANE, true).unwrap(), LaneEnd::Later(Some(_))));
    scene.rules.gone(&OTHER, &broken, |lane| *lane != LANE);
    assert!(matches!(scene.end_lane(2, LANE, true).unwrap(), LaneEnd::Over));
}

#[test]
fn the_session_ends_with_its_control_connection_and_with_a_panic() {
    let mut scene = Scene::open();
    let gone = |scene: &mut Scene, over, kind| {
        let gone = scene.rules.gone(&over, &Error::new(kind, "test", "it is gone"), |_| true);
        (gone.ends, gone.broken)
    };
    assert_eq!(gone(&mut scene, LANE, Kind::Disconnected), (false, false));
    assert_eq!(gone(&mut scene, LANE, Kind::Protocol), (false, true));
    assert_eq!(gone(&mut scene, LANE, Kind::Internal), (true, false));
    assert_eq!(gone(&mut scene, CONTROL, Kind::Disconnected), (true, false));
    assert_eq!(gone(&mut scene, CONTROL, Kind::Protocol), (true, true));
}

#[test]
fn a_session_ends_once_and_leaves_what_was_not_given_back() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    scene.import(Access::READ, None);
    scene.follow(CONTROL, 4, notify(7, 2, "behind")).unwrap();
    let held = scene.rules.admit(handle, Access::READ, vec![block(0, 8)], scene.now).ok().unwrap();
    assert!(matches!(scene.end_lane(5, LANE, true).unwrap(), LaneEnd::Later(_)));
    assert!(scene.rules.end() && !scene.rules.end() && scene.rules.is_over());
    let Remains { grants, goodbye } = scene.rules.clear();
    assert_eq!((grants.len(), goodbye), (2, false));
    assert_eq!(refused(scene.read(LANE, handle, vec![block(0, 1)])).0, Kind::NotFound);
    assert!(scene.rules.look_at_lanes(|_| false, scene.now).0.is_empty());
    // What waited for a last piece never comes; what is being sent stays until it is dropped.
    scene.applied(7, true);
    scene.applied(7, true);
    assert!(scene.delivered.is_empty() && scene.array.held() == 1);
    drop(held);
    assert_eq!((scene.array.held(), scene.allowance.load()), (0, (0, 0)));
}

#[test]
fn a_goodbye_ends_its_connection_and_is_remembered() {
    let mut scene = Scene::open();
    let Action::Goodbye(error) = scene.frame(CONTROL, 0, Bye { error: None }).unwrap() else {
        panic!("no goodbye")
    };
    assert_eq!(error.kind(), Kind::Disconnected);
    assert!(scene.rules.gone(&CONTROL, &error, |_| true).ends && scene.rules.end());
    assert!(scene.rules.clear().goodbye);
}

#[test]
fn a_peer_that_holds_a_claim_and_says_nothing_loses_it() {
    const LIMIT: Duration = Duration::from_secs(2);
    let mut scene = Scene::open();
    let half = Duration::from_millis(500);
    assert_eq!(scene.rules.beat(scene.now), Some(scene.now + half));
    assert_eq!(scene.rules.beat(scene.now), None, "one at a time");
    for _ in 0..3 {
        assert!(matches!(scene.rules.beats(true, LIMIT), Beat::Ask));
        assert!(scene.rules.beat(scene.now).is_some());
    }
    // It says something, whatever that is.
    assert!(matches!(scene.frame(LANE, 0, Pong {}).unwrap(), Action::Nothing));
    for _ in 0..3 {
        assert!(matches!(scene.rules.beats(true, LIMIT), Beat::Ask));
        assert!(scene.rules.beat(scene.now).is_some());
    }
    drop(scene.arrives(Write { transfer: 0, handle: 1, blocks: vec![block(0, 4)] }.into(), 4).unwrap());
    for _ in 0..4 {
        assert!(matches!(scene.rules.beats(true, LIMIT), Beat::Ask));
        assert!(scene.rules.beat(scene.now).is_some());
    }
    let Beat::Abandon(error) = scene.rules.beats(true, LIMIT) else { panic!("it waits on") };
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("for 2.0 s"), "{error}");
}

#[test]
fn a_peer_without_a_claim_is_not_asked() {
    let mut scene = Scene::open();
    scene.rules.beat(scene.now).unwrap();
    assert!(matches!(scene.rules.beats(false, Duration::ZERO), Beat::Ends));
    scene.rules.beat(scene.now).unwrap();
    scene.rules.end();
    assert!(matches!(scene.rules.beats(true, Duration::ZERO), Beat::Ends));
}

#[test]
fn a_ping_is_answered() {
    let mut scene = Scene::open();
    let action = scene.frame(LANE, 9, Ping {}).unwrap();
    assert!(matches!(action, Action::Answer(Message::Pong(_))));
}
