//! The life of a communicator: properties, split, shrink, finalize, destroy, abort, revoke, non-blocking work.

use std::thread;
use std::time::Duration;

use towline::{Kind, Place};
use towline_comm::{Communicator, Config, Progress, WaitSignal, WindowFlag, get_unique_id, mem_alloc};
use towline_testkit::watchdog::eventually;

use super::{ALL_LINKS, LONG, all, config, errors, impatient, outcomes, watch};

#[test]
fn properties_are_told_and_a_closed_communicator_has_none() {
    let _watchdog = watch("properties");
    let id = get_unique_id().unwrap();
    let comm = Communicator::init(1, 0, &id, Config { name: "solo".into(), ..config() }).unwrap();
    assert_eq!((comm.rank().unwrap(), comm.nranks().unwrap()), (0, 1));
    assert_eq!((comm.device().unwrap(), comm.name().unwrap()), (Place::Host, "solo"));
    assert!(comm.is_valid() && comm.is_near(0).unwrap());
    assert_eq!(comm.get_async_error().unwrap(), Progress::Done);
    comm.destroy();
    comm.destroy();
    comm.abort();
    assert!(!comm.is_valid());
    for error in [
        comm.rank().unwrap_err(),
        comm.register_buffer(mem_alloc(64).unwrap()).unwrap_err(),
        comm.register_window(mem_alloc(64).unwrap(), WindowFlag::DEFAULT).unwrap_err(),
        comm.wait_signal(&[WaitSignal::from_rank(0)]).unwrap_err(),
        comm.split(Some(1), 0).unwrap_err(),
        comm.shrink(&[0]).unwrap_err(),
        comm.finalize().unwrap_err(),
    ] {
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains("closed"), "{error}");
    }
}

#[test]
fn every_call_on_a_null_communicator_is_invalid() {
    let null = Communicator::null();
    assert!(!null.is_valid());
    assert_eq!(null.rank().unwrap_err().kind(), Kind::Invalid);
    assert_eq!(null.register_buffer(mem_alloc(64).unwrap()).unwrap_err().kind(), Kind::Invalid);
    null.destroy();
}

#[test]
fn a_split_orders_by_key_and_gives_nothing_to_ranks_without_colour() {
    let _watchdog = watch("split");
    for links in ALL_LINKS {
        all(5, &links.config(), |comm, rank| {
            let color = (rank < 4).then_some(rank as u32 % 2);
            let child = comm.split(color, -(rank as i64))?;
            if rank == 4 {
                assert!(!child.is_valid());
            } else {
                assert_eq!((child.rank()?, child.nranks()?), (usize::from(rank < 2), 2));
                let window = child.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
                window.put_signal_bytes(1 - child.rank()?, 0, &[rank as u8 + 1], 0, 0)?.wait()?;
                child.wait_signal(&[WaitSignal::from_rank(1 - child.rank()?)])?;
                let mut got = [0];
                window.memory()?.read_at(0, &mut got)?;
                assert_eq!(usize::from(got[0]), (rank + 2) % 4 + 1);
                child.finalize()?;
            }
            // The parent is as good as before.
            comm.finalize()
        });
    }
}

#[test]
fn a_shrunk_group_leaves_out_who_was_excluded() {
    let _watchdog = watch("shrink");
    for links in ALL_LINKS {
        let ended = outcomes(4, &links.config(), |comm, rank| {
            if rank == 1 {
                return comm.shrink(&[1]).map(|_| 0);
            }
            let child = comm.shrink(&[1])?;
            assert_eq!(child.nranks()?, 3);
            let again = child.shrink(&[0]);
            if child.rank()? > 0 {
                let again = again?;
                assert_eq!(again.nranks()?, 2);
                again.finalize()?;
            } else {
                assert_eq!(again.unwrap_err().kind(), Kind::Invalid);
            }
            child.finalize()?;
            child.rank()
        });
        assert_eq!(ended[1].as_ref().unwrap_err().kind(), Kind::Invalid);
        let ranks: Vec<_> = ended.iter().filter_map(|rank| rank.as_ref().ok()).collect();
        assert_eq!(ranks, [&0, &1, &2]);
    }
}

