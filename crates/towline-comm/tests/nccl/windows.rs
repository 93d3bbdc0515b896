//! Registered buffers, windows, puts and signals.

use towline::{DeviceStorage, Kind, MemoryDescription, OffsetBuffer, create_buffer};
use towline_comm::{
    Communicator, Config, Progress, WaitSignal, WindowFlag, get_nccl_unique_id, group, mem_alloc_on,
};

use super::{alone, config, elsewhere, fakes, memory, together};

#[test]
fn puts_without_a_signal_and_gets_go_through_the_mapping_of_the_window() {
    const TEST: &str = "windows::puts_without_a_signal_and_gets_go_through_the_mapping_of_the_window";
    if elsewhere(TEST, &[("FAKE_NCCL_VERSION", "23203")]).is_some() {
        return;
    }
    together(2, |comm| {
        let (rank, other) = (comm.rank().unwrap(), 1 - comm.rank().unwrap());
        let window = comm.register_window(mem_alloc_on(0, 8192).unwrap(), WindowFlag::DEFAULT);
        let window = window.unwrap().unwrap();
        let mine = memory(comm, &[rank as u8 + 1; 64]);
        window.memory().unwrap().write_at(0, &[rank as u8 + 7; 64]).unwrap();
        window.fence().unwrap();
        drop(window.put(other, 4096, &mine).unwrap());
        window.flush(other).unwrap();
        window.fence().unwrap();
        let mut bytes = [0; 64];
        window.memory().unwrap().read_at(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [other as u8 + 1; 64]);
        window.get(other, 0, &mine).unwrap().wait().unwrap();
        mine.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [other as u8 + 7; 64]);

        let error = window.get(other, 8192 - 63, &mine).unwrap_err();
        assert_eq!((error.kind(), error.op()), (Kind::Invalid, "get"));
        assert!(error.message().contains("do not lie within the window's 8192"), "{error}");
        assert_eq!(window.put(2, 0, &mine).unwrap_err().kind(), Kind::Invalid);
        let in_group = towline_comm::group(|| window.flush_all()).unwrap_err();
        assert_eq!(in_group.kind(), Kind::Invalid);
        let atomics = window.fetch_add(other, 0, 1).unwrap_err();
        assert_eq!(atomics.message(), "NCCL has no fetch_add: a communicator on a GPU cannot do it");
        window.fence().unwrap();
        window.close();
        assert_eq!(window.put(other, 0, &mine).unwrap_err().kind(), Kind::Invalid);
    });
}

#[test]
fn memory_that_is_not_mapped_here_and_an_nccl_that_does_not_tell_are_refused() {
    const TEST: &str = "windows::memory_that_is_not_mapped_here_and_an_nccl_that_does_not_tell_are_refused";
    let far = [("FAKE_NCCL_VERSION", "23203"), ("FAKE_NCCL_NO", "mapping")];
    let both = [elsewhere(TEST, &far), elsewhere(TEST, &[("FAKE_NCCL_VERSION", "22907")])];
    if both.iter().any(Option::is_some) {
        return;
    }
    let comm = alone();
    let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT);
    let window = window.unwrap().unwrap();
    let error = window.put(0, 0, &memory(&comm, &[1; 8])).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Unsupported, "put"));
    let expected = match std::env::var("FAKE_NCCL_NO") {
        Ok(_) => "the memory of rank 0 is not mapped here: it is on another host",
        Err(_) => "NCCL 2.29.7 has no function ncclGetPeerDevicePointer: it came with NCCL 2.30.0",
    };
    assert_eq!(error.message(), expected);
    assert!(comm.is_valid());
}

#[test]
fn a_put_lands_before_its_signal() {
    together(2, |comm| {
        let rank = comm.rank().unwrap();
        let window = comm.register_window(mem_alloc_on(0, 8192).unwrap(), WindowFlag::COLL_SYMMETRIC);
        let window = window.unwrap().unwrap();
        assert!(window.is_valid());
        assert_eq!(window.size_of(1).unwrap(), 8192);
        let memory = window.memory().unwrap();
        memory.write_at(0, &[rank as u8 + 1; 64]).unwrap();
        comm.barrier().unwrap();
        let peer = 1 - rank;
        window.put_signal(peer, 4096, &memory.part(0, 64).unwrap(), 0, 0).unwrap().wait().unwrap();
        comm.follow("wait_signal", |comm| comm.wait_signal(&[WaitSignal::from_rank(peer)]))
            .unwrap()
            .wait()
            .unwrap();
        let mut bytes = [0; 64];
        memory.read_at(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [peer as u8 + 1; 64]);

        let signaled = comm.signal(peer, 0, 0).unwrap();
        signaled.wait().unwrap();
        comm.wait_signal(&[WaitSignal::from_rank(peer)]).unwrap();
        comm.synchronize().unwrap();
        let error = window.put_signal(peer, 8192 - 32, &memory.part(0, 64).unwrap(), 0, 0).unwrap_err();
        assert_eq!(error.message(), "64 bytes at 8160 do not lie within the window's 8192");
        let error = window.put_signal(2, 0, &memory.part(0, 64).unwrap(), 0, 0).unwrap_err();
        assert_eq!(error.message(), "peer 2 is not among 2 ranks");
        let error = comm.signal(peer, 0, 1).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        window.flush(peer).unwrap();
        let error = window.fetch_add(peer, 0, 1).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported, "{error}");
        assert!(error.message().starts_with("NCCL has no "), "{error}");
        comm.barrier().unwrap();
    });
}

