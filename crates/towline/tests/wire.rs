//! The metadata of operations: a corpus of hostile inputs, `wire/corpus/*`, that must be refused or taken without harm.
//! `TOWLINE_BLESS=1 cargo test -p towline --test wire` writes it again.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../towline-proto/tests/wire/corpus.rs"]
mod corpus;
#[path = "wire/metadata.rs"]
mod metadata;
#[expect(dead_code, reason = "only the tickets travel in metadata")]
#[path = "../../towline-proto/tests/wire/samples.rs"]
mod samples;

use data_encoding::HEXLOWER;
use towline::connect::{RdmaMetadata, fuzzing};

use corpus::corpus;

#[test]
fn hostile_metadata_is_refused_without_harm() {
    let mut made = metadata::hostile_metadata();
    for (name, bytes) in &made {
        let refused = std::str::from_utf8(bytes).is_err()
            || RdmaMetadata::from_json(std::str::from_utf8(bytes).unwrap()).is_err();
        assert!(refused, "{name}");
    }
    for (name, text) in metadata::all_metadata() {
        RdmaMetadata::from_json(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        made.push((name.into(), text.into_bytes()));
    }
    corpus("metadata", made).iter().for_each(|(_, bytes)| fuzzing::metadata(bytes));
}

#[test]
fn hostile_envelopes_are_refused_without_harm() {
    let mut made = metadata::hostile_envelopes();
    for (name, bytes) in &made {
        assert!(RdmaMetadata::owner(&HEXLOWER.encode(bytes)).is_err(), "{name}");
    }
    for (name, bytes) in metadata::envelopes() {
        assert_eq!(RdmaMetadata::owner(&HEXLOWER.encode(&bytes)).unwrap(), "prefill-0", "{name}");
        made.push((name.into(), bytes));
    }
    corpus("envelope", made).iter().for_each(|(_, bytes)| fuzzing::envelope(bytes));
}
