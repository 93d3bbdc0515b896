//! The wire format, byte for byte: golden vectors and a corpus of hostile inputs.
//!
//! `wire/*.hex` are tickets and frames as they have to look; `wire/corpus/*` are inputs that must be refused
//! or taken without harm. `TOWLINE_BLESS=1 cargo test -p towline-proto --test wire` writes both again. A vector
//! that changes is a new version of the wire format: see `docs/reference/wire-format.md`.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "wire/corpus.rs"]
mod corpus;
#[path = "wire/hostile.rs"]
mod hostile;
#[path = "wire/samples.rs"]
mod samples;

use std::fs;

use data_encoding::HEXLOWER;
use towline_proto::ticket::parse_public;
use towline_proto::wire::{FrameKind, HEADER_LEN, Header, Message, fuzzing};
use towline_proto::{Kind, Ticket};

use corpus::{blessing, corpus, folder};

/// The bytes of a vector: hex digits in lines; `#` starts a comment.
fn golden(name: &str, what: &str, bytes: &[u8]) -> Vec<u8> {
    let path = folder().join(format!("{name}.hex"));
    if blessing() {
        let lines: Vec<String> = bytes.chunks(32).map(|line| HEXLOWER.encode(line)).collect();
        fs::write(&path, format!("# {what}\n{}\n", lines.join("\n"))).unwrap();
    }
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let digits: String = text.lines().filter(|line| !line.starts_with('#')).collect();
    HEXLOWER.decode(digits.as_bytes()).unwrap()
}

#[test]
fn tickets_look_as_they_did() {
    for (name, what, ticket) in samples::tickets() {
        let bytes = golden(name, what, &ticket.encode());
        assert_eq!(HEXLOWER.encode(&ticket.encode()), HEXLOWER.encode(&bytes), "{name}");
        let read = Ticket::decode(&bytes).unwrap();
        assert_eq!(read, ticket, "{name}");
        assert_eq!(read.body(), ticket.body(), "{name}");
        assert_eq!(read.caveats(), ticket.caveats(), "{name}");
        let public = parse_public(read.public_bytes()).unwrap();
        assert!(public.tag(&samples::region_key()).verify_proof(b"x", &read.proof(b"x")), "{name}");
    }
}

#[test]
fn frames_look_as_they_did() {
    let frames = samples::frames();
    for kind in FrameKind::ALL {
        assert!(frames.iter().any(|(_, sample)| sample.message.kind() == kind), "{kind:?} has no vector");
    }
    for (name, sample) in frames {
        let what = format!("{:?}, header and body", sample.message.kind());
        let made = sample.message.frame(sample.id, sample.payload_len, sample.files);
        let bytes = golden(&name, &what, &made);
        assert_eq!(HEXLOWER.encode(&made), HEXLOWER.encode(&bytes), "{name}");
        let (header, rest) = bytes.split_first_chunk::<HEADER_LEN>().unwrap();
        let header = Header::decode(header).unwrap();
        assert_eq!(
            (header.id, header.payload_len, header.files),
            (sample.id, sample.payload_len, sample.files)
        );
        header.check(sample.authenticated).unwrap();
        assert_eq!(header.rest(), rest.len());
        let body = header.body(rest).unwrap();
        assert_eq!(Message::decode(header.kind, body).unwrap(), sample.message, "{name}");
    }
}

#[test]
fn no_vector_is_left_over() {
    let mut known: Vec<String> = samples::frames().into_iter().map(|(name, _)| name).collect();
    known.extend(samples::tickets().into_iter().map(|(name, ..)| name.to_owned()));
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "hex") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            assert!(known.contains(&name), "{name}.hex belongs to no sample");
        }
    }
}

#[test]
fn hostile_tickets_are_refused_without_harm() {
    let made = hostile::tickets();
    for (name, bytes) in &made {
        let error = Ticket::decode(bytes).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol, "{name}");
    }
    corpus("ticket", made).iter().for_each(|(_, bytes)| fuzzing::ticket(bytes));
}

#[test]
fn hostile_frames_are_refused_without_harm() {
    let made = hostile::frames();
    for (name, bytes) in &made {
        let refused = bytes.split_first_chunk::<HEADER_LEN>().is_none_or(|(header, body)| {
            Header::decode(header)
                .and_then(|header| header.check(true).map(|()| header))
                .and_then(|header| Message::decode(header.kind, body))
                .is_err()
        });
        assert!(refused, "{name}");
    }
    corpus("frame", made).iter().for_each(|(_, bytes)| fuzzing::frame(bytes));
}

#[test]
fn hostile_handshakes_end_without_a_link() {
    corpus("handshake", hostile::handshakes()).iter().for_each(|(_, bytes)| fuzzing::handshake(bytes));
}
