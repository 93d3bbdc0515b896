//! The rows that are not about bytes: notifications, registering, tickets, contact, idling.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use towline::memory::create_buffer;
use towline::{
    Access, Buffer, Dim, Endpoint, Layout, OffsetBuffer, Registered, SharedStorage, SystemStorage, Ticket,
};

use super::Session;
use super::contacts;
use super::cores::OwnCore;
use super::crowds;
use super::defences;
use super::growth;
use super::layers;
use super::report::{Row, Unit};
use crate::measure::{self, median};
use crate::outcome::{Failure, Outcome};
use crate::worker::protocol::{Ask, Memory, Reply, Usage};
use crate::worker::{Worker, start_echo};

/// A cost and how it is measured.
pub(super) struct Cost {
    pub(super) name: &'static str,
    pub(super) measure: fn(&mut Session) -> Outcome<()>,
}

pub(super) fn all() -> impl Iterator<Item = Cost> {
    [
        Cost { name: "notify", measure: notify },
        Cost { name: "register", measure: register },
        Cost { name: "register-each", measure: crowds::regions },
        Cost { name: "ticket", measure: ticket },
        Cost { name: "open", measure: open },
        Cost { name: "first-contact", measure: contacts::one },
        Cost { name: "first-contact-peers", measure: contacts::many },
        Cost { name: "hub-1000-peers", measure: crowds::hub },
        Cost { name: "import-1000", measure: import_batch },
        Cost { name: "post", measure: crowds::posting },
        Cost { name: "layers", measure: layers::measure },
        Cost { name: "growth", measure: growth::measure },
        Cost { name: "defence", measure: defences::measure },
        Cost { name: "idle", measure: idle },
    ]
    .into_iter()
}

/// A message there and one back, both sides asleep in between.
fn notify(session: &mut Session) -> Outcome<()> {
    let Some(own) = OwnCore::take() else { return notify_on(session, "notify-one-core", None) };
    notify_on(session, "notify", Some(own.peer))?;
    notify_on(session, "notify-one-core", Some(own.own))
}

fn notify_on(session: &mut Session, name: &str, core: Option<usize>) -> Outcome<()> {
    let endpoint = Endpoint::open("bench-notify")?;
    let region = endpoint.register(SharedStorage::new(4096)?, Access::READ).map_err(towline::Error::from)?;
    let mut worker = Worker::start_on(core, "echo")?;
    let theirs = one_region(&mut worker, 4096)?;
    let remote = endpoint.import(&theirs)?;
    worker.ask(&Ask::Echo { ticket: region.ticket()? })?;
    let mut ours = || {
        let sent = endpoint.notify(&remote, *b"ping")?;
        endpoint.receive(Duration::from_secs(5))?;
        Ok(sent.wait()?)
    };
    let bell = || eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| Failure::os("eventfd", error));
    let (ping, pong) = (bell()?, bell()?);
    let copy = |fd: &rustix::fd::OwnedFd| fd.try_clone().map_err(|error| Failure::os("dup", error));
    let _echo = start_echo(core, copy(&ping)?, copy(&pong)?)?;
    let mut bare = || round_trip(ping.as_fd(), pong.as_fd());
    let times = measure::latencies(session.pace, &mut ours, Some(&mut bare))?;
    endpoint.notify(&remote, *b"stop")?.wait()?;
    let row = Row::new(name, Unit::Microseconds, times.ours * 1e6).against(
        "eventfd round trip",
        times.limit.map(|time| time * 1e6),
        Some(1.0 / 3.0),
    );
    let p99 = times.p99.map(|time| time * 1e6);
    session.rows.push(Row {
        path: Some(remote.path().into()),
        bytes: 4,
        blocks: 1,
        p99,
        rounds: times.rounds,
        ..row
    });
    Ok(())
}

