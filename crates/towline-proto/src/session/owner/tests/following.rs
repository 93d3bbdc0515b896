//! What follows a transfer.

use super::*;

#[test]
fn what_follows_a_transfer_acts_once_all_of_it_is_applied_over_whichever_connections() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let signal = Signal { transfer: 7, pieces: 2, handle, offset: 0, add: 3 };
    scene.applied(7, true);
    scene.follow(CONTROL, 4, signal).unwrap();
    scene.follow(CONTROL, 0, notify(7, 2, "behind")).unwrap();
    assert!(scene.answers.is_empty() && scene.delivered.is_empty());
    scene.applied(7, true);
    let before = u64::from_le_bytes([64, 65, 66, 67, 68, 69, 70, 71]);
    assert_eq!(scene.answers, [(CONTROL, 4, Ok(before))]);
    assert_eq!(scene.delivered, [b"behind"]);
    assert_eq!(scene.read(LANE, handle, vec![block(0, 1)]).unwrap(), [67]);
}

#[test]
fn what_follows_a_transfer_that_failed_or_was_given_up_is_cancelled() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let signal = |transfer| Signal { transfer, pieces: 2, handle, offset: 0, add: 1 };
    scene.follow(CONTROL, 4, signal(7)).unwrap();
    scene.follow(CONTROL, 0, notify(7, 2, "behind")).unwrap();
    scene.applied(7, false);
    scene.follow(LANE, 5, signal(8)).unwrap();
    scene.follow(CONTROL, 8, Cancel {}).unwrap();
    let canceled = |over, id| (over, id, Err(Kind::Canceled));
    assert_eq!(scene.answers, [canceled(CONTROL, 4), canceled(LANE, 5)]);
    assert!(scene.delivered.is_empty() && scene.array.begun.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_signal_for_nobody_that_is_refused_is_not_worth_the_session() {
    let mut scene = Scene::open();
    let signal = |pieces| Signal { transfer: 7, pieces, handle: 9, offset: 0, add: 1 };
    scene.follow(CONTROL, 0, signal(0)).unwrap();
    // Behind a transfer it was promised.
    scene.follow(CONTROL, 0, signal(1)).unwrap();
    let settling = scene.rules.applied(7, true).unwrap();
    assert_eq!(scene.settle(settling).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_signal_whose_outcome_somebody_waits_for_forgives_nothing() {
    let mut scene = Scene::open();
    let signal = Signal { transfer: 7, pieces: 0, handle: 9, offset: 0, add: 1 };
    for (id, forgives) in [(0, true), (5, false)] {
        let Action::Settle(settling) = scene.frame(CONTROL, id, signal).unwrap() else {
            panic!("it follows")
        };
        assert_eq!(settling.forgives(), forgives);
    }
}

#[test]
fn pieces_of_no_transfer_are_not_counted() {
    let mut scene = Scene::open();
    scene.import(Access::NONE, None);
    scene.applied(0, true);
    scene.applied(0, true);
    scene.follow(CONTROL, 0, notify(0, 1, "behind nothing")).unwrap();
    assert!(scene.delivered.is_empty());
    scene.follow(CONTROL, 0, notify(0, 0, "alone")).unwrap();
    assert_eq!(scene.delivered, [b"alone"]);
}
