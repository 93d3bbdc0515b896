//! Refusals, old versions, and waits that come to their deadline.

use std::time::{Duration, Instant};

use towline::nccl::{Comm, CommOptions};
use towline::{Dtype, Kind, create_buffer};
use towline_comm::{Communicator, Config, Op, Progress, WindowFlag, get_nccl_unique_id, mem_alloc_on};

use super::{alone, config, elsewhere, fakes, floats};

fn soon() -> Config {
    Config { timeout: Duration::from_millis(200), ..config() }
}

#[test]
fn a_null_window_is_none() {
    if elsewhere("faults::a_null_window_is_none", &[("FAKE_NCCL_NO", "windows")]).is_some() {
        return;
    }
    let comm = alone();
    let window = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap();
    assert!(window.is_none());
    assert_eq!(comm.open_handles().unwrap(), 0);
}

#[test]
fn an_old_version_is_named_with_the_one_that_has_the_function() {
    const TEST: &str = "faults::an_old_version_is_named_with_the_one_that_has_the_function";
    if elsewhere(TEST, &[("FAKE_NCCL_VERSION", "22605")]).is_some() {
        return;
    }
    let comm = alone();
    let memory = floats(&comm, &[1.0]);
    comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum))
        .unwrap()
        .wait()
        .unwrap();
    let error = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert_eq!(
        error.message(),
        "NCCL 2.26.5 has no function ncclCommWindowRegister: it came with NCCL 2.27.0"
    );
    assert_eq!(comm.signal(0, 0, 0).unwrap_err().kind(), Kind::Unsupported);
    assert_eq!(comm.revoke().unwrap_err().kind(), Kind::Unsupported);
    assert!(comm.is_valid());
}

#[test]
fn a_version_that_is_not_known_is_not_used() {
    const TEST: &str = "faults::a_version_that_is_not_known_is_not_used";
    if elsewhere(TEST, &[("FAKE_NCCL_VERSION", "30100")]).is_some() {
        return;
    }
    let error = towline::nccl::load_library(towline_fake_nccl::library().unwrap()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(error.message().contains("its version is 3.1.0"), "{error}");
}

#[test]
fn a_deregistration_that_fails_keeps_the_memory_until_the_communicator_is_gone() {
    const TEST: &str = "faults::a_deregistration_that_fails_keeps_the_memory_until_the_communicator_is_gone";
    let log = std::env::temp_dir().join(format!("towline-nccl-fault-{}", std::process::id()));
    let settings =
        [("FAKE_NCCL_FAIL", "ncclCommWindowDeregister:3"), ("FAKE_NCCL_LOG", log.to_str().unwrap())];
    if elsewhere(TEST, &settings).is_none() {
        let comm = alone();
        let window =
            comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
        window.close();
        assert_eq!(comm.open_handles().unwrap(), 0);
        comm.destroy();
        return;
    }
    let calls = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let at = |name: &str| calls.lines().position(|call| call == name).unwrap();
    assert!(at("ncclCommWindowDeregister") < at("ncclCommDestroy"), "{calls}");
    assert!(at("ncclCommDestroy") < at("ncclMemFree"), "{calls}");
}

#[test]
fn a_buffer_that_cannot_be_deregistered_is_kept_until_the_communicator_is_gone() {
    const TEST: &str = "faults::a_buffer_that_cannot_be_deregistered_is_kept_until_the_communicator_is_gone";
    let log = std::env::temp_dir().join(format!("towline-nccl-buffer-{}", std::process::id()));
    let settings = [("FAKE_NCCL_FAIL", "ncclCommDeregister:3"), ("FAKE_NCCL_LOG", log.to_str().unwrap())];
    if elsewhere(TEST, &settings).is_none() {
        let comm = alone();
        let registered = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
        registered.close();
        registered.close();
        assert!(!registered.is_valid());
        assert_eq!(comm.open_handles().unwrap(), 0);
        comm.destroy();
        return;
    }
    let calls = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let at = |name: &str| calls.lines().position(|call| call == name).unwrap();
    assert!(at("ncclCommDeregister") < at("ncclCommDestroy"), "{calls}");
    assert!(at("ncclCommDestroy") < at("ncclMemFree"), "{calls}");
    assert_eq!(calls.lines().filter(|call| *call == "ncclCommDeregister").count(), 1, "{calls}");
}

/// The kind of what a forked child gets for this; `None` where it gets no error.
#[allow(unsafe_code, reason = "fork has no safe form")]
fn in_a_child(call: impl FnOnce() -> towline::Result<()>) -> Option<Kind> {
    const WELL: i32 = 100;
    // SAFETY: the child makes one call of the library, which promises to do nothing there, and ends without any destructor.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let code = call().map_or_else(|error| error.kind() as i32, |()| WELL);
        // SAFETY: as above.
        unsafe { libc::_exit(code) };
    }
    let (mut status, watchdog) = (0, Instant::now() + Duration::from_secs(20));
    // SAFETY: `status` outlives the calls, and the child is this process's, and not reaped before.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > watchdog {
            // SAFETY: as above.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(libc::WIFEXITED(status), "the child ended by a signal: {status:#x}");
    let code = libc::WEXITSTATUS(status);
    (code != WELL).then(|| Kind::ALL[code as usize].0)
}

