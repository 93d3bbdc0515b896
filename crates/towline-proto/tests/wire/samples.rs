//! The values behind the golden vectors. A value that changes here changes a vector.

use std::time::Duration;

use towline_proto::layout::{Dim, Layout};
use towline_proto::ticket::{RegionKey, TicketBody};
use towline_proto::wire::*;
use towline_proto::{Access, Dtype, Identity, Incarnation, Kind, Place, Reach, ReduceOp, Ticket};

pub(crate) fn region_key() -> RegionKey {
    RegionKey::derive(&[0x42; 32], 5, 0x0102_0304_0506_0708)
}

pub(crate) fn counting<const N: usize>(first: u8) -> [u8; N] {
    std::array::from_fn(|at| first.wrapping_add(at as u8))
}

fn owner() -> Identity {
    Identity::new("prefill-0", Incarnation(counting(0xa0))).unwrap()
}

fn layout() -> Layout {
    let dims = [(2, 0x10_0000), (2, 0x8_0000), (4, 0x1_0000), (8, 0x1000)];
    Layout::new(0x40, 0x800, &dims.map(|(count, stride)| Dim { count, stride })).unwrap()
}

fn body() -> TicketBody {
    TicketBody {
        identity: owner(),
        reach: vec![Reach::Unix, Reach::Tcp("192.0.2.7:7411".parse().unwrap())],
        row: 5,
        generation: 0x0102_0304_0506_0708,
        length: 0x20_0000,
        place: Place::Host,
        access: Access::READ_WRITE,
        issued_ms: 60_000,
        layout: None,
    }
}

pub(crate) fn tickets() -> [(&'static str, &'static str, Ticket); 3] {
    let plain = Ticket::mint(&body(), &region_key()).unwrap();
    let narrowed = plain
        .narrow()
        .range(0x1000, 0x400)
        .access(Access::READ)
        .lease(Duration::from_secs(90))
        .finish()
        .unwrap();
    let mut full = body();
    full.reach.push(Reach::Tcp("[2001:db8::7]:7411".parse().unwrap()));
    full.place = Place::Cuda(3);
    full.layout = Some(layout());
    let full = Ticket::mint(&full, &region_key()).unwrap();
    [
        ("ticket-plain", "A ticket without caveats", plain),
        ("ticket-narrowed", "The plain ticket, narrowed by range, access and lease", narrowed),
        ("ticket-layout", "A ticket with a layout of four dimensions and three addresses", full),
    ]
}

pub(crate) struct Sample {
    pub(crate) message: Message,
    pub(crate) id: u64,
    pub(crate) payload_len: u64,
    pub(crate) files: u8,
    pub(crate) authenticated: bool,
}

fn error() -> WireError {
    WireError { kind: Kind::Stale, message: "the region was deregistered".into() }
}

fn grant(segment: Option<SegmentRef>, layout: Option<Layout>, place: Place) -> Grant {
    Grant {
        handle: 11,
        row: 5,
        generation: 0x0102_0304_0506_0708,
        offset: 0x1000,
        length: 0x400,
        access: Access::READ,
        place,
        layout,
        segment,
        expires_in_ms: Some(5_000),
        offers: 3,
    }
}

