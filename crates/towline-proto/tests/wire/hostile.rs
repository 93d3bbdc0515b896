//! Inputs that an attacker, or a bug, would send. Each is also a seed of the fuzz targets.

use towline_proto::Ticket;
use towline_proto::crypto::sha256;
use towline_proto::wire::{FrameKind, HEADER_LEN, Header, MAX_BODY, MAX_PAYLOAD};

use super::samples;

type Input = (String, Vec<u8>);

/// Gives changed bytes a checksum that fits, so that they are judged by what they say.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - 4);
    let check = sha256(&[&bytes]);
    bytes.extend_from_slice(&check[..4]);
    bytes
}

/// Inserts a field behind the fixed header and sets the length to match.
fn with_field(ticket: &Ticket, field: &[u8]) -> Vec<u8> {
    let mut bytes = ticket.encode();
    bytes.splice(80..80, field.iter().copied());
    let len = u16::from_le_bytes([bytes[6], bytes[7]]) + field.len() as u16;
    bytes[6..8].copy_from_slice(&len.to_le_bytes());
    sealed(bytes)
}

/// Puts bytes between the last caveat and the tag.
fn with_caveat(ticket: &Ticket, caveat: &[u8]) -> Vec<u8> {
    let mut bytes = ticket.encode();
    let at = ticket.public_bytes().len();
    bytes.splice(at..at, caveat.iter().copied());
    sealed(bytes)
}

fn with_byte(ticket: &Ticket, at: usize, value: u8) -> Vec<u8> {
    let mut bytes = ticket.encode();
    bytes[at] = value;
    sealed(bytes)
}

fn range(offset: u64, len: u64) -> Vec<u8> {
    [&[1, 16, 0][..], &offset.to_le_bytes(), &len.to_le_bytes()].concat()
}

