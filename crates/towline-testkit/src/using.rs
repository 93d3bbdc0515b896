//! The whole user's side of the protocol against an owner that does as its input says, in this process or in another.
//!
//! An input is a program for both: what the user asks for, and what the [owner](Actor) says at which moment. The user is a real
//! endpoint in this process. Whatever comes, it must not panic, not hang, and neither write into local memory nor send from it once a
//! transfer has ended, its region is taken back, or its endpoint is closed: memory that is free is filled with canaries, and lies
//! between pages that nobody may touch. The fuzz target `user` and a test over the stored corpus call [`play`].

use std::sync::Once;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use towline::{
    Access, Dtype, Endpoint, Limits, MemoryAccess, MemoryDescription, ReduceOp, Registered, Remote, Routing,
    Ticket, Transfer,
};

use crate::attacker::Medium;
use crate::guarded::Guarded;
use crate::input::Input;
use crate::paths::{is_direct, known};
use crate::process::Process;
use crate::rogue::{Actor, CANARY, STEP, Told};

/// The owner's region.
const LENGTH: u64 = 2 << 20;

/// The local memory: parts for small requests, and for those that go over lanes, which are longer than what a socket holds.
const SMALL: usize = 16 << 10;
const LARGE: usize = 1 << 20;
const SMALL_PARTS: usize = 8;
const LARGE_PARTS: usize = 2;
const LOCAL: usize = SMALL * SMALL_PARTS + LARGE * LARGE_PARTS;

static CANARIES: [u8; LOCAL] = [CANARY; LOCAL];

/// What is sent from, or received over.
static USED: [u8; LARGE] = [0x11; LARGE];

/// Memory of its own that a program takes back at most.
const MOST_TAKEN_BACK: usize = 6;

/// Steps of one input.
const MOST_STEPS: usize = 96;

/// How long an import may take with the steps so far before it gets more.
const TURN: Duration = Duration::from_micros(200);

/// How long anything may take that has nothing to wait for.
const END: Duration = Duration::from_secs(30);

/// An owner in this process or another.
pub trait Owner {
    /// What leads a user to it.
    fn ticket(&self) -> Ticket;

    /// Answers the first contact.
    fn meet(&mut self, setup: &[u8]);

    /// The user has begun something, which is to arrive before the next step.
    fn expect(&mut self);

    /// Takes one step; returns how many canaries it was sent until now.
    fn act(&mut self, step: &[u8]) -> u64;

    /// Hangs up; returns how many canaries it was sent.
    fn end(&mut self) -> u64;

    /// What it was told, as far as that is known here.
    fn told(&self) -> Told {
        Told::default()
    }
}

impl Owner for Actor {
    fn ticket(&self) -> Ticket {
        self.ticket().clone()
    }

    fn meet(&mut self, setup: &[u8]) {
        self.meet(setup);
    }

    fn expect(&mut self) {
        self.expect();
    }

    fn act(&mut self, step: &[u8]) -> u64 {
        self.act(step)
    }

    fn end(&mut self) -> u64 {
        self.end()
    }

    fn told(&self) -> Told {
        self.told()
    }
}

/// A rogue owner in a worker, which may die of what it does.
pub struct RemoteOwner<'a> {
    process: &'a mut Process,
    ticket: Ticket,
    canaries: u64,
}

impl<'a> RemoteOwner<'a> {
    /// Opens one in that worker.
    pub fn open(process: &'a mut Process, medium: Medium) -> RemoteOwner<'a> {
        let medium = if medium == Medium::Tcp { "tcp" } else { "unix" };
        let ticket = process.must(&format!("rogue-open {medium} {LENGTH}")).text(0).parse().unwrap();
        RemoteOwner { process, ticket, canaries: 0 }
    }

    fn order(&mut self, order: &str, step: &[u8]) -> u64 {
        let hex: String = step.iter().map(|byte| format!("{byte:02x}")).collect();
        if let Ok(answer) = self.process.ask(&format!("{order} {hex}-")) {
            self.canaries = answer.number(0);
        }
        self.canaries
    }
}

impl Owner for RemoteOwner<'_> {
    fn ticket(&self) -> Ticket {
        self.ticket.clone()
    }

    fn meet(&mut self, setup: &[u8]) {
        self.order("rogue-meet", setup);
    }

    fn expect(&mut self) {
        self.order("rogue-expect", &[]);
    }

    fn act(&mut self, step: &[u8]) -> u64 {
        self.order("rogue-act", step)
    }

    fn end(&mut self) -> u64 {
        self.order("rogue-end", &[])
    }
}