fn round_trip(ping: BorrowedFd<'_>, pong: BorrowedFd<'_>) -> Outcome<()> {
    let failed = |error| Failure::os("eventfd", error);
    rustix::io::write(ping, &1u64.to_ne_bytes()).map_err(failed)?;
    rustix::io::read(pong, &mut [0; 8]).map_err(failed)?;
    Ok(())
}

/// Views of 200 KB of one allocation: one by one, in one call, and taken back.
fn register(session: &mut Session) -> Outcome<()> {
    register_views(session, 1_000, None)?;
    register_views(session, 10_000, Some(10.0))
}

fn register_views(session: &mut Session, count: usize, target: Option<f64>) -> Outcome<()> {
    const VIEW: usize = 200_000;
    let storage = create_buffer(SystemStorage::new(count * VIEW)?);
    let endpoint = Endpoint::open("bench-register")?;
    let views = |storage: &Buffer| -> Outcome<Vec<OffsetBuffer>> {
        Ok((0..count)
            .map(|index| OffsetBuffer::new(storage.clone(), index * VIEW, VIEW))
            .collect::<towline::Result<_>>()?)
    };
    let (mut single, mut many, mut back) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..session.pace.fewest {
        let made = views(&storage)?;
        let start = Instant::now();
        let mut regions: Vec<Registered<OffsetBuffer>> = Vec::with_capacity(count);
        for view in made {
            regions.push(endpoint.register(view, Access::READ).map_err(towline::Error::from)?);
        }
        single.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        drop(regions);
        back.push(start.elapsed().as_secs_f64());
        let made = views(&storage)?;
        let start = Instant::now();
        let regions = endpoint.register_many(made, Access::READ).map_err(towline::Error::from)?;
        many.push(start.elapsed().as_secs_f64());
        drop(regions);
    }
    for (name, mut times, target) in [
        (format!("register-{count}"), single, target),
        (format!("register-{count}-at-once"), many, target),
        (format!("deregister-{count}"), back, None),
    ] {
        let rounds = times.len();
        let row = Row::new(name, Unit::Milliseconds, median(&mut times) * 1e3).target(target);
        session.rows.push(Row { blocks: count as u64, block_size: VIEW as u64, rounds, ..row });
    }
    Ok(())
}

