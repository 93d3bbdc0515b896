//! What is refused costs nothing: decoding never allocates more than its input and 64 KiB.
#![allow(clippy::unwrap_used, clippy::panic)]
#![allow(unsafe_code, reason = "counts what is allocated, by standing in for the allocator")]

#[expect(dead_code, reason = "the handshakes are not judged by what they allocate")]
#[path = "wire/hostile.rs"]
mod hostile;
#[path = "wire/samples.rs"]
mod samples;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use towline::Ticket;
use towline::connect::RdmaMetadata;
use towline::wire::{FrameKind, HEADER_LEN, Message};

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged, which keeps the contract; the counters are
// plain cells of this thread and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get().wrapping_add(layout.size()));
        PEAK.set(PEAK.get().max(HELD.get()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().saturating_sub(layout.size()));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn peak_of(work: impl FnOnce()) -> usize {
    HELD.set(0);
    PEAK.set(0);
    work();
    PEAK.get()
}

const SLACK: usize = 64 << 10;

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

#[test]
fn metadata_allocates_no_more_than_itself_and_64_kib() {
    let taken =
        samples::all_metadata().into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes(), true));
    let refused = hostile::metadata().into_iter().map(|(name, bytes)| (name, bytes, false));
    for (name, bytes, good) in taken.chain(refused) {
        let Ok(text) = std::str::from_utf8(&bytes) else { continue };
        let peak = peak_of(|| assert_eq!(RdmaMetadata::from_json(text).is_ok(), good, "{name}"));
        assert!(peak <= bytes.len() + SLACK, "{name} allocated {peak} bytes");
    }
    let taken = samples::envelopes().into_iter().map(|(name, bytes)| (name.to_owned(), bytes, true));
    let refused = hostile::envelopes().into_iter().map(|(name, bytes)| (name, bytes, false));
    for (name, bytes, good) in taken.chain(refused) {
        let text = data_encoding::HEXLOWER.encode(&bytes);
        let peak = peak_of(|| assert_eq!(RdmaMetadata::owner(&text).is_ok(), good, "{name}"));
        assert!(peak <= text.len() + SLACK, "{name} allocated {peak} bytes");
    }
}
