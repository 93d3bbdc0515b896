#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::element::{Dtype, ReduceOp};
use crate::identity::{Identity, Incarnation};
use crate::layout::{Dim, Layout};
use crate::place::Place;
use crate::{Access, Kind};

fn body(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(&mut out);
    out
}

fn any_text() -> impl Strategy<Value = String> {
    "[ -~éß漢]{0,100}"
}

fn any_error() -> impl Strategy<Value = WireError> {
    (0..Kind::ALL.len(), any_text())
        .prop_map(|(kind, message)| WireError { kind: Kind::ALL[kind].0, message })
}

fn any_outcome<T: std::fmt::Debug + Clone>(
    good: impl Strategy<Value = T>,
) -> impl Strategy<Value = Result<T, WireError>> {
    prop_oneof![good.prop_map(Ok), any_error().prop_map(Err)]
}

fn any_blocks() -> impl Strategy<Value = Vec<Block>> {
    let offset = 0..u64::MAX / 2;
    let uniform = (0..1u32 << 20, vec(offset.clone(), 0..60))
        .prop_map(|(len, offsets)| offsets.into_iter().map(|offset| Block { offset, len }).collect());
    let varied = vec((offset, 0..1u32 << 20).prop_map(|(offset, len)| Block { offset, len }), 0..60);
    prop_oneof![uniform, varied]
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let dim = (1..50u64, 0..1u64 << 40).prop_map(|(count, stride)| Dim { count, stride });
    (0..1u64 << 50, 1..1u64 << 40, vec(dim, 1..=4))
        .prop_map(|(base, len, dims)| Layout::new(base, len, &dims).unwrap())
}

fn any_grant() -> impl Strategy<Value = Grant> {
    let place = prop_oneof![Just(Place::Host), any::<u32>().prop_map(Place::Cuda), Just(Place::Disk)];
    let range = (0..1u64 << 50, 0..1u64 << 50);
    let segment = option::of((any::<u64>(), 0..1u64 << 50, 0..1u64 << 50, any::<bool>()));
    (
        any::<(u32, u32, u64)>(),
        range,
        0..=3u8,
        place,
        option::of(any_layout()),
        segment,
        any::<(Option<u64>, u8)>(),
    )
        .prop_map(
            |(
                (handle, row, generation),
                (offset, length),
                access,
                place,
                layout,
                segment,
                (expires_in_ms, offers),
            )| {
                Grant {
                    handle,
                    row,
                    generation,
                    offset,
                    length,
                    access: Access::from_bits(access).unwrap(),
                    place,
                    layout,
                    segment: segment.map(|(id, more, at, attached)| SegmentRef {
                        id,
                        len: at + offset + length + more,
                        offset: at,
                        attached,
                    }),
                    expires_in_ms,
                    offers,
                }
            },
        )
}

fn any_identity() -> impl Strategy<Value = Identity> {
    ("[!-~é]{1,32}", any::<[u8; 16]>())
        .prop_map(|(name, life)| Identity::new(name, Incarnation(life)).unwrap())
}

fn any_hello() -> impl Strategy<Value = Message> {
    let key = prop_oneof![
        vec(any::<u8>(), 0..600).prop_map(KeyRef::Ticket),
        any::<u64>().prop_map(KeyRef::Session),
    ];
    (any::<u16>(), any::<u16>(), any_identity(), any::<[u8; 16]>(), any::<[u8; 32]>(), key).prop_map(
        |(a, b, identity, target, nonce, key)| {
            Hello { oldest: a.min(b), newest: a.max(b), identity, target: Incarnation(target), nonce, key }
                .into()
        },
    )
}

fn any_contact() -> impl Strategy<Value = Message> {
    let welcome = any::<(u16, [u8; 16], [u8; 32], bool, [u8; 32])>().prop_map(
        |(version, life, nonce, secret_required, mac)| {
            Welcome { version, incarnation: Incarnation(life), nonce, secret_required, mac }.into()
        },
    );
    let ready = (any::<u64>(), "[!-~é]{1,32}", option::of(any::<u32>()))
        .prop_map(|(session, name, local)| Ready { session, name, local }.into());
    prop_oneof![
        any_hello(),
        welcome,
        any_error().prop_map(|error| Refuse { error }.into()),
        any::<[u8; 32]>().prop_map(|mac| Prove { mac }.into()),
        ready,
        Just(Held {}.into()),
        Just(Cancel {}.into()),
        Just(Withdraw {}.into()),
        any::<[u8; 32]>().prop_map(|lane| EndLane { lane }.into()),
        Just(Ping {}.into()),
        Just(Pong {}.into()),
        option::of(any_error()).prop_map(|error| Bye { error }.into()),
    ]
}

