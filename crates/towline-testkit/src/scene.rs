//! What ill treatment of a worker takes: endpoints with their limits, a worker that owns memory, and an observer.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use towline::{
    Access, Endpoint, EndpointOptions, Kind, Limits, Registered, Remote, Serves, SystemStorage, Ticket,
};

use crate::bench::{outcome, routing};
use crate::lending;
use crate::oracle::Stamp;
use crate::paths::{is_by_an_engine, is_direct, is_here, known, names, required};
use crate::process::{Process, Reply};
use crate::watchdog::eventually;

/// The limit without progress of every endpoint here. What must end within it fails at ten times that.
pub const STALL: Duration = Duration::from_secs(1);

/// A kibibyte.
pub const KIB: usize = 1 << 10;
/// A mebibyte.
pub const MIB: usize = 1 << 20;

/// The kinds of error that a peer's death or standstill may give.
pub const GONE: [Kind; 3] = [Kind::Disconnected, Kind::Stale, Kind::Timeout];

/// An endpoint that lends nothing by NIXL.
pub fn endpoint(name: &str) -> Endpoint {
    limited(name).nixl(lending::options("")).open().unwrap()
}

/// An endpoint whose memory is used on that lane: by NIXL it lends only where it says so.
pub fn owner_on(lane: &str) -> Endpoint {
    limited("owner").nixl(lending::options(lane)).open().unwrap()
}

fn limited(name: &str) -> EndpointOptions {
    Endpoint::options(name).limits(Limits { no_progress: STALL, ..Limits::default() })
}

/// Memory of that endpoint that nobody else may touch.
pub fn local(endpoint: &Endpoint, len: usize) -> Registered<SystemStorage> {
    endpoint.register(SystemStorage::new(len).unwrap(), Access::NONE).unwrap()
}

/// The storage that a lane needs. Streams get shared memory too: that lets an observer look at it without the owner.
pub fn kind_for(lane: &str) -> &'static str {
    let path = known(lane);
    match path.serves {
        Serves::GpuMemory => "device",
        Serves::Files => "disk",
        Serves::HostMemory => "system",
        Serves::Anything if is_here(&path) => "system",
        Serves::Anything | Serves::SharedMemory => "shared",
    }
}

/// The words of an order that require a lane.
pub fn paths(lane: &str) -> String {
    required(lane).join(",")
}

/// A worker that owns one region, number 1.
pub struct Owner {
    /// The worker.
    pub process: Process,
    /// The ticket of its region.
    pub ticket: Ticket,
    /// How long that is.
    pub len: usize,
    filled_from_here: bool,
}

impl Owner {
    /// Starts one whose region that lane can reach.
    pub fn open(lane: &str, len: usize) -> Owner {
        Owner::of(Process::open("owner", &Owner::options(lane)), lane, len)
    }

    /// The words with which a worker opens as an owner.
    pub fn options(lane: &str) -> String {
        format!("stall={} {}", STALL.as_millis(), lending::words(lane))
    }

    /// Lets a worker that has opened an endpoint register the region.
    pub fn of(mut process: Process, lane: &str, len: usize) -> Owner {
        process.must(&format!("register {len} {} read+write", kind_for(lane)));
        let ticket = process.must("ticket 1").text(0).parse().unwrap();
        Owner { process, ticket, len, filled_from_here: false }
    }

    /// Sends it the bytes that it is to be filled with, which it would take long to compute itself.
    pub fn filled_from_here(self) -> Owner {
        Owner { filled_from_here: true, ..self }
    }

    /// Fills the region with what the stamp says.
    pub fn fill(&mut self, stamp: Stamp) -> Reply {
        if self.filled_from_here {
            let mut bytes = vec![0; self.len];
            stamp.fill(0, &mut bytes);
            return self.process.ask_with("put 1 0", &bytes).unwrap();
        }
        self.process.must(&format!("fill 1 {} {}", stamp.region, stamp.generation))
    }

    /// Imports what a living owner offers. On a busy machine its reply may take longer than the limit: that this ends
    /// the wait is right, and it is asked again. Each try is held against the limit, and more than one is reported.
    pub fn import(&self, user: &Endpoint, lane: &str) -> Remote {
        let (mut last, mut tries) = (None, 0);
        eventually(STALL * 10, || {
            tries += 1;
            last = Some(tried(user, &self.ticket, lane));
            match &last {
                // Starting an engine takes a moment, in which the stream that helps it out is taken.
                Some(Ok(remote)) => !is_by_an_engine(&known(lane)) || remote.path() == lane,
                Some(Err(error)) => error.kind() != Kind::Timeout,
                None => false,
            }
        });
        IMPORTS.with_borrow_mut(|imports| imports.again += u64::from(tries > 1));
        let remote = last.expect("it was tried").unwrap();
        assert_eq!(remote.path(), lane, "{}", remote.explain());
        remote
    }
}

