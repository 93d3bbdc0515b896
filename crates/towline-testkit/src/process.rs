//! Real processes to kill and stop: a worker that gets its orders line by line.
//!
//! A child dies with the thread that started it (`PR_SET_PDEATHSIG`), with its [`Process`], and with its standard
//! input; none survives a test, however that ends.
#![allow(unsafe_code, reason = "asks the kernel, between fork and exec, to end a child with its parent")]

mod line;

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use std::{fmt, fs, thread};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use towline::{Error, Kind};

pub(crate) use line::Line;

use crate::watchdog;

/// What a worker is, where this program is one that becomes a worker itself.
static PROGRAM: OnceLock<(PathBuf, Vec<String>)> = OnceLock::new();

/// Starts workers by that program from now on. The first caller decides.
pub fn become_worker_by(program: PathBuf, arguments: &[&str]) {
    let _ = PROGRAM.set((program, arguments.iter().map(|one| (*one).to_owned()).collect()));
}

/// How long a reply may take where nothing else was said.
const ANSWER: Duration = Duration::from_secs(60);

/// An error that a worker reported, or that ended the talk with it.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The kind of the worker's error; `Disconnected` when the worker is gone.
    pub kind: Kind,
    /// What it said.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.kind)
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { kind: error.kind(), message: error.to_string() }
    }
}

/// What a worker answered.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    words: Vec<String>,
    /// The bytes that came with it.
    pub payload: Vec<u8>,
}

impl Reply {
    /// The n-th word.
    pub fn text(&self, n: usize) -> &str {
        self.words.get(n).map_or("", String::as_str)
    }

    /// The n-th word as a number.
    pub fn number(&self, n: usize) -> u64 {
        self.text(n).parse().unwrap_or_else(|_| panic!("word {n} of {:?} is not a number", self.words))
    }
}

/// The CUDA driver of workers, where the test names one.
static DRIVER: OnceLock<PathBuf> = OnceLock::new();

/// Lets this process and the workers that it starts use that library as the CUDA driver.
pub fn use_driver(library: &Path) {
    towline::cuda::load_driver(library).unwrap();
    let _ = DRIVER.set(library.to_owned());
}

/// What can stand between two processes of one host.
#[derive(Debug, Clone, Copy)]
pub enum Wall {
    /// It runs as the user with that number.
    User(u32),
    /// A filter, as a container has one, refuses it the calls that copy between processes.
    NoProcessVm,
    /// It is in a pid namespace of its own with a `/proc` of its own, as in a container; user and network are the same.
    PidNamespace,
    /// It is in a pid namespace of its own and sees the `/proc` of this one.
    PidNamespaceOnly,
    /// It is in a user namespace of its own, in which it is root.
    UserNamespace,
}

impl Wall {
    /// The program that puts another one behind it, where that takes one.
    fn program(self) -> Option<Command> {
        let arguments: &[&str] = match self {
            Wall::User(_) | Wall::NoProcessVm => return None,
            Wall::PidNamespace => &["--pid", "--fork", "--kill-child", "--mount-proc"],
            Wall::PidNamespaceOnly => &["--pid", "--fork", "--kill-child"],
            Wall::UserNamespace => &["--user", "--map-root-user"],
        };
        let mut command = Command::new("unshare");
        command.args(arguments);
        Some(command)
    }
}

/// A worker process.
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    answers: Receiver<Line>,
    log: File,
    last: String,
}

/// An address of this host that nothing else uses, for an owner whose next life is to listen where the last one did. On 127.0.0.1 a
/// port that is free now may be that of anybody's connection a moment later.
pub fn own_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let number =
        std::process::id().wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) | 1 << 16;
    let [_, a, b, c] = number.to_be_bytes();
    SocketAddr::from(([127, a, b, c], 7700))
}

impl Process {
    /// Starts a worker.
    pub fn start(name: &str) -> Process {
        let (program, arguments) = worker_program();
        let mut command = Command::new(program);
        command.args(arguments);
        Process::start_by(command, name)
    }

    /// Starts a worker with these variables in its environment.
    pub fn start_with(name: &str, variables: &[(&str, &str)]) -> Process {
        let mut command = Command::new(worker_path());
        command.envs(variables.iter().copied());
        Process::start_by(command, name)
    }

    /// Starts a worker in a network namespace, which plays a host: UCX must not see that it is not one, and copy past the cable.
    pub fn start_in(namespace: &str, name: &str) -> Process {
        let mut command = Command::new("ip");
        let (program, arguments) = worker_program();
        command.args(["netns", "exec", namespace]).arg(program).args(arguments);
        if std::env::var_os("UCX_TLS").is_none() {
            command.env("UCX_TLS", "tcp");
        }
        Process::start_by(command, name)
    }