/// Every kind of frame at least once, with its name.
pub(crate) fn frames() -> Vec<(String, Sample)> {
    let client = Identity::new("decode-1", Incarnation(counting(0xc0))).unwrap();
    let hello = |key| Hello {
        oldest: 1,
        newest: 1,
        identity: client.clone(),
        target: owner().incarnation,
        nonce: counting(0x10),
        key,
    };
    let [(_, _, plain), ..] = tickets();
    let equal =
        vec![Block { offset: 0, len: 64 }, Block { offset: 4096, len: 64 }, Block { offset: 640, len: 64 }];
    let mixed = vec![Block { offset: 0, len: 64 }, Block { offset: 4096, len: 16 }];
    let segment = SegmentRef { id: 21, len: 0x40_0000, offset: 0x10_0000, attached: true };
    let granted = Granted {
        items: vec![
            Ok(grant(Some(segment), None, Place::Host)),
            Ok(grant(None, Some(layout()), Place::Cuda(3))),
            Err(error()),
        ],
    };
    let welcome = Welcome {
        version: 1,
        incarnation: owner().incarnation,
        nonce: counting(0x30),
        secret_required: true,
        mac: counting(0x50),
    };
    let item =
        |operation| ImportItem { ticket: plain.public_bytes().to_vec(), proof: counting(0x90), operation };
    let operation = counting(0xd0);
    let local = Ready { session: 31, name: "prefill-0".into(), local: Some(65_536) };
    let reduce =
        Reduce { transfer: 77, handle: 11, op: ReduceOp::Sum, dtype: Dtype::F32, blocks: mixed.clone() };
    let swap = AtomicOp::CompareSwap { expected: 6, new: 7 };

    let mut frames = Vec::new();
    let mut add = |name: &str, message: Message, payload_len, files| {
        let early = matches!(message, Message::Hello(_) | Message::Welcome(_) | Message::Prove(_));
        let id = if early { 0 } else { 0x1122_3344_5566_7788 };
        let sample = Sample { message, id, payload_len, files, authenticated: !early };
        frames.push((format!("frame-{name}"), sample));
    };
    add("hello-ticket", hello(KeyRef::Ticket(plain.public_bytes().to_vec())).into(), 0, 0);
    add("hello-session", hello(KeyRef::Session(31)).into(), 0, 0);
    add("welcome", welcome.into(), 0, 0);
    add("refuse", Refuse { error: error() }.into(), 0, 0);
    add("prove", Prove { mac: counting(0x70) }.into(), 0, 0);
    add("ready", Ready { session: 31, name: "prefill-0".into(), local: None }.into(), 0, 0);
    add("ready-local", local.into(), 0, 3);
    add("held", Held {}.into(), 0, 1);
    add("import", Import { items: vec![item(None), item(Some(operation))] }.into(), 0, 0);
    add("granted", granted.into(), 0, 1);
    add("release", Release { handle: 11 }.into(), 0, 0);
    add("unmap", Unmap { segment: 5 }.into(), 0, 0);
    add("ask", Query { handle: 11, path: 2, body: vec![1, 2, 3] }.into(), 0, 0);
    add("told", QueryReply { outcome: Ok(vec![4, 5]) }.into(), 0, 2);
    add("told-error", QueryReply { outcome: Err(error()) }.into(), 0, 0);
    add("recall", Recall { handle: 11 }.into(), 0, 0);
    add("read-equal", Read { transfer: 77, handle: 11, blocks: equal.clone() }.into(), 0, 0);
    add("read-mixed", Read { transfer: 77, handle: 11, blocks: mixed.clone() }.into(), 0, 0);
    add("data", Data { outcome: Ok(()) }.into(), 192, 0);
    add("data-error", Data { outcome: Err(error()) }.into(), 0, 0);
    add("write", Write { transfer: 77, handle: 11, blocks: equal }.into(), 192, 0);
    add("reduce", reduce.into(), 80, 0);
    add("done", Done { outcome: Ok(192) }.into(), 0, 0);
    add("done-error", Done { outcome: Err(error()) }.into(), 0, 0);
    add("atomic-add", Atomic { handle: 11, offset: 8, op: AtomicOp::Add(5) }.into(), 0, 0);
    add("atomic-swap", Atomic { handle: 11, offset: 8, op: swap }.into(), 0, 0);
    add("signal", Signal { transfer: 77, pieces: 3, handle: 11, offset: 16, add: 1 }.into(), 0, 0);
    add("notify", Notify { transfer: 77, pieces: 3, message: b"layer 4 is there".to_vec() }.into(), 0, 0);
    add("cancel", Cancel {}.into(), 0, 0);
    add("finish", Finish { operation, outcome: Ok(()) }.into(), 0, 0);
    add("finish-error", Finish { operation, outcome: Err(error()) }.into(), 0, 0);
    add("check", Check { checks: vec![0, 0xe306_9283, u32::MAX] }.into(), 0, 0);
    add("check-asked", Check { checks: Vec::new() }.into(), 0, 0);
    add("withdraw", Withdraw {}.into(), 0, 0);
    add("end-lane", EndLane { lane: counting(0x60) }.into(), 0, 0);
    add("ping", Ping {}.into(), 0, 0);
    add("pong", Pong {}.into(), 0, 0);
    add("bye", Bye { error: None }.into(), 0, 0);
    add("bye-error", Bye { error: Some(error()) }.into(), 0, 0);
    frames
}