#[test]
fn a_shrink_of_no_rank_or_of_ranks_outside_the_group_is_invalid() {
    let _watchdog = watch("bad shrink");
    all(2, &config(), |comm, _| {
        assert_eq!(comm.shrink(&[]).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(comm.shrink(&[7]).unwrap_err().ranks(), [7]);
        comm.finalize()
    });
}

#[test]
fn survivors_that_disagree_about_the_dead_all_get_an_error() {
    let _watchdog = watch("disagreeing survivors");
    let shorter = Config { timeout: Duration::from_secs(2), ..config() };
    // Rank 0 believes that 2 is dead, rank 1 that 3 is, rank 2 that 1 is, rank 3 that 0 is.
    let ended = errors(4, &shorter, |comm, rank| comm.shrink(&[[2, 3, 1, 0][rank]]));
    assert!(ended.iter().all(|error| matches!(error.kind(), Kind::Invalid | Kind::Timeout)), "{ended:?}");
}

#[test]
fn a_survivor_that_is_gone_too_is_named_at_once() {
    let _watchdog = watch("a dead survivor");
    let gone = std::sync::Barrier::new(4);
    let ended = outcomes(4, &config(), |comm, rank| {
        if rank >= 2 {
            comm.destroy();
        }
        gone.wait();
        if rank < 2 { comm.shrink(&[3]).map(|_| ()) } else { Ok(()) }
    });
    for outcome in &ended[..2] {
        assert_eq!(outcome.as_ref().unwrap_err().ranks(), [2], "{outcome:?}");
    }
}

#[test]
fn who_leaves_after_the_last_call_does_not_fail_the_others() {
    let _watchdog = watch("leaving");
    for links in ALL_LINKS {
        for _ in 0..10 {
            all(4, &links.config(), |comm, _| {
                comm.finalize()?;
                comm.finalize()?;
                comm.destroy();
                Ok(())
            });
        }
    }
}

#[test]
fn calls_after_finalize_are_invalid() {
    let _watchdog = watch("finalize");
    all(2, &config(), |comm, _| {
        comm.finalize()?;
        let error = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.message().contains("finalized"), "{error}");
        Ok(())
    });
}

#[test]
fn an_abort_unblocks_everybody() {
    let _watchdog = watch("abort");
    for links in ALL_LINKS {
        let ended = outcomes(3, &links.config(), |comm, rank| {
            if rank == 2 {
                thread::sleep(Duration::from_millis(100));
                comm.abort();
                comm.abort();
                assert!(!comm.is_valid());
                return Ok(());
            }
            comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT).map(|_| ())
        });
        for outcome in &ended[..2] {
            let error = outcome.as_ref().unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (Kind::Canceled, &[2][..]), "{links:?}: {error}");
        }
    }
}

#[test]
fn a_revoked_group_can_still_be_shrunk() {
    let _watchdog = watch("revoke");
    let ended = outcomes(3, &config(), |comm, rank| {
        if rank == 0 {
            thread::sleep(Duration::from_millis(50));
            comm.revoke()?;
        } else {
            assert_eq!(comm.wait_signal(&[WaitSignal::from_rank(0)]).unwrap_err().kind(), Kind::Canceled);
        }
        assert!(comm.get_async_error().is_err());
        if rank == 2 {
            return Ok(());
        }
        let child = comm.shrink(&[2])?;
        child.finalize()
    });
    ended.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_signal_that_never_comes_is_waited_for_until_the_limit_and_its_source_is_named() {
    let _watchdog = watch("no signal");
    all(2, &impatient(), |comm, rank| {
        if rank == 0 {
            let error = comm.wait_signal(&[WaitSignal::from_rank(1)]).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[1][..]));
            // Nothing was taken, and nothing is broken.
            comm.signal(0, 0, 0)?.wait()?;
            comm.wait_signal(&[WaitSignal::from_rank(0)])?;
        } else {
            thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    });
}

