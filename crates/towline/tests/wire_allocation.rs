//! What is refused costs nothing: decoding metadata never allocates more than its input and 64 KiB.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../towline-proto/tests/wire/allocator.rs"]
mod allocator;
#[path = "wire/metadata.rs"]
mod metadata;
#[expect(dead_code, reason = "only the tickets travel in metadata")]
#[path = "../../towline-proto/tests/wire/samples.rs"]
mod samples;

use towline::connect::RdmaMetadata;

use allocator::{SLACK, peak_of};

#[test]
fn metadata_allocates_no_more_than_itself_and_64_kib() {
    let taken =
        metadata::all_metadata().into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes(), true));
    let refused = metadata::hostile_metadata().into_iter().map(|(name, bytes)| (name, bytes, false));
    for (name, bytes, good) in taken.chain(refused) {
        let Ok(text) = std::str::from_utf8(&bytes) else { continue };
        let peak = peak_of(|| assert_eq!(RdmaMetadata::from_json(text).is_ok(), good, "{name}"));
        assert!(peak <= bytes.len() + SLACK, "{name} allocated {peak} bytes");
    }
    let taken = metadata::envelopes().into_iter().map(|(name, bytes)| (name.to_owned(), bytes, true));
    let refused = metadata::hostile_envelopes().into_iter().map(|(name, bytes)| (name, bytes, false));
    for (name, bytes, good) in taken.chain(refused) {
        let text = data_encoding::HEXLOWER.encode(&bytes);
        let peak = peak_of(|| assert_eq!(RdmaMetadata::owner(&text).is_ok(), good, "{name}"));
        assert!(peak <= text.len() + SLACK, "{name} allocated {peak} bytes");
    }
}
