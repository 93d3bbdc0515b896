#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| towline_proto::wire::fuzzing::ticket(data));