fn any_message() -> impl Strategy<Value = Message> {
    let item = (vec(any::<u8>(), 0..300), any::<[u8; 32]>(), option::of(any::<[u8; 16]>()))
        .prop_map(|(ticket, proof, operation)| ImportItem { ticket, proof, operation });
    let op = (0..ReduceOp::ALL.len()).prop_map(|at| ReduceOp::ALL[at]);
    let dtype = (0..Dtype::ALL.len()).prop_map(|at| Dtype::ALL[at]);
    let atomic = prop_oneof![
        any::<u64>().prop_map(AtomicOp::Add),
        any::<(u64, u64)>().prop_map(|(expected, new)| AtomicOp::CompareSwap { expected, new }),
    ];
    let ids = any::<(u64, u32)>();
    prop_oneof![
        10 => any_contact(),
        1 => vec(item, 0..20).prop_map(|items| Import { items }.into()),
        1 => vec(any_outcome(any_grant()), 0..20).prop_map(|items| Granted { items }.into()),
        1 => any::<u32>().prop_map(|handle| Release { handle }.into()),
        1 => any::<u64>().prop_map(|segment| Unmap { segment }.into()),
        1 => (any::<u32>(), any::<u8>(), vec(any::<u8>(), 0..300))
            .prop_map(|(handle, path, body)| Query { handle, path, body }.into()),
        1 => any_outcome(vec(any::<u8>(), 0..300)).prop_map(|outcome| QueryReply { outcome }.into()),
        1 => any::<u32>().prop_map(|handle| Recall { handle }.into()),
        1 => (ids, any_blocks()).prop_map(|((transfer, handle), blocks)| Read { transfer, handle, blocks }.into()),
        1 => any_outcome(Just(())).prop_map(|outcome| Data { outcome }.into()),
        1 => (ids, any_blocks()).prop_map(|((transfer, handle), blocks)| Write { transfer, handle, blocks }.into()),
        1 => (ids, op, dtype, any_blocks()).prop_map(|((transfer, handle), op, dtype, blocks)| {
            Reduce { transfer, handle, op, dtype, blocks }.into()
        }),
        1 => any_outcome(any::<u64>()).prop_map(|outcome| Done { outcome }.into()),
        1 => (any::<[u8; 16]>(), any_outcome(Just(())))
            .prop_map(|(operation, outcome)| Finish { operation, outcome }.into()),
        1 => prop::collection::vec(any::<u32>(), 0..50).prop_map(|checks| Check { checks }.into()),
        1 => (any::<(u32, u64)>(), atomic).prop_map(|((handle, offset), op)| Atomic { handle, offset, op }.into()),
        1 => any::<(u64, u32, u32, u64, u64)>().prop_map(|(transfer, pieces, handle, offset, add)| {
            Signal { transfer, pieces, handle, offset, add }.into()
        }),
        1 => (ids, vec(any::<u8>(), 0..500))
            .prop_map(|((transfer, pieces), message)| Notify { transfer, pieces, message }.into()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2048) })]

    #[test]
    fn any_message_survives_the_wire(message in any_message(), id in any::<u64>()) {
        let bytes = message.frame(id, 0, 0);
        let (header, rest) = bytes.split_first_chunk().unwrap();
        let header = Header::decode(header).unwrap();
        prop_assert_eq!((header.kind, header.id, header.rest()), (message.kind(), id, rest.len()));
        prop_assert!(!header.kind.is_padded() || bytes.len() % ALIGNED == 0);
        prop_assert_eq!(Message::decode(header.kind, header.body(rest).unwrap()).unwrap(), message);
    }

    #[test]
    fn a_changed_cut_or_longer_message_never_panics_and_never_changes_form(
        message in any_message(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        kind in 0..FrameKind::ALL.len(),
    ) {
        let mut bytes = message.frame(1, 0, 0);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fuzzing::frame(&bytes);
        fuzzing::frame(&bytes[..cut.index(bytes.len())]);
        // The same body under another kind.
        bytes[HEADER_LEN - 1] = FrameKind::ALL[kind] as u8;
        fuzzing::frame(&bytes[HEADER_LEN - 1..]);
        bytes.push(0);
        fuzzing::frame(&bytes);
        let mut longer = body(&message);
        longer.push(0);
        prop_assert!(message.kind() == FrameKind::Notify || Message::decode(message.kind(), &longer).is_err());
    }

    #[test]
    fn random_bytes_never_panic(noise in vec(any::<u8>(), 0..300)) {
        fuzzing::frame(&noise);
        fuzzing::handshake(&noise);
    }
}

