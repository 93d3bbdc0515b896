//! What a worker process does: one order per line, one reply per order.
//!
//! Regions and remotes are named by the numbers that `register` and `import` answer with. `loop` and `chase` go on
//! until the next line (`halt`) comes, or until the worker is killed, which is what they are for.

mod alone;
mod chase;
mod leaving;
mod mapped;
mod operations;
mod parts;
mod pinning;
mod segments;

use std::collections::HashMap;
use std::io::BufReader;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use towline::memory::{DeviceMemory, DeviceStorage, PinnedStorage};
use towline::{
    Access, Buffer, DiskStorage, Endpoint, Error, Isolation, Kind, Layout, Limits, NixlOptions, OffsetBuffer,
    Pinned, Quotas, Registered, Remote, Routing, SharedStorage, Storage, SystemStorage, Ticket,
};

pub use self::pinning::play;
use crate::attacker::Medium;
use crate::forced::as_forced;
use crate::lending;
use crate::oracle::Stamp;
use crate::process::{Failure, Line};
use crate::random::Random;
use crate::rogue::Actor;
use crate::serving;

type Answer = Result<(String, Vec<u8>), Failure>;

/// A storage of the kind that the order names.
pub fn storage(len: usize, kind: &str) -> towline::Result<Arc<dyn Storage>> {
    match kind {
        "system" => Ok(Arc::new(SystemStorage::new(len)?)),
        "shared" => Ok(Arc::new(SharedStorage::new(len)?)),
        "disk" => Ok(Arc::new(DiskStorage::new(len)?)),
        "pinned" => Ok(Arc::new(PinnedStorage::new(len)?)),
        "device" => Ok(Arc::new(DeviceStorage::new(len, 0)?)),
        "exportable" => {
            Ok(Arc::new(DeviceStorage::options().memory(DeviceMemory::Exportable).allocate(len)?))
        }
        "segments" => segments::storage(len),
        other => match other.strip_prefix("mapped:") {
            Some(path) => mapped::storage(len, path.as_ref()),
            None => Err(Error::new(Kind::Invalid, "register", format!("no storage is called {other}"))),
        },
    }
}

/// Registers `count` views of one storage, `step` bytes apart.
pub(crate) fn register_views(
    endpoint: &Endpoint,
    count: usize,
    step: usize,
    len: usize,
    kind: &str,
    stamp: Stamp,
) -> towline::Result<Vec<Registered<OffsetBuffer>>> {
    let whole = Buffer::from_arc(storage(count * step + len, kind)?);
    stamp.fill_storage(&whole)?;
    let views = (0..count)
        .map(|number| OffsetBuffer::new(whole.clone(), number * step, len))
        .collect::<towline::Result<Vec<_>>>()?;
    endpoint.register_many(views, Access::READ_WRITE).map_err(|failed| failed.error)
}

/// Reads paths, separated by commas, as a routing that requires them.
pub fn requiring(paths: &str) -> towline::Result<Routing> {
    paths
        .split(',')
        .filter(|path| !path.is_empty())
        .try_fold(Routing::default(), |all, path| all.require(path))
}

/// An order that this worker does not know, and what carries it out: it may answer beforehand by the function that it is given.
pub type Further = fn(&str, &mut dyn FnMut(&str)) -> Option<Result<String, Failure>>;

/// Runs until the end of the input.
pub fn main() {
    main_with(|_, _| None);
}

/// [`main`], with further orders.
pub fn main_with(further: Further) {
    let (sender, orders) = channel();
    thread::Builder::new()
        .name("orders".into())
        .spawn(move || {
            let mut input = BufReader::new(std::io::stdin());
            while let Ok(Some(line)) = Line::read(&mut input) {
                if sender.send(line).is_err() {
                    return;
                }
            }
            // Nobody is there to give further orders, whatever the worker is doing.
            std::process::exit(0);
        })
        .unwrap();
    let mut worker = Worker {
        endpoint: None,
        regions: HashMap::new(),
        remotes: HashMap::new(),
        pinned: HashMap::new(),
        views: Vec::new(),
        operation: None,
        rogue: None,
        next: 0,
        returning: None,
        orders,
    };
    while let Ok(line) = worker.orders.recv() {
        let mut say = |text: &str| drop(Line::outcome(said(text)).write(&mut std::io::stdout()));
        let outcome = match further(&line.text, &mut say) {
            Some(outcome) => outcome.and_then(said),
            None => worker.carry_out(&line),
        };
        if let Some(code) = worker.returning {
            // As at the end of a main function: everything is dropped, then the process exits.
            drop(worker);
            std::process::exit(code);
        }
        let _ = Line::outcome(outcome).write(&mut std::io::stdout());
    }
}

