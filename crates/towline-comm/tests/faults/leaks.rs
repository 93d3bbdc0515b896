//! What is left of a group that was killed, and what a forked child may do.
#![allow(unsafe_code, reason = "forks, which is what is tested")]

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::time::Duration;

use towline::{Kind, SharedStorage};
use towline_comm::{Communicator, WaitSignal, WindowFlag, get_unique_id, group, mem_alloc};
use towline_testkit::watchdog::{self, eventually};

use super::LONG;
use super::rank::{Rank, join};

/// What a process could leave behind for others to see: files in shared memory, named sockets, listeners.
fn traces() -> BTreeSet<String> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut traces: BTreeSet<String> =
        files.map(|file| file.path().display().to_string()).filter(|name| name.contains("towline")).collect();
    for folder in [std::env::temp_dir(), "/run".into()] {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        traces.extend(
            files.map(|file| file.path().display().to_string()).filter(|name| name.contains("towline")),
        );
    }
    traces
}

/// The sockets of our own, by the name in the kernel's table; other tests may have some too.
fn sockets() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    names.filter(|name| name.contains("towline")).map(str::to_owned).collect()
}

/// The names in the socket table that belong to that process.
fn sockets_of(pid: u32) -> BTreeSet<String> {
    let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return BTreeSet::new() };
    let inodes: BTreeSet<String> = open
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok())
        .filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row.len() == 8 && inodes.contains(row[6])).map(|row| row[7].to_owned()).collect()
}

/// A rank that holds windows of all kinds until it is killed.
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
pub(crate) fn idle(words: &[&str]) {
    let comm = join(words, LONG).unwrap();
    let shared = comm.register_window(mem_alloc(1 << 20).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    let _buffer = comm.register_buffer(mem_alloc(1 << 20).unwrap()).unwrap();
    let next = (comm.rank().unwrap() + 1) % comm.nranks().unwrap();
    shared.put_bytes(next, 0, &[1; 4096]).unwrap().wait().unwrap();
    comm.barrier().unwrap();
    println!("READY");
    let _ = comm.wait_signal(&[WaitSignal::from_rank(next)]);
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_killed_group_leaves_no_file_and_no_socket_behind() {
    let _watchdog = watchdog::watch("what a killed group leaves", 10 * LONG);
    for links in ["Near", "Far"] {
        let before = traces();
        let id = get_unique_id().unwrap();
        let mut ranks: Vec<Rank> =
            (0..3).map(|rank| Rank::start(&format!("idle {links} 3 {rank} {id}"))).collect();
        ranks.iter_mut().for_each(|rank| drop(rank.says("READY", "an idle group")));
        let named: BTreeSet<String> = ranks.iter().flat_map(|rank| sockets_of(rank.child().id())).collect();
        assert!(!named.is_empty(), "the ranks of this test have no sockets by which they could be known");
        drop(ranks);
        let left = || traces().difference(&before).cloned().collect::<Vec<_>>();
        // Tests beside this one open and close sockets of their own; those of the dead must go.
        let gone = eventually(LONG, || named.intersection(&sockets()).next().is_none() && left().is_empty());
        assert!(
            gone,
            "{links}: {:?} and {:?} are left",
            left(),
            named.intersection(&sockets()).collect::<Vec<_>>()
        );
    }
}

/// What a call in a forked child came to: its name, where it did not fail at once as it should.
fn in_the_child(
    comm: &Communicator,
    memory: &towline_comm::Memory,
    window: &towline_comm::Window,
    storage: SharedStorage,
) -> String {
    let mut wrong = String::new();
    let mut check = |name: &str, outcome: towline_comm::Result<()>| match outcome {
        Err(error) if matches!(error.kind(), Kind::Unavailable | Kind::Invalid) => {}
        Err(error) => wrong.push_str(&format!("{name}: {error}; ")),
        Ok(()) => wrong.push_str(&format!("{name} works; ")),
    };
    check("barrier", comm.barrier());
    check("all_reduce", comm.all_reduce(memory, memory, towline::Dtype::U64, towline_comm::Op::Sum));
    check("send", comm.send(memory, towline::Dtype::U8, 1));
    check("group", group(|| comm.recv(memory, towline::Dtype::U8, 1)));
    check("wait_signal", comm.wait_signal(&[WaitSignal::from_rank(1)]));
    check("signal", comm.signal(1, 0, 0).map(drop));
    check("put", window.put_bytes(1, 0, &[1; 8]).map(drop));
    check("put_signal", window.put_signal_bytes(1, 0, &[1; 8], 0, 0).map(drop));
    check("get", window.get_bytes(1, 0, &mut [0; 8]));
    check("fence", window.fence());
    check("register_buffer", comm.register_buffer(storage).map(drop));
    check("split", comm.split(Some(0), 0).map(drop));
    check("shrink", comm.shrink(&[1]).map(drop));
    check("finalize", comm.finalize());
    check("revoke", comm.revoke());
    comm.abort();
    comm.destroy();
    wrong
}

/// Forks with a communicator open; the parent then goes on with it.
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
pub(crate) fn fork_and_go_on(words: &[&str]) {
    let comm = join(words, LONG).unwrap();
    let window = comm.register_window(mem_alloc(4096).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
    let memory = comm.memory(mem_alloc(4096).unwrap()).unwrap();
    if comm.rank().unwrap() == 0 {
        let storage = mem_alloc(4096).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        // SAFETY: the child calls only the library, which promises to do nothing there, writes to a pipe and exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let wrong = in_the_child(&comm, &memory, &window, storage);
            // SAFETY: the pipe is open here, the text outlives the call, and `_exit` runs no destructor.
            unsafe {
                libc::write(writer.as_raw_fd(), wrong.as_ptr().cast(), wrong.len());
                libc::_exit(0);
            }
        }
        drop(writer);
        let mut wrong = String::new();
        std::io::Read::read_to_string(&mut fs::File::from(reader), &mut wrong).unwrap();
        let mut status = 0;
        // SAFETY: reaps the child that was forked above.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert!(wrong.is_empty() && libc::WIFEXITED(status), "in the child: {wrong:?}, status {status:#x}");
    }
    memory.write_at(0, &5u64.to_ne_bytes()).unwrap();
    comm.all_reduce(&memory, &memory, towline::Dtype::U64, towline_comm::Op::Sum).unwrap();
    let mut sum = [0; 8];
    memory.read_at(0, &mut sum).unwrap();
    assert_eq!(u64::from_ne_bytes(sum), 10);
    window.put_signal_bytes(1 - comm.rank().unwrap(), 0, b"alive", 0, 0).unwrap().wait().unwrap();
    comm.wait_signal(&[WaitSignal::from_rank(1 - comm.rank().unwrap())]).unwrap();
    comm.finalize().unwrap();
    println!("END");
}

#[test]
fn a_forked_child_gets_errors_at_once_and_its_parent_goes_on() {
    let _watchdog = watchdog::watch("fork with a communicator", 10 * LONG);
    for links in ["Near", "Far"] {
        let id = get_unique_id().unwrap();
        let ranks: Vec<Rank> =
            (0..2).map(|rank| Rank::start(&format!("fork {links} 2 {rank} {id}"))).collect();
        for mut rank in ranks {
            rank.says("END", "a fork");
            rank.ends_well("a fork", &[]);
        }
    }
}