#[test]
fn a_non_blocking_communicator_returns_at_once_and_tells_when_it_is_done() {
    let _watchdog = watch("non-blocking");
    let id = get_unique_id().unwrap();
    let lazy = Config { blocking: false, ..config() };
    let first = Communicator::init(2, 0, &id, lazy.clone()).unwrap();
    assert_eq!(first.get_async_error().unwrap(), Progress::InProgress);
    let second = Communicator::init(2, 1, &id, lazy).unwrap();
    let done = |comm: &Communicator| comm.get_async_error().unwrap() == Progress::Done;
    assert!(eventually(LONG, || done(&first) && done(&second)));

    let window = first.register_window(mem_alloc(4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    assert_eq!(window.handle(), 0);
    assert_eq!(first.get_async_error().unwrap(), Progress::InProgress);
    assert_eq!(window.put_bytes(1, 0, b"x").unwrap_err().kind(), Kind::Invalid);
    let other = second.register_window(mem_alloc(4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    assert!(eventually(LONG, || done(&first) && done(&second)));
    assert!(window.handle() != 0 && window.handle() == other.handle());

    let put = window.put_signal_bytes(1, 8, b"later", 0, 0).unwrap();
    second.wait_signal(&[WaitSignal::from_rank(0)]).unwrap();
    second.synchronize().unwrap();
    put.wait().unwrap();
    let mut bytes = [0; 5];
    other.memory().unwrap().read_at(8, &mut bytes).unwrap();
    assert_eq!(&bytes, b"later");

    // An error is reported by the state, not by the call, and the communicator goes on.
    let bad = first.register_window(mem_alloc(64).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    let worse = second.register_window(mem_alloc(128).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    assert_eq!(first.synchronize().unwrap_err().kind(), Kind::Invalid);
    assert_eq!(second.synchronize().unwrap_err().kind(), Kind::Invalid);
    assert!(!bad.is_valid() && !worse.is_valid());
    let (left, right) = (first.split(Some(1), 0).unwrap(), second.split(Some(1), 0).unwrap());
    assert!(eventually(LONG, || done(&left) && done(&right)));
    assert_eq!(left.nranks().unwrap(), 2);
}

#[test]
fn a_non_blocking_meeting_that_fails_is_told_by_the_state() {
    let _watchdog = watch("non-blocking failure");
    let id = get_unique_id().unwrap();
    let lazy = Config { blocking: false, ..impatient() };
    let comm = Communicator::init(3, 1, &id, lazy).unwrap();
    assert!(eventually(LONG, || comm.get_async_error().is_err()));
    let error = comm.get_async_error().unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[0, 2][..]));
    comm.destroy();
}

#[test]
fn everything_can_be_used_from_any_thread() {
    fn sync<T: Send + Sync>() {}
    sync::<Communicator>();
    sync::<towline_comm::Window>();
    sync::<towline_comm::RegisteredBuffer>();
    sync::<towline_comm::Memory>();
    sync::<towline_comm::Operation>();
    sync::<towline_comm::PeerView>();
    sync::<towline_comm::Epoch<'static>>();
}

#[test]
fn threads_of_one_rank_share_its_communicator() {
    let _watchdog = watch("threads of one rank");
    for links in ALL_LINKS {
        all(2, &links.config(), |comm, rank| {
            let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
            thread::scope(|scope| {
                for index in 0..4 {
                    let window = &window;
                    scope.spawn(move || {
                        for _ in 0..50 {
                            let put = window
                                .put_signal_bytes(1 - rank, index * 8, &[index as u8; 8], 0, index as u32)
                                .unwrap();
                            drop(put);
                            let wait = WaitSignal { index: index as u32, ..WaitSignal::from_rank(1 - rank) };
                            comm.wait_signal(&[wait]).unwrap();
                        }
                    });
                }
            });
            comm.finalize()
        });
    }
}

#[test]
fn a_handle_can_be_closed_while_another_thread_waits_for_a_signal() {
    let _watchdog = watch("closing beside a wait");
    all(1, &config(), |comm, _| {
        let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| comm.wait_signal(&[WaitSignal::from_rank(0)]));
            thread::sleep(Duration::from_millis(50));
            window.close();
            assert!(!waiting.is_finished());
            comm.signal(0, 0, 0)?.wait()?;
            waiting.join().unwrap()
        })
    });
}