#[test]
fn a_put_needs_memory_of_a_symmetric_window() {
    let comm = alone();
    let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    let error = window.put_signal(0, 0, &window.memory().unwrap(), 0, 0).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().contains("COLL_SYMMETRIC"), "{error}");
    window.close();
    window.close();
    assert_eq!(window.handle(), 0);
    assert_eq!(comm.open_handles().unwrap(), 0);
}

#[test]
fn windows_want_memory_of_the_right_kind_at_the_right_place() {
    let comm = alone();
    let plain = DeviceStorage::new(4096, 0).unwrap();
    let error = comm.register_window(plain, WindowFlag::DEFAULT).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().starts_with("windows need memory of mem_alloc"), "{error}");
    let whole = create_buffer(mem_alloc_on(0, 8192).unwrap());
    let part = OffsetBuffer::new(whole, 256, 4096).unwrap();
    let error = comm.register_window(part, WindowFlag::DEFAULT).unwrap_err();
    assert!(error.message().contains("a multiple of 4096"), "{error}");
    assert_eq!(comm.open_handles().unwrap(), 0);
}

#[test]
fn the_handle_of_a_window_comes_at_the_end_of_the_group() {
    let comm = alone();
    let window = group(|| {
        let window = comm.register_window(mem_alloc_on(0, 4096)?, WindowFlag::DEFAULT)?.unwrap();
        assert_eq!(window.handle(), 0);
        Ok(window)
    })
    .unwrap();
    assert_ne!(window.handle(), 0);
    comm.destroy();
    assert_eq!(window.handle(), 0);
}

#[test]
fn a_window_that_is_closed_before_its_group_ends_is_not_registered() {
    let comm = alone();
    let error = group(|| {
        drop(comm.register_window(mem_alloc_on(0, 4096)?, WindowFlag::DEFAULT)?);
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.message(), "the window was closed");
    assert_eq!(comm.open_handles().unwrap(), 0);
    let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    assert!(window.is_valid() && comm.open_handles().unwrap() == 1);
}

#[test]
fn a_communicator_that_does_not_block_fills_the_handle_later() {
    fakes();
    let config = Config { blocking: false, ..config() };
    let comm = Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), config).unwrap();
    assert_eq!(comm.get_async_error().unwrap(), Progress::InProgress);
    comm.synchronize().unwrap();
    assert_eq!(comm.get_async_error().unwrap(), Progress::Done);
    let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    assert_eq!(window.handle(), 0);
    while comm.get_async_error().unwrap() == Progress::InProgress {
        std::thread::yield_now();
    }
    assert_ne!(window.handle(), 0);
    comm.finalize().unwrap();
    assert_eq!(comm.register_buffer(mem_alloc_on(0, 64).unwrap()).unwrap_err().kind(), Kind::Invalid);
    comm.destroy();
}

#[test]
fn a_thousand_registrations_leave_nothing_and_keep_the_owner_while_they_last() {
    let comm = alone();
    let buffer = create_buffer(mem_alloc_on(0, 4096).unwrap());
    for _ in 0..1000 {
        let registered = comm.register_buffer(buffer.clone()).unwrap();
        assert_ne!(registered.handle().unwrap(), 0);
        assert_eq!(comm.open_handles().unwrap(), 1);
        registered.close();
        assert!(registered.handle().is_err());
        let window = comm.register_window(buffer.clone(), WindowFlag::DEFAULT).unwrap().unwrap();
        drop(window);
    }
    assert_eq!(comm.open_handles().unwrap(), 0);
    let kept = comm.register_buffer(buffer.clone()).unwrap();
    let addr = buffer.addr();
    drop(buffer);
    assert_eq!(kept.memory().unwrap().len(), 4096);
    comm.destroy();
    assert!(!kept.is_valid());
    assert_ne!(addr, 0);
}

#[test]
fn handles_are_closed_before_the_communicator_and_once() {
    const TEST: &str = "windows::handles_are_closed_before_the_communicator_and_once";
    let log = std::env::temp_dir().join(format!("towline-nccl-{}", std::process::id()));
    let path = log.to_str().unwrap();
    if elsewhere(TEST, &[("FAKE_NCCL_LOG", path)]).is_none() {
        let comm = alone();
        let buffer = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
        let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap();
        comm.destroy();
        comm.destroy();
        drop((buffer, window, comm));
        return;
    }
    let calls = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let wanted = ["Deregister", "WindowDeregister", "MemFree", "Finalize", "Destroy"];
    let calls: Vec<_> = calls
        .lines()
        .filter_map(|call| call.strip_prefix("ncclComm").or_else(|| call.strip_prefix("nccl")))
        .filter(|call| wanted.contains(call))
        .collect();
    assert_eq!(calls, ["Deregister", "MemFree", "WindowDeregister", "MemFree", "Finalize", "Destroy"]);
}