/// Tickets of a region among ten thousand, plain and with a layout of 6.5 million blocks.
fn ticket(session: &mut Session) -> Outcome<()> {
    const MAKES: usize = 1000;
    let endpoint = Endpoint::open("bench-ticket")?;
    let storage = create_buffer(SystemStorage::new(6_500_000 * 256)?);
    let mut regions = Vec::new();
    for _ in 0..10_000 {
        regions.push(endpoint.register(storage.clone(), Access::READ_WRITE).map_err(towline::Error::from)?);
    }
    let Some(region) = regions.last() else { return Ok(()) };
    // 80 layers, keys and values, 40,625 blocks each.
    let layout = || {
        Layout::new(
            0,
            256,
            &[
                Dim { count: 80, stride: 2 * 40_625 * 256 },
                Dim { count: 2, stride: 40_625 * 256 },
                Dim { count: 40_625, stride: 256 },
            ],
        )
    };
    let plain = || region.ticket();
    let paged = || region.ticket_with_layout(layout()?);
    type Make<'a> = &'a dyn Fn() -> towline::Result<Ticket>;
    let kinds: [(&str, Make<'_>, u64); 2] =
        [("ticket", &plain, 1), ("ticket-6.5m-blocks", &paged, 6_500_000)];
    for (name, make, blocks) in kinds {
        let mut times = Vec::new();
        for _ in 0..MAKES {
            let start = Instant::now();
            make()?;
            times.push(start.elapsed().as_secs_f64());
        }
        let bytes = make()?.encode().len();
        let row = Row::new(format!("{name}-size"), Unit::Bytes, bytes as f64).target(Some(512.0));
        session.rows.push(Row { blocks, ..row });
        let row = Row::new(format!("{name}-make"), Unit::Microseconds, median(&mut times) * 1e6);
        session.rows.push(Row { blocks, rounds: MAKES, ..row });
    }
    Ok(())
}

fn open(session: &mut Session) -> Outcome<()> {
    let mut times = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        let endpoint = Endpoint::open("bench-open")?;
        times.push(start.elapsed().as_secs_f64());
        endpoint.close()?;
    }
    let row = Row::new("open", Unit::Milliseconds, median(&mut times) * 1e3).target(Some(5.0));
    session.rows.push(Row { rounds: times.len(), ..row });
    Ok(())
}

fn import_batch(session: &mut Session) -> Outcome<()> {
    const TICKETS: u32 = 1000;
    let mut worker = Worker::start("tickets")?;
    let reply = worker.ask(&Ask::Tickets { count: TICKETS })?;
    let Reply::Tickets { tickets } = reply else { return Err(worker.surprise(&reply)) };
    let endpoint = Endpoint::open("bench-import")?;
    let first = endpoint.import(&tickets[0])?;
    let (mut times, mut singles) = (Vec::new(), Vec::new());
    for _ in 0..session.pace.fewest {
        let start = Instant::now();
        for imported in endpoint.import_many(&tickets)? {
            imported?;
        }
        times.push(start.elapsed().as_secs_f64());
        for ticket in tickets.iter().take(50) {
            let start = Instant::now();
            endpoint.import(ticket)?;
            singles.push(start.elapsed().as_secs_f64());
        }
    }
    let row = Row::new("import-1000-at-once", Unit::Milliseconds, median(&mut times) * 1e3);
    session.rows.push(Row {
        path: Some(first.path().into()),
        blocks: u64::from(TICKETS),
        rounds: times.len(),
        ..row
    });
    let row = Row::new("import-one", Unit::Microseconds, median(&mut singles) * 1e6);
    session.rows.push(Row { path: Some(first.path().into()), blocks: 1, rounds: singles.len(), ..row });
    Ok(())
}

/// What a process with twenty endpoints, all in contact with this one, uses while nothing happens.
fn idle(session: &mut Session) -> Outcome<()> {
    const ENDPOINTS: u32 = 20;
    const WATCHED: Duration = Duration::from_secs(2);
    // Threads that had work linger for a second.
    const SETTLE: Duration = Duration::from_millis(1500);
    let endpoint = Endpoint::open("bench-idle")?;
    let region = endpoint.register(SharedStorage::new(4096)?, Access::READ).map_err(towline::Error::from)?;
    let mut worker = Worker::start("idle")?;
    worker.ask(&Ask::Endpoints { count: ENDPOINTS, ticket: region.ticket()? })?;
    std::thread::sleep(SETTLE);
    let mut usage = || -> Outcome<Usage> {
        match worker.ask(&Ask::Usage)? {
            Reply::Usage(usage) => Ok(usage),
            reply => Err(worker.surprise(&reply)),
        }
    };
    let before = usage()?;
    std::thread::sleep(WATCHED);
    let after = usage()?;
    let cpu = (after.cpu_seconds - before.cpu_seconds).max(0.0);
    let blocks = u64::from(ENDPOINTS);
    // Answering the two queries costs a little.
    let row = Row::new("idle-cpu-2s", Unit::Seconds, cpu).target(Some(0.002));
    session.rows.push(Row { blocks, ..row });
    let row = Row::new("idle-threads", Unit::Count, after.threads as f64).target(Some(3.0));
    session.rows.push(Row { blocks, ..row });
    let row = Row::new("idle-files", Unit::Count, after.files as f64);
    session.rows.push(Row { blocks, ..row });
    Ok(())
}

/// A shared region of a worker.
pub(super) fn one_region(worker: &mut Worker, bytes: u64) -> Outcome<Ticket> {
    match worker.ask(&Ask::Register { memory: Memory::Shared, bytes, seed: 1 })? {
        Reply::Region { ticket, .. } => Ok(ticket),
        reply => Err(worker.surprise(&reply)),
    }
}
