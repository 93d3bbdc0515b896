#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::Kind;
use crate::identity::{EndpointId, Incarnation};
use crate::layout::Dim;

const MASTER: [u8; 32] = [0x11; 32];

fn key() -> RegionKey {
    RegionKey::derive(&MASTER, 5, 77)
}

fn body() -> TicketBody {
    TicketBody {
        identity: Identity::new("prefill-0", Incarnation([9; 16])).unwrap(),
        reach: vec![Reach::Unix, Reach::Tcp("10.1.2.3:7000".parse().unwrap())],
        row: 5,
        generation: 77,
        length: 1000,
        place: Place::Cuda(3),
        access: Access::READ_WRITE,
        issued_ms: 10_000,
        layout: Some(Layout::new(8, 16, &[Dim { count: 10, stride: 32 }]).unwrap()),
    }
}

fn ticket() -> Ticket {
    Ticket::mint(&body(), &key()).unwrap()
}

/// Whether the owner would accept what a holder of that tag says about these public bytes.
fn verifies(public: &[u8], holder: &Ticket) -> bool {
    parse_public(public)
        .is_ok_and(|seen| seen.tag(&key()).verify_proof(b"challenge", &holder.proof(b"challenge")))
}

fn resealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..bytes.len() - CHECK_LEN].to_vec();
    let check = checksum(&bytes);
    bytes.extend_from_slice(&check);
    bytes
}

fn kind_of(bytes: &[u8]) -> Kind {
    Ticket::decode(bytes).unwrap_err().kind()
}

#[test]
fn a_ticket_says_what_the_owner_said() {
    let ticket = ticket();
    assert_eq!(ticket.body(), &body());
    assert_eq!(ticket.range(), 0..1000);
    assert_eq!(ticket.length(), 1000);
    assert_eq!(ticket.access(), Access::READ_WRITE);
    assert_eq!(ticket.expires_ms(), None);
    assert_eq!(ticket.layout(), body().layout.as_ref());
    assert!(ticket.caveats().is_empty());
    assert!(verifies(ticket.public_bytes(), &ticket));
    assert_eq!(Ticket::decode(&ticket.encode()).unwrap(), ticket);
}

#[test]
fn a_full_ticket_stays_within_512_bytes() {
    let mut body = body();
    body.identity = Identity::new("n".repeat(64), Incarnation([9; 16])).unwrap();
    body.reach = vec![
        Reach::Tcp("[2001:db8::1]:7000".parse().unwrap()),
        Reach::Tcp("[2001:db8::2]:7000".parse().unwrap()),
        Reach::Tcp("[2001:db8::3]:7000".parse().unwrap()),
        Reach::Unix,
    ];
    body.length = u64::MAX;
    body.layout = Some(Layout::new(0, 4096, &[Dim { count: 8, stride: 1 << 20 }; 4]).unwrap());
    let ticket = Ticket::mint(&body, &key()).unwrap();
    assert!(ticket.encode().len() <= 512, "{} bytes", ticket.encode().len());
    let narrowed = ticket.narrow().range(0, 4096).access(Access::READ).lease(Duration::from_secs(9));
    assert!(narrowed.finish().unwrap().encode().len() <= 512);
}

#[test]
fn the_socket_name_follows_from_the_incarnation() {
    let name = socket_name(&Incarnation([0xa0; 16]));
    assert_eq!(name, format!("towline/{}", "a0".repeat(16)).into_bytes());
}

#[test]
fn narrowing_counts_from_the_present_range() {
    let once = ticket().narrow().range(100, 500).finish().unwrap();
    let twice = once.narrow().range(50, 10).finish().unwrap();
    assert_eq!(once.range(), 100..600);
    assert_eq!(twice.range(), 150..160);
    assert_eq!(twice.caveats().len(), 2);
    assert!(verifies(twice.public_bytes(), &twice));
    assert_eq!(ticket().narrow().range(100, 500).range(50, 10).finish().unwrap(), twice);
}