    /// Starts a worker behind a wall, or says why that is not possible here.
    pub fn start_behind(wall: Wall, name: &str) -> Result<Process, String> {
        if let Wall::User(_) = wall
            && !rustix::process::geteuid().is_root()
        {
            return Err("only root can start a process of another user".into());
        }
        let (program, arguments) = worker_program();
        let mut command = match wall.program() {
            None => Command::new(program),
            Some(mut unshare) => {
                let tried = wall.program().map(|mut tried| tried.arg("true").output());
                match tried {
                    Some(Ok(output)) if output.status.success() => {}
                    Some(Ok(output)) => {
                        return Err(format!("unshare: {}", String::from_utf8_lossy(&output.stderr).trim()));
                    }
                    other => return Err(format!("the command unshare cannot be run: {other:?}")),
                }
                unshare.arg(program);
                unshare
            }
        };
        command.args(arguments);
        match wall {
            Wall::User(id) => drop(command.uid(id).gid(id)),
            // SAFETY: the closure only makes system calls that are safe between fork and exec.
            Wall::NoProcessVm => drop(unsafe { command.pre_exec(forbid_process_vm) }),
            Wall::PidNamespace | Wall::PidNamespaceOnly | Wall::UserNamespace => {}
        }
        Process::spawn(command, name).map_err(|error| format!("a worker behind {wall:?}: {error}"))
    }

    /// Starts a worker and opens an endpoint of the same name in it.
    pub fn open(name: &str, options: &str) -> Process {
        let mut process = Process::start(name);
        process.must(&format!("open {name} {options}"));
        process
    }

