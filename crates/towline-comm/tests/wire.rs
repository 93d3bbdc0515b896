//! What may come to the door of a meeting: a corpus of genuine, damaged and hostile messages.
//!
//! `TOWLINE_BLESS=1 cargo test -p towline-comm --test wire` writes `wire/corpus` again. Inputs that the fuzzer found
//! lie beside what is made here, under names of their own.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::Path;

use towline_comm::fuzzing;

#[test]
fn whatever_comes_to_a_meeting_is_taken_whole_or_refused_without_harm() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire/corpus/meeting");
    let made = fuzzing::samples();
    if std::env::var_os("TOWLINE_BLESS").is_some_and(|value| value == "1") {
        fs::create_dir_all(&folder).unwrap();
        made.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).unwrap());
    }
    for (name, bytes) in &made {
        assert_eq!(&fs::read(folder.join(name)).unwrap(), bytes, "{name} is not stored as it is made");
    }
    for entry in fs::read_dir(&folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        fuzzing::meeting(&bytes);
        // And as it would come in pieces, or with a byte changed on the way.
        for at in 0..bytes.len() {
            fuzzing::meeting(&bytes[..at]);
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            fuzzing::meeting(&changed);
        }
    }
}