/// Sees a region of another process as it is at that moment, without any help of its owner.
pub struct Observer {
    endpoint: Endpoint,
    remote: Remote,
    glass: Registered<SystemStorage>,
    len: usize,
}

impl Observer {
    /// Looks at the region of an owner that is reached by that lane.
    pub fn of(owner: &Owner, lane: &str) -> Observer {
        let endpoint = endpoint("observer");
        // What reaches such memory without its help.
        let kind = match kind_for(lane) {
            "shared" => Serves::SharedMemory,
            "device" => Serves::GpuMemory,
            "disk" => Serves::Files,
            _ => Serves::HostMemory,
        };
        let lane = names(|path| is_direct(path) && path.serves == kind)[0];
        let remote = owner.import(&endpoint, lane);
        let glass = local(&endpoint, owner.len);
        Observer { endpoint, remote, glass, len: owner.len }
    }

    /// The bytes now.
    pub fn look(&self) -> Vec<u8> {
        outcome(self.endpoint.read(&self.remote, &self.glass).start()).unwrap();
        let mut bytes = vec![0; self.len];
        self.glass.read_at(0, &mut bytes).unwrap();
        bytes
    }
}

/// Panics where bytes that must stand still have changed.
pub fn unchanged(what: &str, before: &[u8], after: &[u8]) {
    if let Some(at) = before.iter().zip(after).position(|(before, after)| before != after) {
        let count = before.iter().zip(after).filter(|(before, after)| before != after).count();
        panic!("{what}: {count} bytes changed after the end, the first at offset {at}");
    }
}

/// Panics unless every byte is one of those that the two stamps have there.
pub fn old_or_new(what: &str, bytes: &[u8], at: usize, old: Stamp, new: Stamp, new_at: usize) {
    let (mut before, mut after) = (vec![0; bytes.len()], vec![0; bytes.len()]);
    old.fill(at as u64, &mut before);
    new.fill(new_at as u64, &mut after);
    let wrong = (0..bytes.len()).find(|i| bytes[*i] != before[*i] && bytes[*i] != after[*i]);
    if let Some(wrong) = wrong {
        panic!("{what}: the byte at offset {} is neither the old one nor the new one", at + wrong);
    }
}

/// What imports were like.
#[derive(Debug, Default)]
pub struct Imports {
    /// How long each try took.
    pub took: Vec<Duration>,
    /// How many had to be tried again, of an owner that lives and did not answer the first time.
    pub again: u64,
}

thread_local! {
    /// The imports by this thread since they were last handed over.
    static IMPORTS: RefCell<Imports> = RefCell::default();
}

/// One try of an import, which ends by the limit of the endpoint, well or not.
fn tried(user: &Endpoint, ticket: &Ticket, lane: &str) -> towline::Result<Remote> {
    let begun = Instant::now();
    let outcome = user.import_with(ticket, &routing(lane));
    let took = begun.elapsed();
    IMPORTS.with_borrow_mut(|imports| imports.took.push(took));
    assert!(took < STALL * 10, "an import took {took:?}, and its limit is {STALL:?}");
    outcome
}

/// Hands over what the imports by this thread were like since the last time.
pub fn take_imports() -> Imports {
    IMPORTS.take()
}

/// Waits until a read of a few bytes succeeds again.
pub fn served_again(user: &Endpoint, ticket: &Ticket, lane: &str, what: &str) {
    let small = local(user, 4096);
    let served = eventually(STALL * 10, || {
        tried(user, ticket, lane)
            .and_then(|remote| outcome(user.read(&remote, &small).at(0, 0, 4096).start()))
            .is_ok()
    });
    assert!(served, "{what}: the owner goes on, and nobody is served");
}

/// An owner that nothing happens to: a peer that fails somewhere else must still reach it.
pub struct Bystander {
    owner: Owner,
    stamp: Stamp,
}

impl Bystander {
    /// Starts it.
    pub fn open(lane: &str) -> Bystander {
        let stamp = Stamp::new(50, 1);
        let mut owner = Owner::open(lane, 64 * KIB);
        owner.fill(stamp);
        Bystander { owner, stamp }
    }

    /// Reads from it by that lane, and says how long that took.
    pub fn serves(&self, user: &Endpoint, lane: &str) -> Duration {
        let started = Instant::now();
        let remote = self.owner.import(user, lane);
        let local = local(user, 64 * KIB);
        outcome(user.read(&remote, &local).start()).unwrap();
        let took = started.elapsed();
        self.stamp.verify_storage(local.storage(), 0, 64 * KIB).unwrap();
        took
    }
}
