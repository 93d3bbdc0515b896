//! What a group is compared with: the same calls by Open MPI and by gloo, where they are installed.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::machine;
use crate::outcome::{Failure, Outcome};

const OPEN_MPI: &str = include_str!("peers/open_mpi.c");
const GLOO: &str = include_str!("peers/gloo.py");

/// The interpreter of the distribution comes first: its packages bring torch along.
const PYTHONS: [&str; 2] = ["/usr/bin/python3", "python3"];

/// How long a reply may take; the first one needs a while on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a peer may take to end by itself.
const GRACE: Duration = Duration::from_secs(3);

/// Settings of Open MPI that copy between processes with one copy.
macro_rules! with_cma {
    ($($more:literal),*) => {
        &["pml=ob1", "btl=self,vader", "btl_vader_single_copy_mechanism=cma", $($more),*]
    };
}

/// Ways to run Open MPI: what they are called, and which arguments mpirun gets.
pub(super) const SETTINGS: [(&str, &[&str]); 8] = [
    ("defaults", &[]),
    ("vader with cma", with_cma!()),
    ("vader without cma", &["pml=ob1", "btl=self,vader", "btl_vader_single_copy_mechanism=none"]),
    (
        "cma, recursive doubling",
        with_cma!("coll_tuned_use_dynamic_rules=1", "coll_tuned_allreduce_algorithm=3"),
    ),
    ("cma, ring", with_cma!("coll_tuned_use_dynamic_rules=1", "coll_tuned_allreduce_algorithm=4")),
    ("cma, segmented ring", with_cma!("coll_tuned_use_dynamic_rules=1", "coll_tuned_allreduce_algorithm=5")),
    ("cma, Rabenseifner", with_cma!("coll_tuned_use_dynamic_rules=1", "coll_tuned_allreduce_algorithm=6")),
    ("cma, shared-memory collectives", with_cma!("coll_sm_priority=100")),
];

/// Which peers there are.
pub(super) struct Peers {
    folder: Option<Folder>,
    /// The program for Open MPI, compiled.
    open_mpi: Outcome<PathBuf>,
    /// An interpreter that has torch.
    python: Outcome<&'static str>,
}

/// A folder that goes away with this value.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Peers {
    /// Looks for peers, and compiles what they need.
    pub(super) fn find() -> Outcome<Peers> {
        let folder = Folder(std::env::temp_dir().join(format!("towline-bench-{}", std::process::id())));
        std::fs::create_dir_all(&folder.0).map_err(|error| Failure::os(folder.0.display(), error))?;
        let open_mpi = compile(folder.0.join("open-mpi"));
        Ok(Peers { folder: Some(folder), open_mpi, python: interpreter() })
    }

    /// Looks for nobody.
    pub(super) fn none() -> Peers {
        let unwanted = || Failure::lacking("not asked");
        Peers { folder: None, open_mpi: Err(unwanted()), python: Err(unwanted()) }
    }

    /// Starts that many ranks under mpirun.
    pub(super) fn open_mpi(&self, nranks: usize, settings: &[&str]) -> Outcome<Peer> {
        let program = self.open_mpi.clone()?;
        let mut command = Command::new("mpirun");
        command.args(["-n", &nranks.to_string(), "--oversubscribe"]);
        command.args(["--bind-to", if nranks <= machine::cores() { "core" } else { "none" }]);
        for setting in settings {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            command.args(["--mca", name, value]);
        }
        // It refuses to serve the superuser otherwise; what runs here is the program above.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        Ok(Peer(vec![Process::start("Open MPI", command.arg(program))?]))
    }

    /// Starts that many interpreters that meet.
    pub(super) fn gloo(&self, nranks: usize) -> Outcome<Peer> {
        let python = self.python.clone()?;
        let Some(folder) = &self.folder else { return Err(Failure::lacking("there is no place to meet")) };
        let meeting = folder.0.join(format!("gloo-{nranks}"));
        let _ = std::fs::remove_file(&meeting);
        let own_cores = nranks <= machine::cores();
        let start = |rank: usize| {
            let core = if own_cores { rank.to_string() } else { "-1".to_owned() };
            let mut command = Command::new(python);
            command.args(["-c", GLOO, &rank.to_string(), &nranks.to_string()]);
            Process::start("gloo", command.arg(&meeting).arg(core))
        };
        let mut peer = Peer((0..nranks).map(start).collect::<Outcome<_>>()?);
        for process in &mut peer.0 {
            process.line()?;
        }
        Ok(peer)
    }
}

