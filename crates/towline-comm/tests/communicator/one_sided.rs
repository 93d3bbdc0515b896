//! Laws of one-sided access: bounds, visibility, order, atomicity, over shared memory and over sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use towline::{Kind, Layout, SystemStorage};
use towline_comm::{Communicator, Config, Result, WaitSignal, Window, WindowFlag, interruptible, mem_alloc};

use super::{ALL_LINKS, Links, all, config, outcomes, watch};

fn window(comm: &Communicator, size: usize, flags: WindowFlag) -> Result<Window> {
    Ok(comm.register_window(mem_alloc(size)?, flags)?.unwrap())
}

#[test]
fn bytes_that_were_put_are_got_from_every_rank_in_groups_of_one_to_eight() {
    let _watchdog = watch("put and get");
    for links in ALL_LINKS {
        for nranks in [1, 2, 3, 5, 8] {
            all(nranks, &links.config(), |comm, rank| {
                let window = window(comm, nranks * 64, WindowFlag::DEFAULT)?;
                for peer in 0..nranks {
                    window.put_bytes(peer, rank * 64, &[rank as u8 + 1; 64])?.wait()?;
                }
                window.fence()?;
                for peer in 0..nranks {
                    let mut bytes = vec![0; nranks * 64];
                    window.get_bytes(peer, 0, &mut bytes)?;
                    let right = bytes.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / 64 + 1);
                    assert!(right, "{links:?}: rank {peer} holds {bytes:?}");
                }
                let expected = if links == Links::Far && nranks > 1 { "tcp" } else { "inproc" };
                assert_eq!(window.path((rank + 1) % nranks)?, expected);
                comm.finalize()
            });
        }
    }
}

#[test]
fn ranks_talk_through_tls_where_they_want_it() {
    let _watchdog = watch("TLS");
    let encrypted = Config { tls: Some(towline::Tls::by_ticket().unwrap()), ..Links::Far.config() };
    all(2, &encrypted, |comm, rank| {
        let size = 3 << 20;
        let window = window(comm, size, WindowFlag::DEFAULT)?;
        window.put_bytes(1 - rank, 0, &vec![rank as u8 + 1; size])?.wait()?;
        window.fence()?;
        let mut bytes = vec![0; size];
        window.get_bytes(rank, 0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| usize::from(*byte) == 2 - rank));
        assert_eq!(window.path(1 - rank)?, "tcp");
        comm.finalize()
    });
}

#[test]
fn large_and_odd_pieces_arrive_whole_through_memory_of_any_kind() {
    let _watchdog = watch("large pieces");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let size = 3 << 20;
            let window = window(comm, size, WindowFlag::DEFAULT)?;
            let source = comm.memory(SystemStorage::new(size - 13)?)?;
            let pattern: Vec<u8> = (0..size - 13).map(|at| (at * 7 + rank) as u8).collect();
            source.write_at(0, &pattern)?;
            window.put(1 - rank, 13, &source)?.wait()?;
            window.fence()?;
            let target = comm.memory(mem_alloc(size - 13)?)?;
            window.get(1 - rank, 13, &target)?.wait()?;
            let mut bytes = vec![0; size - 13];
            target.read_at(0, &mut bytes)?;
            assert!(bytes == pattern, "{links:?}");
            comm.finalize()
        });
    }
}

