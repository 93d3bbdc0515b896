//! A worker as its parent sees it.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use towline::Ticket;

use super::protocol::{Ask, Memory, Op, Reply};
use crate::outcome::{Failure, Outcome};

/// How long a reply may take: the largest regions are filled and verified in a debug build too.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a worker may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

/// A region of a worker.
#[derive(Debug, Clone)]
pub struct Region {
    /// Its number there.
    number: usize,
    /// Its ticket.
    pub ticket: Ticket,
}

/// What a transfer by a worker was like.
#[derive(Debug, Clone)]
pub struct Moved {
    /// How long it took: the median.
    pub seconds: f64,
    /// The path that it took.
    pub path: String,
    /// The first offset at which wrong bytes were read, if there is one.
    pub wrong: Option<u64>,
}

/// A worker process; it is ended with this value.
pub struct Worker {
    child: Child,
    orders: Option<ChildStdin>,
    replies: Receiver<std::io::Result<String>>,
    name: String,
}

impl Worker {
    /// Starts one.
    ///
    /// # Errors
    /// Where no process can be started.
    pub fn start(name: &str) -> Outcome<Worker> {
        Worker::start_on(None, name)
    }

    /// A worker that stays on that core.
    pub(crate) fn start_on(core: Option<usize>, name: &str) -> Outcome<Worker> {
        let mut child = itself(core)?
            .args(["--name", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::os(format!("worker {name}"), error))?;
        let orders = child.stdin.take();
        let stdout = child.stdout.take();
        let (sender, replies) = channel();
        // Reading in a thread lets a reply have a limit. It ends with the worker's output.
        std::thread::Builder::new()
            .name(format!("replies-{name}"))
            .spawn(move || {
                let Some(stdout) = stdout else { return };
                for line in BufReader::new(stdout).lines() {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(|error| Failure::os("thread", error))?;
        Ok(Worker { child, orders, replies, name: name.to_owned() })
    }

    /// The number of its process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets it lend what it registers from now on by NIXL, too, over the loopback interface: the first order.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn lend(&mut self) -> Outcome<()> {
        self.must(&Ask::Lend)
    }

    /// Lets it register memory for reading and writing, filled with the bytes of that seed.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn register(&mut self, memory: Memory, bytes: u64, seed: u64) -> Outcome<Region> {
        match self.ask(&Ask::Register { memory, bytes, seed })? {
            Reply::Region { region, ticket, .. } => Ok(Region { number: region, ticket }),
            reply => Err(self.surprise(&reply)),
        }
    }

    /// Lets it fill a region with the bytes of that seed.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn fill(&mut self, region: &Region, seed: u64) -> Outcome<()> {
        self.must(&Ask::Fill { region: region.number, seed })
    }

    /// Lets it compare the first bytes of a region with those of that seed: the first offset that is wrong.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn verify(&mut self, region: &Region, seed: u64, bytes: u64) -> Outcome<Option<u64>> {
        match self.ask(&Ask::Verify { region: region.number, seed, bytes })? {
            Reply::Verified { wrong } => Ok(wrong),
            reply => Err(self.surprise(&reply)),
        }
    }

    /// Lets it take a region back.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn release(&mut self, region: &Region) -> Outcome<()> {
        self.must(&Ask::Release { region: region.number })
    }

    /// Lets it move the first bytes of a region over one path, so many times after one that is verified when read;
    /// what it writes are the bytes of that seed.
    ///
    /// # Errors
    /// Where it fails, or is gone.
    pub fn transfer(
        &mut self,
        ticket: &Ticket,
        path: &str,
        op: Op,
        bytes: u64,
        seed: u64,
        repeat: u32,
    ) -> Outcome<Moved> {
        let ask = Ask::Move { ticket: ticket.clone(), path: path.to_owned(), op, bytes, seed, repeat };
        match self.ask(&ask)? {
            Reply::Moved { seconds, path, wrong } => Ok(Moved { seconds, path, wrong }),
            reply => Err(self.surprise(&reply)),
        }
    }

    fn must(&mut self, ask: &Ask) -> Outcome<()> {
        self.ask(ask).map(drop)
    }

    /// Asks for something and waits for the reply.
    pub(crate) fn ask(&mut self, ask: &Ask) -> Outcome<Reply> {
        self.send(ask)?;
        self.reply()
    }

    fn gone(&mut self) -> Failure {
        let status = self.child.try_wait().ok().flatten();
        let how = status.map_or("it closed its output".to_owned(), |status| status.to_string());
        Failure::failed(format!("worker {} is gone: {how}", self.name))
    }

    /// Asks for something; [`reply`](Self::reply) waits for what it replies.
    pub(crate) fn send(&mut self, ask: &Ask) -> Outcome<()> {
        let line = serde_json::to_string(ask).map_err(|error| Failure::failed(error.to_string()))?;
        let sent =
            self.orders.as_mut().map(|orders| writeln!(orders, "{line}").and_then(|()| orders.flush()));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.gone()) }
    }

    /// Waits for the reply to what it was asked.
    pub(crate) fn reply(&mut self) -> Outcome<Reply> {
        let line = match self.replies.recv_timeout(PATIENCE) {
            Ok(Ok(line)) => line,
            Ok(Err(error)) => return Err(Failure::os(format!("worker {}", self.name), error)),
            Err(RecvTimeoutError::Disconnected) => return Err(self.gone()),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = PATIENCE.as_secs();
                return Err(Failure::failed(format!("worker {} gave no reply in {seconds} s", self.name)));
            }
        };
        match serde_json::from_str::<Reply>(&line) {
            Ok(reply) => reply.or_failure(),
            Err(error) => Err(Failure::failed(format!("worker {}: {error}", self.name))),
        }
    }

    /// The failure of a reply that is not the one asked for.
    pub(crate) fn surprise(&self, reply: &Reply) -> Failure {
        Failure::failed(format!("worker {} answered something else: {reply:?}", self.name))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.orders.take());
        end(&mut self.child);
    }
}

/// Waits a moment for a child to end, then ends it.
fn end(child: &mut Child) {
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A process that answers one eventfd with another; ended with this value.
pub(crate) struct Echo(Child);

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process that answers every count on `ping` with one on `pong`.
pub(crate) fn start_echo(core: Option<usize>, ping: OwnedFd, pong: OwnedFd) -> Outcome<Echo> {
    let child = itself(core)?
        .arg("--echo")
        .stdin(Stdio::from(ping))
        .stdout(Stdio::from(pong))
        .spawn()
        .map_err(|error| Failure::os("worker", error))?;
    Ok(Echo(child))
}

fn itself(core: Option<usize>) -> Outcome<Command> {
    let program = std::env::current_exe().map_err(|error| Failure::os("this program's own path", error))?;
    let mut command = Command::new(program);
    command.args(["worker", "--parent", &std::process::id().to_string()]);
    if let Some(core) = core {
        command.args(["--core", &core.to_string()]);
    }
    Ok(command)
}