#[test]
fn every_truncated_body_is_refused() {
    let blocks = vec![Block { offset: 1, len: 2 }, Block { offset: 3, len: 4 }];
    let full: [Message; 5] = [
        Read { transfer: 1, handle: 2, blocks: blocks.clone() }.into(),
        Reduce { transfer: 1, handle: 2, op: ReduceOp::Max, dtype: Dtype::F32, blocks }.into(),
        Atomic { handle: 1, offset: 8, op: AtomicOp::CompareSwap { expected: 1, new: 2 } }.into(),
        Import {
            items: vec![ImportItem { ticket: vec![1; 9], proof: [2; 32], operation: Some([3; 16]) }; 3],
        }
        .into(),
        Bye { error: Some(WireError { kind: Kind::Timeout, message: "slow".into() }) }.into(),
    ];
    for message in full {
        let bytes = body(&message);
        for len in 0..bytes.len() {
            let error = Message::decode(message.kind(), &bytes[..len]).unwrap_err();
            assert_eq!(error.kind(), Kind::Protocol);
        }
    }
}

#[test]
fn kinds_keep_their_numbers() {
    let numbers: Vec<u8> = FrameKind::ALL.iter().map(|kind| *kind as u8).collect();
    assert_eq!(
        numbers,
        [
            1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44,
            48, 49, 50
        ]
    );
    assert_eq!((0..=255).filter_map(FrameKind::from_code).count(), FrameKind::ALL.len());
}

