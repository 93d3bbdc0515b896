//! What each kind of error means: the table of `docs/decisions/0047-what-each-kind-promises.md`, row by row.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType};
use towline::ticket::{RegionKey, TicketBody};
use towline::{
    Access, Capabilities, Contact, Endpoint, Error, Identity, Incarnation, Kind, PathProperties, Reach,
    Registered, Remote, Result, Serves, SystemStorage, Ticket,
};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::paths::{is_here, known, names};
use towline_testkit::process::{Process, own_address};
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, watch};

use super::{MIB, STALL, endpoint, kind_for, lanes, lanes_of, local};

const LEN: usize = 2 * MIB;

/// What happens to the owner, or to its region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Deregistered,
    LeaseOver,
    Closed,
    Killed,
    /// Killed, and another life of it listens at the same address.
    Restarted,
    /// Killed before this process had any contact with it.
    NeverMet,
    /// It stands still, and what it serves with it.
    Stopped,
}

/// What is asked for afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Alive,
    SmallRead,
    LargeRead,
    Write,
    Add,
    Notify,
    Pin,
    Import,
}

use Act::{Add, Alive, Import, LargeRead, Notify, Pin, SmallRead, Write};

type Which = fn(&PathProperties) -> bool;

const SHARED: Which = |path| path.shares_memory;
const ON_THE_HOST: Which = |path| path.contact == Contact::Unix;
const BY_ITSELF: Which = |path| !path.enforced;
const STREAMS: Which = |path| path.enforced;
const TCP: Which = |path| path.contact == Contact::Tcp;
const ALL: Which = |_| true;
const WITH_WORDS: Which = |path| path.capabilities.contains(Capabilities::ATOMIC);

const ACCESS: &[Act] = &[SmallRead, LargeRead, Write];
const ANYTHING: &[Act] = &[Alive, SmallRead, LargeRead, Write, Notify];