    /// Starts what becomes a worker by that command.
    pub fn start_by(command: Command, name: &str) -> Process {
        let program = command.get_program().to_owned();
        Process::spawn(command, name)
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()))
    }

    fn spawn(mut command: Command, name: &str) -> io::Result<Process> {
        if let Some(driver) = DRIVER.get() {
            command.env(towline::cuda::SETTING, driver);
        }
        let log = File::from(memfd_create("worker-log", MemfdFlags::CLOEXEC).unwrap());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
        let parent = std::process::id();
        // SAFETY: the closure only makes system calls that are safe between fork and exec.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before the request.
                if libc::getppid() as u32 != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        watchdog::child_started(child.id() as i32, name);
        let stdin = child.stdin.take();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = channel();
        thread::spawn(move || {
            while let Ok(Some(line)) = Line::read(&mut stdout) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Process { name: name.to_owned(), child, stdin, answers, log, last: String::new() })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Gives an order and waits for the reply.
    pub fn ask(&mut self, order: &str) -> Result<Reply, Failure> {
        self.ask_with(order, &[])
    }

    /// [`ask`](Self::ask), with bytes.
    pub fn ask_with(&mut self, order: &str, payload: &[u8]) -> Result<Reply, Failure> {
        self.tell_with(order, payload);
        self.answer(ANSWER)
    }

    /// Gives an order that must be carried out.
    pub fn must(&mut self, order: &str) -> Reply {
        self.ask(order)
            .unwrap_or_else(|failure| panic!("worker {}: {order}: {failure}\n{}", self.name, self.log()))
    }

    /// Gives an order without waiting for the reply.
    pub fn tell(&mut self, order: &str) {
        self.tell_with(order, &[]);
    }

    /// [`tell`](Self::tell), with bytes.
    pub fn tell_with(&mut self, order: &str, payload: &[u8]) {
        self.last = order.chars().take(80).collect();
        let line = Line::order(order, payload);
        // A worker that is gone says so when the reply is waited for.
        if let Some(stdin) = &mut self.stdin {
            let _ = line.write(stdin).and_then(|()| stdin.flush());
        }
    }

    /// Waits for the reply to an order; one that does not come in time is a failure of the test.
    pub fn answer(&mut self, within: Duration) -> Result<Reply, Failure> {
        match self.answers.recv_timeout(within) {
            Ok(line) => line.into_reply(),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure { kind: Kind::Disconnected, message: format!("worker {} is gone", self.name) })
            }
            Err(RecvTimeoutError::Timeout) => panic!(
                "worker {} does not answer {:?} in {within:?}\n{}{}",
                self.name,
                self.last,
                watchdog::dump(self.pid(), &self.name),
                self.log()
            ),
        }
    }

    /// A reply that has come already, to an order that nobody has waited for yet.
    pub fn early_answer(&mut self) -> Option<Result<Reply, Failure>> {
        self.answers.try_recv().ok().map(Line::into_reply)
    }

    /// Waits until it has ended by itself: its exit code, or 128 and the signal that ended it, or `None` at the limit.
    pub fn ended_within(&mut self, within: Duration) -> Option<i32> {
        let mut status = None;
        watchdog::eventually(within, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        let status = status?;
        watchdog::child_ended(self.pid());
        status.code().or_else(|| status.signal().map(|signal| 128 + signal))
    }

    /// How much of its memory is in RAM, in bytes.
    pub fn resident(&self) -> u64 {
        resident_of(self.pid())
    }

    /// How much address space it has in use, in bytes.
    pub fn address_space(&self) -> u64 {
        pages_of(self.pid(), 0)
    }

    /// Ends its input, at which it ends.
    pub fn end_input(&mut self) {
        self.stdin = None;
    }

    /// Sends it a signal.
    pub fn send_signal(&self, signal: Signal) {
        self.signal(signal);
    }

    /// Kills it, as `kill -9` does, and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        watchdog::child_ended(self.pid());
    }

    /// Kills it without waiting until it is gone.
    pub fn kill_without_waiting(&mut self) {
        let _ = self.child.kill();
    }

    /// Stops it in whatever it does, and waits until all its threads stand still.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        let stopped = watchdog::eventually(Duration::from_secs(10), || {
            self.thread_states().iter().all(|state| matches!(state, 'T' | 't' | 'Z'))
        });
        assert!(stopped, "worker {} does not stop: {}", self.name, watchdog::dump(self.pid(), &self.name));
    }

    /// Lets a stopped worker go on.
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid()).unwrap(), signal).unwrap();
    }

    fn thread_states(&self) -> Vec<char> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        tasks.map(|task| watchdog::state_of(&task.path())).collect()
    }

    /// The names of its threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        tasks
            .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect()
    }

    /// The worker itself, where another program has put it behind a wall and waits for it.
    fn worker_pid(&self) -> i32 {
        let pid = self.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let inner = children.split_whitespace().next().and_then(|child| child.parse().ok());
        let waits =
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "unshare");
        inner.filter(|_| waits).unwrap_or(pid)
    }

    /// How many shared storages it has mapped: its own, and those of its peers.
    pub fn mapped_segments(&self) -> usize {
        self.mappings_of("towline")
    }

    /// How many mappings it has of memory files with that name.
    pub fn mappings_of(&self, name: &str) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.worker_pid())).unwrap_or_default();
        maps.lines().filter(|line| line.contains(&format!("/memfd:{name} ("))).count()
    }

    /// How many descriptors it has open.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// What it wrote to its standard error.
    pub fn log(&self) -> String {
        // By offset: the child writes at the position that both share.
        let mut text = vec![0; 64 << 10];
        let len = self.log.read_at(&mut text, 0).unwrap_or(0);
        String::from_utf8_lossy(&text[..len]).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.log();
            let doing = watchdog::dump(self.pid(), &self.name);
            crate::skip::say(&format!(
                "worker at the time of the failure, last order {:?}:\n{doing}{log}",
                self.last
            ));
        }
        self.stdin = None;
        self.kill();
    }
}

/// Has the kernel answer `process_vm_readv` and `process_vm_writev` with EPERM from now on. Called between fork and exec.
fn forbid_process_vm() -> io::Result<()> {
    let code = |code: u32| code as u16;
    let (load, equal, answer) = (
        code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
        code(libc::BPF_RET | libc::BPF_K),
    );
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        // The number of the call is the first field of what the filter sees.
        step(load, 0, 0, 0),
        step(equal, 2, 0, libc::SYS_process_vm_readv as u32),
        step(equal, 1, 0, libc::SYS_process_vm_writev as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
        step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its steps outlive the call, which copies them.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How much of a process's memory is in RAM, in bytes.
pub fn resident_of(pid: i32) -> u64 {
    pages_of(pid, 1)
}

/// That column of what the kernel says of a process's memory, in bytes.
fn pages_of(pid: i32, column: usize) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(column).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// The worker's program, and what it is called with.
fn worker_program() -> (PathBuf, Vec<String>) {
    PROGRAM.get().cloned().unwrap_or_else(|| (worker_path(), Vec::new()))
}

/// The program of its own: beside the tests that cargo has built.
fn worker_path() -> PathBuf {
    if let Some(path) = std::env::var_os("TOWLINE_TESTKIT_WORKER") {
        return path.into();
    }
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    if path.ends_with("deps") {
        path.pop();
    }
    path.join("towline-testkit-worker")
}