/// The state of a worker between orders.
struct Worker {
    endpoint: Option<Endpoint>,
    regions: HashMap<u64, Registered<Arc<dyn Storage>>>,
    remotes: HashMap<u64, Remote>,
    pinned: HashMap<u64, Pinned>,
    views: Vec<Registered<OffsetBuffer>>,
    operation: Option<operations::Operation>,
    rogue: Option<Actor>,
    next: u64,
    /// The code that the worker is to end with.
    returning: Option<i32>,
    orders: Receiver<Line>,
}

/// The words of an order, taken one after the other.
struct Words<'a> {
    words: std::str::SplitWhitespace<'a>,
}

impl<'a> Words<'a> {
    fn text(&mut self) -> Result<&'a str, Failure> {
        self.words.next().ok_or_else(|| bad("a word is missing"))
    }

    fn take<T: FromStr>(&mut self) -> Result<T, Failure> {
        let word = self.text()?;
        word.parse().map_err(|_| bad(format!("{word:?} is not what was expected")))
    }

    fn millis(&mut self) -> Result<Duration, Failure> {
        self.take().map(Duration::from_millis)
    }

    fn stamp(&mut self) -> Result<Stamp, Failure> {
        Ok(Stamp::new(self.take()?, self.take()?))
    }

    /// The words that are left, up to one of another kind.
    fn rest<T: FromStr>(&mut self) -> Vec<T> {
        self.words.by_ref().map_while(|word| word.parse().ok()).collect()
    }

    /// The words that are left, as `key=value`.
    fn options(&mut self) -> Vec<(&'a str, &'a str)> {
        self.words.by_ref().filter_map(|word| word.split_once('=')).collect()
    }
}

fn bad(message: impl Into<String>) -> Failure {
    Failure { kind: Kind::Invalid, message: message.into() }
}

/// Bytes in hex, up to something else.
fn bytes_of(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map_while(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok())
        .collect()
}

fn said(text: impl ToString) -> Answer {
    Ok((text.to_string(), Vec::new()))
}

