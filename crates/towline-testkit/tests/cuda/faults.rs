//! What a driver can do wrong, each in a process of its own.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline::cuda::{Availability, CopyOptions, Gpu, Run, SETTING, Tuning, availability};
use towline::memory::{DeviceMemory, DeviceStorage, ExternalStorage, PinnedStorage, SystemStorage};
use towline::{Access, Endpoint, Kind, MemoryAccess, MemoryDescription, Storage, Ticket};
use towline_testkit::bench::routing;
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::watchdog::watch;
use towline_testkit::worker::storage;

/// Runs one test of this module again, with the fake and these settings; true in that process.
fn elsewhere(test: &str, settings: &[(&str, &str)]) -> bool {
    alone(&format!("faults::{test}"), settings)
}

/// Runs one test again in a process of its own, with the fake and these settings; true in that process.
pub(crate) fn alone(test: &str, settings: &[(&str, &str)]) -> bool {
    const MARK: &str = "TOWLINE_TEST_ELSEWHERE";
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, test)
        .env(SETTING, super::fake())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// Twelve runs from one storage to another.
fn runs(one: &DeviceStorage, two: &DeviceStorage) -> [Run; 12] {
    std::array::from_fn(|at| {
        let offset = at as u64 * 1000;
        Run { from: one.addr() as u64 + offset, to: two.addr() as u64 + offset, len: 900 }
    })
}

fn pair() -> (Arc<Gpu>, DeviceStorage, DeviceStorage) {
    let gpu = Gpu::open(0).unwrap();
    (gpu, DeviceStorage::new(20_000, 0).unwrap(), DeviceStorage::new(20_000, 0).unwrap())
}

const OPTIONS: CopyOptions = CopyOptions { bytes: 12 * 900, host: false, after: None };

#[test]
fn the_setting_and_the_fake_are_shown() {
    if elsewhere("the_setting_and_the_fake_are_shown", &[("FAKE_CUDA_DEVICES", "2")]) {
        let Availability::Found { path, origin, version, fake, devices } = availability() else {
            panic!("the fake is there")
        };
        assert_eq!((origin.as_str(), version.as_str(), fake), (SETTING, "13.0", true));
        assert_eq!(path, super::fake().canonicalize().unwrap());
        assert_eq!(devices.len(), 2);
        assert!(devices[0].ipc && devices[0].descriptors && devices[0].reaches == [1]);
    }
}

#[test]
fn without_a_device_everything_is_unavailable_and_says_why() {
    let name = "without_a_device_everything_is_unavailable_and_says_why";
    if elsewhere(name, &[("FAKE_CUDA_DEVICES", "0")]) {
        for error in [
            Gpu::open(0).unwrap_err(),
            DeviceStorage::new(10, 0).unwrap_err(),
            PinnedStorage::new(10).unwrap_err(),
        ] {
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.message().contains("cuInit returned 100 (CUDA_ERROR_NO_DEVICE)"), "{error}");
        }
        let Availability::Missing { tried, .. } = availability() else { panic!("there is no device") };
        assert!(tried[0].contains("libtowline_fake_cuda.so: cuInit returned 100"), "{tried:?}");
    }
}

#[test]
fn a_driver_that_is_turned_off_or_too_old_is_unavailable() {
    let name = "a_driver_that_is_turned_off_or_too_old_is_unavailable";
    if elsewhere(name, &[("FAKE_CUDA_VERSION", "11020")]) {
        let error = Gpu::open(0).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(error.message().contains("for CUDA 11.2"), "{error}");
    }
}