/// What came of a program.
#[derive(Debug, Default, Clone, Copy)]
pub struct Played {
    /// The import went well.
    pub imported: usize,
    /// And over memory or a file that the owner has handed over, or by its address.
    pub shared: usize,
    /// Transfers that ended well.
    pub well: usize,
    /// And those that failed.
    pub failed: usize,
    /// Memory that was taken back while the owner went on.
    pub taken_back: usize,
    /// Transfers that were quiet in time.
    pub quiet: usize,
    /// Reads of which the owner was notified that they are not wanted any more.
    pub withdrawn: usize,
    /// Lanes that the owner was asked to end.
    pub ended_lanes: usize,
}

impl std::ops::AddAssign for Played {
    fn add_assign(&mut self, other: Played) {
        self.imported += other.imported;
        self.shared += other.shared;
        self.well += other.well;
        self.failed += other.failed;
        self.taken_back += other.taken_back;
        self.quiet += other.quiet;
        self.withdrawn += other.withdrawn;
        self.ended_lanes += other.ended_lanes;
    }
}

/// Runs one input, with the owner in this process.
///
/// # Panics
/// Where the user breaks a rule.
pub fn play(data: &[u8]) -> Played {
    play_against(data, false, |medium| Box::new(Actor::open(medium, LENGTH)))
}

/// Runs one input against that owner. One that is another process may also change what `cma` reads in its own table.
///
/// # Panics
/// Where the user breaks a rule.
pub fn play_against<'a>(
    data: &[u8],
    apart: bool,
    open: impl FnOnce(Medium) -> Box<dyn Owner + 'a>,
) -> Played {
    end_with_any_panic_of_the_library();
    let mut input = Input(data);
    let way = input.byte();
    let (medium, path) = match way % 8 {
        0 | 1 => (Medium::Tcp, "tcp"),
        2 | 3 => (Medium::Unix, "unix"),
        4 | 5 => (Medium::Unix, "mapped"),
        6 => (Medium::Unix, ""),
        _ if apart => (Medium::Unix, "cma"),
        _ => (Medium::Unix, "file"),
    };
    let mut setup = input.take(2 * STEP);
    setup.resize(2 * STEP, 0);
    match path {
        "mapped" | "cma" => setup[0] = setup[0] & !8 | 1,
        "file" => setup[0] |= 9,
        _ => {}
    }
    let routing = [path].into_iter().filter(|path| !path.is_empty());
    let routing = routing.fold(Routing::default(), |all, path| all.require(path).unwrap());
    let limits = Limits { no_progress: END / 15, ..Limits::default() };
    let user =
        Endpoint::options("user").limits(limits).checksums(way & 0xc0 == 0xc0).lanes(2).open().unwrap();
    let local = user.register(canaries(), Access::READ_WRITE).unwrap();
    let mut owner = open(medium);
    let ticket = owner.ticket();
    let imported = thread::scope(|scope| {
        let waiting = thread::current();
        let (user, ticket, routing) = (&user, &ticket, &routing);
        let import = scope.spawn(move || {
            let imported = user.import_within(ticket, routing, END);
            waiting.unpark();
            imported
        });
        owner.meet(&setup);
        for honest in 0..40 {
            if import.is_finished() {
                break;
            }
            // First what the program says, then what an honest owner would, and then the end.
            let step = if honest < 2 { input.take(STEP) } else { vec![0; STEP] };
            owner.expect();
            owner.act(&step);
            if !import.is_finished() {
                thread::park_timeout(TURN);
            }
        }
        if !import.is_finished() {
            owner.end();
        }
        import.join().expect("an import that does not panic")
    });
    let mut played = Played::default();
    let mut using = Using {
        user,
        local,
        flying: Vec::new(),
        busy: [false; SMALL_PARTS + LARGE_PARTS],
        closing: Vec::new(),
        freed: Vec::new(),
    };
    let mut order = way >> 3;
    if let Ok(remote) = imported {
        played.imported = 1;
        played.shared = usize::from(is_direct(&known(remote.path())));
        let mut steps = 0;
        while !input.0.is_empty() && steps < MOST_STEPS {
            steps += 1;
            let step = input.take(STEP);
            if step[0] < 144 {
                assert_eq!(owner.act(&step), 0, "bytes of memory that is free were sent");
            } else {
                order ^= step[0];
                if using.step(&remote, Input(&step[1..]), &mut played) {
                    owner.expect();
                }
            }
        }
    }
    using.end(&mut *owner, order, &mut played);
    let Told { withdrawn, ends } = owner.told();
    Played { withdrawn, ended_lanes: ends, ..played }
}

/// A request in flight, and the part of the local memory that it has; none where it has memory of its own.
struct Flying {
    transfer: Transfer,
    part: Option<usize>,
}

struct Using {
    user: Endpoint,
    local: Registered<Guarded>,
    flying: Vec<Flying>,
    busy: [bool; SMALL_PARTS + LARGE_PARTS],
    /// Memory of single requests that could not be taken back yet.
    closing: Vec<Registered<Guarded>>,
    /// And what was: only canaries.
    freed: Vec<Guarded>,
}

