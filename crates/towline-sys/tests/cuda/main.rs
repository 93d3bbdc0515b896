//! The CUDA driver: a fake that behaves, the faults that a test can ask it for, and whatever the machine has.
#![allow(clippy::unwrap_used, clippy::panic)]
#![allow(unsafe_code, reason = "calls the driver")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use towline_sys::cuda::{Attribute, Context, Cuda, Entered, HostFlags, MemoryType, SETTING, Stream, code};
use towline_sys::{Error, Result};

fn fake() -> PathBuf {
    towline_fake_cuda::library().expect("Cargo builds the fake for its dependants")
}

fn context() -> Context {
    Cuda::load_from(fake()).unwrap().device(0).unwrap().primary_context().unwrap()
}

/// Runs one test of this program again, in a process of its own with these settings; `None` in that process.
fn elsewhere(test: &str, settings: &[(&str, &str)]) -> Option<()> {
    const MARK: &str = "TOWLINE_TEST_ELSEWHERE";
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, test)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(())
}

fn upload(entered: &Entered<'_>, stream: &Stream, to: u64, bytes: &[u8]) {
    // SAFETY: the bytes are read before the call returns, since they are not pinned.
    unsafe { stream.copy(entered, to, bytes.as_ptr().expose_provenance() as u64, bytes.len()) }.unwrap();
}

fn download(entered: &Entered<'_>, stream: &Stream, from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    // SAFETY: the bytes are written before the call returns, since they are not pinned.
    unsafe { stream.copy(entered, bytes.as_mut_ptr().expose_provenance() as u64, from, len) }.unwrap();
    stream.synchronize(entered).unwrap();
    bytes
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> (&'static str, i32, &'static str) {
    match result {
        Err(Error::Refused { call, code, name }) => (call, code, name),
        other => panic!("the driver should have refused: {other:?}"),
    }
}

#[test]
fn the_fake_says_what_it_is_and_where_it_lies() {
    let cuda = Cuda::load_from(fake()).unwrap();
    assert!(cuda.is_fake());
    assert_eq!(cuda.path(), fake().canonicalize().unwrap());
    assert_eq!(cuda.origin(), "named by the program");
    assert_eq!(cuda.init().unwrap(), 13000);
    let device = cuda.device(0).unwrap();
    assert_eq!(device.name().unwrap(), "Fake GPU");
    assert_eq!(device.bus().unwrap(), "fa4e:01:00.0");
    assert!(device.can(Attribute::VirtualMemory));
    assert_eq!(refusal(cuda.device(9)), ("cuDeviceGet", code::INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"));
}

#[test]
fn the_fake_is_used_only_where_it_is_named() {
    let copy = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("looks-real");
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(fake(), copy.join("libcuda.so.1")).unwrap();
    let folder = copy.to_str().unwrap();
    let settings = [("LD_LIBRARY_PATH", folder), (SETTING, "")];
    if elsewhere("the_fake_is_used_only_where_it_is_named", &settings).is_none() {
        match Cuda::load() {
            Ok(real) => assert!(!real.is_fake()),
            Err(error) => assert!(error.to_string().contains("it is a fake for tests"), "{error}"),
        }
    }
}

#[test]
fn the_setting_names_the_library() {
    let file = fake();
    let name = "the_setting_names_the_library";
    if elsewhere(name, &[(SETTING, file.to_str().unwrap())]).is_none() {
        let cuda = Cuda::load().unwrap();
        assert!(cuda.is_fake());
        assert_eq!(cuda.origin(), SETTING);
    }
}

#[test]
fn bytes_go_to_the_device_and_come_back_and_no_cpu_reaches_them_there() {
    let context = context();
    let entered = context.enter().unwrap();
    let stream = entered.stream(0).unwrap();
    let address = entered.allocate(10_000).unwrap();
    upload(&entered, &stream, address + 5, b"keys and values");
    assert_eq!(download(&entered, &stream, address + 5, 15), b"keys and values");
    // SAFETY: the range is the allocation's.
    unsafe { stream.fill(&entered, address, 7, 5) }.unwrap();
    assert_eq!(download(&entered, &stream, address, 6), [7, 7, 7, 7, 7, b'k']);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let range = u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap();
        range.contains(&address)
    });
    assert!(line.unwrap().contains("---p"), "{line:?}");
    // SAFETY: nothing uses it any more.
    unsafe { entered.free(address) }.unwrap();
    assert_eq!(context.device().cuda().pointer_facts(address).unwrap(), None);
}

#[test]
fn an_address_tells_its_allocation() {
    let context = context();
    let cuda = context.device().cuda();
    let entered = context.enter().unwrap();
    let (one, other) = (entered.allocate(5000).unwrap(), entered.allocate(5000).unwrap());
    let facts = cuda.pointer_facts(one + 4999).unwrap().unwrap();
    assert_eq!((facts.memory, facts.device, facts.start, facts.len), (MemoryType::Device, 0, one, 5000));
    assert!(facts.legacy_ipc && facts.handle_types == 0 && !facts.pooled);
    assert_ne!(facts.buffer, cuda.pointer_facts(other).unwrap().unwrap().buffer);
    assert_eq!(cuda.pointer_facts(one + 5000).unwrap(), None);
    let host = entered.allocate_host(4096, HostFlags::default()).unwrap();
    let facts = cuda.pointer_facts(host.expose_provenance() as u64 + 9).unwrap().unwrap();
    assert_eq!(facts.memory, MemoryType::Host);
    assert_eq!(entered.device_address(host).unwrap(), host.addr() as u64);
    // SAFETY: nothing uses them any more.
    unsafe {
        cuda.free_host(host).unwrap();
        entered.free(one).unwrap();
        entered.free(other).unwrap();
    }
}

#[test]
fn a_context_was_current_until_it_was_taken_off_and_in_the_thread_that_had_it() {
    let context = context();
    assert!(!context.was_current(), "the thread has none");
    let entered = context.enter().unwrap();
    assert!(context.is_current() && context.was_current());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| context.was_current());
        assert!(!other.join().unwrap(), "another thread never had it");
    });
    drop(entered);
    assert!(!context.was_current() && !context.is_current());
}

