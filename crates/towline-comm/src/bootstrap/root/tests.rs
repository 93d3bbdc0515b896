//! Refused guests are logged, now and then.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::*;
use crate::bootstrap::wire::HELLO_LEN;
use crate::unique_id::UniqueId;

/// The meeting whose refusals are counted: other tests of this process refuse connections too.
static MEETING: OnceLock<String> = OnceLock::new();
/// Lines about its refusals, and what they say was left out.
static LINES: AtomicUsize = AtomicUsize::new(0);
static LEFT_OUT: AtomicUsize = AtomicUsize::new(0);

struct Log;

#[derive(Default)]
struct Line {
    of_meeting: bool,
    suppressed: usize,
}

impl Visit for Line {
    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        self.of_meeting |= field.name() == "meeting" && MEETING.get().is_some_and(|meeting| meeting == value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "suppressed" {
            self.suppressed = value as usize;
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        if line.of_meeting {
            LINES.fetch_add(1, Ordering::SeqCst);
            LEFT_OUT.fetch_add(line.suppressed, Ordering::SeqCst);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn whom_the_root_does_not_let_in_is_logged_once_a_second() {
    const MANY: usize = 300;
    let _ = tracing::subscriber::set_global_default(Log);
    let listeners = listen(&[]).unwrap();
    let address = listeners[0].local_addr().unwrap();
    let mut random = [0; 48];
    getrandom::fill(&mut random).unwrap();
    let id = UniqueId::compose(&random, &[address], false).unwrap();
    MEETING.set(id.socket_name()).unwrap();
    let root = open(&id, listeners, Duration::from_secs(60)).unwrap();
    let began = Instant::now();
    let is_cut_off = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut rest = [0; 8];
        assert!(!matches!(stream.read(&mut rest), Ok(1..)), "it was welcomed");
    };
    // A guest that says nothing is not refused.
    (0..10).for_each(|_| drop(TcpStream::connect(address).unwrap()));
    for number in 0..MANY {
        let mut stream = TcpStream::connect(address).unwrap();
        // No greeting, or half of one.
        match number % 2 {
            0 => {
                stream.write_all(&[0xff; HELLO_LEN]).unwrap();
                is_cut_off(stream);
            }
            _ => stream.write_all(&[0xff; HELLO_LEN / 2]).unwrap(),
        }
    }
    let counted = || LINES.load(Ordering::SeqCst) + LEFT_OUT.load(Ordering::SeqCst);
    let until = Instant::now() + Duration::from_secs(20);
    // The next line says what was left out since the last one: it comes with whoever is refused when it is time for it.
    let mut refused = MANY;
    while counted() < refused {
        assert!(Instant::now() < until, "{} of {refused} were logged", counted());
        let mut another = TcpStream::connect(address).unwrap();
        another.write_all(&[0xff; HELLO_LEN]).unwrap();
        refused += 1;
        is_cut_off(another);
        let soon = Instant::now() + Duration::from_millis(50);
        while counted() < refused && Instant::now() < soon {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(counted(), refused);
    let lines = LINES.load(Ordering::SeqCst) as u64;
    assert!((2..=2 + began.elapsed().as_secs()).contains(&lines), "{lines} lines");
    root.call_off(Error::new(towline::Kind::Canceled, OP, "the test is over"));
}