fn range_of(part: usize) -> (usize, usize) {
    match part.checked_sub(SMALL_PARTS) {
        None => (part * SMALL, SMALL),
        Some(large) => (SMALL_PARTS * SMALL + large * LARGE, LARGE),
    }
}

impl Using {
    /// Takes one step; returns whether the owner has something to hear of it.
    fn step(&mut self, remote: &Remote, mut input: Input<'_>, played: &mut Played) -> bool {
        match input.byte() % 16 {
            0..=9 => return self.start(remote, &mut input),
            10 => {
                if let Some(flying) = self.flying.get(input.byte() as usize % 8) {
                    flying.transfer.cancel();
                    return true;
                }
            }
            11 => self.settle(Duration::from_micros(input.byte().into()), played),
            12 => {
                let _ = (remote.alive(), remote.path(), self.user.stats());
            }
            13 => {
                let _ = self.user.notify(remote, vec![1; usize::from(input.byte()) * 8]);
            }
            14 => return self.take_back(remote, &mut input, played),
            _ => self.silence(Duration::from_micros(input.byte().into()), played),
        }
        false
    }

    /// Asks for something in memory of its own, which is then taken back as soon as that is said to be possible; returns whether it is
    /// in flight.
    fn take_back(&mut self, remote: &Remote, input: &mut Input<'_>, played: &mut Played) -> bool {
        let (what, size, time) = (input.byte(), input.byte(), input.byte());
        let mut under_way = false;
        if self.closing.len() + self.freed.len() < MOST_TAKEN_BACK {
            let len = if size >= 208 { LARGE } else { SMALL };
            let memory = Guarded::new(len);
            memory.write_at(0, &USED[..len]).unwrap();
            let own = self.user.register(memory, Access::READ_WRITE).unwrap();
            let started = match what % 8 {
                0..=3 => self.user.read(remote, &own).at(0, 0, len as u64).start(),
                4..=6 => self.user.write(remote, &own).at(0, 0, len as u64).start(),
                _ => self.user.reduce_into(remote, &own, ReduceOp::Sum, Dtype::U64).start(),
            };
            if let Ok(transfer) = started {
                under_way = !transfer.is_done();
                if what >= 128 {
                    transfer.cancel();
                }
                self.flying.push(Flying { transfer, part: None });
            }
            self.closing.push(own);
        }
        for own in std::mem::take(&mut self.closing) {
            match own.into_storage_within(Duration::from_micros(u64::from(time) * 8)) {
                Ok(memory) => {
                    played.taken_back += 1;
                    self.was_taken_back(memory);
                }
                Err(pinned) => self.closing.push(pinned.registration),
            }
        }
        under_way
    }

    /// From here on nobody may touch that memory.
    fn was_taken_back(&mut self, memory: Guarded) {
        memory.write_at(0, &CANARIES[..memory.size()]).unwrap();
        self.freed.push(memory);
    }

    /// Frees what is quiet within that time.
    fn silence(&mut self, within: Duration, played: &mut Played) {
        let mut flying = std::mem::take(&mut self.flying);
        flying.retain(|one| {
            let quiet = one.transfer.wait_quiet(within);
            if quiet {
                played.quiet += 1;
                self.ended(one, played);
            }
            !quiet
        });
        self.flying = flying;
    }

    /// Asks for something, in a part of the local memory that is free; returns whether it is in flight.
    fn start(&mut self, remote: &Remote, input: &mut Input<'_>) -> bool {
        let (what, size, at) = (input.byte(), input.byte(), u64::from(input.byte()) << 11);
        let parts = if size >= 208 { SMALL_PARTS..SMALL_PARTS + LARGE_PARTS } else { 0..SMALL_PARTS };
        let Some(part) = parts.clone().find(|part| !self.busy[*part]) else { return false };
        let (start, whole) = range_of(part);
        self.is_untouched(start, whole);
        self.local.write_at(start, &USED[..whole]).unwrap();
        let len = if whole == LARGE { whole as u64 - u64::from(size) } else { (u64::from(size) + 1) << 5 };
        let (user, local, start) = (&self.user, &self.local, start as u64);
        let spans = [(at, start, len / 4), (at + len / 2, start + len / 2, len / 4)];
        let started = match what % 12 {
            0..=2 => user.read(remote, local).at(at, start, len).start(),
            3 => user.read(remote, local).spans(&spans[..]).start(),
            4..=5 => user.write(remote, local).at(at, start, len).start(),
            6 => user.write(remote, local).spans(&spans[..]).start(),
            7 => user.write(remote, local).at(at, start, len).signal(8, 1).start(),
            8 => user.write(remote, local).at(at, start, len).notify(b"there".to_vec()).start(),
            9 => user.reduce_into(remote, local, ReduceOp::Sum, Dtype::U64).at(at, start, len & !31).start(),
            10 => user.fetch_add(remote, at, 3),
            _ => user.read(remote, local).at(at, start, len).notify(b"read".to_vec()).start(),
        };
        match started {
            Ok(transfer) => {
                let under_way = !transfer.is_done();
                self.busy[part] = true;
                self.flying.push(Flying { transfer, part: Some(part) });
                under_way
            }
            Err(_) => {
                self.frees(part);
                false
            }
        }
    }