#[test]
fn no_access_goes_past_the_end_of_its_target() {
    let _watchdog = watch("bounds");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = window(comm, 4096, WindowFlag::DEFAULT)?;
            let peer = 1 - rank;
            let wide = comm.memory(SystemStorage::new(4097)?)?;
            let layout = Layout::blocks(0, 16, 300, 16)?;
            let mut bytes = [0; 16];
            let refusals = [
                window.put_bytes(peer, 4090, &[0; 16]).unwrap_err(),
                window.put_bytes(peer, usize::MAX, &[0; 16]).unwrap_err(),
                window.put(peer, 0, &wide).unwrap_err(),
                window.get(peer, 0, &wide).unwrap_err(),
                window.get_bytes(peer, 4081, &mut bytes).unwrap_err(),
                window.put_signal(peer, 1, &wide, 0, 0).unwrap_err(),
                window.put_signal_bytes(peer, 4096, &[1], 0, 0).unwrap_err(),
                window.fetch_add(peer, 4096, 1).unwrap_err(),
                window.fetch_add(peer, 4, 1).unwrap_err(),
                window.compare_swap(peer, 4092, 0, 1).unwrap_err(),
                window.put_blocks(peer, &layout, &[299u32], &wide, &layout, &[0u32]).unwrap_err(),
            ];
            for error in refusals {
                assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[peer][..]), "{error}");
            }
            let foreign = [
                window.put_bytes(2, 0, &[0]).unwrap_err(),
                window.peer_view(9).unwrap_err(),
                window.flush(2).unwrap_err(),
                comm.signal(2, 0, 0).unwrap_err(),
                comm.signal(0, 99, 0).unwrap_err(),
                comm.signal(0, 0, 99).unwrap_err(),
                comm.wait_signal(&[]).unwrap_err(),
                comm.wait_signal(&[WaitSignal { count: 0, ..WaitSignal::from_rank(0) }]).unwrap_err(),
                comm.wait_signal(&[WaitSignal::from_rank(3)]).unwrap_err(),
            ];
            assert!(foreign.iter().all(|error| error.kind() == Kind::Invalid));
            window.fence()?;
            let mut bytes = vec![1; 4096];
            window.memory()?.read_at(0, &mut bytes)?;
            assert!(bytes.iter().all(|byte| *byte == 0));
            comm.finalize()
        });
    }
}

#[test]
fn data_is_visible_before_its_signal() {
    let _watchdog = watch("visibility");
    for links in ALL_LINKS {
        let rounds = if links == Links::Near { 2000 } else { 100 };
        all(3, &links.config(), |comm, rank| {
            let window = window(comm, 3 * 4096, WindowFlag::DEFAULT)?;
            let next = (rank + 1) % 3;
            let before = (rank + 2) % 3;
            let source = comm.memory(mem_alloc(4096)?)?;
            for round in 1..=rounds {
                source.write_at(0, &vec![round as u8; 4096])?;
                // Earlier plain puts count too, not only the one that carries the signal.
                drop(window.put_bytes(next, rank * 4096, &vec![round as u8; 2048])?);
                window.put_signal(next, rank * 4096 + 2048, &source.part(0, 2048)?, 1, 3)?.wait()?;
                comm.wait_signal(&[WaitSignal { context: 1, index: 3, ..WaitSignal::from_rank(before) }])?;
                let mut bytes = vec![0; 4096];
                window.memory()?.read_at(before * 4096, &mut bytes)?;
                assert!(bytes.iter().all(|byte| *byte == round as u8), "{links:?}, round {round}");
                // The source may only go on once this rank has looked.
                comm.signal(before, 0, 0)?.wait()?;
                comm.wait_signal(&[WaitSignal::from_rank(next)])?;
            }
            comm.finalize()
        });
    }
}

#[test]
fn signals_are_counted_remembered_and_kept_apart_by_context_and_index() {
    let _watchdog = watch("signals");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let peer = 1 - rank;
            for (context, index, count) in [(0, 0, 3), (1, 0, 2), (0, 5, 4)] {
                for _ in 0..count {
                    comm.signal(peer, context, index)?.wait()?;
                }
            }
            let of = |context, index, count| WaitSignal { peer, context, index, count };
            comm.wait_signal(&[of(0, 0, 1), of(1, 0, 2), of(0, 0, 1)])?;
            comm.wait_signal(&[of(0, 5, 4)])?;
            comm.wait_signal(&[of(0, 0, 1)])?;
            assert_eq!(comm.signals(peer, 0, 0)?, 3);
            // To oneself as well.
            comm.signal(rank, 2, 1)?.wait()?;
            comm.signaled(&[WaitSignal { context: 2, index: 1, ..WaitSignal::from_rank(rank) }])?.wait()?;
            comm.finalize()
        });
    }
}

