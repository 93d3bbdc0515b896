//! What callers see of a transfer's end, and when.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::sync::lock;
use crate::{Access, Endpoint, SystemStorage};

const WATCHDOG: Duration = Duration::from_secs(20);

#[test]
fn nobody_learns_of_the_end_before_the_local_memory_is_released() {
    let endpoint = Endpoint::open("both").unwrap();
    let region = endpoint.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let remote = endpoint.import(&region.ticket().unwrap()).unwrap();
    let local = endpoint.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let (over, is_over) = channel();
    let (go_on, goes_on) = channel::<()>();
    let goes_on = Mutex::new(goes_on);
    let transfer = endpoint
        .read(&remote, &local)
        .by_workers(true)
        .then(Box::new(move |result| {
            over.send(result.clone()).unwrap();
            let _ = lock(&goes_on).recv_timeout(WATCHDOG);
        }))
        .start()
        .unwrap();
    // The last unit has reported, and the one who counts it takes its time.
    is_over.recv_timeout(WATCHDOG).unwrap().unwrap();
    assert!(!transfer.is_done() && !transfer.quiet() && transfer.result().is_none());
    assert!(transfer.wait_for(Duration::from_millis(1)).is_none());
    local.into_storage_within(Duration::ZERO).expect("the transfer has let go of the memory");
    go_on.send(()).unwrap();
    transfer.wait().unwrap();
}
