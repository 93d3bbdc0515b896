//! Cancelling, dropping, closing, dying: both sides end, with the cause.

use std::time::Duration;

use towline::connect::{Connector, OperationStatus, ReadOperation, ReadableOperation};
use towline::{Kind, Limits};

use crate::scene::*;

const LARGE: usize = 96 << 20;

/// The readable's memory is one large pattern: long enough that something can happen while it is read.
fn reading(path: &str) -> (Connector, Connector, ReadableOperation, ReadOperation) {
    let (encode, decode) = pair(path);
    let readable = encode.create_readable(empty_shared(LARGE)).unwrap();
    let read = decode.begin_read(&readable.metadata().unwrap(), empty(LARGE)).unwrap();
    (encode, decode, readable, read)
}

#[test]
fn cancelling_the_active_side_ends_both_as_cancelled() {
    for path in paths() {
        let (encode, decode, readable, read) = reading(path);
        read.cancel();
        let outcome = read.wait(Some(WATCHDOG));
        let there = readable.wait(Some(WATCHDOG));
        match outcome {
            Err(error) => {
                assert_eq!(error.kind(), Kind::Canceled, "{path}: {error}");
                assert_eq!(read.status(), OperationStatus::Cancelled);
                let error = there.unwrap_err();
                assert_eq!((error.kind(), error.peer()), (Kind::Canceled, Some("decode")), "{path}: {error}");
                assert_eq!(readable.status(), OperationStatus::Cancelled);
                assert_eq!(read.results().unwrap_err().kind(), Kind::Invalid);
            }
            // It was over before the cancel came.
            Ok(()) => there.unwrap(),
        }
        assert_eq!((regions(&encode), regions(&decode)), (0, 0), "{path}");
    }
}

#[test]
fn cancelling_the_passive_side_ends_both() {
    for path in paths() {
        let (_encode, _decode, readable, read) = reading(path);
        readable.cancel();
        let there = readable.wait(Some(WATCHDOG));
        let here = read.wait(Some(WATCHDOG));
        match there {
            Err(error) => {
                assert_eq!(error.kind(), Kind::Canceled, "{path}: {error}");
                assert_eq!(readable.status(), OperationStatus::Cancelled);
                // It may have got the last byte just before; otherwise it learns that the memory is gone.
                if let Err(error) = here {
                    assert_eq!(error.kind(), Kind::Stale, "{path}: {error}");
                    assert_eq!(read.status(), OperationStatus::Errored);
                }
            }
            Ok(()) => here.unwrap(),
        }
        assert!(readable.quiet());
    }
}

#[test]
fn a_cancelled_operation_was_never_claimed_by_anybody() {
    let (encode, decode) = pair("unix");
    let readable = encode.create_readable(filled(1, 100)).unwrap();
    let metadata = readable.metadata().unwrap();
    readable.cancel();
    readable.cancel();
    assert_eq!(readable.wait(None).unwrap_err().kind(), Kind::Canceled);
    assert_eq!(readable.status(), OperationStatus::Cancelled);
    assert_eq!(decode.begin_read(&metadata, empty(100)).unwrap_err().kind(), Kind::Stale);
}

#[test]
fn cancelling_after_the_end_changes_nothing() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let read = decode.begin_read(&readable.metadata().unwrap(), empty(100)).unwrap();
        read.wait(None).unwrap();
        readable.wait(None).unwrap();
        read.cancel();
        readable.cancel();
        assert_eq!(
            (read.status(), readable.status()),
            (OperationStatus::Complete, OperationStatus::Complete)
        );
        assert_eq!(read.results().unwrap().len(), 1);
        read.wait(None).unwrap();
    }
}

#[test]
fn dropping_either_side_ends_the_other() {
    for path in paths() {
        let (_encode, decode, readable, read) = reading(path);
        drop(read);
        if let Err(error) = readable.wait(Some(WATCHDOG)) {
            assert_eq!(error.kind(), Kind::Canceled, "{path}: {error}");
        }
        eventually("the local memory is let go", || regions(&decode) == 0);

        let (encode, _decode, readable, read) = reading(path);
        drop(readable);
        if let Err(error) = read.wait(Some(WATCHDOG)) {
            assert_eq!(error.kind(), Kind::Stale, "{path}: {error}");
        }
        eventually("the offered memory is let go", || regions(&encode) == 0);
    }
}

#[test]
fn dropping_a_begin_gives_the_operation_back_as_cancelled() {
    for path in ["unix", "tcp"] {
        let (encode, decode) = pair(path);
        // Once with a first contact that a thread makes, then with a session that is there.
        for _ in 0..3 {
            let readable = encode.create_readable(filled(1, 100)).unwrap();
            drop(decode.begin_read_async(&readable.metadata().unwrap(), empty(100)));
            let error = readable.wait(Some(WATCHDOG)).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (Kind::Canceled, Some("decode")), "{path}: {error}");
            eventually("the local memory is let go", || regions(&decode) == 0);
        }
    }
}