#[test]
fn memory_that_runs_out_is_exhausted_and_a_lack_is_unsupported() {
    let name = "memory_that_runs_out_is_exhausted_and_a_lack_is_unsupported";
    if elsewhere(name, &[("FAKE_CUDA_MEMORY", "1000000"), ("FAKE_CUDA_NO", "vmm,register")]) {
        let kept = DeviceStorage::new(900_000, 0).unwrap();
        let error = DeviceStorage::new(200_000, 0).unwrap_err();
        assert_eq!(error.kind(), Kind::Exhausted);
        assert!(error.message().starts_with("200000 bytes of GPU 0: cuMemAlloc_v2 returned 2"), "{error}");
        drop(kept);
        DeviceStorage::new(200_000, 0).unwrap();
        let exportable = DeviceStorage::options().memory(DeviceMemory::Exportable).allocate(10);
        assert_eq!(exportable.unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(PinnedStorage::new(10).unwrap_err().kind(), Kind::Unsupported);
        PinnedStorage::options().private(true).allocate(10).unwrap();
    }
}

#[test]
fn what_fails_half_way_leaves_nothing_behind() {
    let name = "what_fails_half_way_leaves_nothing_behind";
    let settings =
        [("FAKE_CUDA_FAIL", "cuMemSetAccess:999@1,cuMemMap:2@2,cuMemHostGetDevicePointer_v2:999@1")];
    if elsewhere(name, &settings) {
        let exportable = || DeviceStorage::options().memory(DeviceMemory::Exportable).allocate(600 << 20);
        assert_eq!(exportable().unwrap_err().kind(), Kind::Native);
        assert_eq!(exportable().unwrap_err().kind(), Kind::Exhausted);
        exportable().unwrap();
        let private = || PinnedStorage::options().private(true).allocate(4096);
        assert_eq!(private().unwrap_err().kind(), Kind::Native);
        private().unwrap();
    }
}

#[test]
fn a_launch_that_is_refused_is_an_error_and_the_next_works() {
    let name = "a_launch_that_is_refused_is_an_error_and_the_next_works";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuLaunchKernel:2@2"), ("FAKE_CUDA_DELAY_US", "3000")]) {
        let (gpu, one, two) = pair();
        one.memset(5, 0, 20_000).unwrap();
        two.memset(0, 0, 20_000).unwrap();
        let tuning = Tuning { first: 3, ..Tuning::default() };
        // SAFETY: the storages live until the end.
        let start = || unsafe { gpu.copy_tuned(runs(&one, &two), &OPTIONS, Some(&tuning)) };
        let error = start().unwrap_err();
        assert_eq!(error.kind(), Kind::Exhausted);
        assert!(error.message().contains("cuLaunchKernel returned 2"), "{error}");
        // The first launch was not refused: an error means that it has ended too.
        let mut bytes = [0; 900];
        two.read_at(2000, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 900]);
        assert!(start().unwrap().wait(Some(Instant::now() + Duration::from_secs(60))).unwrap());
    }
}

#[test]
fn a_kernel_that_the_driver_does_not_take_is_an_error() {
    let name = "a_kernel_that_the_driver_does_not_take_is_an_error";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuModuleLoadDataEx:222")]) {
        let (gpu, one, two) = pair();
        // SAFETY: the storages live until the end.
        let error = unsafe { gpu.copy(runs(&one, &two), &OPTIONS) }.unwrap_err();
        assert!(error.message().contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "{error}");
        assert_eq!(gpu.prepare().unwrap_err().kind(), Kind::Native);
        let one_run = runs(&one, &two).into_iter().take(1);
        // SAFETY: as above.
        let few = unsafe { gpu.copy(one_run, &CopyOptions { bytes: 900, ..OPTIONS }) }.unwrap();
        assert!(few.wait(Some(Instant::now() + Duration::from_secs(60))).unwrap());
    }
}

#[test]
fn a_copy_from_freed_memory_loses_the_context_and_nobody_hangs() {
    let name = "a_copy_from_freed_memory_loses_the_context_and_nobody_hangs";
    if elsewhere(name, &[("FAKE_CUDA_DELAY_US", "2000")]) {
        let _watch = watch("a lost context", Duration::from_secs(60));
        let (gpu, one, two) = pair();
        let list = runs(&one, &two);
        drop(one);
        // SAFETY: not kept, which is what the test is about; the fake finds it out.
        let copying = unsafe { gpu.copy(list, &OPTIONS) }.unwrap();
        let error = copying.wait(None).unwrap_err();
        assert_eq!(error.kind(), Kind::Native);
        assert!(error.message().contains("the CUDA context of this process is lost"), "{error}");
        assert!(two.write_at(0, &[1]).unwrap_err().message().contains("is lost"));
        assert!(DeviceStorage::new(1, 0).unwrap_err().message().contains("is lost"));
    }
}

#[test]
fn a_copy_that_fails_ends_a_transfer_of_many_portions() {
    let name = "a_copy_that_fails_ends_a_transfer_of_many_portions";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuMemcpyAsync:999@3,cuMemcpyAsync:999@45")]) {
        const LEN: usize = 80 << 20;
        let _watch = watch("a portion that fails", Duration::from_secs(60));
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let remote = user.import_with(&region.ticket().unwrap(), &routing("tcp")).unwrap();
        let local = user.register(DeviceStorage::new(LEN, 0).unwrap(), Access::NONE).unwrap();
        let read = || user.read(&remote, &local).start().unwrap().wait();
        let write = || user.write(&remote, &local).start().unwrap().wait();
        let error = read().unwrap_err();
        assert!(error.kind() == Kind::Native && error.message().contains("cuMemcpyAsync"), "{error}");
        read().unwrap();
        // By now more calls have been made than were to succeed: one of these is refused, the others are not.
        let (first, second) = (write(), write());
        assert!(first.is_ok() || second.is_ok(), "{first:?} {second:?}");
        write().unwrap();
        assert!(local.into_storage().is_ok() && region.into_storage().is_ok());
    }
}