#[test]
fn narrowing_refuses_what_would_widen() {
    let narrow = ticket().narrow().range(100, 500).access(Access::READ).finish().unwrap();
    let wider = [
        narrow.narrow().range(0, 501),
        narrow.narrow().range(500, 1),
        narrow.narrow().range(u64::MAX, 1),
        narrow.narrow().range(1, u64::MAX),
        narrow.narrow().access(Access::WRITE),
        narrow.narrow().access(Access::READ_WRITE),
        narrow.narrow().range(900, 1).range(0, 1),
    ];
    for attempt in wider {
        assert_eq!(attempt.finish().unwrap_err().kind(), Kind::Invalid);
    }
}

#[test]
fn a_lease_counts_from_the_issue_and_never_grows() {
    let leased = ticket().narrow().lease(Duration::from_millis(500)).finish().unwrap();
    assert_eq!(leased.expires_ms(), Some(10_500));
    let longer = leased.narrow().lease(Duration::from_secs(500)).finish().unwrap();
    assert_eq!(longer, leased);
    let shorter = leased.narrow().lease(Duration::from_micros(1)).finish().unwrap();
    assert_eq!(shorter.expires_ms(), Some(10_001));
    assert_eq!(ticket().narrow().lease(Duration::MAX).finish().unwrap().expires_ms(), Some(u64::MAX));
}

#[test]
fn narrowing_to_the_same_changes_nothing() {
    let ticket = ticket();
    assert_eq!(ticket.narrow().range(0, 1000).access(Access::READ_WRITE).finish().unwrap(), ticket);
}

#[test]
fn a_seventeenth_caveat_is_refused() {
    let mut ticket = ticket();
    for len in (0..16).map(|step| 900 - step) {
        ticket = ticket.narrow().range(0, len).finish().unwrap();
    }
    assert_eq!(ticket.caveats().len(), MAX_CAVEATS);
    assert!(verifies(ticket.public_bytes(), &ticket));
    assert_eq!(ticket.narrow().range(0, 1).finish().unwrap_err().kind(), Kind::Invalid);
    // By hand, past the builder.
    let mut public = ticket.public_bytes().to_vec();
    Caveat::Access(Access::READ).encode(&mut public);
    assert!(parse_public(&public).is_err());
}

#[test]
fn only_a_ticket_of_the_whole_region_has_the_layout() {
    let part = ticket().narrow().range(0, 999).finish().unwrap();
    assert_eq!(part.layout(), None);
    assert!(part.body().layout.is_some());
    assert!(ticket().narrow().access(Access::READ).finish().unwrap().layout().is_some());
}

#[test]
fn every_way_to_widen_makes_the_proof_wrong() {
    let mint = ticket();
    let held =
        mint.narrow().range(100, 500).access(Access::READ).lease(Duration::from_secs(1)).finish().unwrap();
    let public = held.public_bytes();
    let head = mint.public_bytes().len();
    let (range, access, expiry) = (head..head + 19, head + 19..head + 23, head + 23..head + 34);
    assert_eq!(expiry.end, public.len());
    assert!(verifies(public, &held));

    let spliced = |parts: &[&[u8]]| [&[&public[..head]], parts].concat().concat();
    let (range, access, expiry) = (&public[range], &public[access], &public[expiry]);
    let mut wide = Vec::new();
    Caveat::Range { offset: 100, len: 501 }.encode(&mut wide);
    let mut both = Vec::new();
    Caveat::Access(Access::READ_WRITE).encode(&mut both);
    let attempts = [
        ("all dropped", spliced(&[])),
        ("last dropped", spliced(&[range, access])),
        ("first dropped", spliced(&[access, expiry])),
        ("reordered", spliced(&[access, range, expiry])),
        ("repeated", spliced(&[range, access, expiry, expiry])),
        ("range edited", spliced(&[&wide, access, expiry])),
        ("access edited", spliced(&[range, &both, expiry])),
    ];
    for (what, bytes) in attempts {
        assert!(parse_public(&bytes).is_ok(), "{what} should fail by its proof, not by its form");
        assert!(!verifies(&bytes, &held), "{what}");
    }
}

