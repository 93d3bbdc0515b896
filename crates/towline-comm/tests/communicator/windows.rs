//! Registration of buffers and windows: handles, agreement, ends.

use std::time::Instant;

use towline::{Arena, Buffer, Kind, OffsetBuffer, SharedStorage, SystemStorage, create_buffer};
use towline_comm::{Communicator, Error, WindowFlag, WindowOptions, get_unique_id, mem_alloc};
use towline_testkit::watchdog::eventually;

use super::{ALL_LINKS, LONG, all, config, errors, outcomes, watch};

#[test]
fn every_rank_gets_the_same_handle_and_closing_is_idempotent() {
    let _watchdog = watch("handles");
    for nranks in 1..=8 {
        let handles = all(nranks, &config(), |comm, _| {
            let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
            let handle = window.handle();
            assert!(window.is_valid() && window.size() == 4096 && comm.open_handles()? == 1);
            window.fence()?;
            window.close();
            window.close();
            assert_eq!((window.handle(), window.is_valid()), (0, false));
            assert_eq!(window.put_bytes(0, 0, b"x").unwrap_err().kind(), Kind::Invalid);
            assert_eq!(comm.open_handles()?, 0);
            comm.finalize()?;
            Ok(handle)
        });
        assert!(handles[0] != 0 && handles.iter().all(|handle| *handle == handles[0]));
    }
}

#[test]
fn sizes_that_differ_are_invalid_on_every_rank_and_the_communicator_goes_on() {
    let _watchdog = watch("sizes");
    for links in ALL_LINKS {
        all(3, &links.config(), |comm, rank| {
            let size = if rank == 1 { 8192 } else { 4096 };
            let error = comm.register_window(mem_alloc(size)?, WindowFlag::DEFAULT).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]), "{error}");
            let options = WindowOptions { unequal_sizes: true, ..WindowOptions::default() };
            let window = comm.register_window(mem_alloc(size)?, options)?.unwrap();
            assert_eq!((window.size(), window.size_of(1)?, window.size_of(2)?), (size, 8192, 4096));
            // What counts is the size of the memory that is accessed.
            window.put_bytes(1, 8000, &[1; 8])?.wait()?;
            let error = window.put_bytes(2, 8000, &[1; 8]).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[2][..]));
            comm.finalize()
        });
    }
}

#[test]
fn flags_that_differ_are_invalid_on_every_rank() {
    let _watchdog = watch("flags");
    let ended = errors(3, &config(), |comm, rank| {
        let flags = if rank == 2 { WindowFlag::STRICT_ORDERING } else { WindowFlag::DEFAULT };
        comm.register_window(mem_alloc(4096)?, flags)
    });
    for error in ended {
        assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[2][..]));
    }
}

#[test]
fn a_symmetric_window_needs_equal_offsets() {
    let _watchdog = watch("symmetry");
    all(3, &config(), |comm, rank| {
        let whole = Buffer::new(mem_alloc(16384)?);
        let part = |offset| OffsetBuffer::new(whole.clone(), offset, 4096);
        let offset = if rank == 0 { 8192 } else { 4096 };
        let error = comm.register_window(part(offset)?, WindowFlag::COLL_SYMMETRIC).unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[0][..]), "{error}");
        let window = comm.register_window(part(offset)?, WindowFlag::DEFAULT)?.unwrap();
        let both = WindowFlag::COLL_SYMMETRIC | WindowFlag::STRICT_ORDERING;
        let symmetric = comm.register_window(part(4096)?, both)?.unwrap();
        assert!(window.is_valid() && symmetric.flags()?.contains(WindowFlag::COLL_SYMMETRIC));
        comm.finalize()
    });
}

#[test]
fn a_rank_whose_buffer_cannot_be_registered_is_named_to_everybody() {
    let _watchdog = watch("a bad buffer");
    let device = |len: usize| {
        let memory = SystemStorage::new(len).unwrap();
        Foreign(memory)
    };
    let ended = errors(3, &config(), |comm, rank| match rank {
        1 => comm.register_window(device(4096), WindowFlag::DEFAULT),
        _ => comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT),
    });
    for error in ended {
        assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]), "{error}");
    }
}

/// Host memory that claims to be on a GPU.
#[derive(Debug)]
struct Foreign(SystemStorage);