#[test]
fn the_callers_context_is_what_it_was() {
    let context = context();
    let cuda = context.device().cuda();
    assert!(!cuda.has_current().unwrap());
    let entered = context.enter().unwrap();
    let before = cuda.current_id().unwrap();
    drop(context.enter().unwrap());
    assert_eq!(cuda.current_id().unwrap(), before);
    drop(entered);
    assert!(!cuda.has_current().unwrap());
}

#[test]
fn streams_keep_their_order_and_wait_for_each_other() {
    let context = context();
    let entered = context.enter().unwrap();
    let (one, other) = (entered.stream(0).unwrap(), entered.stream(-1).unwrap());
    let address = entered.allocate(64).unwrap();
    let (open, gate) = mpsc::channel::<()>();
    one.call_back(&entered, move || gate.recv_timeout(Duration::from_secs(20)).unwrap()).unwrap();
    // SAFETY: the range is the allocation's.
    unsafe { one.fill(&entered, address, 1, 64) }.unwrap();
    let event = entered.event().unwrap();
    assert!(event.has_happened().unwrap(), "what was never recorded is no reason to wait");
    one.record(&entered, &event).unwrap();
    assert!(!event.has_happened().unwrap());
    other.wait(&entered, &event).unwrap();
    // SAFETY: as above.
    unsafe { other.fill(&entered, address, 2, 32) }.unwrap();
    assert!(!one.is_idle(&entered).unwrap() && !other.is_idle(&entered).unwrap());
    // SAFETY: the stream is alive.
    unsafe { entered.wait_for_foreign(other.handle(), &one) }.unwrap();
    let (done, ended) = mpsc::channel();
    one.call_back(&entered, move || done.send(()).unwrap()).unwrap();
    assert!(ended.try_recv().is_err());
    open.send(()).unwrap();
    ended.recv_timeout(Duration::from_secs(20)).unwrap();
    event.synchronize().unwrap();
    let bytes = download(&entered, &other, address, 64);
    assert_eq!((bytes[0], bytes[31], bytes[32], bytes[63]), (2, 2, 1, 1));
    // SAFETY: nothing uses it any more.
    unsafe { entered.free(address) }.unwrap();
}