#[test]
fn a_forked_child_closes_nothing_of_its_parents() {
    const TEST: &str = "faults::a_forked_child_closes_nothing_of_its_parents";
    let log = std::env::temp_dir().join(format!("towline-nccl-fork-{}", std::process::id()));
    if elsewhere(TEST, &[("FAKE_NCCL_LOG", log.to_str().unwrap())]).is_none() {
        fakes();
        let id = *get_nccl_unique_id().unwrap().as_bytes();
        let comm = Comm::init(0, 1, 0, &id, CommOptions::default()).unwrap();
        let registered = || comm.register(create_buffer(mem_alloc_on(0, 4096).unwrap())).unwrap();
        let [open, closed, dropped] = [(); 3].map(|()| registered());
        closed.close().unwrap();
        assert_eq!(in_a_child(|| closed.close()), None, "there is nothing left to close");
        assert_eq!(in_a_child(|| open.close()), Some(Kind::Unavailable));
        let mut dropped = Some(dropped);
        let drop_it = || {
            drop(dropped.take());
            Ok(())
        };
        assert_eq!(in_a_child(drop_it), None);
        assert!(!open.is_closed() && dropped.is_some_and(|buffer| !buffer.is_closed()));
        open.close().unwrap();
        return;
    }
    let calls = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    let times = |name: &str| calls.lines().filter(|call| *call == name).count();
    assert_eq!((times("ncclCommRegister"), times("ncclCommDeregister")), (3, 3), "{calls}");
}

#[test]
fn a_handle_that_went_with_a_closed_one_does_not_close_the_next() {
    let comm = alone();
    let first = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
    first.close();
    let second = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
    first.close();
    drop(first);
    assert_eq!(comm.open_handles().unwrap(), 1);
    assert_eq!(second.memory().unwrap().len(), 4096);
    comm.destroy();
    assert!(!second.is_valid());
    assert_eq!(second.memory().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_shrink_that_the_others_do_not_join_ends_at_its_deadline() {
    fakes();
    let ranks = Communicator::init_all_on(&[0; 3], &soon()).unwrap();
    ranks[0].revoke().unwrap();
    let begun = Instant::now();
    let error = ranks[0].shrink(&[2]).unwrap_err();
    // It had no limit once: a watchdog, not a figure.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(error.op(), "shrink");
    assert!(error.message().contains("ncclCommShrink"), "{error}");
    assert_eq!(ranks[0].rank().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_context_or_signal_past_the_last_is_refused_and_the_others_count_from_2_31_on() {
    const TEST: &str =
        "faults::a_context_or_signal_past_the_last_is_refused_and_the_others_count_from_2_31_on";
    if elsewhere(TEST, &[("FAKE_NCCL_VERSION", "23203")]).is_some() {
        return;
    }
    let comm = alone();
    comm.signal(0, 3, 31).unwrap().wait().unwrap();
    for (context, index) in [(4, 0), (0, 32)] {
        let error = comm.signal(0, context, index).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().ends_with("the communicator has 4 contexts of 32 signals"), "{error}");
    }
}

#[test]
fn a_refusal_says_what_nccl_said() {
    const TEST: &str = "faults::a_refusal_says_what_nccl_said";
    if elsewhere(TEST, &[("FAKE_NCCL_FAIL", "ncclAllReduce:1,ncclCommRegister:2")]).is_some() {
        return;
    }
    let comm = alone();
    let memory = floats(&comm, &[1.0]);
    let error = comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap_err();
    assert_eq!(error.kind(), Kind::Native);
    let said = "ncclAllReduce returned 1 (ncclUnhandledCudaError): the fake has nothing to add";
    assert_eq!(error.message(), said);
    assert_eq!(comm.register_buffer(mem_alloc_on(0, 64).unwrap()).unwrap_err().kind(), Kind::Native);
    assert_eq!(comm.open_handles().unwrap(), 0);
}

#[test]
fn ranks_that_do_not_come_are_waited_for_until_the_deadline() {
    fakes();
    let begun = Instant::now();
    let error = Communicator::init(2, 0, &get_nccl_unique_id().unwrap(), soon()).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("still in progress after 0.200 s: not all 2 ranks"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(15));

    let config = Config { blocking: false, ..soon() };
    let comm = Communicator::init(2, 0, &get_nccl_unique_id().unwrap(), config).unwrap();
    assert_eq!(comm.get_async_error().unwrap(), Progress::InProgress);
    let error = comm.synchronize().unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(
        error.message().contains("NCCL says that it is in progress; the communicator was revoked"),
        "{error}"
    );
    assert!(comm.get_async_error().is_err());
    comm.destroy();
}

#[test]
fn a_stream_that_waits_for_a_rank_is_ended_at_the_deadline() {
    const TEST: &str = "faults::a_stream_that_waits_for_a_rank_is_ended_at_the_deadline";
    if elsewhere(TEST, &[("FAKE_NCCL_STUCK", "ncclAllReduce")]).is_some() {
        return;
    }
    fakes();
    let comm = Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), soon()).unwrap();
    let memory = floats(&comm, &[1.0]);
    let sum =
        comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum)).unwrap();
    let error = sum.wait().unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Timeout, "all_reduce"));
    assert!(error.message().contains("has not got past it in 0.200 s"), "{error}");
    assert!(error.message().ends_with("the communicator was revoked"), "{error}");
    let error = comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    comm.destroy();
}