type Row = (Event, Which, &'static [Act], Option<Kind>);

/// What happened, on which paths, what is asked for then, and the kind of error; no error where the owner lives on.
const TABLE: &[Row] = &[
    (Event::Deregistered, ALL, &[Alive], None),
    (Event::Deregistered, ALL, ACCESS, Some(Kind::Stale)),
    (Event::Deregistered, WITH_WORDS, &[Add], Some(Kind::Stale)),
    (Event::Deregistered, SHARED, &[Pin], Some(Kind::Stale)),
    (Event::Deregistered, ALL, &[Import], Some(Kind::Stale)),
    (Event::LeaseOver, ALL, &[Alive], None),
    (Event::LeaseOver, ALL, ACCESS, Some(Kind::PermissionDenied)),
    (Event::LeaseOver, WITH_WORDS, &[Add], Some(Kind::PermissionDenied)),
    (Event::LeaseOver, SHARED, &[Pin], Some(Kind::PermissionDenied)),
    (Event::LeaseOver, ALL, &[Import], Some(Kind::PermissionDenied)),
    (Event::Closed, ALL, ANYTHING, Some(Kind::Stale)),
    (Event::Closed, WITH_WORDS, &[Add], Some(Kind::Stale)),
    (Event::Closed, SHARED, &[Pin], Some(Kind::Stale)),
    (Event::Closed, ON_THE_HOST, &[Import], Some(Kind::Stale)),
    // Nobody answers there, and a goodbye that anybody on the way could have sent is not remembered.
    (Event::Closed, TCP, &[Import], Some(Kind::Disconnected)),
    (Event::Killed, ON_THE_HOST, ANYTHING, Some(Kind::Stale)),
    (Event::Killed, ON_THE_HOST, &[Import], Some(Kind::Stale)),
    (Event::Killed, SHARED, &[Add, Pin], Some(Kind::Stale)),
    // A connection that has ended shows nothing of its owner.
    (Event::Killed, TCP, ANYTHING, Some(Kind::Disconnected)),
    (Event::Killed, TCP, &[Import], Some(Kind::Disconnected)),
    (Event::Restarted, ON_THE_HOST, ANYTHING, Some(Kind::Stale)),
    // The next request connects anew, and meets the other life.
    (Event::Restarted, TCP, &[SmallRead, LargeRead, Write, Add, Notify], Some(Kind::Stale)),
    (Event::Restarted, ALL, &[Import], Some(Kind::Stale)),
    (Event::NeverMet, ALL, &[Import], Some(Kind::Disconnected)),
    // A peer that reaches the memory by itself does not need it.
    (Event::Stopped, BY_ITSELF, ACCESS, None),
    (Event::Stopped, STREAMS, ACCESS, Some(Kind::Timeout)),
    (Event::Stopped, ALL, &[Import], Some(Kind::Timeout)),
];

struct Scene {
    path: &'static str,
    owner: Process,
    user: Endpoint,
    ticket: Ticket,
    remote: Option<Remote>,
    local: Registered<SystemStorage>,
}

impl Scene {
    fn after(event: Event, path: &'static str) -> Scene {
        let options = format!("listen={}", own_address());
        let mut owner = Process::open("owner", &options);
        owner.must(&format!("register {LEN} {} read+write", kind_for(path)));
        let mut ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let lease = Duration::from_millis(300);
        if event == Event::LeaseOver {
            ticket = ticket.narrow().lease(lease).finish().unwrap();
        }
        let user = endpoint("user");
        let local = local(&user, LEN);
        let remote = (event != Event::NeverMet).then(|| {
            let remote = user.import_with(&ticket, &routing(path)).unwrap();
            assert_eq!(remote.path(), path, "{}", remote.explain());
            remote
        });
        if let (Some(remote), true) = (&remote, event != Event::LeaseOver) {
            outcome(user.read(remote, &local).start()).unwrap();
        }
        match event {
            Event::Deregistered => drop(owner.must("deregister 1 20000")),
            Event::LeaseOver => thread::sleep(lease),
            Event::Closed => drop(owner.must("close")),
            Event::Killed | Event::NeverMet => owner.kill(),
            Event::Stopped => owner.stop(),
            Event::Restarted => {
                owner.kill();
                owner = Process::open("owner", &options);
                owner.must(&format!("register {LEN} {} read+write", kind_for(path)));
            }
        }
        let lives_on = matches!(event, Event::Deregistered | Event::LeaseOver | Event::Stopped);
        if let (Some(remote), false) = (&remote, lives_on) {
            assert!(eventually(STALL * 10, || remote.alive().is_err()), "{path}: {event:?} is not noticed");
        }
        Scene { path, owner, user, ticket, remote, local }
    }

    fn act(&self, act: Act) -> Result<()> {
        let remote = || self.remote.as_ref().unwrap();
        match act {
            Alive => remote().alive(),
            SmallRead => outcome(self.user.read(remote(), &self.local).at(0, 0, 8).start()),
            LargeRead => outcome(self.user.read(remote(), &self.local).start()),
            Write => outcome(self.user.write(remote(), &self.local).at(0, 0, 8).start()),
            Add => outcome(self.user.fetch_add(remote(), 0, 1)),
            Notify => outcome(self.user.notify(remote(), "hello")),
            Pin => remote().pin().map(drop),
            Import => self.user.import_within(&self.ticket, &routing(self.path), 5 * STALL).map(drop),
        }
    }
}

/// Whether the error says what is true of it: who, over which path, and whether asking again may help.
fn describes(error: &Error, path: &str, act: Act) -> bool {
    // A lease is looked at before a path is chosen.
    let chosen = act != Import && error.kind() != Kind::PermissionDenied;
    let said = chosen.then_some(path);
    let retryable = matches!(error.kind(), Kind::Disconnected | Kind::Timeout | Kind::Exhausted);
    error.transport() == said && error.peer() == Some("owner") && error.is_retryable() == retryable
}

#[test]
fn each_kind_promises_what_the_table_says() {
    let _watchdog = watch("each_kind_promises_what_the_table_says", Duration::from_secs(240));
    let with_files = names(|path| !is_here(path) && path.serves != Serves::GpuMemory && !path.opt_in);
    lanes_of(&with_files, |path, _| {
        let of_path = || TABLE.iter().filter(|(_, which, ..)| which(&known(path)));
        let mut events: Vec<Event> = of_path().map(|(event, ..)| *event).collect();
        events.dedup();
        for event in events {
            let scene = Scene::after(event, path);
            for (_, _, acts, kind) in of_path().filter(|row| row.0 == event) {
                for act in *acts {
                    // Twice: what was said once is said again.
                    for _ in 0..2 {
                        let ended = scene.act(*act);
                        let what = format!("{path}: {event:?}, then {act:?}: {ended:?}");
                        assert_eq!(ended.as_ref().err().map(Error::kind), *kind, "{what}");
                        if let Err(error) = &ended {
                            assert!(describes(error, path, *act), "{what}");
                        }
                    }
                }
            }
            drop(scene.owner);
        }
    });
}

#[test]
fn an_import_that_races_its_owners_close_is_stale_or_can_be_tried_again() {
    let test = "an_import_that_races_its_owners_close_is_stale_or_can_be_tried_again";
    let _watchdog = watch(test, Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(470 + lane);
        for round in 0..20 {
            let mut owner = Process::open("owner", "");
            owner.must(&format!("register 65536 {} read+write", kind_for(path)));
            let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
            let user = endpoint("user");
            drop(user.import_with(&ticket, &routing(path)).unwrap());
            thread::scope(|scope| {
                let importing = scope.spawn(|| {
                    loop {
                        if let Err(error) = user.import_with(&ticket, &routing(path)) {
                            return error;
                        }
                    }
                });
                thread::sleep(random.micros(3000));
                owner.must("close");
                let error = importing.join().unwrap();
                let kinds = [Kind::Stale, Kind::Disconnected];
                assert!(kinds.contains(&error.kind()), "{path} round {round}: {error}");
            });
        }
    });
}