fn named(inputs: Vec<(&str, Vec<u8>)>) -> Vec<Input> {
    inputs.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

pub(crate) fn tickets() -> Vec<Input> {
    let [(_, _, plain), (_, _, narrowed), (_, _, full)] = samples::tickets();
    let layout_at = full.public_bytes().len() - 81;
    let layout = |at: usize, value: u8| with_byte(&full, layout_at + at, value);
    let mut name_twice = vec![1, 9, 0];
    name_twice.extend_from_slice(b"prefill-0");
    named(vec![
        ("empty", Vec::new()),
        ("one-byte", vec![b'T']),
        ("magic-alone", b"TOWL".to_vec()),
        ("magic-wrong", with_byte(&plain, 0, b't')),
        ("version-zero", with_byte(&plain, 4, 0)),
        ("version-future", with_byte(&plain, 4, 2)),
        ("version-huge", with_byte(&plain, 5, 0xff)),
        ("checksum-wrong", {
            let mut bytes = plain.encode();
            *bytes.last_mut().unwrap() ^= 1;
            bytes
        }),
        ("cut-in-the-tag", sealed(plain.encode()[..plain.encode().len() - 9].to_vec())),
        ("header-length-zero", with_byte(&plain, 6, 0)),
        ("header-length-79", with_byte(&plain, 6, 79)),
        ("header-length-past-the-end", with_byte(&plain, 7, 0xff)),
        ("header-length-inside-a-field", with_byte(&plain, 6, plain.encode()[6] - 1)),
        ("id-of-another-name", with_byte(&plain, 8, plain.encode()[8] ^ 1)),
        ("place-unknown", with_byte(&plain, 60, 9)),
        ("place-host-with-index", with_byte(&plain, 61, 1)),
        ("access-unknown", with_byte(&plain, 65, 4)),
        ("reserved-set", with_byte(&plain, 70, 1)),
        ("name-control-character", with_byte(&plain, 83, b'\n')),
        ("name-not-utf8", with_byte(&plain, 83, 0xff)),
        ("name-twice", with_field(&plain, &name_twice)),
        ("field-critical-unknown", with_field(&plain, &[0x90, 0, 0])),
        ("field-longer-than-the-header", with_field(&plain, &[0x70, 0xff, 0xff])),
        ("unix-with-a-value", with_field(&plain, &[2, 1, 0, 7])),
        ("tcp4-short", with_field(&plain, &[3, 5, 0, 1, 2, 3, 4, 5])),
        ("tcp4-port-zero", with_field(&plain, &[3, 6, 0, 127, 0, 0, 1, 0, 0])),
        ("tcp4-unspecified", with_field(&plain, &[3, 6, 0, 0, 0, 0, 0, 80, 0])),
        ("nine-addresses", with_field(&plain, &[2, 0, 0].repeat(7))),
        ("layout-twice", with_field(&full, &full.public_bytes()[layout_at - 3..])),
        ("layout-five-dimensions", layout(16, 5)),
        ("layout-no-dimensions", layout(16, 0)),
        ("layout-255-dimensions", layout(16, 255)),
        ("layout-zero-count", layout(17, 0)),
        ("layout-zero-block", layout(9, 0)),
        ("layout-beyond-the-region", layout(5, 1)),
        ("layout-overflow", layout(24, 0xff)),
        ("caveat-unknown", with_caveat(&plain, &[9, 0, 0])),
        ("caveat-label", with_caveat(&plain, b"towline import")),
        ("caveat-cut", with_caveat(&plain, &[1, 16, 0, 1, 2])),
        ("caveat-too-long", with_caveat(&plain, &[2, 2, 0, 1, 1])),
        ("caveat-access-wider", with_caveat(&narrowed, &[2, 1, 0, 3])),
        ("caveat-access-unknown", with_caveat(&plain, &[2, 1, 0, 0x80])),
        ("caveat-range-wider", with_caveat(&narrowed, &range(0x1000, 0x401))),
        ("caveat-range-overflow", with_caveat(&plain, &range(u64::MAX, 2))),
        ("caveat-expiry-later", with_caveat(&narrowed, &[&[3, 8, 0][..], &[0xff; 8]].concat())),
        ("caveats-seventeen", with_caveat(&plain, &[2, 1, 0, 1].repeat(17))),
        ("too-long", with_field(&plain, &[&[0x70, 0xa0, 0x0f][..], &[0; 4000]].concat())),
        ("tag-missing-plain", plain.public_bytes().to_vec()),
        ("tag-missing-narrowed", narrowed.public_bytes().to_vec()),
        ("tag-missing-layout", full.public_bytes().to_vec()),
        ("text-not-bytes", plain.to_string().into_bytes()),
        ("http-request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        (
            "pickle",
            b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94".to_vec(),
        ),
    ])
}

fn frame(kind: FrameKind, body: &[u8]) -> Vec<u8> {
    towline_proto::wire::frame(kind, 1, body, 0, 0)
}

fn header(kind: FrameKind, body_len: u32, payload_len: u64, files: u8) -> Vec<u8> {
    Header { kind, flags: 0, files, pad: 0, body_len, payload_len, id: 1 }.encode().to_vec()
}

pub(crate) fn frames() -> Vec<Input> {
    let ids = [7; 12];
    let mut inputs = named(vec![
        ("empty", Vec::new()),
        ("short-header", vec![32; HEADER_LEN - 1]),
        ("kind-zero", vec![0; HEADER_LEN]),
        ("http-request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("tls-client-hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03aaaaaaaaaaaaaaaa".to_vec()),
        ("body-over-the-cap", header(FrameKind::Read, MAX_BODY + 1, 0, 0)),
        ("body-4-gib", header(FrameKind::Read, u32::MAX, 0, 0)),
        ("payload-over-the-cap", header(FrameKind::Write, 0, MAX_PAYLOAD + 1, 0)),
        ("payload-endless", header(FrameKind::Write, 0, u64::MAX, 0)),
        ("payload-on-a-ping", header(FrameKind::Ping, 0, 1, 0)),
        ("files-on-a-read", header(FrameKind::Read, 0, 0, 1)),
        ("files-too-many", header(FrameKind::Granted, 0, 0, 254)),
        ("hello-late", header(FrameKind::Hello, 0, 0, 0)),
        ("flags-set", [&[32, 1][..], &[0; 22]].concat()),
        ("reserved-set", [&[32, 0, 0, 1][..], &[0; 20]].concat()),
        ("blocks-4-billion", frame(FrameKind::Read, &[&ids[..], &[255; 4], &[0], &[0; 12]].concat())),
        ("blocks-form-unknown", frame(FrameKind::Read, &[&ids[..], &[1, 0, 0, 0, 2], &[0; 12]].concat())),
        (
            "blocks-overflow",
            frame(FrameKind::Write, &[&ids[..], &[1, 0, 0, 0, 1, 1, 0, 0, 0], &[255; 8]].concat()),
        ),
        (
            "blocks-over-the-payload",
            frame(FrameKind::Read, &[&ids[..], &[2, 0, 0, 0, 1], &[255; 4], &[0; 16]].concat()),
        ),
        ("blocks-longer-form", frame(FrameKind::Read, &[&ids[..], &[1, 0, 0, 0, 0], &[0; 12]].concat())),
        (
            "blocks-one-too-few",
            frame(FrameKind::Read, &[&ids[..], &[2, 0, 0, 0, 1, 1, 0, 0, 0], &[0; 8]].concat()),
        ),
        ("reduce-op-unknown", frame(FrameKind::Reduce, &[&ids[..], &[200, 0, 0, 0, 0, 0, 0]].concat())),
        ("reduce-dtype-unknown", frame(FrameKind::Reduce, &[&ids[..], &[0, 200, 0, 0, 0, 0, 0]].concat())),
        ("import-65535-items", frame(FrameKind::Import, &[255, 255, 0, 0])),
        ("import-ticket-too-long", frame(FrameKind::Import, &[&[1, 0, 255, 255][..], &[0; 200]].concat())),
        (
            "granted-257-items",
            frame(FrameKind::Granted, &[&257u16.to_le_bytes()[..], &[1, 0, 0, 0].repeat(257)].concat()),
        ),
        ("import-operation-short", {
            let item = [&[1, 0, 1, 0, 7][..], &[0; 32], &[1], &[0; 15]].concat();
            frame(FrameKind::Import, &item)
        }),
        ("finish-outcome-two", frame(FrameKind::Finish, &[&[7; 16][..], &[2]].concat())),
        ("finish-without-an-outcome", frame(FrameKind::Finish, &[7; 16])),
        ("granted-bool-two", frame(FrameKind::Granted, &[1, 0, 2, 0, 0, 0])),
        ("error-kind-unknown", frame(FrameKind::Refuse, &[13, 0, 0])),
        ("error-not-utf8", frame(FrameKind::Refuse, &[1, 1, 0, 0xff])),
        ("error-too-long", frame(FrameKind::Refuse, &[&[1, 1, 2][..], &[b'a'; 513]].concat())),
        ("atomic-unknown", frame(FrameKind::Atomic, &[&ids[..], &[3], &[0; 16]].concat())),
        ("notify-too-long", frame(FrameKind::Notify, &[&ids[..], &vec![0; 65_537]].concat())),
        ("ping-with-a-body", frame(FrameKind::Ping, &[0])),
        ("ready-name-control", frame(FrameKind::Ready, &[&[0; 8][..], &[1, 0, 7, 0]].concat())),
        ("ready-name-empty", frame(FrameKind::Ready, &[0; 11])),
    ]);
    for (name, sample) in samples::frames() {
        let whole = sample.message.frame(sample.id, sample.payload_len, sample.files);
        if whole.len() > HEADER_LEN && sample.message.kind() != FrameKind::Notify {
            inputs.push((format!("{name}-cut"), whole[..whole.len() - 1].to_vec()));
            inputs.push((format!("{name}-longer"), [&whole[..], &[0]].concat()));
        }
    }
    inputs
}

pub(crate) fn handshakes() -> Vec<Input> {
    let mut inputs = named(vec![
        ("empty", Vec::new()),
        ("zeros", vec![0; 200]),
        ("versions-none", vec![2, 0, 1, 0]),
        ("versions-future", vec![2, 0, 9, 0]),
        ("genuine", vec![0, 0, 0, 0]),
        ("hello-version-raised", vec![0, 2, 0, 2]),
        ("hello-nonce-changed", vec![0, 64, 0, 1]),
        ("hello-ticket-changed", vec![0, 120, 0, 1]),
        ("welcome-version-changed", vec![1, 0, 0, 3]),
        ("welcome-nonce-changed", vec![1, 20, 0, 1]),
        ("welcome-secret-dropped", vec![1, 50, 0, 1]),
        ("welcome-proof-changed", vec![1, 60, 0, 0x80]),
        ("prove-changed", vec![2, 31, 0, 0x80]),
    ]);
    for (name, sample) in samples::frames() {
        if !sample.authenticated {
            let whole = sample.message.frame(sample.id, sample.payload_len, sample.files);
            inputs.push((format!("{name}-body"), whole[HEADER_LEN..].to_vec()));
        }
    }
    inputs
}
