//! Futures, without any runtime.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use towline::{Access, Kind};

use crate::bench::{Bench, STALL};
use crate::executor::block_on;
use crate::oracle::Stamp;
use crate::watchdog::eventually;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A transfer can be awaited; the task that has polled it is woken at the end.
pub fn a_transfer_is_a_future(bench: &Bench) {
    for mut parts in bench.several(8 << 20, THEIRS) {
        block_on(parts.read().start().unwrap()).unwrap();
        parts.check_here(THEIRS).unwrap();

        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let mut transfer = pin!(parts.read().start().unwrap());
        if transfer.as_mut().poll(&mut context).is_pending() {
            // Polling again does not ask for a second wake.
            let again = transfer.as_mut().poll(&mut context).is_pending();
            assert!(eventually(STALL, || transfer.is_done()));
            if again {
                assert!(eventually(STALL, || count.0.load(Ordering::SeqCst) == 1), "{:?}", count.0);
            }
        }
        assert!(matches!(transfer.as_mut().poll(&mut context), Poll::Ready(Ok(()))));
        parts.regions.pop().unwrap().deregister(STALL).unwrap();
        let ended = parts.read().start().map_or_else(Err, block_on);
        assert_eq!(ended.unwrap_err().kind(), Kind::Stale);
    }
}

/// A ticket can be imported without blocking the caller.
pub fn an_import_is_a_future(bench: &Bench) {
    let region = bench.stamped(64, Access::READ_WRITE, THEIRS);
    let remote = block_on(bench.user.import_async(&region.ticket())).unwrap();
    assert_eq!(remote.path(), bench.path);
    let local = bench.local(64);
    block_on(bench.user.read(&remote, &local).start().unwrap()).unwrap();
    THEIRS.verify_storage(local.storage(), 0, 64).unwrap();
    let ticket = region.ticket();
    // With paths and a limit of its own.
    let within = bench.user.import_async_within(&ticket, bench.user.routing(), STALL);
    assert_eq!(block_on(within).unwrap().path(), bench.path);
    // Several at once.
    let imports: Vec<_> = (0..8).map(|_| bench.user.import_async(&ticket)).collect();
    for import in imports {
        block_on(import).unwrap();
    }
    // One that is not waited for does no harm.
    drop(bench.user.import_async(&ticket));
    region.deregister(STALL).unwrap();
    assert_eq!(block_on(bench.user.import_async(&ticket)).unwrap_err().kind(), Kind::Stale);
}

/// The next message can be awaited.
pub fn a_notification_is_a_future(bench: &Bench) {
    // The user is an owner too: it gets its own message over the same path.
    let region =
        bench.user.register(crate::worker::storage(64, bench.kind()).unwrap(), Access::READ).unwrap();
    let sender = crate::bench::options("sender").open().unwrap();
    let remote = sender.import(&region.ticket().unwrap()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| block_on(bench.user.next_notification()));
        thread::sleep(Duration::from_millis(2));
        sender.notify(&remote, "hello").unwrap().wait().unwrap();
        let notification = waiting.join().unwrap().unwrap();
        assert_eq!((notification.from.name.as_str(), &notification.message[..]), ("sender", &b"hello"[..]));
        let waiting = scope.spawn(|| block_on(bench.user.next_notification()));
        thread::sleep(Duration::from_millis(2));
        bench.user.close().unwrap();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), Kind::Invalid);
    });
}
