//! What transfers let be seen in traces. Alone in its process: whether a span is wanted is decided once for all threads, and another
//! test that comes first, and listens to nothing, could decide it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use towline::{Access, Endpoint, Routing, SharedStorage, SystemStorage};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps the names and the fields of all spans.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<String>>>, Arc<AtomicU64>);

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                write!(self.0, " {}={value:?}", field.name()).unwrap();
            }
        }
        let mut text = Text(span.metadata().name().to_owned());
        span.record(&mut text);
        self.0.lock().push(text.0);
        Id::from_u64(self.1.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn imports_and_transfers_are_spans_that_name_path_and_peer() {
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let region = owner.register(SharedStorage::new(4096).unwrap(), Access::READ).unwrap();
    let local = user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let spans = Spans::default();
    tracing::subscriber::with_default(spans.clone(), || {
        let tcp = Routing::default().require("tcp").unwrap();
        let remote = user.import_with(&region.ticket().unwrap(), &tcp).unwrap();
        user.read(&remote, &local).start().unwrap().wait().unwrap();
    });
    let seen = spans.0.lock().join("\n");
    assert!(seen.contains("import endpoint=\"user\" tickets=1"), "{seen}");
    let transfer =
        seen.lines().find(|span| span.starts_with("transfer ")).unwrap_or_else(|| panic!("{seen}"));
    for field in ["op=\"read\"", "path=\"tcp\"", "peer=\"owner\"", "bytes=4096"] {
        assert!(transfer.contains(field), "{field} in {transfer}");
    }
    // Nothing that would let a reader of logs in.
    let ticket = region.ticket().unwrap().to_string();
    assert!(!seen.contains(&ticket) && !seen.contains("towline1:"), "{seen}");
}
