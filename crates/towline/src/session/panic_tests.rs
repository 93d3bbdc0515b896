//! A panic in what handles a frame of the owner's: it ends that session of the initiator, and no other.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use super::{Medium, Session};
use crate::ticket::Reach;
use crate::{Access, Endpoint, Kind, Registered, Remote, Routing, SystemStorage, Ticket, Transfer};

const LEN: usize = 8 << 20;
const WATCHDOG: Duration = Duration::from_secs(30);

/// A waker of the user's own. It panics where it is called by a thread that handles replies: this thread delivers the end, unless another
/// was the last to let go of the memory.
struct Panics {
    /// How the names of such threads begin.
    thread: &'static str,
    count: AtomicUsize,
}

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        if std::thread::current().name().is_some_and(|name| name.starts_with(self.thread)) {
            self.count.fetch_add(1, Ordering::SeqCst);
            panic!("on purpose");
        }
    }
}

struct User {
    endpoint: Endpoint,
    remote: Remote,
    local: Registered<SystemStorage>,
}

fn import(endpoint: &Endpoint, region: &Registered<SystemStorage>) -> Remote {
    endpoint.import_with(&region.ticket().unwrap(), &Routing::default().require("tcp").unwrap()).unwrap()
}

impl User {
    fn of(region: &Registered<SystemStorage>) -> User {
        let endpoint = Endpoint::open("user").unwrap();
        let remote = import(&endpoint, region);
        let local = endpoint.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        User { endpoint, remote, local }
    }

    fn start(&self, len: usize) -> Transfer {
        self.endpoint.read(&self.remote, &self.local).at(0, 0, len as u64).start().unwrap()
    }

    fn session(&self, ticket: &Ticket) -> Arc<Session> {
        let (sessions, body) = (&self.endpoint.core().sessions, ticket.body());
        let media = body.reach.iter().filter_map(|reach| match reach {
            Reach::Tcp(address) => Some(Medium::Tcp(*address)),
            _ => None,
        });
        media.filter_map(|medium| sessions.to(body.identity.incarnation, medium, true)).next().unwrap()
    }
}

#[test]
fn a_panic_where_an_answer_is_handled_ends_that_session_of_the_initiator_and_no_other() {
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ).unwrap();
    let well = User::of(&region);
    // Over the control connection, which the event loop drives, and over lanes, which workers drive.
    for (len, thread) in [(64, "towline-io"), (LEN, "towline-copy")] {
        let unwell = User::of(&region);
        unwell.start(len).wait().unwrap();
        let session = unwell.session(&region.ticket().unwrap());
        let panics = Arc::new(Panics { thread, count: AtomicUsize::new(0) });
        let waker = Waker::from(Arc::clone(&panics));
        let until = Instant::now() + WATCHDOG;
        while panics.count.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < until, "the replies were always there before anybody waited");
            let mut transfer = unwell.start(len);
            if Pin::new(&mut transfer).poll(&mut Context::from_waker(&waker)).is_pending() {
                transfer.wait().unwrap();
                // Its end is known before its waker is called.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // Nobody knows what it has left behind, whichever connection it came over.
        while session.alive().is_ok() {
            assert!(Instant::now() < until, "the session goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = session.alive().unwrap_err();
        assert!(error.kind() == Kind::Internal && error.message().contains("on purpose"), "{error}");
        well.start(len).wait().unwrap();
        // It comes again, over another session.
        let again = import(&unwell.endpoint, &region);
        unwell.endpoint.read(&again, &unwell.local).start().unwrap().wait().unwrap();
    }
}
