//! Which frames a user may send when, and what goes with them.

use super::*;

#[test]
fn a_payload_of_another_length_than_its_blocks_ends_the_connection() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    for len in [3, 5, u64::MAX] {
        let write = Write { transfer: 0, handle, blocks: vec![block(0, 4)] };
        assert_eq!(scene.arrives(write.into(), len).err().unwrap().kind(), Kind::Protocol);
    }
}

#[test]
fn a_reduction_above_the_limit_ends_the_connection() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let reduce = |len| Reduce {
        transfer: 0,
        handle,
        op: ReduceOp::Sum,
        dtype: Dtype::U8,
        blocks: vec![block(0, len)],
    };
    let most = MOST_REDUCED as u32;
    assert_eq!(
        scene.arrives(reduce(most + 1).into(), MOST_REDUCED + 1).err().unwrap().kind(),
        Kind::Protocol
    );
    // At the limit only the range is in its way.
    let arriving = scene.arrives(reduce(most).into(), MOST_REDUCED).unwrap();
    assert!(arriving.is_combined && arriving.charge.bytes() == MOST_REDUCED + 64);
    assert_eq!(refused(arriving.admitted).0, Kind::Invalid);
}

#[test]
fn a_payload_for_which_there_is_no_memory_is_refused_and_not_blamed_on_anybody() {
    let quotas = Quotas { memory: 1 << 20, ..Quotas::default() };
    let mut scene = Scene::with(quotas, None);
    let handle = scene.import(Access::READ_WRITE, None);
    let blocks = vec![block(0, 2 << 20)];
    let reduce = Reduce { transfer: 0, handle, op: ReduceOp::Sum, dtype: Dtype::U8, blocks };
    let arriving = scene.arrives(reduce.into(), 2 << 20).unwrap();
    assert!(matches!(refused(arriving.admitted), (Kind::Exhausted, Blame::Nobody)));
    assert_eq!(arriving.charge.bytes(), 64);
}

#[test]
fn what_an_owner_sends_is_refused_from_a_user() {
    let mut scene = Scene::open();
    let done = Done { outcome: Ok(1) };
    let error = scene.frame(LANE, 1, done.clone()).err().unwrap();
    assert_eq!((error.kind(), error.message()), (Kind::Protocol, "a user does not send Done"));
    assert!(scene.frame(LANE, 1, Data { outcome: Ok(()) }).is_err());
    // A page of life between processes that share nothing.
    assert_eq!(scene.frame(CONTROL, 0, Held {}).err().unwrap().kind(), Kind::Protocol);
    // As a payload, and payloads as plain frames.
    assert_eq!(scene.arrives(done.into(), 4).err().unwrap().kind(), Kind::Protocol);
    let write = Write { transfer: 0, handle: 1, blocks: Vec::new() };
    assert_eq!(scene.frame(LANE, 1, write).err().unwrap().kind(), Kind::Protocol);
}

#[test]
fn every_kind_of_frame_is_answered_done_or_refused() {
    let user = [
        FrameKind::Held,
        FrameKind::Import,
        FrameKind::Release,
        FrameKind::Query,
        FrameKind::Read,
        FrameKind::Atomic,
        FrameKind::Signal,
        FrameKind::Notify,
        FrameKind::Cancel,
        FrameKind::Finish,
        FrameKind::Check,
        FrameKind::Withdraw,
        FrameKind::EndLane,
        FrameKind::Ping,
        FrameKind::Pong,
        FrameKind::Bye,
    ];
    let operation = [0; 16];
    let messages: Vec<Message> = vec![
        Held {}.into(),
        Import { items: Vec::new() }.into(),
        Release { handle: 1 }.into(),
        Query { handle: 1, path: 0, body: Vec::new() }.into(),
        Read { transfer: 0, handle: 1, blocks: Vec::new() }.into(),
        Atomic { handle: 1, offset: 0, op: AtomicOp::Add(1) }.into(),
        Signal { transfer: 0, pieces: 0, handle: 1, offset: 0, add: 1 }.into(),
        notify(0, 0, "").into(),
        Cancel {}.into(),
        Finish { operation, outcome: Ok(()) }.into(),
        Check { checks: Vec::new() }.into(),
        Withdraw {}.into(),
        EndLane { lane: [9; 32] }.into(),
        Ping {}.into(),
        Pong {}.into(),
        Bye { error: None }.into(),
    ];
    assert!(messages.iter().map(Message::kind).eq(user));
    let mut scene = Scene::open();
    scene.rules.is_local = true;
    for message in messages {
        let kind = message.kind();
        assert!(scene.rules.frame(&LANE, 1, message, scene.now).is_ok(), "{kind:?}");
    }
}

