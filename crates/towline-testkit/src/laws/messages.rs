//! Messages.

use std::collections::HashSet;
use std::time::Duration;

use towline::{Access, Kind, MAX_MESSAGE};

use crate::bench::{Bench, STALL, outcome, refused};
use crate::oracle::Stamp;

/// Every message arrives, once, with its bytes and its sender's name.
pub fn messages_arrive_once_each(bench: &Bench) {
    const COUNT: u32 = 200;
    let region = bench.region(64, Access::NONE);
    let remote = bench.import(&region);
    let transfers: Vec<_> =
        (0..COUNT).map(|number| bench.user.notify(&remote, number.to_le_bytes()).unwrap()).collect();
    let mut seen = HashSet::new();
    for _ in 0..COUNT {
        let (from, message) = bench.owner.receive(STALL).unwrap();
        assert_eq!(from, "user");
        assert!(seen.insert(u32::from_le_bytes(message.try_into().unwrap())), "a message came twice");
    }
    transfers.iter().for_each(|transfer| transfer.wait().unwrap());
    assert_eq!(bench.owner.receive(Duration::ZERO).unwrap_err().kind, Kind::Timeout);

    let longest = vec![7; MAX_MESSAGE];
    outcome(bench.user.notify(&remote, longest.clone())).unwrap();
    assert_eq!(bench.owner.receive(STALL).unwrap().1, longest);
    outcome(bench.user.notify(&remote, Vec::new())).unwrap();
    assert_eq!(bench.owner.receive(STALL).unwrap().1, Vec::<u8>::new());
}

/// After a read the message says that the bytes of all parts have been taken: the owner may change them.
pub fn a_message_follows_the_bytes_of_a_read(bench: &Bench) {
    for parts in bench.several(3 << 20, Stamp::new(1, 0)) {
        for round in 1..3 {
            let stamp = Stamp::new(1, round);
            parts.fill_there(stamp);
            let ranges = parts.ranges(|len| (0, 0, if round % 2 == 0 { len } else { 4096.min(len) }));
            let transfer = parts.read_ranges(&ranges).notify("taken").start().unwrap();
            assert_eq!(bench.owner.receive(STALL).unwrap().1, b"taken");
            parts.fill_there(Stamp::new(1, 1000));
            transfer.wait().unwrap();
            parts.check_read(&ranges, stamp).unwrap();
        }
    }
}

/// A message has a longest length, also behind bytes, and nothing moves for one that exceeds it.
pub fn messages_that_are_too_long_are_refused(bench: &Bench) {
    let stamp = Stamp::new(1, 1);
    let long = vec![0; MAX_MESSAGE + 1];
    for parts in bench.several(64, stamp) {
        parts.fill_here(Stamp::new(2, 1));
        refused(bench.user.notify(&parts.remotes[0], long.clone()), &[Kind::Invalid]);
        refused(parts.write().notify(long.clone()).start(), &[Kind::Invalid]);
        parts.check_there(stamp).unwrap();
    }
    assert_eq!(bench.owner.receive(Duration::ZERO).unwrap_err().kind, Kind::Timeout);
}

/// What does not come ends the wait with `Timeout`, and a wait for nonsense is `Invalid`.
pub fn waiting_for_a_message_or_a_signal_ends_in_time(bench: &Bench) {
    let region = bench.region(64, Access::READ_WRITE);
    let short = Duration::from_millis(5);
    assert_eq!(bench.owner.receive(short).unwrap_err().kind, Kind::Timeout);
    if bench.has_words() {
        assert_eq!(region.wait_signal(8, 1, short).unwrap_err().kind, Kind::Timeout);
        assert_eq!(region.wait_signal(8, 0, short).unwrap(), 0);
        for offset in [4, 57, 64, usize::MAX] {
            assert_eq!(region.wait_signal(offset, 1, short).unwrap_err().kind, Kind::Invalid);
        }
    } else {
        assert_eq!(region.wait_signal(8, 1, short).unwrap_err().kind, Kind::Unsupported);
    }
    assert!(bench.user.try_receive().unwrap().is_none());
    assert_eq!(bench.user.receive(short).unwrap_err().kind(), Kind::Timeout);
}
