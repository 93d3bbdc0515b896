#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| drop(towline_testkit::using::play(data)));