#[test]
fn another_process_opens_what_a_handle_names() {
    let name = "another_process_opens_what_a_handle_names";
    let context = context();
    let entered = context.enter().unwrap();
    let stream = entered.stream(0).unwrap();
    if let Ok(handle) = std::env::var("TOWLINE_TEST_HANDLE") {
        let bytes: Vec<u8> = handle.split(' ').map(|byte| byte.parse().unwrap()).collect();
        // SAFETY: the parent keeps the allocation.
        let address = unsafe { entered.open_ipc(&bytes.clone().try_into().unwrap()) }.unwrap();
        // SAFETY: as above.
        let again = unsafe { entered.open_ipc(&bytes.try_into().unwrap()) }.unwrap();
        assert_eq!(address, again, "an allocation is mapped once");
        assert_eq!(download(&entered, &stream, address + 100, 6), b"parent");
        upload(&entered, &stream, address, b"child");
        stream.synchronize(&entered).unwrap();
        // SAFETY: nothing uses it any more.
        unsafe {
            entered.close_ipc(address).unwrap();
            entered.close_ipc(address).unwrap();
            assert_eq!(refusal(entered.close_ipc(address)).1, code::INVALID_VALUE);
        }
        return;
    }
    let address = entered.allocate(1 << 20).unwrap();
    upload(&entered, &stream, address + 100, b"parent");
    stream.synchronize(&entered).unwrap();
    let handle = entered.ipc_handle(address + 512).unwrap();
    // SAFETY: the allocation is this test's.
    assert_eq!(refusal(unsafe { entered.open_ipc(&handle) }).1, code::INVALID_CONTEXT);
    let text = handle.map(|byte| byte.to_string()).join(" ");
    elsewhere(name, &[("TOWLINE_TEST_HANDLE", &text)]).unwrap();
    assert_eq!(download(&entered, &stream, address, 5), b"child");
    // SAFETY: nothing uses it any more.
    unsafe { entered.free(address) }.unwrap();
}

#[test]
fn physical_memory_is_mapped_twice_and_handed_over() {
    let name = "physical_memory_is_mapped_twice_and_handed_over";
    let context = context();
    let cuda = context.device().cuda();
    let entered = context.enter().unwrap();
    let stream = entered.stream(0).unwrap();
    let len = context.device().granularity().unwrap().bytes;
    let map = |allocation: &towline_sys::cuda::Allocation| {
        let address = cuda.reserve_addresses(len).unwrap();
        // SAFETY: just reserved.
        unsafe { allocation.map(address, len) }.unwrap();
        entered.allow_access(address, len).unwrap();
        address
    };
    if let Ok(file) = std::env::var("TOWLINE_TEST_FILE") {
        use std::os::fd::AsFd;
        let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
        let address = map(&cuda.import_allocation(file.as_fd()).unwrap());
        assert_eq!(download(&entered, &stream, address + 9, 6), b"parent");
        upload(&entered, &stream, address, b"child");
        stream.synchronize(&entered).unwrap();
        return;
    }
    let allocation = context.device().create_allocation(len).unwrap();
    let (one, other) = (map(&allocation), map(&allocation));
    drop(allocation);
    upload(&entered, &stream, one + 9, b"parent");
    assert_eq!(download(&entered, &stream, other + 9, 6), b"parent");
    let facts = cuda.pointer_facts(one + 3).unwrap().unwrap();
    assert!(!facts.legacy_ipc && facts.handle_types == 1);
    let file = cuda.retain_allocation(one).unwrap().export().unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&file));
    elsewhere(name, &[("TOWLINE_TEST_FILE", &path)]).unwrap();
    assert_eq!(download(&entered, &stream, other, 5), b"child");
    for address in [one, other] {
        // SAFETY: mapped above; nothing uses it any more.
        unsafe {
            cuda.unmap(address, len).unwrap();
            cuda.free_addresses(address, len).unwrap();
        }
    }
}

