//! Handshakes that are refused are said in the log, now and then.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::memory::SystemStorage;
use crate::ticket::Reach;
use crate::{Access, Endpoint};

const WATCHDOG: Duration = Duration::from_secs(30);

/// The endpoint whose lines are kept: other tests of this process refuse connections too.
const NAME: &str = "refuses-in-the-log";

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

#[derive(Default)]
struct Line {
    endpoint: String,
    message: String,
    origin: String,
    peer: String,
    error: String,
    suppressed: u64,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let place = match field.name() {
            "endpoint" => &mut self.endpoint,
            "message" => &mut self.message,
            "origin" => &mut self.origin,
            "peer" => &mut self.peer,
            "error" => &mut self.error,
            _ => return,
        };
        value.clone_into(place);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "suppressed" {
            self.suppressed = value;
        }
    }
}

struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().ends_with("refusals")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        if line.endpoint == NAME {
            LINES.lock().push(line);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Says something that is no handshake, until it is cut off.
fn is_refused(address: SocketAddr) {
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.set_read_timeout(Some(WATCHDOG)).unwrap();
    stranger.write_all(&[0xff; 64]).unwrap();
    // It is told why, or finds the connection reset.
    if let Err(error) = stranger.read_to_end(&mut Vec::new()) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it is not cut off: {error}");
    }
}

#[test]
fn a_refused_handshake_is_logged_with_its_origin_and_reason_once_a_second() {
    tracing::subscriber::set_global_default(Log).unwrap();
    let endpoint = Endpoint::options(NAME).listen("127.0.0.1:0".parse().unwrap()).open().unwrap();
    let region = endpoint.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    let address = ticket.body().reach.iter().find_map(|reach| match reach {
        Reach::Tcp(address) => Some(*address),
        _ => None,
    });
    let (began, mut refused) = (Instant::now(), 0);
    while LINES.lock().len() < 2 {
        is_refused(address.unwrap());
        refused += 1;
        while endpoint.stats().refused_handshakes < refused {
            assert!(began.elapsed() < WATCHDOG, "a refused handshake is not counted");
            std::thread::yield_now();
        }
        assert!(began.elapsed() < WATCHDOG, "{} lines of {refused}", LINES.lock().len());
        if refused > 100 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let (lines, elapsed) = (LINES.lock(), began.elapsed());
    assert!(lines.len() as u64 <= 1 + elapsed.as_secs(), "{} lines in {elapsed:?}", lines.len());
    assert!(refused > 2, "none was left out");
    // Each of them is said, or counted by the line that follows; one may have come while the last line was written.
    let told: u64 = lines.iter().map(|line| 1 + line.suppressed).sum();
    assert!(told == refused || told + 1 == refused, "{told} of {refused}");
    for line in lines.iter() {
        assert_eq!(line.message, "a connection was refused");
        assert_eq!((&*line.origin, &*line.peer), ("127.0.0.1", "unproven"));
        assert!(!line.error.is_empty());
    }
}
