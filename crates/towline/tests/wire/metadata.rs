//! Metadata of operations and the opaque part in it: some that are taken, and some that must be refused.

use towline::Ticket;

use super::samples::{counting, tickets};

type Input = (String, Vec<u8>);

/// What `nixl_metadata` holds, before its text form: an operation and the tickets of its memory.
pub(crate) fn envelope(tickets: &[Ticket]) -> Vec<u8> {
    let mut bytes = b"TOWC\x01\x00".to_vec();
    bytes.extend_from_slice(&counting::<16>(0xc0));
    bytes.extend_from_slice(&(tickets.len() as u16).to_le_bytes());
    for ticket in tickets {
        let ticket = ticket.encode();
        bytes.extend_from_slice(&(ticket.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&ticket);
    }
    bytes
}

/// Envelopes that are taken.
pub(crate) fn envelopes() -> Vec<(&'static str, Vec<u8>)> {
    let [plain, narrowed, full] = tickets().map(|(_, _, ticket)| ticket);
    vec![
        ("genuine-one", envelope(std::slice::from_ref(&plain))),
        ("genuine-narrowed", envelope(std::slice::from_ref(&narrowed))),
        ("genuine-layout", envelope(std::slice::from_ref(&full))),
        ("genuine-three", envelope(&[plain, narrowed, full])),
    ]
}

/// The JSON form of metadata.
pub(crate) fn metadata(descriptors: &[(&str, u64, u64)], opaque: &str, kind: u8) -> String {
    let descriptors: Vec<String> = descriptors
        .iter()
        .map(|(device, ptr, size)| format!(r#"{{"device":"{device}","ptr":{ptr},"size":{size}}}"#))
        .collect();
    let descriptors = descriptors.join(",");
    format!(
        r#"{{"descriptors":[{descriptors}],"nixl_metadata":"{opaque}","notification_key":"c0c1c2c3-c4c5-46c7-88c9-cacbcccdcecf","operation_kind":{kind}}}"#
    )
}

fn base64(bytes: &[u8]) -> String {
    format!("b64:{}", data_encoding::BASE64.encode(bytes))
}

/// JSON that is taken; whether the opaque part opens is another matter.
pub(crate) fn all_metadata() -> Vec<(&'static str, String)> {
    let [plain, _, full] = tickets().map(|(_, _, ticket)| ticket);
    let packed = full.layout().unwrap().packed_len().unwrap();
    let (one, view) = (envelope(std::slice::from_ref(&plain)), envelope(std::slice::from_ref(&full)));
    let both = envelope(&[plain.clone(), plain]);
    let hex = data_encoding::HEXLOWER.encode(&one);
    let len = 0x20_0000;
    vec![
        ("genuine-read", metadata(&[("cpu", 7, len)], &base64(&one), 1)),
        ("genuine-write", metadata(&[("cpu", 7, len)], &base64(&one), 2)),
        ("genuine-hex", metadata(&[("cpu", 7, len)], &hex, 1)),
        ("genuine-two", metadata(&[("cpu", 7, len), ("cpu", 8, len)], &base64(&both), 1)),
        ("genuine-layout", metadata(&[("cuda:3", 7, packed)], &base64(&view), 1)),
        ("layout-prefix", metadata(&[("cuda:3", 7, packed - 1)], &base64(&view), 1)),
        ("layout-too-long", metadata(&[("cuda:3", 7, packed + 1)], &base64(&view), 1)),
        ("layout-for-a-write", metadata(&[("cuda:3", 7, packed)], &base64(&view), 2)),
        ("size-not-the-tickets", metadata(&[("cpu", 7, 1)], &base64(&one), 1)),
        ("device-not-the-tickets", metadata(&[("xpu:1", 7, len)], &base64(&one), 1)),
        ("more-descriptors-than-tickets", metadata(&[("cpu", 7, len), ("cpu", 8, len)], &base64(&one), 1)),
        ("of-nixl", metadata(&[("cpu", 7, 4096)], "b64:eJxLTEpOAQAD2AGL", 1)),
        ("opaque-empty", metadata(&[("cpu", 7, 4096)], "", 1)),
        ("opaque-not-text", metadata(&[("cpu", 7, 4096)], "b64:%%%", 1)),
        ("opaque-escaped", metadata(&[("cpu", 7, 4096)], "b64:\\u0054\\u004f", 1)),
    ]
}

/// Opaque parts of metadata that must be refused.
pub(crate) fn hostile_envelopes() -> Vec<Input> {
    let [(_, _, plain), ..] = tickets();
    let good = envelope(std::slice::from_ref(&plain));
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let with = |count: u16, rest: &[u8]| [&good[..22], &count.to_le_bytes()[..], rest].concat();
    let inputs = vec![
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
    ];
    inputs.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

/// JSON that must be refused.
pub(crate) fn hostile_metadata() -> Vec<Input> {
    let one =
        |device: &str, ptr: u64, size: u64, kind: u8| metadata(&[(device, ptr, size)], "b64:AA==", kind);
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
        ("sizes-overflow", metadata(&[("cpu", 7, 1 << 62), ("cpu", 8, 1 << 62)], "b64:AA==", 1)),
        ("device-unknown", one("meta", 7, 4096, 1)),
        ("device-number-too-large", one("cuda:99999999999", 7, 4096, 1)),
        ("descriptors-none", metadata(&[], "b64:AA==", 1)),
        ("descriptors-1025", metadata(&vec![("cpu", 7, 1); 1025], "b64:AA==", 1)),
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