impl Worker {
    fn carry_out(&mut self, line: &Line) -> Answer {
        let mut words = Words { words: line.text.split_whitespace() };
        match words.text()? {
            "open" => self.open(&mut words),
            "register" => {
                let (len, kind, access): (usize, &str, Access) =
                    (words.take()?, words.text()?, words.take()?);
                let region = self
                    .endpoint()?
                    .register(storage(len, kind)?, access)
                    .map_err(|failed| Failure::from(failed.error))?;
                let generation = region.generation();
                self.next += 1;
                self.regions.insert(self.next, region);
                said(format!("{} {generation}", self.next))
            }
            "ticket" => said(self.region(&mut words)?.ticket()?),
            "ticket-layout" => {
                let region = self.region(&mut words)?;
                let layout = Layout::blocks(words.take()?, words.take()?, words.take()?, words.take()?)?;
                said(region.ticket_with_layout(layout)?)
            }
            "fill" => {
                let region = self.region(&mut words)?;
                words.stamp()?.fill_storage(region.storage())?;
                said("")
            }
            "register-parts" => self.register_parts(&mut words),
            "fill-parts" => self.each_part(true, &mut words),
            "check-parts" => self.each_part(false, &mut words),
            "check" => {
                let region = self.region(&mut words)?;
                let (stamp, offset, len) = (words.stamp()?, words.take()?, words.take()?);
                match stamp.verify_storage(region.storage(), offset, len) {
                    Ok(()) => said(""),
                    Err(wrong) => Err(Failure { kind: Kind::Internal, message: wrong.to_string() }),
                }
            }
            "put" => {
                self.region(&mut words)?.write_at(words.take()?, &line.payload)?;
                said("")
            }
            "take" => {
                let region = self.region(&mut words)?;
                let (offset, len): (usize, usize) = (words.take()?, words.take()?);
                let mut bytes = vec![0; len];
                region.read_at(offset, &mut bytes)?;
                Ok((String::new(), bytes))
            }
            "wait-signal" => {
                let region = self.region(&mut words)?;
                said(region.wait_signal(words.take()?, words.take()?, words.millis()?)?)
            }
            "grasp" => {
                let (passed, answered, lives) = serving::grasp(&words.take()?);
                said(format!("{passed} {answered} {lives}"))
            }
            "rogue-open" => {
                let medium = if words.text()? == "tcp" { Medium::Tcp } else { Medium::Unix };
                let rogue = self.rogue.insert(Actor::open(medium, words.take()?));
                said(rogue.ticket())
            }
            order @ ("rogue-meet" | "rogue-expect" | "rogue-act" | "rogue-end") => {
                let step = bytes_of(words.text()?);
                let rogue = self.rogue.as_mut().ok_or_else(|| bad("no rogue is open"))?;
                match order {
                    "rogue-meet" => rogue.meet(&step),
                    "rogue-expect" => rogue.expect(),
                    "rogue-act" => drop(rogue.act(&step)),
                    _ => drop(rogue.end()),
                }
                said(rogue.canaries())
            }
            "deregister" => self.deregister(&mut words),
            "recycle" => self.recycle(&mut words),
            "leave" => self.leave(&mut words),
            "until-broken" => self.until_broken(&mut words),
            "drop" => {
                let id: u64 = words.take()?;
                said(self.regions.remove(&id).is_some())
            }
            "receive" => {
                let notification = self.endpoint()?.receive(words.millis()?)?;
                Ok((notification.from.name, notification.message))
            }
            "stats" => {
                let stats = self.endpoint()?.stats();
                let (parked, bytes) = stats.parked;
                said(format!("{} {parked} {bytes} {} {}", stats.regions, stats.refused, stats.peer_memory))
            }
            "stats-nixl" => {
                let nixl = self.endpoint()?.stats().nixl;
                said(nixl.map_or("none".to_owned(), |nixl| {
                    format!("{} {} {} {}", nixl.registered, nixl.peers, nixl.in_flight, nixl.unquiet)
                }))
            }
            "close" => {
                // Laws about pins find out by themselves what is still held.
                let _ = self.endpoint()?.close();
                said("")
            }
            "import" => {
                let ticket: Ticket = words.take()?;
                let remote = match words.text() {
                    Ok(paths) => self.endpoint()?.import_with(&ticket, &requiring(paths)?)?,
                    Err(_) => self.endpoint()?.import(&ticket)?,
                };
                let path = remote.path();
                self.next += 1;
                self.remotes.insert(self.next, remote);
                said(format!("{} {path}", self.next))
            }
            "forget" => {
                let id: u64 = words.take()?;
                said(self.remotes.remove(&id).is_some())
            }
            op @ ("read" | "write") => {
                let (remote, local) = (self.remote(&mut words)?, self.region(&mut words)?);
                let endpoint = self.endpoint()?;
                let request =
                    if op == "read" { endpoint.read(remote, local) } else { endpoint.write(remote, local) };
                let transfer = request.at(words.take()?, words.take()?, words.take()?).start()?;
                transfer.wait()?;
                said(transfer.path())
            }
            "give-up" => self.give_up(&mut words),
            "lose" => self.lose(&mut words),
            "add" => {
                let remote = self.remote(&mut words)?;
                let transfer = self.endpoint()?.fetch_add(remote, words.take()?, words.take()?)?;
                transfer.wait()?;
                said(transfer.value().unwrap_or_default())
            }
            "notify" => {
                let remote = self.remote(&mut words)?;
                self.endpoint()?.notify(remote, line.payload.clone())?.wait()?;
                said("")
            }
            "views" => {
                let (count, step, len, kind) = (words.take()?, words.take()?, words.take()?, words.text()?);
                let views = register_views(self.endpoint()?, count, step, len, kind, words.stamp()?)?;
                let mut tickets = String::new();
                for view in &views {
                    tickets.push_str(&format!("{}\n", view.ticket()?));
                }
                self.views.extend(views);
                Ok((String::new(), tickets.into_bytes()))
            }
            "pin" => self.pin(&mut words),
            "unpin" => {
                let id: u64 = words.take()?;
                said(self.pinned.remove(&id).is_some())
            }
            "pong" => self.pong(&mut words),
            "offer" => self.offer(&mut words),
            "claim" => self.claim(line, &mut words),
            "ended" => self.ended(&mut words),
            "full" => self.full(&mut words),
            "loop" => self.repeat(&mut words),
            "chase" => self.chase(&mut words),
            "crowd" => alone::crowd(words.take()?),
            "read-all" => self.read_all(line, &mut words),
            "fork" => self.fork(),
            "leave-child" => alone::leave_child(),
            // The kernel lets only root look into it from now on.
            "hide" => {
                let behavior = rustix::process::DumpableBehavior::NotDumpable;
                match rustix::process::set_dumpable_behavior(behavior) {
                    Ok(()) => said(""),
                    Err(error) => Err(bad(error.to_string())),
                }
            }
            "starve" => self.starve(&mut words),
            "exit" => std::process::exit(words.take()?),
            other => Err(bad(format!("no order is called {other:?}"))),
        }
    }