#[test]
fn a_header_keeps_its_shape() {
    let (kind, body_len, payload_len) = (FrameKind::Write, 0x0102, 0x0304);
    let header = Header { kind, flags: 0, files: 7, pad: 9, body_len, payload_len, id: 5 };
    let bytes = header.encode();
    assert_eq!(bytes, [34, 0, 7, 9, 2, 1, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Header::decode(&bytes).unwrap(), header);
    for (at, value) in [(0, 0), (0, 255), (0, b'G'), (1, 1)] {
        let mut wrong = bytes;
        wrong[at] = value;
        assert_eq!(Header::decode(&wrong).unwrap_err().kind(), Kind::Protocol);
    }
}

#[test]
fn padding_is_short_empty_and_not_in_the_handshake() {
    for kind in FrameKind::ALL {
        let header = Header { kind, flags: 0, files: 0, pad: 63, body_len: 0, payload_len: 0, id: 0 };
        let plain = Header { pad: 0, ..header };
        assert_eq!(header.check(true).is_ok(), plain.check(true).is_ok() && kind.is_padded(), "{kind:?}");
        assert!(header.check(false).is_err() && Header { pad: 64, ..header }.check(true).is_err());
    }
    let header =
        Header { kind: FrameKind::Ping, flags: 0, files: 0, pad: 2, body_len: 1, payload_len: 0, id: 0 };
    assert_eq!(header.body(&[7, 0, 0]).unwrap(), [7]);
    for rest in [&[7, 0, 1][..], &[]] {
        assert_eq!(header.body(rest).unwrap_err().kind(), Kind::Protocol);
    }
}

#[test]
fn nothing_but_the_handshake_is_heard_before_authentication() {
    for kind in FrameKind::ALL {
        let header = Header { kind, flags: 0, files: 0, pad: 0, body_len: 0, payload_len: 0, id: 0 };
        let early =
            matches!(kind, FrameKind::Hello | FrameKind::Welcome | FrameKind::Refuse | FrameKind::Prove);
        assert_eq!(header.check(false).is_ok(), early, "{kind:?}");
        assert_eq!(header.check(true).is_ok(), !early || kind == FrameKind::Refuse, "{kind:?}");
        let long = Header { body_len: MAX_HELLO + 1, ..header };
        assert!(long.check(false).is_err());
    }
}

#[test]
fn caps_are_checked_before_anything_is_allocated() {
    for kind in FrameKind::ALL {
        let header = Header { kind, flags: 0, files: 0, pad: 0, body_len: MAX_BODY, payload_len: 0, id: 0 };
        let known = header.check(true).is_ok();
        assert!(Header { body_len: MAX_BODY + 1, ..header }.check(true).is_err());
        assert_eq!(Header { payload_len: 1, ..header }.check(true).is_ok(), known && kind.has_payload());
        assert_eq!(
            Header { payload_len: MAX_PAYLOAD, ..header }.check(true).is_ok(),
            known && kind.has_payload()
        );
        assert!(Header { payload_len: MAX_PAYLOAD + 1, ..header }.check(true).is_err());
        let files = kind.max_files();
        assert_eq!(Header { files, ..header }.check(true).is_ok(), known);
        assert!(Header { files: files + 1, ..header }.check(true).is_err());
    }
}

#[test]
fn a_count_larger_than_the_body_is_refused_before_room_is_made() {
    let read = [&[0; 12][..], &u32::MAX.to_le_bytes(), &[0], &[0; 12]].concat();
    assert!(Read::decode(&read).unwrap_err().message().contains("do not fit"));
    let import = [&u16::MAX.to_le_bytes()[..], &[0; 40]].concat();
    assert!(Import::decode(&import).unwrap_err().message().contains("more than fit"));
    let granted = [&2000u16.to_le_bytes()[..], &[1; 9000]].concat();
    assert!(Granted::decode(&granted).unwrap_err().message().contains("more than fit"));
}

#[test]
fn equal_blocks_take_eight_bytes_each_and_have_one_form() {
    let same: Vec<Block> = (0..100).map(|at| Block { offset: at * 64, len: 64 }).collect();
    let read = Message::from(Read { transfer: 1, handle: 2, blocks: same.clone() });
    assert_eq!(body(&read).len(), 12 + 4 + 1 + 4 + 100 * 8);

    let mut long = Vec::from([0; 12]);
    crate::codec::put_u32(&mut long, 2);
    long.push(0);
    for block in &same[..2] {
        crate::codec::put_u64(&mut long, block.offset);
        crate::codec::put_u32(&mut long, block.len);
    }
    assert!(Read::decode(&long).unwrap_err().message().contains("shortest form"));
}

#[test]
fn blocks_beyond_a_payload_or_the_end_of_numbers_are_refused() {
    let decode =
        |blocks| Message::decode(FrameKind::Write, &body(&Write { transfer: 1, handle: 1, blocks }.into()));
    let most = MAX_PAYLOAD as u32;
    assert!(decode(vec![Block { offset: 0, len: most }]).is_ok());
    assert!(decode(vec![Block { offset: 0, len: most }, Block { offset: 0, len: 1 }]).is_err());
    assert!(decode(vec![Block { offset: 0, len: u32::MAX }; 3]).is_err());
    assert!(decode(vec![Block { offset: u64::MAX, len: 1 }]).is_err());
    let full = Read { transfer: 1, handle: 1, blocks: vec![Block { offset: 7, len: 1 }; MAX_BLOCKS] };
    assert!(body(&full.into()).len() <= MAX_BODY as usize);
}

#[test]
fn a_grant_outside_its_segment_is_refused() {
    let grant = Grant {
        handle: 1,
        row: 2,
        generation: 3,
        offset: 100,
        length: 50,
        access: Access::READ,
        place: Place::Host,
        layout: None,
        segment: Some(SegmentRef { id: 1, len: 4096, offset: 4096 - 150, attached: true }),
        expires_in_ms: None,
        offers: 0,
    };
    let decode = |grant: Grant| Granted::decode(&body(&Granted { items: vec![Ok(grant)] }.into()));
    assert!(decode(grant.clone()).is_ok());
    let segment = SegmentRef { id: 1, len: 4096, offset: 4096 - 149, attached: true };
    assert!(decode(Grant { segment: Some(segment), ..grant.clone() }).is_err());
    assert!(decode(Grant { offset: u64::MAX, segment: None, ..grant }).is_err());
}

#[test]
fn a_long_message_is_cut_at_a_character() {
    let error = Error::new(Kind::Stale, "read", "é".repeat(400));
    let wire = WireError::from(&error);
    assert_eq!(wire.message.len(), MAX_ERROR);
    let wire = WireError::from(&Error::new(Kind::Stale, "read", format!("x{}", "é".repeat(400))));
    assert_eq!(wire.message.len(), MAX_ERROR - 1);
    let long = WireError { kind: Kind::Stale, message: "y".repeat(9000) };
    let Message::Refuse(back) =
        Message::decode(FrameKind::Refuse, &body(&Refuse { error: long }.into())).unwrap()
    else {
        panic!("another kind came back");
    };
    assert_eq!(back.error.message, "y".repeat(MAX_ERROR));
    let error = back.error.into_error("read");
    assert_eq!((error.kind(), error.op()), (Kind::Stale, "read"));
}

#[test]
fn a_notification_longer_than_64_kib_is_refused() {
    let notify = |len| body(&Notify { transfer: 1, pieces: 0, message: vec![7; len] }.into());
    assert!(Notify::decode(&notify(MAX_NOTIFY)).is_ok());
    assert!(Notify::decode(&notify(MAX_NOTIFY + 1)).is_err());
}

#[test]
fn an_unknown_kind_of_error_is_refused() {
    assert!(Refuse::decode(&[13, 0, 0]).is_err());
    assert!(Refuse::decode(&[12, 0, 0]).is_ok());
}
