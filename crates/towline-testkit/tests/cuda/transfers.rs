//! Transfers from, to and between GPUs: the laws over every path that serves them.

use towline_testkit::bench::Setting;
use towline_testkit::laws;

use super::driver;

macro_rules! suite {
    ($module:ident $path:literal $setting:ident $owner:literal $user:literal: $($law:ident)*) => {
        mod $module {
            use super::*;

            $(
                #[test]
                fn $law() {
                    if driver(concat!(stringify!($module), "::", stringify!($law))) {
                        let kinds = ($owner, $user);
                        laws::run_with($path, Setting::$setting, kinds, stringify!($law), laws::$law);
                    }
                }
            )*
        }
    };
}

towline_testkit::each_law_without_words!(suite!(cuda_to_gpu "cuda" TwoProcesses "device" "device"));
towline_testkit::each_law_without_words!(suite!(cuda_to_host "cuda" TwoProcesses "device" "system"));
towline_testkit::each_law_without_words!(suite!(cuda_to_pinned "cuda" TwoProcesses "exportable" "pinned"));
towline_testkit::each_law_without_words!(suite!(inproc_on_gpu "inproc" OneProcess "device" "device"));
towline_testkit::each_law_without_words!(suite!(inproc_to_host "inproc" OneProcess "exportable" "system"));
towline_testkit::each_law_without_words!(suite!(inproc_from_host "inproc" OneProcess "system" "device"));
towline_testkit::each_law_without_words!(suite!(mapped_to_gpu "mapped" TwoProcesses "shared" "device"));
towline_testkit::each_law_without_words!(suite!(cma_to_gpu "cma" TwoProcesses "system" "device"));
towline_testkit::each_law_without_words!(suite!(unix_between_gpus "unix" TwoProcesses "device" "device"));
towline_testkit::each_law_without_words!(suite!(tcp_between_gpus "tcp" TwoProcesses "device" "device"));
towline_testkit::each_law_without_words!(suite!(tcp_from_gpu "tcp" OneProcess "exportable" "system"));
