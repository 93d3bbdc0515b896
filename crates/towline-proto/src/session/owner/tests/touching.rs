//! What a request may touch, and what holds it.

use super::*;

#[test]
fn what_a_ticket_allows_is_read_and_written_and_nothing_is_held_afterwards() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let blocks = [block(0, 2), block(98, 2)];
    assert_eq!(scene.read(LANE, handle, blocks.to_vec()).unwrap(), [64, 65, 162, 163]);
    scene.write(handle, &blocks, b"wxyz").unwrap();
    assert_eq!(scene.read(CONTROL, handle, blocks.to_vec()).unwrap(), b"wxyz");
    assert_eq!((scene.array.begun.load(Ordering::SeqCst), scene.array.held()), (3, 0));
    assert_eq!(scene.allowance.load(), (0, 0));
}

#[test]
fn what_is_admitted_holds_its_region_until_it_is_dropped() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let arriving = scene.arrives(Write { transfer: 0, handle, blocks: vec![block(0, 4)] }.into(), 4).unwrap();
    let (hold, _) = arriving.admitted.unwrap_or_else(|_| panic!("refused")).into_parts();
    assert!(hold.1.is_some());
    assert_eq!((scene.array.held(), scene.allowance.load()), (1, (1, 4)));
    // Whatever becomes of the grant.
    drop(scene.frame(CONTROL, 0, Release { handle }).unwrap());
    assert_eq!(scene.array.held(), 1);
    drop(hold);
    assert_eq!((scene.array.held(), scene.allowance.load()), (0, (0, 0)));
}

#[test]
fn a_handle_of_nothing_and_one_that_was_given_back_open_nothing() {
    let mut scene = Scene::open();
    for handle in [0, 1, 7, u32::MAX] {
        let (kind, blame) = refused(scene.read(LANE, handle, vec![block(0, 1)]));
        assert!(kind == Kind::NotFound && matches!(blame, Blame::Peer));
    }
    let handle = scene.import(Access::READ_WRITE, None);
    assert!(matches!(scene.frame(LANE, 0, Release { handle }).unwrap(), Action::LetGo(_)));
    assert!(matches!(refused(scene.read(LANE, handle, vec![block(0, 1)])), (Kind::NotFound, Blame::Peer)));
    assert!(matches!(refused(scene.write(handle, &[block(0, 1)], b"x")), (Kind::NotFound, Blame::Peer)));
    // Giving it back again changes nothing.
    assert!(matches!(scene.frame(LANE, 0, Release { handle }).unwrap(), Action::Nothing));
    assert_eq!(scene.array.begun.load(Ordering::SeqCst), 0);
}

#[test]
fn nothing_outside_the_range_is_touched() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let outside = [
        block(LENGTH, 1),
        block(LENGTH - 1, 2),
        block(0, LENGTH as u32 + 1),
        block(LENGTH + 1, 0),
        block(u64::MAX - START, 1),
    ];
    for block in outside {
        for blocks in [vec![block], vec![Block { offset: 0, len: 1 }, block]] {
            let (kind, blame) = refused(scene.read(LANE, handle, blocks));
            assert!(kind == Kind::Invalid && matches!(blame, Blame::Grant(_)), "{block:?}");
        }
    }
    // Such ones do not pass the decoder.
    for block in [block(u64::MAX, 1), block(u64::MAX - 1, 2), block(u64::MAX, u32::MAX)] {
        let admitted = scene.rules.admit(handle, Access::READ, vec![block], scene.now);
        assert_eq!(refused(admitted).0, Kind::Invalid, "{block:?}");
    }
    assert_eq!((scene.array.begun.load(Ordering::SeqCst), scene.allowance.load()), (0, (0, 0)));
    assert!(scene.read(LANE, handle, vec![block(LENGTH, 0)]).unwrap().is_empty());
}

#[test]
fn a_ticket_to_read_writes_nothing_and_one_to_write_reads_nothing() {
    let mut scene = Scene::open();
    let (reads, writes) = (scene.import(Access::READ, None), scene.import(Access::WRITE, None));
    let blocks = [block(0, 1)];
    let kind = |outcome| refused::<()>(outcome).0;
    assert_eq!(kind(scene.write(reads, &blocks, b"x")), Kind::PermissionDenied);
    assert_eq!(kind(scene.read(LANE, writes, blocks.to_vec()).map(drop)), Kind::PermissionDenied);
    let atomic = Atomic { handle: reads, offset: 0, op: AtomicOp::Add(1) };
    let Action::Atomic(_, word) = scene.frame(LANE, 1, atomic).unwrap() else { panic!("no atomic") };
    assert_eq!(refused(word).0, Kind::PermissionDenied);
}

#[test]
fn what_is_in_flight_is_bounded_by_what_is_held() {
    let mut scene = Scene::with(Quotas { requests: 2, ..Quotas::default() }, None);
    let handle = scene.import(Access::READ, None);
    let rules = &mut scene.rules;
    let mut read = || rules.admit(handle, Access::READ, vec![block(0, 8)], scene.now);
    let held: Vec<_> = [read(), read()].into_iter().map(Result::ok).collect();
    assert!(matches!(refused(read()), (Kind::Exhausted, Blame::Grant(_))));
    assert!(held.iter().all(Option::is_some));
    drop(held);
    assert!(read().is_ok());
}

#[test]
fn a_region_that_is_taken_back_is_not_held_any_more() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let before = scene.rules.admit(handle, Access::WRITE, vec![block(0, 8)], scene.now).ok().unwrap();
    scene.array.closed.store(true, Ordering::SeqCst);
    assert!(matches!(refused(scene.write(handle, &[block(0, 1)], b"x")), (Kind::Stale, Blame::Grant(_))));
    assert_eq!(refused(scene.read(LANE, handle, vec![block(0, 1)])).0, Kind::Stale);
    // A thread that was inside before stays until it leaves.
    assert_eq!((scene.array.held(), scene.allowance.load()), (1, (1, 8)));
    drop(before);
    assert_eq!(scene.array.held(), 0);
    // Two requests have looked at it in vain, and the rules let go of nothing themselves.
    assert_eq!(scene.rules.take_spent().len(), 2);
    scene.array = Arc::new(Array::default());
    let error = scene.rules.granted("import", handle, Access::NONE, scene.now).err().unwrap();
    assert_eq!(error.kind(), Kind::Stale, "its memory is gone");
}

#[test]
fn a_lease_that_ends_between_two_requests_ends_what_it_allowed() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, Some(1000));
    let blocks = || vec![block(0, 1)];
    scene.pass(Duration::from_millis(999));
    assert!(scene.read(LANE, handle, blocks()).is_ok());
    scene.pass(Duration::from_millis(1));
    assert!(matches!(refused(scene.read(LANE, handle, blocks())), (Kind::PermissionDenied, Blame::Grant(_))));
    assert_eq!(refused(scene.write(handle, &blocks(), b"x")).0, Kind::PermissionDenied);
}