#[test]
fn an_import_that_races_the_close_within_one_process_is_stale() {
    let test = "an_import_that_races_the_close_within_one_process_is_stale";
    let _watchdog = watch(test, Duration::from_secs(120));
    let mut random = Random::new(480);
    for round in 0..50 {
        let owner = endpoint("owner");
        let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
        let ticket = region.ticket().unwrap();
        let user = endpoint("user");
        thread::scope(|scope| {
            let importing = scope.spawn(|| {
                loop {
                    if let Err(error) = user.import(&ticket) {
                        return error;
                    }
                }
            });
            thread::sleep(random.micros(300));
            owner.close().unwrap();
            let error = importing.join().unwrap();
            assert_eq!(error.kind(), Kind::Stale, "round {round}: {error}");
        });
    }
}

/// A listener that has no room takes no notice of those who come.
fn full_listener() -> (TcpListener, Vec<TcpStream>) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    let waiting = std::iter::from_fn(|| TcpStream::connect_timeout(&address, STALL / 2).ok()).collect();
    (listener, waiting)
}

#[test]
fn an_import_waits_for_its_whole_limit_where_packets_vanish() {
    let _watchdog =
        watch("an_import_waits_for_its_whole_limit_where_packets_vanish", Duration::from_secs(120));
    let (full, _waiting) = full_listener();
    let owner = Endpoint::options("owner").advertise(full.local_addr().unwrap()).open().unwrap();
    let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let (began, limit) = (Instant::now(), Duration::from_secs(4));
    let error =
        endpoint("user").import_within(&region.ticket().unwrap(), &routing("tcp"), limit).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    assert!(began.elapsed() >= limit, "{error}");
}