    fn open(&mut self, words: &mut Words<'_>) -> Answer {
        let mut options = as_forced(Endpoint::options(words.text()?)).nixl(lending::options(""));
        let mut limits = Limits::default();
        let mut quotas = Quotas::default();
        for (key, value) in words.options() {
            let number = || value.parse::<u64>().map_err(|_| bad(format!("{key}={value}")));
            options = match key {
                "stall" => {
                    limits.no_progress = Duration::from_millis(number()?);
                    options.limits(limits)
                }
                "total" => {
                    limits.total = Duration::from_millis(number()?);
                    options.limits(limits)
                }
                "secret" => options.secret(value.as_bytes()),
                "listen" => options.listen(value.parse().map_err(|_| bad(format!("{key}={value}")))?),
                "require" => options.routing(requiring(value)?),
                "tls" => options.tls(towline::Tls::by_ticket()?),
                "checksums" => options.checksums(value == "yes"),
                "lanes" => options.lanes(number()? as usize),
                "share" => options.share_between_containers(value == "yes"),
                "prove" => {
                    quotas.prove_within = Duration::from_millis(number()?);
                    options.quotas(quotas)
                }
                "unauthenticated" | "peers" | "connections" | "grants" | "requests" | "bytes" | "memory" => {
                    let number = number()?;
                    match key {
                        "unauthenticated" => quotas.unauthenticated = number as usize,
                        "peers" => quotas.peers = number as usize,
                        "connections" => quotas.connections = number as usize,
                        "grants" => quotas.grants = number as usize,
                        "requests" => quotas.requests = number as usize,
                        "memory" => quotas.memory = number,
                        _ => quotas.bytes = number,
                    }
                    options.quotas(quotas)
                }
                "lend" => options.nixl(NixlOptions::default().lend_over(value.split(','))),
                "reach" => options.nixl(NixlOptions::default().reach_over(value.split(','))),
                "isolation" => options.routing(Routing::default().isolation(Isolation::Enforced)),
                "forbid" => options.routing(Routing::default().forbid(value)?),
                _ => return Err(bad(format!("no option is called {key}"))),
            };
        }
        let endpoint = options.open()?;
        let incarnation = endpoint.identity().incarnation;
        self.endpoint = Some(endpoint);
        said(incarnation)
    }

    fn deregister(&mut self, words: &mut Words<'_>) -> Answer {
        let (id, within): (u64, _) = (words.take()?, words.millis()?);
        let region = self.regions.remove(&id).ok_or_else(|| bad(format!("no region is called {id}")))?;
        match region.into_storage_within(within) {
            Ok(_) => said(""),
            Err(pinned) => {
                let failure = Failure::from(pinned.error);
                self.regions.insert(id, pinned.registration);
                Err(failure)
            }
        }
    }