    /// Frees what has ended within that time.
    fn settle(&mut self, within: Duration, played: &mut Played) {
        let mut flying = std::mem::take(&mut self.flying);
        flying.retain(|one| {
            let ended = one.transfer.wait_for(within).is_some();
            if ended {
                self.ended(one, played);
            }
            !ended
        });
        self.flying = flying;
    }

    fn ended(&mut self, one: &Flying, played: &mut Played) {
        match one.transfer.wait_for(Duration::ZERO) {
            Some(Ok(())) => played.well += 1,
            Some(Err(_)) => played.failed += 1,
            None => panic!("a transfer is quiet and has not ended: {:?}", one.transfer),
        }
        if let Some(part) = one.part {
            self.frees(part);
        }
    }

    /// From here on nobody may touch that part.
    fn frees(&mut self, part: usize) {
        let (start, len) = range_of(part);
        self.local.write_at(start, &CANARIES[..len]).unwrap();
        self.busy[part] = false;
    }

    fn is_untouched(&self, start: usize, len: usize) {
        assert!(
            only_canaries(self.local.storage(), start, len),
            "memory was written into after its transfer had ended"
        );
    }

    /// Everything ends: in one order or another, and in time.
    fn end(mut self, owner: &mut dyn Owner, order: u8, played: &mut Played) {
        match order % 64 {
            // While the owner goes on, as it likes.
            0 => self.user.close_within(END).expect("an endpoint that closes"),
            1 => self.user.close_within(Duration::ZERO).unwrap_or_default(),
            _ => assert_eq!(owner.end(), 0, "bytes of memory that is free were sent"),
        }
        // Connections that were being made are let in: they would be waited for otherwise.
        for _ in 0..16 {
            if order % 64 >= 2 || self.flying.iter().all(|one| one.transfer.is_done()) {
                break;
            }
            owner.expect();
            assert_eq!(owner.act(&[0; STEP]), 0, "bytes of memory that is free were sent");
        }
        self.settle(END, played);
        assert!(self.flying.is_empty(), "a transfer does not end: {:?}", self.flying[0].transfer);
        for own in std::mem::take(&mut self.closing) {
            let taken_back = own.into_storage_within(END).map_err(|pinned| pinned.error);
            self.was_taken_back(taken_back.expect("memory that is free"));
        }
        let Using { user, local, freed: own, .. } = self;
        let freed =
            local.into_storage_within(END).map_err(|pinned| pinned.error).expect("memory that is free");
        for step in [[0; STEP], [6; STEP], [11; STEP]] {
            owner.act(&step);
        }
        assert_eq!(owner.end(), 0, "bytes of memory that was given back were sent");
        user.close_within(END).expect("an endpoint that closes");
        assert!(only_canaries(&freed, 0, LOCAL), "memory that was free, or given back, was written into");
        for memory in &own {
            assert!(only_canaries(memory, 0, memory.size()), "memory that was taken back was written into");
        }
        // Some of it is given back to the system, where a late access ends the process; what is kept shows it to the next input.
        let mut kept = KEPT.lock();
        if !order.is_multiple_of(16) && kept.is_empty() {
            kept.push(freed);
        }
    }
}

/// Local memory of inputs that have ended: only canaries.
static KEPT: Mutex<Vec<Guarded>> = Mutex::new(Vec::new());

/// Local memory with nothing but canaries.
fn canaries() -> Guarded {
    let kept = KEPT.lock().pop();
    kept.unwrap_or_else(|| {
        let fresh = Guarded::new(LOCAL);
        fresh.write_at(0, &CANARIES).unwrap();
        fresh
    })
}

fn only_canaries(memory: &Guarded, start: usize, len: usize) -> bool {
    let mut found = [0; SMALL];
    (start..start + len).step_by(SMALL).all(|at| {
        let found = &mut found[..SMALL.min(start + len - at)];
        memory.read_at(at, found).unwrap();
        *found == CANARIES[..found.len()]
    })
}

/// A panic of one of the library's own threads ends the process, as it should end a test.
fn end_with_any_panic_of_the_library() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            if thread::current().name().is_some_and(|name| name.starts_with("towline-")) {
                std::process::abort();
            }
        }));
    });
}