#[test]
fn a_goodbye_over_tls_is_remembered() {
    let _watchdog = watch("a_goodbye_over_tls_is_remembered", Duration::from_secs(120));
    let mut owner = Process::open("owner", "tls=yes");
    owner.must("register 4096 system read");
    let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let user = Endpoint::options("user").tls(towline::Tls::by_ticket().unwrap()).open().unwrap();
    let remote = user.import_with(&ticket, &routing("tcp")).unwrap();
    owner.must("close");
    assert!(eventually(STALL * 10, || remote.alive().is_err()), "the goodbye is not received");
    assert_eq!(remote.alive().unwrap_err().kind(), Kind::Stale);
    assert_eq!(user.import_with(&ticket, &routing("tcp")).unwrap_err().kind(), Kind::Stale);
}

#[test]
fn within_one_process_a_region_that_was_taken_back_is_stale_and_a_lease_that_is_over_is_denied() {
    let owner = endpoint("owner");
    let user = endpoint("user");
    let local = local(&user, 4096);
    let register = || owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
    let taken_back = register();
    let gone = taken_back.ticket().unwrap();
    let kept = register();
    let lease = Duration::from_millis(300);
    let leased = kept.ticket().unwrap().narrow().lease(lease).finish().unwrap();
    let remotes = [&gone, &leased].map(|ticket| user.import(ticket).unwrap());
    assert!(remotes.iter().all(|remote| remote.path() == "inproc"));
    taken_back.into_storage_within(STALL).unwrap();
    thread::sleep(lease);
    let kinds = [Kind::Stale, Kind::PermissionDenied];
    for ((remote, ticket), kind) in remotes.iter().zip([&gone, &leased]).zip(kinds) {
        remote.alive().unwrap();
        for ended in [
            outcome(user.read(remote, &local).start()),
            outcome(user.write(remote, &local).start()),
            outcome(user.fetch_add(remote, 0, 1)),
            remote.pin().map(drop),
            user.import(ticket).map(drop),
        ] {
            assert_eq!(ended.as_ref().unwrap_err().kind(), kind, "{ended:?}");
        }
    }
}

#[test]
fn within_one_process_everything_of_a_closed_owner_is_stale() {
    let owner = endpoint("owner");
    let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
    let user = endpoint("user");
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    assert_eq!(remote.path(), "inproc");
    let local = local(&user, 4096);
    owner.close().unwrap();
    for ended in [
        remote.alive(),
        outcome(user.read(&remote, &local).start()),
        outcome(user.write(&remote, &local).start()),
        outcome(user.fetch_add(&remote, 0, 1)),
        outcome(user.notify(&remote, "hello")),
        remote.pin().map(drop),
    ] {
        let error = ended.unwrap_err();
        assert_eq!((error.kind(), error.transport()), (Kind::Stale, Some("inproc")), "{error}");
    }
}

/// Another life that answers at one address is no proof while another address is silent: it may be another host's.
#[test]
fn another_life_at_one_of_several_addresses_decides_nothing_while_another_one_is_silent() {
    let test = "another_life_at_one_of_several_addresses_decides_nothing_while_another_one_is_silent";
    let _watchdog = watch(test, Duration::from_secs(120));
    let other = endpoint("owner");
    let region = other.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let body = region.ticket().unwrap().body().clone();
    let answers = *body.reach.iter().find(|reach| matches!(reach, Reach::Tcp(_))).unwrap();
    let (full, _waiting) = full_listener();
    let silent = Reach::Tcp(full.local_addr().unwrap());
    let nobody = Reach::Tcp(TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let user = endpoint("user");
    let cases = [
        (vec![answers], Kind::Stale),
        (vec![nobody, answers], Kind::Stale),
        (vec![answers, nobody], Kind::Stale),
        (vec![answers, silent], Kind::Timeout),
        (vec![nobody], Kind::Disconnected),
    ];
    for (reach, kind) in cases {
        let identity = Identity::new("owner", Incarnation(*b"an earlier life.")).unwrap();
        let body = TicketBody { identity, reach, ..body.clone() };
        let ticket = Ticket::mint(&body, &RegionKey::derive(&[1; 32], body.row, body.generation)).unwrap();
        let error = user.import_within(&ticket, &routing("tcp"), STALL).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}