#[test]
fn strict_puts_to_one_peer_become_visible_in_order() {
    let _watchdog = watch("strict order");
    for links in ALL_LINKS {
        let rounds: u64 = if links == Links::Near { 20_000 } else { 300 };
        let done = AtomicBool::new(false);
        all(2, &links.config(), |comm, rank| {
            let window = window(comm, 4096, WindowFlag::STRICT_ORDERING)?;
            if rank == 0 {
                for round in 1..=rounds {
                    drop(window.put_bytes(1, 0, &round.to_ne_bytes())?);
                    drop(window.put_bytes(1, 2048, &round.to_ne_bytes())?);
                }
                window.flush(1)?;
                done.store(true, Ordering::Release);
            } else {
                let memory = window.memory()?;
                let read = |offset| -> Result<u64> {
                    let mut word = [0; 8];
                    memory.read_at(offset, &mut word)?;
                    Ok(u64::from_ne_bytes(word))
                };
                while !done.load(Ordering::Acquire) {
                    // The later one is looked at first.
                    let (later, earlier) = (read(2048)?, read(0)?);
                    assert!(earlier >= later, "{links:?}: {earlier} after {later}");
                }
                assert_eq!((read(0)?, read(2048)?), (rounds, rounds));
            }
            comm.finalize()
        });
    }
}

#[test]
fn atomic_updates_lose_nothing_whoever_makes_them() {
    let _watchdog = watch("atomicity");
    for links in ALL_LINKS {
        let rounds: u64 = if links == Links::Near { 5000 } else { 100 };
        all(4, &links.config(), |comm, rank| {
            let window = window(comm, 64, WindowFlag::DEFAULT)?;
            let mut seen = Vec::new();
            for _ in 0..rounds {
                seen.push(window.fetch_add(2, 8, 1)?.wait()?);
                loop {
                    let mut word = [0; 8];
                    window.get_bytes(2, 16, &mut word)?;
                    let old = u64::from_ne_bytes(word);
                    if window.compare_swap(2, 16, old, old + rank as u64 + 1)?.wait()? == old {
                        break;
                    }
                }
            }
            assert!(seen.is_sorted(), "one rank's values grow");
            window.fence()?;
            let mut words = [0; 16];
            window.get_bytes(2, 8, &mut words)?;
            let word = |at: usize| u64::from_ne_bytes(words[at..at + 8].try_into().unwrap());
            assert_eq!((word(0), word(8)), (4 * rounds, 10 * rounds));
            comm.finalize()
        });
    }
}

#[test]
fn blocks_and_strides_go_where_the_layouts_say() {
    let _watchdog = watch("blocks");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = window(comm, 4096, WindowFlag::DEFAULT)?;
            let source = comm.memory(mem_alloc(1024)?)?;
            source.write_at(0, &(0..1024).map(|at| (at / 64) as u8 + 1).collect::<Vec<_>>())?;
            let (packed, spread) = (Layout::contiguous(1024, 64)?, Layout::blocks(32, 64, 16, 256)?);
            let peer = 1 - rank;
            window
                .put_blocks_signal(peer, &spread, &[3u32, 0, 9], &source, &packed, &[15u32, 7, 8], (0, 0))?
                .wait()?;
            comm.wait_signal(&[WaitSignal::from_rank(peer)])?;
            let mut bytes = vec![0; 4096];
            window.memory()?.read_at(0, &mut bytes)?;
            for (block, value) in [(3, 16), (0, 8), (9, 9)] {
                let at = 32 + block * 256;
                assert!(bytes[at..at + 64].iter().all(|byte| *byte == value), "{links:?}");
                assert!(bytes[at - 32..at].iter().chain(&bytes[at + 64..at + 100]).all(|byte| *byte == 0));
            }
            let back = comm.memory(mem_alloc(1024)?)?;
            window.get_blocks(peer, &spread, &[9u32, 3], &back, &packed, &[0u32, 1])?.wait()?;
            let mut bytes = vec![0; 192];
            back.read_at(0, &mut bytes)?;
            assert!(
                bytes[..64].iter().all(|byte| *byte == 9) && bytes[64..128].iter().all(|byte| *byte == 16)
            );
            assert!(bytes[128..].iter().all(|byte| *byte == 0));
            comm.finalize()
        });
    }
}