#[test]
fn checksums_are_for_the_next_frame_of_their_connection_and_for_no_other_request() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ_WRITE, None);
    let announce = |scene: &mut Scene, over, id| {
        let nothing = scene.frame(over, id, Check { checks: vec![id as u32] }).unwrap();
        assert!(matches!(nothing, Action::Nothing));
    };
    announce(&mut scene, LANE, 5);
    assert_eq!(scene.rules.announced(&OTHER, 5), None, "over another connection");
    assert_eq!(scene.rules.announced(&LANE, 6), None, "for another request");
    assert_eq!(scene.rules.announced(&LANE, 5), None, "it was not the next one");
    announce(&mut scene, LANE, 5);
    announce(&mut scene, LANE, 7);
    announce(&mut scene, OTHER, 5);
    assert_eq!(scene.rules.announced(&LANE, 7), Some(vec![7]));
    assert_eq!(scene.rules.announced(&OTHER, 5), Some(vec![5]));
    // What is announced for a read is asked for by that read, and goes with its connection.
    for (id, checked) in [(8, true), (9, false)] {
        announce(&mut scene, LANE, 8);
        let read = Read { transfer: 0, handle, blocks: vec![block(0, 1)] };
        let Action::Read(reading) = scene.frame(LANE, id, read).unwrap() else { panic!("not read") };
        assert_eq!(reading.checks.is_some(), checked);
    }
    announce(&mut scene, LANE, 5);
    scene.rules.gone(&LANE, &stale("test"), |_| true);
    assert_eq!(scene.rules.announced(&LANE, 5), None);
}

#[test]
fn checksums_of_long_requests_are_not_made_on_the_control_connection() {
    let mut scene = Scene::open();
    let claims = Claims { range: 0..4 << 20, ..claims(Access::READ_WRITE, None) };
    let handle = scene.import_as(b"long", claims);
    for (over, len, may) in [(CONTROL, 1 << 20, true), (CONTROL, (1 << 20) + 1, false), (LANE, 2 << 20, true)]
    {
        scene.frame(over, 3, Check { checks: vec![1] }).unwrap();
        let read = Read { transfer: 0, handle, blocks: vec![block(0, len)] };
        let Action::Read(reading) = scene.frame(over, 3, read).unwrap() else { panic!("not read") };
        assert_eq!(reading.checks.unwrap().is_ok(), may);
        let now = scene.now;
        let held = scene.rules.hold_to_check(&over, "write", handle, Access::WRITE, vec![block(0, len)], now);
        assert_eq!(held.is_ok(), may);
    }
    assert_eq!((scene.array.held(), scene.allowance.load()), (0, (0, 0)));
}

#[test]
fn an_answer_is_taken_back_only_where_it_waits_and_nothing_is_kept_in_mind() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ, None);
    // What an edge has not sent: requests, and what holds their bytes.
    let mut queue: Vec<(u64, HoldOfArray)> = Vec::new();
    for id in [1, 2] {
        let read = Read { transfer: 0, handle, blocks: vec![block(0, 8)] };
        let Action::Read(reading) = scene.frame(LANE, id, read).unwrap() else { panic!("not read") };
        queue.push((id, reading.admitted.ok().unwrap().into_parts().0));
    }
    // The first has been sent; one was never asked for.
    queue.remove(0);
    for (id, waits) in [(1, false), (2, true), (3, false), (2, false)] {
        let Action::Withdraw(error) = scene.frame(LANE, id, Withdraw {}).unwrap() else { panic!("kept") };
        assert_eq!((error.kind(), error.op()), (Kind::Canceled, "read"));
        let at = queue.iter().position(|(request, _)| *request == id);
        assert_eq!(at.map(|at| queue.remove(at)).is_some(), waits, "request {id}");
    }
    assert_eq!((scene.array.held(), scene.allowance.load()), (0, (0, 0)));
    assert!(scene.read(LANE, handle, vec![block(0, 8)]).is_ok());
}

#[test]
fn a_question_without_words_lets_go_and_one_about_nothing_is_answered() {
    let mut scene = Scene::open();
    let handle = scene.import(Access::READ, None);
    let query = |handle, words: &[u8]| Query { handle, path: 1, body: words.to_vec() };
    assert!(matches!(scene.frame(CONTROL, 0, query(handle, b"")).unwrap(), Action::LetGo(_)));
    assert!(matches!(scene.frame(CONTROL, 0, query(99, b"")).unwrap(), Action::Nothing));
    assert!(matches!(scene.frame(CONTROL, 1, query(99, b"open")).unwrap(), Action::Reply(_, None)));
    assert!(matches!(scene.frame(CONTROL, 1, query(handle, b"open")).unwrap(), Action::Reply(_, Some(_))));
}