#[test]
fn a_lost_context_wakes_who_waits_for_long() {
    let name = "a_lost_context_wakes_who_waits_for_long";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuMemAlloc_v2:719@3"), ("FAKE_CUDA_DELAY_US", "500000")]) {
        let _watch = watch("a lost context", Duration::from_secs(60));
        let (gpu, one, two) = pair();
        // SAFETY: the storages live until the end.
        let copying = unsafe { gpu.copy(runs(&one, &two), &OPTIONS) }.unwrap();
        let waiting = std::thread::spawn(move || copying.wait(None));
        assert_eq!(DeviceStorage::new(1, 0).unwrap_err().kind(), Kind::Native);
        assert!(waiting.join().unwrap().unwrap_err().message().contains("is lost"));
    }
}

#[test]
fn memory_of_another_gpu_is_told_apart_and_reached() {
    let name = "memory_of_another_gpu_is_told_apart_and_reached";
    if elsewhere(name, &[("FAKE_CUDA_DEVICES", "2")]) {
        let (one, two) = (DeviceStorage::new(20_000, 0).unwrap(), DeviceStorage::new(20_000, 1).unwrap());
        // SAFETY: refused, so that nothing touches it.
        let error = unsafe { ExternalStorage::device(two.addr(), 10, 0, None) }.unwrap_err();
        assert!(error.message().contains("that is memory of GPU 1, not 0"), "{error}");
        let (near, far) = (Gpu::open(0).unwrap(), Gpu::open(1).unwrap());
        near.reach(&far).unwrap();
        near.reach(&far).unwrap();
        near.reach(&near).unwrap();
        one.memset(4, 0, 20_000).unwrap();
        // SAFETY: the storages live until the end.
        let copying = unsafe { near.copy(runs(&one, &two), &OPTIONS) }.unwrap();
        assert!(copying.wait(Some(Instant::now() + Duration::from_secs(60))).unwrap());
        let mut byte = [0];
        two.read_at(11_899, &mut byte).unwrap();
        assert_eq!(byte, [4]);
        assert_eq!(two.place(), towline::Place::Cuda(1));
    }
}

#[test]
fn gpus_that_cannot_reach_each_other_say_so() {
    let name = "gpus_that_cannot_reach_each_other_say_so";
    if elsewhere(name, &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO", "peer")]) {
        let error = Gpu::open(0).unwrap().reach(&Gpu::open(1).unwrap()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.message().contains("GPU 0 cannot reach the memory of GPU 1"), "{error}");
    }
}

#[test]
fn memory_whose_numbers_mix_to_the_same_is_not_taken_for_other_memory() {
    const LEN: usize = 300_000;
    let name = "memory_whose_numbers_mix_to_the_same_is_not_taken_for_other_memory";
    if !elsewhere(name, &[("FAKE_CUDA_ALIKE", "1")]) {
        return;
    }
    let _watchdog = watch("gpu: memory that is alike", Duration::from_secs(60));
    super::driver(name);
    let (user, mut owner) = (Endpoint::open("user").unwrap(), Process::open("owner", ""));
    let local = user.register(storage(LEN, "device").unwrap(), Access::NONE).unwrap();
    // All of them at once, and opened at once, of the same length.
    let kinds = ["exportable", "exportable", "segments", "segments"];
    let remotes: Vec<_> = (1u16..)
        .zip(kinds)
        .map(|(number, kind)| {
            let id = owner.must(&format!("register {LEN} {kind} read+write")).number(0);
            owner.must(&format!("fill {id} 5 {number}"));
            let ticket: Ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
            (number, user.import_with(&ticket, &routing("cuda")).unwrap())
        })
        .collect();
    for (number, remote) in &remotes {
        Stamp::new(9, 9).fill_storage(local.storage()).unwrap();
        user.read(remote, &local).start().unwrap().wait().unwrap();
        Stamp::new(5, *number).verify_storage(local.storage(), 0, LEN).unwrap();
    }
}