#[test]
fn a_call_that_hangs_inside_nccl_is_ended_at_the_deadline_also_where_it_cannot_be_revoked() {
    const TEST: &str =
        "faults::a_call_that_hangs_inside_nccl_is_ended_at_the_deadline_also_where_it_cannot_be_revoked";
    let settings = [("FAKE_NCCL_STUCK", "ncclCommWindowRegister"), ("FAKE_NCCL_VERSION", "22800")];
    if elsewhere(TEST, &settings).is_some() {
        return;
    }
    fakes();
    let comm = Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), soon()).unwrap();
    let error = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("the communicator was aborted"), "{error}");
    assert_eq!(comm.open_handles().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_call_that_hangs_when_nobody_has_called_for_long_is_ended_too() {
    const TEST: &str = "faults::a_call_that_hangs_when_nobody_has_called_for_long_is_ended_too";
    if elsewhere(TEST, &[("FAKE_NCCL_STUCK", "ncclCommWindowRegister")]).is_some() {
        return;
    }
    fakes();
    let comm = Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), soon()).unwrap();
    let memory = floats(&comm, &[1.0]);
    for pause in [300, 0, 600] {
        comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap();
        std::thread::sleep(Duration::from_millis(pause));
    }
    let error = comm.register_window(mem_alloc_on(0, 4096).unwrap(), WindowFlag::DEFAULT).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("the communicator was revoked"), "{error}");
}

#[test]
fn abort_and_revoke_end_what_waits_in_streams() {
    const TEST: &str = "faults::abort_and_revoke_end_what_waits_in_streams";
    if elsewhere(TEST, &[("FAKE_NCCL_STUCK", "ncclAllReduce")]).is_some() {
        return;
    }
    let comm = alone();
    let memory = floats(&comm, &[1.0]);
    let sum =
        comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum)).unwrap();
    comm.revoke().unwrap();
    assert_eq!(sum.wait().unwrap_err().kind(), Kind::Canceled);
    assert_eq!(comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap_err().kind(), Kind::Canceled);
    comm.destroy();

    let comm = alone();
    let memory = floats(&comm, &[1.0]);
    let sum =
        comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum)).unwrap();
    comm.abort();
    comm.abort();
    assert_eq!(sum.wait().unwrap_err().kind(), Kind::Canceled);
    assert_eq!(comm.rank().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_revoked_communicator_can_be_shrunk() {
    super::together(2, |comm| {
        let rank = comm.rank().unwrap();
        comm.barrier().unwrap();
        if rank == 0 {
            comm.revoke().unwrap();
            let memory = floats(comm, &[1.0]);
            assert_eq!(comm.signal(1, 0, 0).unwrap_err().kind(), Kind::Canceled);
            assert_eq!(comm.send(&memory, Dtype::F32, 1).unwrap_err().kind(), Kind::Canceled);
            let rest = comm.shrink(&[1]).unwrap();
            assert_eq!((rest.rank().unwrap(), rest.nranks().unwrap()), (0, 1));
            rest.destroy();
        }
    });
}
