//! A worker that tests start, order about, stop and kill.

fn main() {
    towline_testkit::worker::main();
}
