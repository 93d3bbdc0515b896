//! Inputs that somebody with bad intentions, or a bug, would send. Each is also a seed of the fuzz targets.

use sha2::{Digest, Sha256};
use towline::Ticket;
use towline::wire::{FrameKind, HEADER_LEN, Header, MAX_BODY, MAX_PAYLOAD};

use super::samples;

type Input = (String, Vec<u8>);

/// Gives changed bytes a checksum that fits, so that they are judged by what they say.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - 4);
    let check: [u8; 32] = Sha256::digest(&bytes).into();
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
    towline::wire::frame(kind, 1, body, 0, 0)
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

/// Opaque parts of metadata that must be refused.
pub(crate) fn envelopes() -> Vec<Input> {
    let [(_, _, plain), ..] = samples::tickets();
    let good = samples::envelope(std::slice::from_ref(&plain));
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let with = |count: u16, rest: &[u8]| [&good[..22], &count.to_le_bytes()[..], rest].concat();
    named(vec![
        ("empty", Vec::new()),
        ("magic-alone", b"TOWC".to_vec()),
        ("magic-wrong", changed(0, b't')),
        ("magic-of-a-ticket", plain.encode()),
        ("version-zero", changed(4, 0)),
        ("version-later", changed(4, 2)),
        ("operation-cut", good[..20].to_vec()),
        ("tickets-none", with(0, &[])),
        ("tickets-one-too-many", changed(22, 2)),
        ("tickets-1025", with(1025, &vec![0; 4096])),
        ("tickets-65535", with(u16::MAX, &vec![0; 4096])),
        ("ticket-empty", with(1, &[0, 0])),
        ("ticket-longer-than-the-rest", with(1, &[0xff, 0xff, 0])),
        ("ticket-too-long", with(1, &[&5000u16.to_le_bytes()[..], &vec![0; 5000]].concat())),
        ("ticket-damaged", changed(60, 0xff)),
        ("cut", good[..good.len() - 1].to_vec()),
        ("longer", [&good[..], &[0]].concat()),
        ("of-nixl", b"\x78\x9c\x4b\x4c\x4a\x4e\x01\x00\x03\xd8\x01\x8b".to_vec()),
        ("zlib-header-alone", vec![0x78, 0x01]),
    ])
}

/// JSON that must be refused.
pub(crate) fn metadata() -> Vec<Input> {
    let one = |device: &str, ptr: u64, size: u64, kind: u8| {
        samples::metadata(&[(device, ptr, size)], "b64:AA==", kind)
    };
    let good = one("cpu", 7, 4096, 1);
    let mut inputs: Vec<(&str, String)> = vec![
        ("empty", String::new()),
        ("null", "null".into()),
        ("a-list", "[]".into()),
        ("no-fields", "{}".into()),
        ("cut", good[..good.len() - 1].into()),
        ("longer", format!("{good}x")),
        ("one-field-more", good.replacen('{', r#"{"extra":1,"#, 1)),
        ("a-field-twice", good.replacen('{', r#"{"operation_kind":1,"#, 1)),
        ("a-field-less", good.replacen(r#","operation_kind":1"#, "", 1)),
        ("kind-0", one("cpu", 7, 4096, 0)),
        ("kind-3", one("cpu", 7, 4096, 3)),
        ("kind-text", good.replacen(r#""operation_kind":1"#, r#""operation_kind":"1""#, 1)),
        ("ptr-0", one("cpu", 0, 4096, 1)),
        ("ptr-negative", good.replacen(r#""ptr":7"#, r#""ptr":-7"#, 1)),
        ("ptr-65-bits", good.replacen(r#""ptr":7"#, r#""ptr":18446744073709551616"#, 1)),
        ("ptr-a-fraction", good.replacen(r#""ptr":7"#, r#""ptr":7.5"#, 1)),
        ("size-0", one("cpu", 7, 0, 1)),
        ("size-64-bits", one("cpu", 7, u64::MAX, 1)),
        ("size-exponent", good.replacen(r#""size":4096"#, r#""size":1e400"#, 1)),
        ("sizes-overflow", samples::metadata(&[("cpu", 7, 1 << 62), ("cpu", 8, 1 << 62)], "b64:AA==", 1)),
        ("device-unknown", one("meta", 7, 4096, 1)),
        ("device-number-too-large", one("cuda:99999999999", 7, 4096, 1)),
        ("descriptors-none", samples::metadata(&[], "b64:AA==", 1)),
        ("descriptors-1025", samples::metadata(&vec![("cpu", 7, 1); 1025], "b64:AA==", 1)),
        ("key-empty", good.replacen("c0c1c2c3-c4c5-46c7-88c9-cacbcccdcecf", "", 1)),
        ("key-long", good.replacen("c0c1c2c3-c4c5-46c7-88c9-cacbcccdcecf", &"k".repeat(257), 1)),
        ("a-lone-surrogate", good.replacen("b64:AA==", "\\ud800", 1)),
    ];
    inputs.push(("lists-in-lists", format!(r#"{{"descriptors":{}"#, "[".repeat(5000))));
    let mut inputs: Vec<Input> =
        inputs.into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes())).collect();
    inputs.push(("not-utf8".into(), b"\xff\xfe{}".to_vec()));
    inputs
}