#[test]
fn closing_the_claimer_ends_what_it_claimed() {
    for path in paths_with_contact() {
        let (encode, decode, readable, read) = reading(path);
        decode.close();
        if let Err(error) = read.wait(Some(WATCHDOG)) {
            assert!(matches!(error.kind(), Kind::Canceled | Kind::Stale), "{path}: {error}");
            let there = readable.wait(Some(WATCHDOG)).unwrap_err();
            assert!(matches!(there.kind(), Kind::Disconnected | Kind::Canceled), "{path}: {there}");
            assert_eq!(there.peer(), Some("decode"));
        } else {
            // The bytes were all there; whether the last word got through is another matter.
            let _ = readable.wait(Some(WATCHDOG));
        }
        assert!(readable.status().is_final());
        eventually("the offered memory is let go", || regions(&encode) == 0);
    }
}

#[test]
fn closing_the_owner_ends_both() {
    for path in paths() {
        let (encode, _decode, readable, read) = reading(path);
        encode.close();
        if let Err(error) = readable.wait(Some(WATCHDOG)) {
            assert_eq!(error.kind(), Kind::Canceled, "{path}: {error}");
        }
        if let Err(error) = read.wait(Some(WATCHDOG)) {
            assert!(matches!(error.kind(), Kind::Stale | Kind::Disconnected), "{path}: {error}");
        }
    }
}

/// Claims and then does nothing: the operation begins only when its future is polled.
fn silent_claim(
    decode: &Connector,
    readable: &ReadableOperation,
    len: usize,
) -> towline::connect::Beginning<ReadOperation> {
    let begun = decode.begin_read_async(&readable.metadata().unwrap(), empty(len));
    eventually("it is claimed", || readable.status() != OperationStatus::Initialized);
    begun
}

#[test]
fn a_claimer_that_says_nothing_is_given_up_at_the_deadline() {
    for path in paths() {
        let short =
            Limits { no_progress: Duration::from_millis(20), ..Limits::within(Duration::from_millis(20)) };
        let (encode, decode) = (limited(path, "encode", short), over(path, "decode"));
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let begun = silent_claim(&decode, &readable, 100);
        let error = readable.wait(Some(WATCHDOG)).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (Kind::Timeout, Some("decode")), "{path}: {error}");
        assert!(error.message().contains("was not done after"), "{error}");
        let late = block_on(async { begun.await?.await });
        assert_eq!(late.unwrap_err().kind(), Kind::Stale, "{path}");
    }
}

#[test]
fn a_silent_claimer_that_closes_is_named() {
    for path in paths_with_contact() {
        let (encode, decode) = pair(path);
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let begun = silent_claim(&decode, &readable, 100);
        assert_eq!(readable.status(), OperationStatus::InProgress);
        decode.close();
        let error = readable.wait(Some(WATCHDOG)).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (Kind::Disconnected, Some("decode")), "{path}: {error}");
        assert_eq!(readable.status(), OperationStatus::Errored);
        assert!(block_on(async { begun.await?.await }).is_err());
        eventually("the offered memory is let go", || regions(&encode) == 0);
    }
}

/// Not a test by itself: what the next one runs as another process. Claims what it is given and says nothing more.
#[test]
fn the_other_process() {
    let Ok(path) = std::env::var("TOWLINE_TEST_CLAIM_OVER") else { return };
    let mut metadata = String::new();
    std::io::stdin().read_line(&mut metadata).unwrap();
    let decode = over(&path, "decode");
    let _begun = decode.begin_read_async(&metadata.trim().parse().unwrap(), empty(100));
    std::thread::sleep(WATCHDOG);
}

#[test]
fn a_claimer_that_is_killed_is_noticed_and_named() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    for path in paths_with_contact() {
        let encode = over(path, "encode");
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::the_other_process"])
            .env("TOWLINE_TEST_CLAIM_OVER", path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let metadata = readable.metadata().unwrap().to_json().unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "{metadata}").unwrap();
        eventually("it is claimed", || readable.status() == OperationStatus::InProgress);
        child.kill().unwrap();
        let error = readable.wait(Some(WATCHDOG)).unwrap_err();
        child.wait().unwrap();
        assert_eq!((error.kind(), error.peer()), (Kind::Disconnected, Some("decode")), "{path}: {error}");
        assert!(readable.quiet());
        assert_eq!(regions(&encode), 0);
    }
}

#[test]
fn many_threads_can_wait_for_one_operation() {
    let (encode, decode) = pair("unix");
    let readable = encode.create_readable(filled(1, 1 << 20)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| readable.wait(Some(WATCHDOG)).unwrap());
        }
        decode.begin_read(&readable.metadata().unwrap(), empty(1 << 20)).unwrap().wait(None).unwrap();
    });
}
