//! How many launches a request takes.

use towline::Layout;
use towline_testkit::bench::{Bench, COUNTS, Setting, outcome};
use towline_testkit::oracle::Stamp;
use towline_testkit::watchdog::watch;

use super::driver;
use super::faults::alone;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };
const BLOCK: u64 = 256;

fn launches(what: impl FnOnce()) -> u64 {
    let count = || towline_fake_cuda::launches().expect("the fake is loaded");
    let before = count();
    what();
    count() - before
}

#[test]
fn a_request_over_many_regions_on_one_gpu_is_one_launch() {
    // The launches of a process are counted: no other test may be in it.
    if !alone("launches::a_request_over_many_regions_on_one_gpu_is_one_launch", &[]) {
        return;
    }
    let _watchdog = watch("gpu: launches", std::time::Duration::from_secs(120));
    assert!(driver("launches"));
    for (path, setting) in [("inproc", Setting::OneProcess), ("cuda", Setting::TwoProcesses)] {
        let bench = Bench::open_with(path, setting, Some(("device", "device"))).unwrap();
        for count in &COUNTS[1..] {
            let parts = bench.parts(*count, 256 << 10, THEIRS);
            parts.fill_here(OURS);
            assert_eq!(launches(|| outcome(parts.read().start()).unwrap()), 1, "{path}: {count} parts");
            parts.check_here(THEIRS).unwrap();
            parts.fill_here(OURS);
            assert_eq!(launches(|| outcome(parts.write().start()).unwrap()), 1, "{path}: {count} parts");
            parts.check_there(OURS).unwrap();
            let blocks = Layout::contiguous(4 * BLOCK, BLOCK).unwrap();
            let (from, to) = ([3u32, 0, 2], [0u32, 1, 2]);
            let paged = || {
                let all = parts.whole().map(|part| part.blocks(&blocks, &from, &blocks, &to));
                outcome(bench.user.read_parts(all).start()).unwrap();
            };
            assert_eq!(launches(paged), 1, "{path}: blocks of {count} parts");
        }
    }
}
