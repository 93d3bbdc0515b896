//! Groups of calls.

use towline::{Dtype, Kind};
use towline_comm::{
    Communicator, Config, Error, Op, WaitSignal, WindowFlag, group, group_end, group_start, mem_alloc,
};

use super::{all, config, watch};

#[test]
fn an_end_without_a_start_is_invalid() {
    assert_eq!(group_end().unwrap_err().kind(), Kind::Invalid);
    group_start();
    group_end().unwrap();
    assert_eq!(group_end().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_window_registered_in_a_group_gets_its_handle_at_the_outermost_end() {
    let _watchdog = watch("window in a group");
    all(3, &config(), |comm, _| {
        group_start();
        group_start();
        let first = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
        let second = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        assert_eq!((first.handle(), second.handle()), (0, 0));
        group_end()?;
        assert_eq!(first.handle(), 0);
        group_end()?;
        assert!(first.is_valid() && second.is_valid());
        assert_ne!(first.handle(), second.handle());
        comm.finalize()
    });
}

#[test]
fn one_thread_drives_all_ranks_by_a_group() {
    let _watchdog = watch("one thread");
    let comms = Communicator::init_all(4).unwrap();
    let windows = group(|| {
        let one = |comm: &Communicator| comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT);
        comms.iter().map(one).collect::<Result<Vec<_>, _>>()
    })
    .unwrap();
    group(|| {
        for (rank, window) in windows.iter().enumerate() {
            let next = (rank + 1) % 4;
            drop(window.as_ref().unwrap().put_signal_bytes(next, 0, &[rank as u8 + 1], 0, 0)?);
            comms[rank].wait_signal(&[WaitSignal::from_rank((rank + 3) % 4)])?;
        }
        Ok(())
    })
    .unwrap();
    for (rank, window) in windows.iter().enumerate() {
        let mut got = [0];
        window.as_ref().unwrap().memory().unwrap().read_at(0, &mut got).unwrap();
        assert_eq!(usize::from(got[0]), (rank + 3) % 4 + 1);
    }
}

#[test]
fn an_error_inside_a_group_launches_nothing_and_leaves_the_communicator_usable() {
    let _watchdog = watch("poisoned group");
    all(2, &config(), |comm, rank| {
        let window = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        group_start();
        let put = window.put_signal_bytes(1 - rank, 0, &[1; 8], 0, 0)?;
        let wait = put.wait().unwrap_err();
        assert_eq!(wait.kind(), Kind::Invalid, "it would wait for itself");
        let other = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        let bad = window.put_bytes(1 - rank, 60, &[1; 8]).unwrap_err();
        assert_eq!((bad.kind(), bad.ranks()), (Kind::Invalid, &[1 - rank][..]));
        let end = group_end().unwrap_err();
        assert_eq!(end.to_string(), bad.to_string());
        assert!(put.wait().is_err() && !other.is_valid());
        window.fence()?;
        let mut bytes = [9; 8];
        window.memory()?.read_at(0, &mut bytes)?;
        assert_eq!(bytes, [0; 8]);
        assert_eq!(comm.signals(1 - rank, 0, 0)?, 0);
        comm.finalize()
    });
}

#[test]
fn a_group_whose_body_errs_or_panics_launches_nothing() {
    let _watchdog = watch("errors in a group");
    all(1, &config(), |comm, _| {
        let refused = group(|| {
            drop(comm.signal(0, 0, 0)?);
            Err::<(), _>(Error::invalid("test", "changed my mind"))
        });
        assert_eq!(refused.unwrap_err().message(), "changed my mind");
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            group(|| -> towline_comm::Result<()> {
                drop(comm.signal(0, 0, 0)?);
                panic!("on purpose")
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(comm.signals(0, 0, 0)?, 0);
        assert_eq!(group_end().unwrap_err().kind(), Kind::Invalid, "the group is over");
        Ok(())
    });
}

#[test]
fn communicators_are_not_made_inside_a_group() {
    let _watchdog = watch("init in a group");
    group_start();
    assert_eq!(Communicator::init_all(1).unwrap_err().kind(), Kind::Invalid);
    assert!(group_end().is_err());
}

#[test]
fn a_call_that_is_followed_ends_when_its_work_has() {
    let _watchdog = watch("followed calls");
    let patient = Config { blocking: false, ..config() };
    all(2, &patient, |comm, rank| {
        let barrier = comm.follow("barrier", |comm| comm.barrier())?;
        barrier.wait()?;
        let memory = comm.memory(mem_alloc(64)?)?;
        let mut window = None;
        let summed =
            comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum))?;
        let registered = comm.follow("register_window", |comm| {
            window = comm.register_window(mem_alloc(64 << rank)?, WindowFlag::DEFAULT)?;
            Ok(())
        })?;
        let said = if rank == 0 {
            comm.follow("send", |comm| comm.send(&memory, Dtype::U8, 1))?
        } else {
            comm.follow("recv", |comm| comm.recv(&memory, Dtype::U8, 0))?
        };
        summed.wait()?;
        // Each call ends with its own error, also where those after it go well.
        assert_eq!(registered.wait().unwrap_err().kind(), Kind::Invalid);
        said.wait()?;
        comm.finalize()
    });
}

#[test]
fn a_call_that_is_followed_in_a_group_that_fails_was_never_started() {
    let _watchdog = watch("followed in a group");
    let comm = Communicator::init_all(1).unwrap().remove(0);
    let mut barrier = None;
    let error = group(|| {
        barrier = Some(comm.follow("barrier", |comm| comm.barrier())?);
        Err::<(), _>(Error::invalid("test", "no"))
    });
    assert!(error.is_err());
    assert_eq!(barrier.unwrap().wait().unwrap_err().kind(), Kind::Canceled);
    comm.barrier().unwrap();
}
