//! Every law over every path in the list of transports, in one process and between two.
//!
//! `TOWLINE_TEST_FORCE=tcp` runs all of them over that path, `tcp+tls` with TLS too, and `tcp+crc` with
//! checksums; `TOWLINE_REQUIRE=mapped,cma,tcp` makes it a failure that
//! one of these paths cannot run here. `TOWLINE_TEST_SETTING="one process"` leaves out the owners in workers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use towline_testkit::bench::{Bench, outcome};
use towline_testkit::laws;
use towline_testkit::oracle::Stamp;
use towline_testkit::process::use_driver;

macro_rules! suite {
    ($path:ident: $($law:ident)*) => {
        mod $path {
            use super::*;

            $(
                #[test]
                fn $law() {
                    run(stringify!($path), stringify!($law), laws::$law);
                }
            )*

            #[test]
            fn transfers_and_imports_are_awaited_under_tokio() {
                run(stringify!($path), "transfers_and_imports_are_awaited_under_tokio", under_tokio);
            }
        }
    };
}

macro_rules! suites {
    (: $($path:ident)*) => {
        $(towline_testkit::each_law!(suite!($path));)*
    };
}

// A suite for each path in the list of transports: no other place names them.
towline::each_path!(suites!());

fn run(path: &str, name: &str, law: fn(&Bench)) {
    // A machine with a GPU has tests of its own for it: here its place is taken by the fake, on which the laws hold just so.
    if std::env::var_os(towline::cuda::SETTING).is_none()
        && let Some(fake) = towline_fake_cuda::library()
    {
        use_driver(&fake);
    }
    laws::run(path, name, law);
}

/// No runtime is imposed: it works under tokio as it does without it.
fn under_tokio(bench: &Bench) {
    let stamp = Stamp::new(1, 1);
    let len = 4 << 20;
    let region = bench.stamped(len, towline::Access::READ_WRITE, stamp);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let remote = bench.user.import_async(&region.ticket()).await.unwrap();
        let local = bench.local(len);
        let limit = std::time::Duration::from_secs(30);
        tokio::time::timeout(limit, bench.user.read(&remote, &local).start().unwrap())
            .await
            .unwrap()
            .unwrap();
        stamp.verify_storage(local.storage(), 0, len).unwrap();
        // Two at once on one thread, and one that is dropped before its end.
        let (a, b) = (bench.local(len), bench.local(len));
        let (first, second) = tokio::join!(
            bench.user.read(&remote, &a).start().unwrap(),
            bench.user.read(&remote, &b).start().unwrap()
        );
        first.unwrap();
        second.unwrap();
        let abandoned = bench.user.read(&remote, &local).start().unwrap();
        let _ = tokio::time::timeout(std::time::Duration::from_micros(10), abandoned).await;
    });
    runtime.block_on(async { outcome(bench.user.notify(&bench.import(&region), "bye")) }).unwrap();
    bench.owner.receive(towline_testkit::bench::STALL).unwrap();
}