    /// `recycle REGION STAMP MS`: takes the memory back, fills it and registers it again, all in one; answers with the new
    /// number and its ticket.
    fn recycle(&mut self, words: &mut Words<'_>) -> Answer {
        let id: u64 = words.take()?;
        let (stamp, within) = (words.stamp()?, words.millis()?);
        let region = self.regions.remove(&id).ok_or_else(|| bad(format!("no region is called {id}")))?;
        let memory = region.into_storage_within(within).map_err(|pinned| Failure::from(pinned.error))?;
        stamp.fill_storage(&memory)?;
        let region = self.endpoint()?.register(memory, Access::READ_WRITE).map_err(|failed| failed.error)?;
        let ticket = region.ticket()?;
        self.next += 1;
        self.regions.insert(self.next, region);
        said(format!("{} {ticket}", self.next))
    }

    /// `give-up read|write REMOTE REGION LEN MS`: cancels it after that time. Answers, once it is quiet, with the milliseconds that it took
    /// to end.
    fn give_up(&mut self, words: &mut Words<'_>) -> Answer {
        let (op, remote, local) = (words.text()?, self.remote(words)?, self.region(words)?);
        let (len, endpoint) = (words.take()?, self.endpoint()?);
        let request = if op == "read" { endpoint.read(remote, local) } else { endpoint.write(remote, local) };
        let transfer = request.at(0, 0, len).start()?;
        thread::sleep(words.millis()?);
        let cancelled = Instant::now();
        transfer.cancel();
        let ended = transfer.wait();
        let took = cancelled.elapsed().as_millis();
        match ended {
            Err(error) if error.kind() == Kind::Canceled => {}
            other => return Err(bad(format!("it ended as {other:?}"))),
        }
        if !transfer.wait_quiet(Duration::from_secs(60)) {
            return Err(bad("it never becomes quiet"));
        }
        said(took)
    }

    /// `lose REMOTE REGION LEN`: writes, and answers at once when it has failed: with the kind of the error, and whether it is
    /// quiet then.
    fn lose(&mut self, words: &mut Words<'_>) -> Answer {
        let (remote, local, endpoint) = (self.remote(words)?, self.region(words)?, self.endpoint()?);
        let transfer = endpoint.write(remote, local).at(0, 0, words.take()?).start()?;
        match transfer.wait() {
            Ok(()) => Err(bad("it was not lost")),
            Err(error) => said(format!("{} {}", error.kind().name(), transfer.quiet())),
        }
    }

    /// `loop read|write REMOTE REGION LEN [BLOCK]`: reads or writes over and over until the next order, in shuffled blocks where
    /// their length is given; answers at once, and again at the end.
    fn repeat(&mut self, words: &mut Words<'_>) -> Answer {
        let (op, remote, local) = (words.text()?, self.remote(words)?, self.region(words)?);
        let len: u64 = words.take()?;
        let endpoint = self.endpoint()?;
        let pages = match words.take::<u64>() {
            Ok(block) => {
                let mut indices: Vec<u32> = (0..(len / block) as u32).collect();
                Random::new(len).shuffle(&mut indices);
                Some((Layout::contiguous(len, block)?, indices))
            }
            Err(_) => None,
        };
        let _ = Line::outcome(said("started")).write(&mut std::io::stdout());
        let (mut done, mut failed, mut last) = (0u64, 0u64, "none");
        while self.orders.try_recv().is_err() {
            let request = match op {
                "read" => endpoint.read(remote, local),
                _ => endpoint.write(remote, local),
            };
            let request = match &pages {
                Some((pages, indices)) => request.blocks(pages, indices, pages, indices),
                None => request.at(0, 0, len),
            };
            match request.start().and_then(|transfer| transfer.wait()) {
                Ok(()) => done += 1,
                Err(error) => {
                    failed += 1;
                    last = error.kind().name();
                    // A peer that is gone stays so: no need to ask as fast as possible.
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        said(format!("{done} {failed} {last}"))
    }

    fn endpoint(&self) -> Result<&Endpoint, Failure> {
        self.endpoint.as_ref().ok_or_else(|| bad("no endpoint is open"))
    }

    fn region(&self, words: &mut Words<'_>) -> Result<&Registered<Arc<dyn Storage>>, Failure> {
        let id: u64 = words.take()?;
        self.regions.get(&id).ok_or_else(|| bad(format!("no region is called {id}")))
    }

    fn remote(&self, words: &mut Words<'_>) -> Result<&Remote, Failure> {
        let id: u64 = words.take()?;
        self.remotes.get(&id).ok_or_else(|| bad(format!("no remote is called {id}")))
    }
}