#[test]
fn every_changed_byte_of_the_public_part_makes_the_proof_wrong() {
    let held = ticket().narrow().range(100, 500).finish().unwrap();
    for at in 0..held.public_bytes().len() {
        for flip in [1, 0x80] {
            let mut public = held.public_bytes().to_vec();
            public[at] ^= flip;
            assert!(!verifies(&public, &held), "byte {at}");
        }
    }
}

#[test]
fn a_ticket_of_another_region_generation_or_endpoint_does_not_verify() {
    let held = ticket();
    let seen = parse_public(held.public_bytes()).unwrap();
    let proof = held.proof(b"challenge");
    let others = [
        RegionKey::derive(&MASTER, 6, 77),
        RegionKey::derive(&MASTER, 5, 78),
        RegionKey::derive(&[0x12; 32], 5, 77),
    ];
    assert!(others.iter().all(|other| !seen.tag(other).verify_proof(b"challenge", &proof)));
    assert!(!seen.tag(&key()).verify_proof(b"another", &proof));
}

#[test]
fn a_proof_is_not_the_tag_of_a_narrower_ticket() {
    // A challenge is chosen with the peer's help: it must not make the proof a tag.
    let held = ticket();
    let mut caveat = Vec::new();
    Caveat::Access(Access::READ).encode(&mut caveat);
    assert_ne!(held.proof(&caveat), held.tag().extend(&caveat).0);
    let labelled = [b"towline import".as_slice(), &caveat].concat();
    assert_eq!(held.tag().extend(&labelled).0, held.proof(&caveat));
    let public = [held.public_bytes(), &labelled].concat();
    assert!(parse_public(&public).is_err(), "no caveat may start like a label");
}

#[test]
fn claims_are_what_is_left_after_the_caveats() {
    let held = ticket()
        .narrow()
        .range(100, 500)
        .access(Access::READ)
        .lease(Duration::from_secs(1))
        .finish()
        .unwrap();
    let claims = parse_public(held.public_bytes()).unwrap().claims();
    let incarnation = Incarnation([9; 16]);
    let expected = Claims {
        incarnation,
        row: 5,
        generation: 77,
        range: 100..600,
        access: Access::READ,
        expires_ms: Some(11_000),
        layout: held.body().layout.clone(),
    };
    assert_eq!(claims, expected);
}

#[test]
fn every_flipped_bit_is_noticed_before_any_connection() {
    let bytes = ticket().encode();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(kind_of(&damaged), Kind::Protocol, "bit {bit}");
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = ticket().narrow().range(1, 2).finish().unwrap().encode();
    for len in 0..bytes.len() {
        assert_eq!(kind_of(&bytes[..len]), Kind::Protocol, "{len} bytes");
    }
    // With a checksum that fits, a cut between two caveats still parses; then its tag is wrong.
    for len in 0..bytes.len() - CHECK_LEN {
        let cut = resealed(&[&bytes[..len], [0; CHECK_LEN].as_slice()].concat());
        if let Ok(cut) = Ticket::decode(&cut) {
            assert!(!verifies(cut.public_bytes(), &cut), "{len} bytes");
        }
    }
    assert_eq!(kind_of(&vec![0; MAX_TICKET + 1]), Kind::Protocol);
}

#[test]
fn a_foreign_version_is_named_together_with_ours() {
    let mut bytes = ticket().encode();
    bytes[4..6].copy_from_slice(&7u16.to_le_bytes());
    for bytes in [resealed(&bytes), bytes] {
        let error = Ticket::decode(&bytes).unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol);
        assert!(error.message().contains("version 7"), "{error}");
        assert!(error.message().contains("1 to 1"), "{error}");
    }
}

