//! Every law over every path.
//!
//! `TOWLINE_TEST_FORCE=tcp` runs all of them over that path, `tcp+tls` with TLS too, and `tcp+crc` with
//! checksums; `TOWLINE_REQUIRE=mapped,cma,tcp` makes it a failure that
//! one of these paths cannot run here.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use towline_testkit::bench::{Bench, Setting, outcome};
use towline_testkit::laws;
use towline_testkit::oracle::Stamp;

macro_rules! suite {
    ($module:ident $path:literal $setting:ident: $($law:ident)*) => {
        mod $module {
            use super::*;

            $(
                #[test]
                fn $law() {
                    laws::run($path, Setting::$setting, stringify!($law), laws::$law);
                }
            )*

            #[test]
            fn transfers_and_imports_are_awaited_under_tokio() {
                laws::run($path, Setting::$setting, "transfers_and_imports_are_awaited_under_tokio", under_tokio);
            }
        }
    };
}

towline_testkit::each_law!(suite!(inproc "inproc" OneProcess));
towline_testkit::each_law!(suite!(mapped "mapped" OneProcess));
towline_testkit::each_law!(suite!(unix "unix" OneProcess));
towline_testkit::each_law!(suite!(tcp "tcp" OneProcess));
towline_testkit::each_law!(suite!(mapped_between_processes "mapped" TwoProcesses));
towline_testkit::each_law!(suite!(cma_between_processes "cma" TwoProcesses));
towline_testkit::each_law!(suite!(unix_between_processes "unix" TwoProcesses));
towline_testkit::each_law!(suite!(tcp_between_processes "tcp" TwoProcesses));
towline_testkit::each_law!(suite!(nixl "nixl" OneProcess));
towline_testkit::each_law!(suite!(nixl_between_processes "nixl" TwoProcesses));

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