impl towline::MemoryDescription for Foreign {
    fn addr(&self) -> usize {
        self.0.addr()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn storage_kind(&self) -> towline::StorageKind {
        towline::StorageKind::Device(0)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

// SAFETY: the bytes are those of the storage inside, which keeps the contract; nothing touches them where it claims to
// be.
#[allow(unsafe_code, reason = "the only way to make memory of another place without a GPU")]
unsafe impl towline::Storage for Foreign {
    fn place(&self) -> towline::Place {
        towline::Place::Cuda(0)
    }
}

#[test]
fn a_registered_buffer_counts_its_parts_and_keeps_its_memory() {
    let _watchdog = watch("registered buffers");
    let id = get_unique_id().unwrap();
    let comm = Communicator::init(1, 0, &id, config()).unwrap();
    let whole = create_buffer(SharedStorage::new(16384).unwrap());
    let outer = comm.register_buffer(whole.clone()).unwrap();
    let part = comm.register_buffer(OffsetBuffer::new(whole.clone(), 4096, 100).unwrap()).unwrap();
    let many: Vec<_> = (0..100).map(|_| comm.register_buffer(whole.clone()).unwrap()).collect();
    assert_eq!(outer.handle().unwrap(), part.handle().unwrap());
    assert!(outer.handle().unwrap() != 0 && comm.open_handles().unwrap() == 1);
    assert_eq!((outer.size(), part.size(), part.memory().unwrap().len()), (16384, 100, 100));
    outer.close();
    drop(many);
    assert!(part.is_valid() && comm.open_handles().unwrap() == 1);
    drop(whole);
    part.memory().unwrap().write_at(0, b"still there").unwrap();
    part.close();
    part.close();
    assert_eq!(comm.open_handles().unwrap(), 0);
    assert!(part.handle().is_err() && part.memory().is_err());
    assert_eq!(part.size(), 100);
    let foreign = comm.register_buffer(Foreign(SystemStorage::new(64).unwrap())).unwrap_err();
    assert_eq!(foreign.kind(), Kind::Invalid);
}

#[test]
fn memory_inside_a_window_or_buffer_is_found_by_its_address() {
    let _watchdog = watch("memory by address");
    let id = get_unique_id().unwrap();
    let comm = Communicator::init(1, 0, &id, config()).unwrap();
    let whole = create_buffer(mem_alloc(16384).unwrap());
    let part = || OffsetBuffer::new(whole.clone(), 4096, 100).unwrap();
    assert!(!comm.memory(part()).unwrap().is_registered());
    let buffer = comm.register_buffer(whole.clone()).unwrap();
    assert!(comm.memory(part()).unwrap().is_registered());
    buffer.close();
    assert!(!comm.memory(part()).unwrap().is_registered());
    let window = comm.register_window(whole.clone(), WindowFlag::DEFAULT).unwrap().unwrap();
    let memory = comm.memory(part()).unwrap();
    assert!(memory.is_registered());
    memory.write_at(0, b"abc").unwrap();
    let mut bytes = [0; 3];
    window.get_bytes(0, 4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"abc");
}

#[test]
fn handles_are_released_when_the_communicator_is_destroyed_or_aborted() {
    let _watchdog = watch("release");
    for abort in [false, true] {
        let arena = Arena::new(SharedStorage::new(1 << 20).unwrap(), 4096).unwrap();
        let before = arena.available();
        {
            let comms = Communicator::init_all(2).unwrap();
            let kept: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = comms
                    .iter()
                    .map(|comm| {
                        let arena = &arena;
                        scope.spawn(move || {
                            let window = comm
                                .register_window(arena.allocate(8192).unwrap(), WindowFlag::DEFAULT)
                                .unwrap()
                                .unwrap();
                            let buffer = comm.register_buffer(arena.allocate(4096).unwrap()).unwrap();
                            window.put_bytes(0, 0, b"x").unwrap().wait().unwrap();
                            (window, buffer)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for comm in &comms {
                if abort { comm.abort() } else { comm.destroy() }
            }
            for (window, buffer) in &kept {
                assert!(!window.is_valid() && !buffer.is_valid());
            }
            assert!(eventually(LONG, || arena.available() == before), "memory came back");
        }
    }
}

#[test]
fn who_still_accesses_a_closed_window_gets_stale() {
    let _watchdog = watch("closed elsewhere");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
            window.put_bytes(1 - rank, 0, b"x")?.wait()?;
            let view = window.peer_view(1 - rank).ok();
            window.fence()?;
            if rank == 0 {
                window.close();
                comm.signal(1, 0, 0)?.wait()?;
                comm.wait_signal(&[towline_comm::WaitSignal::from_rank(1)])?;
            } else {
                comm.wait_signal(&[towline_comm::WaitSignal::from_rank(0)])?;
                let put = window.put_bytes(0, 0, b"y").and_then(|put| put.wait());
                assert_eq!(put.unwrap_err().kind(), Kind::Stale, "{links:?}");
                let mut bytes = [0; 1];
                assert_eq!(window.get_bytes(0, 0, &mut bytes).unwrap_err().kind(), Kind::Stale);
                if let Some(view) = view {
                    assert_eq!(view.read_at(0, &mut bytes).unwrap_err().kind(), Kind::Stale);
                }
                // The rank's own memory is still there.
                window.put_bytes(1, 0, b"z")?.wait()?;
                comm.signal(0, 0, 0)?.wait()?;
            }
            comm.finalize()
        });
    }
}

#[test]
fn a_window_over_private_memory_works_too() {
    let _watchdog = watch("private memory");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = comm.register_window(SystemStorage::new(4096)?, WindowFlag::DEFAULT)?.unwrap();
            window.put_signal_bytes(1 - rank, 8, b"private", 1, 2)?.wait()?;
            let wait = towline_comm::WaitSignal {
                context: 1,
                index: 2,
                ..towline_comm::WaitSignal::from_rank(1 - rank)
            };
            comm.wait_signal(&[wait])?;
            let mut bytes = [0; 7];
            window.memory()?.read_at(8, &mut bytes)?;
            assert_eq!(&bytes, b"private");
            comm.finalize()
        });
    }
}

#[test]
fn registering_a_large_window_touches_no_page() {
    let _watchdog = watch("a large window");
    all(2, &config(), |comm, rank| {
        let storage = SystemStorage::new(1 << 30)?;
        let resident = || -> u64 {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
        };
        let (before, start) = (resident(), Instant::now());
        let window = comm.register_window(storage, WindowFlag::DEFAULT)?.unwrap();
        let spent = start.elapsed();
        assert!(resident() < before + (256 << 20), "registration made pages resident");
        window.put_bytes(1 - rank, (1 << 30) - 1, b"!")?.wait()?;
        comm.finalize()?;
        Ok(spent)
    });
}

#[test]
fn a_handle_closed_before_the_group_ends_is_not_left_open() {
    let _watchdog = watch("closed in a group");
    let ended = outcomes(2, &config(), |comm, _| {
        towline_comm::group_start();
        let window = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        window.close();
        towline_comm::group_end()?;
        assert_eq!((window.handle(), comm.open_handles()?), (0, 0));
        comm.finalize()
    });
    ended.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn memory_comes_back_when_the_others_notice_that_a_window_was_closed() {
    let _watchdog = watch("memory comes back");
    let arena = Arena::new(SharedStorage::new(1 << 20).unwrap(), 4096).unwrap();
    let before = arena.available();
    all(2, &config(), |comm, rank| {
        let storage = create_buffer(arena.allocate(8192).unwrap());
        let window = comm.register_window(storage, WindowFlag::DEFAULT)?.unwrap();
        window.put_bytes(1 - rank, 0, b"x")?.wait()?;
        window.fence()?;
        if rank == 0 {
            window.close();
        }
        // Rank 1 keeps its window open and never accesses it again.
        let other = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        other.fence()?;
        if rank == 0 {
            assert!(eventually(LONG, || arena.available() == before - 8192), "{}", arena.available());
        }
        comm.finalize()?;
        drop(window);
        Ok(())
    });
    assert!(eventually(LONG, || arena.available() == before));
}

#[test]
fn a_rank_without_a_buffer_tells_the_others_instead_of_keeping_them() {
    let _watchdog = watch("refused window");
    all(3, &config(), |comm, rank| {
        let error = if rank == 1 {
            comm.refuse_window(Error::invalid("register_window", "its memory has gaps")).unwrap_err()
        } else {
            comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT).unwrap_err()
        };
        assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]), "{error}");
        assert!(error.message().contains("its memory has gaps"), "{error}");
        assert!(comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.is_some());
        comm.finalize()
    });
}