#[test]
fn an_unknown_optional_field_is_kept_and_a_critical_one_refused() {
    for (kind, accepted) in [(0x7f, true), (0x80 | 0x7f, false), (0x80 | 1, false)] {
        let mut head = fields::write_head(&body()).unwrap();
        head.extend_from_slice(&[kind, 3, 0, b'n', b'e', b'w']);
        let len = head.len() as u16;
        head[6..8].copy_from_slice(&len.to_le_bytes());
        let tag = key().sign(&head);
        let bytes = seal(head, &tag);
        match Ticket::decode(&bytes) {
            Ok(ticket) => {
                assert!(accepted, "field {kind:#x}");
                assert_eq!(ticket.body(), &body());
                assert_eq!(ticket.encode(), bytes);
                let less = ticket.narrow().range(0, 1).finish().unwrap();
                assert!(verifies(less.public_bytes(), &less));
            }
            Err(error) => assert!(!accepted && error.message().contains("critical"), "{error}"),
        }
    }
}

#[test]
fn what_nobody_may_say_cannot_be_minted() {
    let wrong: [fn(&mut TicketBody); 6] = [
        |body| body.identity.name = String::new(),
        |body| body.identity.id = EndpointId([0; 16]),
        |body| body.reach = vec![Reach::Unix; MAX_REACH + 1],
        |body| body.reach = vec![Reach::Tcp("10.0.0.1:0".parse().unwrap())],
        |body| body.reach = vec![Reach::Tcp("[::]:80".parse().unwrap())],
        |body| body.length = 8 + 16 + 9 * 32 - 1,
    ];
    for change in wrong {
        let mut body = body();
        change(&mut body);
        let error = Ticket::mint(&body, &key()).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
    }
}

#[test]
fn neither_tag_nor_key_is_ever_shown() {
    let ticket = ticket();
    let tag = ticket.tag().0;
    let shown = format!("{ticket:?} {:#?} {:?} {:?}", ticket.narrow(), ticket.tag(), key());
    let hex = data_encoding::HEXLOWER.encode(&tag[..4]);
    let decimal = format!("{}, {}, {}", tag[0], tag[1], tag[2]);
    assert!(!shown.contains(&hex) && !shown.contains(&decimal), "{shown}");
    assert!(shown.contains("prefill-0") && shown.contains("Tag(..)") && shown.contains("RegionKey(..)"));
}

#[test]
fn the_text_form_is_strict_and_travels_through_json() {
    let ticket = ticket();
    let text = ticket.to_string();
    assert!(text.starts_with("towline1:") && !text.contains('='));
    assert_eq!(format!(" {text}\n").parse::<Ticket>().unwrap(), ticket);
    let json = serde_json::to_string(&ticket).unwrap();
    assert_eq!(json, format!("\"{text}\""));
    assert_eq!(serde_json::from_str::<Ticket>(&json).unwrap(), ticket);
    let code = &text["towline1:".len()..];
    for bad in ["", "towline1:", &format!("towline2:{code}"), &format!("{text}="), &text[1..], &text[..99]] {
        assert_eq!(bad.parse::<Ticket>().unwrap_err().kind(), Kind::Protocol, "{bad}");
    }
    assert!(format!("towline1:{}", "A".repeat(1 << 20)).parse::<Ticket>().is_err());
}

#[test]
fn a_compact_format_carries_the_bytes() {
    use serde::de::value::{BytesDeserializer, Error as ValueError, SeqDeserializer};
    // The value deserializers say that they are readable by people, so the visitor is asked through bytes
    // and sequences directly, as a compact format would.
    let bytes = ticket().encode();
    let visit = |deserializer| text::TicketVisitor::bytes::<_>(deserializer);
    assert_eq!(visit(BytesDeserializer::<ValueError>::new(&bytes)).unwrap(), ticket());
    let sequence = SeqDeserializer::<_, ValueError>::new(bytes.iter().copied());
    assert_eq!(text::TicketVisitor::bytes(sequence).unwrap(), ticket());
}