#[test]
fn without_a_device_the_driver_says_so() {
    let name = "without_a_device_the_driver_says_so";
    if elsewhere(name, &[("FAKE_CUDA_DEVICES", "0")]).is_none() {
        let cuda = Cuda::load_from(fake()).unwrap();
        assert_eq!(refusal(cuda.device_count()), ("cuInit", code::NO_DEVICE, "CUDA_ERROR_NO_DEVICE"));
    }
}

#[test]
fn a_driver_that_is_too_old_is_refused() {
    let name = "a_driver_that_is_too_old_is_refused";
    if elsewhere(name, &[("FAKE_CUDA_VERSION", "10020")]).is_none() {
        let error = Cuda::load_from(fake()).unwrap().device_count().unwrap_err();
        assert!(error.to_string().contains("the driver is for CUDA 10.2"), "{error}");
    }
}

#[test]
fn a_refusal_keeps_the_call_the_code_and_its_name() {
    let name = "a_refusal_keeps_the_call_the_code_and_its_name";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuMemAlloc_v2:2@2,cuIpcGetMemHandle:77")]).is_none() {
        let context = context();
        let entered = context.enter().unwrap();
        let address = entered.allocate(100).unwrap();
        let error = entered.allocate(100).unwrap_err();
        assert_eq!(error.to_string(), "cuMemAlloc_v2 returned 2 (CUDA_ERROR_OUT_OF_MEMORY)");
        entered.allocate(100).unwrap();
        assert_eq!(refusal(entered.ipc_handle(address)), ("cuIpcGetMemHandle", 77, "unknown code"));
    }
}

#[test]
fn a_context_that_is_lost_stays_so() {
    let name = "a_context_that_is_lost_stays_so";
    if elsewhere(name, &[("FAKE_CUDA_FAIL", "cuEventRecord:700")]).is_none() {
        let context = context();
        let cuda = context.device().cuda();
        let entered = context.enter().unwrap();
        let (stream, event) = (entered.stream(0).unwrap(), entered.event().unwrap());
        let (_, lost, _) = refusal(stream.record(&entered, &event));
        assert!(code::context_lost(lost));
        assert_eq!(refusal(entered.allocate(1)).1, lost);
        assert_eq!(refusal(cuda.pointer_facts(1)).1, lost);
        assert_eq!(refusal(event.has_happened()).1, lost);
        drop((stream, event, entered));
        assert!(!cuda.has_current().unwrap());
    }
}

#[test]
fn freeing_waits_for_work_and_later_use_is_refused() {
    let name = "freeing_waits_for_work_and_later_use_is_refused";
    if elsewhere(name, &[("FAKE_CUDA_DELAY_US", "20000")]).is_none() {
        let context = context();
        let entered = context.enter().unwrap();
        let stream = entered.stream(0).unwrap();
        let host = entered.allocate_host(4096, HostFlags::default()).unwrap();
        let address = entered.allocate(4096).unwrap();
        // SAFETY: freed only afterwards, for which the driver waits.
        unsafe {
            stream.copy(&entered, host.expose_provenance() as u64, address, 4096).unwrap();
            entered.free(address).unwrap();
        }
        // SAFETY: the fake finds this out.
        let late = unsafe { stream.copy(&entered, host.expose_provenance() as u64, address, 4096) };
        assert_eq!(refusal(late).1, code::INVALID_VALUE);
    }
}

/// What every machine has: a driver, or the reason why there is none. Nothing aborts.
#[test]
fn the_machine_has_a_driver_or_says_what_was_tried() {
    match Cuda::load() {
        Ok(cuda) => drop(cuda.device_count()),
        Err(error) => {
            assert!(error.is_unavailable());
            assert!(error.to_string().contains("libcuda.so.1 (the loader's path): "), "{error}");
        }
    }
}