fn compile(program: PathBuf) -> Outcome<PathBuf> {
    let mut compiler = Command::new("mpicc")
        .args(["-O2", "-x", "c", "-", "-o"])
        .arg(&program)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|_| Failure::lacking("not installed: there is no mpicc"))?;
    if let Some(mut source) = compiler.stdin.take() {
        // A compiler that stops reading says why.
        let _ = source.write_all(OPEN_MPI.as_bytes());
    }
    let output = compiler.wait_with_output().map_err(|error| Failure::os("mpicc", error))?;
    if output.status.success() {
        return Ok(program);
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::lacking(format!("mpicc refuses the program: {}", said.lines().next().unwrap_or(""))))
}

fn interpreter() -> Outcome<&'static str> {
    let has_torch = |python: &&str| {
        Command::new(python)
            .args(["-c", "import torch.distributed as dist; assert dist.is_available()"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let found = PYTHONS.into_iter().find(has_torch);
    found.ok_or_else(|| Failure::lacking("not installed: no python3 has torch.distributed"))
}

/// A peer that runs and waits for orders; it ends with this value.
pub(super) struct Peer(Vec<Process>);

impl Peer {
    /// Reduces so many times; the seconds of one.
    pub(super) fn all_reduce(&mut self, bytes: u64, repeats: u64) -> Outcome<f64> {
        match self.0.len() {
            1 => self.ask(&format!("reduce {bytes} {repeats}")),
            _ => self.ask(&format!("{bytes} {repeats}")),
        }
    }

    /// Goes back and forth so many times by puts; the seconds of one round trip.
    pub(super) fn put(&mut self, count: u64) -> Outcome<f64> {
        self.ask(&format!("put {count}"))
    }

    fn ask(&mut self, order: &str) -> Outcome<f64> {
        for process in &mut self.0 {
            process.say(order)?;
        }
        let mut most: f64 = 0.0;
        for process in &mut self.0 {
            let said = process.line()?;
            let seconds: f64 = said
                .trim()
                .parse()
                .map_err(|_| Failure::failed(format!("{} says {said:?} instead of a time", process.name)))?;
            most = most.max(seconds);
        }
        Ok(most)
    }
}

/// A process that gets its orders line by line.
struct Process {
    name: &'static str,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Process {
    fn start(name: &'static str, command: &mut Command) -> Outcome<Process> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Failure::lacking(format!("not installed: {error}")))?;
        let (orders, output) = (child.stdin.take(), child.stdout.take());
        let (sender, answers) = channel();
        std::thread::Builder::new()
            .name("peer".into())
            .spawn(move || {
                let Some(output) = output else { return };
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(|error| Failure::os("thread", error))?;
        Ok(Process { name, child, orders, answers })
    }

    fn say(&mut self, line: &str) -> Outcome<()> {
        let said =
            self.orders.as_mut().map(|orders| writeln!(orders, "{line}").and_then(|()| orders.flush()));
        if matches!(said, Some(Ok(()))) { Ok(()) } else { Err(self.gone()) }
    }

    fn line(&mut self) -> Outcome<String> {
        self.answers.recv_timeout(PATIENCE).map_err(|_| self.gone())
    }

    fn gone(&self) -> Failure {
        Failure::lacking(format!("{} does not run here, or gives no reply", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.orders.take());
        let until = Instant::now() + GRACE;
        while Instant::now() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