fn any_reach() -> impl Strategy<Value = Reach> {
    let v4 = (1..=u32::MAX, 1..=u16::MAX)
        .prop_map(|(ip, port)| Reach::Tcp(SocketAddr::new(std::net::Ipv4Addr::from(ip).into(), port)));
    let v6 = (1..=u128::MAX, 1..=u16::MAX, any::<u32>()).prop_map(|(ip, port, scope)| {
        Reach::Tcp(std::net::SocketAddrV6::new(ip.into(), port, 0, scope).into())
    });
    prop_oneof![Just(Reach::Unix), v4, v6]
}

fn any_body() -> impl Strategy<Value = TicketBody> {
    let place = prop_oneof![Just(Place::Host), any::<u32>().prop_map(Place::Cuda), Just(Place::Disk)];
    let layout = proptest::option::of((
        0..1000u64,
        1..1000u64,
        prop::collection::vec(
            (1..10u64, 0..1000u64).prop_map(|(count, stride)| Dim { count, stride }),
            1..=4,
        ),
    ));
    (
        ("[a-zé0-9 -]{1,32}", any::<[u8; 16]>()),
        prop::collection::vec(any_reach(), 0..=MAX_REACH),
        (any::<u32>(), any::<u64>(), 1u64 << 20..=u64::MAX, any::<u64>()),
        (place, 0..=3u8, layout),
    )
        .prop_map(
            |((name, life), reach, (row, generation, length, issued_ms), (place, access, layout))| {
                TicketBody {
                    identity: Identity::new(name, Incarnation(life)).unwrap(),
                    reach,
                    row,
                    generation,
                    length,
                    place,
                    access: Access::from_bits(access).unwrap(),
                    issued_ms,
                    layout: layout.map(|(base, len, dims)| Layout::new(base, len, &dims).unwrap()),
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn any_body_survives_the_wire(body in any_body()) {
        let ticket = Ticket::mint(&body, &key()).unwrap();
        prop_assert_eq!(ticket.body(), &body);
        let again = Ticket::decode(&ticket.encode()).unwrap();
        prop_assert_eq!(&again, &ticket);
        prop_assert_eq!(again.body(), &body);
        prop_assert_eq!(&ticket.to_string().parse::<Ticket>().unwrap(), &ticket);
        prop_assert!(verifies(ticket.public_bytes(), &ticket));
    }

    #[test]
    fn narrowing_step_by_step_never_widens(
        body in any_body(),
        steps in prop::collection::vec((any::<u64>(), any::<u64>(), 0..=3u8, any::<u32>()), 0..6),
    ) {
        let mut ticket = Ticket::mint(&body, &key()).unwrap();
        for (offset, len, access, lease) in steps {
            let offset = offset % (ticket.length() + 1);
            let narrow = ticket.narrow()
                .range(offset, len % (ticket.length() - offset + 1))
                .access(Access::from_bits(access & ticket.access().bits()).unwrap())
                .lease(Duration::from_millis(lease.into()));
            let Ok(less) = narrow.finish() else {
                prop_assert!(ticket.caveats().len() + 3 > MAX_CAVEATS);
                break;
            };
            prop_assert!(ticket.range().start <= less.range().start && less.range().end <= ticket.range().end);
            prop_assert!(ticket.access().contains(less.access()));
            prop_assert!(less.expires_ms() <= Some(ticket.expires_ms().unwrap_or(u64::MAX)));
            prop_assert!(verifies(less.public_bytes(), &less));
            prop_assert!(less.encode().len() <= MAX_TICKET);
            prop_assert_eq!(&Ticket::decode(&less.encode()).unwrap(), &less);
            ticket = less;
        }
    }

    #[test]
    fn random_and_changed_bytes_give_a_ticket_or_an_error(
        noise in prop::collection::vec(any::<u8>(), 0..600),
        body in any_body(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        crate::wire::fuzzing::ticket(&noise);
        let ticket = Ticket::mint(&body, &key()).unwrap();
        let mut public = ticket.public_bytes().to_vec();
        for (at, value) in changes {
            let at = at.index(public.len());
            public[at] = value;
        }
        crate::wire::fuzzing::ticket(&public);
        prop_assert!(public == ticket.public_bytes() || !verifies(&public, &ticket));
    }
}
