//! Handles, and what a peer's tickets are worth.

use super::*;

#[test]
fn a_ticket_has_one_handle_until_it_is_given_back_as_often_as_it_was_granted() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ, None);
    assert_eq!((scene.import(Access::READ, None), scene.rules.count_grants()), (handle, 1));
    // The same bytes that are now worth something else are another grant.
    let other = scene.import_as(b"read None", claims(Access::WRITE, None));
    assert!(other != handle && scene.rules.count_grants() == 2);
    assert!(scene.rules.release(handle).is_none());
    assert!(scene.read(LANE, handle, vec![block(0, 1)]).is_ok());
    assert!(scene.rules.release(handle).is_some());
    assert!(scene.rules.find("test", handle).is_err());
    assert_eq!(scene.import_as(b"read None", claims(Access::WRITE, None)), other);
}

#[test]
fn handles_in_use_are_not_given_again_and_none_is_zero() {
    let mut scene = Scene::open();
    let first = scene.import(Access::READ, None);
    scene.rules.number_grants_from(u32::MAX);
    let (last, next) = (scene.import(Access::WRITE, None), scene.import(Access::READ_WRITE, None));
    assert_eq!((first, last, next), (1, u32::MAX, 2));
}

#[test]
fn a_peer_holds_no_more_grants_than_it_may() {
    let mut scene = Scene::with(Quotas { grants: 1, ..Quotas::default() }, None);
    let handle = scene.import(Access::READ, None);
    let more = claims(Access::WRITE, None);
    assert_eq!(scene.rules.grant_again(b"more", &more).unwrap_err().kind(), Kind::Exhausted);
    assert_eq!(scene.import(Access::READ, None), handle, "the same once more is no other");
}

#[test]
fn a_peer_whose_tickets_are_no_good_any_more_delivers_nothing() {
    let mut scene = Scene::with(Quotas::default(), Some(1000));
    scene.import(Access::NONE, Some(3000));
    scene.import(Access::READ, Some(2000));
    // The first ticket, and then the one of the others that lasts longest.
    for _ in 0..3 {
        scene.follow(CONTROL, 0, notify(0, 0, "good")).unwrap();
        scene.pass(Duration::from_millis(999));
    }
    scene.pass(Duration::from_millis(3));
    let error = scene.follow(CONTROL, 0, notify(0, 0, "late")).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::PermissionDenied, "notify"));
    // The waiter learns why, and the session lives.
    scene.follow(CONTROL, 4, notify(0, 0, "late")).unwrap();
    assert_eq!(scene.answers, [(CONTROL, 4, Err(Kind::PermissionDenied))]);
    assert_eq!(scene.delivered.len(), 3);
    // One that is granted then is as good as ever, until its region is taken back.
    scene.import(Access::NONE, None);
    scene.follow(CONTROL, 0, notify(0, 0, "again")).unwrap();
    scene.array.closed.store(true, Ordering::SeqCst);
    assert_eq!(scene.follow(CONTROL, 0, notify(0, 0, "gone")).unwrap_err().kind(), Kind::Stale);
    assert_eq!(scene.delivered.len(), 4);
}

#[test]
fn a_message_without_a_good_ticket_counts_against_the_peer() {
    let mut scene = Scene::with(Quotas::default(), Some(0));
    let Action::Settle(mut settling) = scene.frame(CONTROL, 0, notify(0, 0, "x")).unwrap() else {
        panic!("it follows")
    };
    let settled = scene.rules.settle(&mut settling, scene.now).unwrap();
    assert!(matches!(refused(settled.act), (Kind::PermissionDenied, Blame::Peer)));
}
