//! What is refused costs nothing: decoding never allocates more than its input and 64 KiB.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "wire/allocator.rs"]
mod allocator;
#[expect(dead_code, reason = "the handshakes are not judged by what they allocate")]
#[path = "wire/hostile.rs"]
mod hostile;
#[path = "wire/samples.rs"]
mod samples;

use towline_proto::Ticket;
use towline_proto::wire::{FrameKind, HEADER_LEN, Message};

use allocator::{SLACK, peak_of};

#[test]
fn a_hostile_ticket_allocates_no_more_than_itself_and_64_kib() {
    for (name, bytes) in hostile::tickets() {
        let peak = peak_of(|| assert!(Ticket::decode(&bytes).is_err()));
        assert!(peak <= bytes.len() + SLACK, "{name} allocated {peak} bytes");
    }
    for (name, _, ticket) in samples::tickets() {
        let bytes = ticket.encode();
        let peak = peak_of(|| assert!(Ticket::decode(&bytes).is_ok()));
        assert!(peak <= bytes.len() + SLACK, "{name} allocated {peak} bytes");
    }
}

#[test]
fn a_refused_body_allocates_no_more_than_itself_and_64_kib() {
    let mut bodies: Vec<(String, FrameKind, Vec<u8>)> = hostile::frames()
        .into_iter()
        .filter(|(_, bytes)| bytes.len() >= HEADER_LEN)
        .filter_map(|(name, bytes)| {
            Some((name, FrameKind::from_code(bytes[0])?, bytes[HEADER_LEN..].to_vec()))
        })
        .collect();
    // As much as fits, and wrong only at its very end.
    let ids = [7; 12];
    let offsets =
        [&ids[..], &131_000u32.to_le_bytes(), &[1, 1, 0, 0, 0], &[0; 8 * 130_999], &[255; 8]].concat();
    bodies.push(("a-million-bytes-of-blocks".into(), FrameKind::Read, offsets));
    let errors = [&256u16.to_le_bytes()[..], &[1, 0, 0, 0].repeat(255), &[1, 99, 0, 0]].concat();
    bodies.push(("many-tiny-answers".into(), FrameKind::Granted, errors));
    let items = [&256u16.to_le_bytes()[..], &[0; 34 * 256], &[0]].concat();
    bodies.push(("many-tiny-tickets".into(), FrameKind::Import, items));

    for (name, kind, body) in bodies {
        let mut refused = false;
        let peak = peak_of(|| refused = Message::decode(kind, &body).is_err());
        assert!(peak <= body.len() + SLACK, "{name} allocated {peak} bytes");
        let made_here = name.starts_with("many-") || name.starts_with("a-million");
        assert!(refused || !made_here, "{name} was meant to be refused");
    }
}