#[test]
fn views_and_epochs_reach_near_ranks_directly_and_end_with_the_window() {
    let _watchdog = watch("views");
    all(2, &Links::Near.config(), |comm, rank| {
        let window = window(comm, 4096, WindowFlag::DEFAULT)?;
        let peer = 1 - rank;
        let view = window.peer_view(peer)?;
        assert_eq!((view.rank(), view.len()), (peer, 4096));
        view.write_at(100, &[rank as u8 + 1; 10])?;
        view.store(8, 77)?;
        window.fence()?;
        assert_eq!(window.peer_view(rank)?.load(8)?, 77);
        let mut bytes = [0; 10];
        window.memory()?.read_at(100, &mut bytes)?;
        assert_eq!(bytes, [peer as u8 + 1; 10]);
        assert_eq!(view.read_at(4090, &mut bytes).unwrap_err().kind(), Kind::Invalid);
        {
            let epoch = window.epoch()?;
            for round in 1..=1000u64 {
                epoch.put_signal(peer, 256, &round.to_ne_bytes(), 0, 0)?;
                epoch.wait_level(peer, 0, 0, round)?;
                let mut word = [0; 8];
                epoch.get(rank, 256, &mut word)?;
                assert!(u64::from_ne_bytes(word) >= round);
            }
            assert_eq!(epoch.put(5, 0, &[1]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(epoch.put(peer, 4096, &[1]).unwrap_err().kind(), Kind::Invalid);
        }
        window.fence()?;
        window.close();
        assert_eq!(view.write_at(0, &[1]).unwrap_err().kind(), Kind::Invalid);
        comm.finalize()
    });
    all(2, &Links::Far.config(), |comm, rank| {
        let window = window(comm, 4096, WindowFlag::DEFAULT)?;
        assert_eq!(window.peer_view(1 - rank).unwrap_err().kind(), Kind::Unsupported);
        let epoch = window.epoch()?;
        epoch.put_signal(1 - rank, 0, &[7; 9], 0, 0)?;
        epoch.wait_level(1 - rank, 0, 0, 1)?;
        let mut bytes = [0; 9];
        epoch.get(1 - rank, 0, &mut bytes)?;
        assert_eq!((bytes, epoch.fetch_add(1 - rank, 16, 5)?), ([7; 9], 0));
        comm.finalize()
    });
}

#[test]
fn operations_can_be_awaited() {
    let _watchdog = watch("futures");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = window(comm, 64, WindowFlag::DEFAULT)?;
            let before = towline_testkit::executor::block_on(window.fetch_add(1 - rank, 0, 3)?)?;
            towline_testkit::executor::block_on(window.put_signal_bytes(1 - rank, 8, b"awaited!", 0, 0)?)?;
            towline_testkit::executor::block_on(comm.signaled(&[WaitSignal::from_rank(1 - rank)])?)?;
            let mut bytes = [0; 8];
            window.memory()?.read_at(8, &mut bytes)?;
            assert_eq!((before, &bytes), (0, b"awaited!"));
            comm.finalize()
        });
    }
}

#[test]
fn a_wait_that_is_given_up_has_taken_nothing() {
    let _watchdog = watch("withdrawn wait");
    let comm = Communicator::init_all(1).unwrap().remove(0);
    let one = [WaitSignal::from_rank(0)];
    let withdrawn = Arc::new(AtomicBool::new(false));
    let waiting = comm.signaled_unless(&one, Arc::clone(&withdrawn)).unwrap();
    assert!(!waiting.is_done());
    withdrawn.store(true, Ordering::Release);
    assert_eq!(waiting.wait().unwrap_err().kind(), Kind::Canceled);
    comm.signal(0, 0, 0).unwrap().wait().unwrap();
    comm.wait_signal(&one).unwrap();
}

#[test]
fn an_interrupted_wait_ends_and_its_rank_is_named_by_the_others() {
    let _watchdog = watch("interrupted wait");
    let found = outcomes(3, &config(), |comm, rank| match rank {
        0 => interruptible(|| true, || comm.barrier()),
        1 => comm.barrier(),
        // It does not come.
        _ => comm.wait_signal(&[WaitSignal::from_rank(0)]),
    });
    for error in found.into_iter().map(Result::unwrap_err) {
        assert_eq!((error.kind(), error.ranks()), (Kind::Canceled, &[0][..]), "{error}");
    }
}
