//! Many regions, many peers, long requests: what each of them costs.

use std::sync::Arc;
use std::time::Instant;

use towline::memory::create_buffer;
use towline::{Access, Endpoint, Layout, OffsetBuffer, Registered, Routing, SharedStorage, SystemStorage};

use super::Session;
use super::costs::one_region;
use super::report::{Row, Unit};
use super::shapes::Path;
use crate::measure::median;
use crate::outcome::{Failure, Outcome};
use crate::pattern::Shuffle;
use crate::raw::sleeper::Sleeper;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Op, Reply, Usage};
use crate::worker::sockets::{Client, Style};

/// Microseconds that registering one region may take, and taking one back.
const EACH: f64 = 5.0;

/// Peers of one hub, in as many processes; seconds until all are connected; descriptors that one of them may cost.
const PEERS: u32 = 1000;
const PROCESSES: u32 = 8;
const CONNECTED: f64 = 10.0;
const DESCRIPTORS: f64 = 2.0;

/// Microseconds until a request of any size is posted: that 99 of 100 stay below.
const POSTED: f64 = 50.0;

/// Seconds of a loop that nobody is called in, about as long as a call that hands a transfer over.
const LOOP: f64 = 20e-6;

/// How often a request is posted, and how often a bare thread is woken, each time after such a transfer.
const POSTS: (usize, usize) = (200, 50);
const QUICK_POSTS: (usize, usize) = (100, 20);

/// Registers few regions and many, and takes them back: each costs the same.
pub(super) fn regions(session: &mut Session) -> Outcome<()> {
    const BYTES: usize = 4096;
    let storage = create_buffer(SystemStorage::new(BYTES)?);
    for count in [1_000, 100_000] {
        let endpoint = Endpoint::open("bench-regions")?;
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..session.pace.fewest {
            let mut regions: Vec<Registered<OffsetBuffer>> = Vec::with_capacity(count);
            let start = Instant::now();
            for _ in 0..count {
                let view = OffsetBuffer::new(storage.clone(), 0, BYTES)?;
                regions.push(endpoint.register(view, Access::READ).map_err(towline::Error::from)?);
            }
            there.push(start.elapsed().as_secs_f64() / count as f64);
            let start = Instant::now();
            drop(regions);
            back.push(start.elapsed().as_secs_f64() / count as f64);
        }
        for (name, mut times) in
            [(format!("register-each-of-{count}"), there), (format!("deregister-each-of-{count}"), back)]
        {
            let rounds = times.len();
            let row = Row::new(name, Unit::Microseconds, median(&mut times) * 1e6).target(Some(EACH));
            session.rows.push(Row { blocks: count as u64, block_size: BYTES as u64, rounds, ..row });
        }
    }
    Ok(())
}

/// A thousand endpoints make contact with this one, and then do nothing.
pub(super) fn hub(session: &mut Session) -> Outcome<()> {
    let endpoint = Endpoint::open("bench-hub")?;
    let region = endpoint.register(SharedStorage::new(4096)?, Access::READ).map_err(towline::Error::from)?;
    let ticket = region.ticket()?;
    let mut workers = (0..PROCESSES).map(|_| Worker::start("peers")).collect::<Outcome<Vec<Worker>>>()?;
    let before = Usage::now().files;
    let start = Instant::now();
    for worker in &mut workers {
        worker.send(&Ask::Endpoints { count: PEERS / PROCESSES, ticket: ticket.clone() })?;
    }
    for worker in &mut workers {
        worker.reply()?;
    }
    let took = start.elapsed().as_secs_f64();
    let files = Usage::now().files.saturating_sub(before);
    let blocks = u64::from(PEERS);
    let row = Row::new("hub-1000-peers-connected", Unit::Seconds, took).target(Some(CONNECTED));
    session.rows.push(Row { blocks, ..row });
    let each = files as f64 / f64::from(PEERS);
    let row = Row::new("hub-1000-peers-descriptors-each", Unit::Count, each).target(Some(DESCRIPTORS));
    session.rows.push(Row { blocks, ..row });
    Ok(())
}

/// How long the call takes that starts a transfer.
pub(super) fn posting(session: &mut Session) -> Outcome<()> {
    const BLOCKS: u64 = 81_920;
    const BLOCK: u64 = 256;
    const LONG: u64 = 64 << 20;
    let shuffle = Shuffle::new(BLOCKS, BLOCK)?;
    // Handed over, as a program does that has no more use for them.
    let wide = |list: &[u32]| Arc::new(list.iter().copied().map(u64::from).collect::<Vec<u64>>());
    let (theirs, ours) = (wide(&shuffle.remote), wide(&shuffle.local));
    let layout = Layout::contiguous(BLOCKS * BLOCK, BLOCK)?;
    let sleeper = Sleeper::start().map_err(|error| Failure::os("thread creation", error))?;
    let (posts, wakes) = if session.quick { QUICK_POSTS } else { POSTS };
    let mut paths: Vec<Path> = Path::all().filter(|path| !path.is_here() && !path.is_opt_in()).collect();
    if session.quick {
        // The nearest and the farthest.
        paths = paths.iter().take(1).chain(paths.last()).copied().collect();
    }
    let mut loops = Vec::with_capacity(posts * paths.len());
    for path in paths.iter().copied() {
        let mut worker = Worker::start("posted")?;
        let ticket = one_region(&mut worker, LONG)?;
        let endpoint = Endpoint::open("bench-posting")?;
        let remote = endpoint.import_with(&ticket, &Routing::default().require(path.name())?)?;
        let local = endpoint
            .register(SystemStorage::new(LONG as usize)?, Access::NONE)
            .map_err(towline::Error::from)?;
        let request = |name: &str| {
            let whole = endpoint.read(&remote, &local);
            match name {
                "post-4k" => whole.at(0, 0, 4096),
                "post-256k" => whole.at(0, 0, 256 << 10),
                "post-1m" => whole.at(0, 0, 1 << 20),
                "post-64m" => whole,
                _ => whole.blocks(&layout, Arc::clone(&theirs), &layout, Arc::clone(&ours)),
            }
        };
        for _ in 0..posts {
            loops.push(undisturbed(LOOP));
        }
        for (name, bytes, blocks) in [
            ("post-4k", 4096, 1),
            ("post-256k", 256 << 10, 1),
            ("post-1m", 1 << 20, 1),
            ("post-64m", LONG, 1),
            ("post-81920-blocks", BLOCKS * BLOCK, BLOCKS),
        ] {
            let (mut times, mut busy) = (Vec::with_capacity(posts), Vec::with_capacity(posts));
            for _ in 0..posts {
                let worked = own_time();
                let start = Instant::now();
                let transfer = request(name).start()?;
                times.push(start.elapsed().as_secs_f64());
                busy.push(own_time() - worked);
                transfer.wait()?;
            }
            let limit = match name {
                "post-4k" => asking(&mut worker, path, bytes, posts)?.map(|p99| ("a bare request", p99)),
                "post-64m" | "post-81920-blocks" => {
                    let mut woken = Vec::with_capacity(wakes);
                    for _ in 0..wakes {
                        request(name).start()?.wait()?;
                        let start = Instant::now();
                        sleeper.wake();
                        woken.push(start.elapsed().as_secs_f64());
                        sleeper.answered();
                    }
                    Some(("waking a thread", p99(&mut woken)))
                }
                _ => None,
            };
            // On a busy machine a call that wakes a thread may have to leave its processor to whom it woke, which the time
            // of the thread alone does not see.
            for (name, mut times, target) in
                [(name.to_owned(), times, Some(POSTED)), (format!("{name}-own-time"), busy, None)]
            {
                let p99 = p99(&mut times);
                let row = Row::new(name, Unit::Microseconds, p99).target(target);
                let row = match limit {
                    Some((against, limit)) => row.against(against, Some(limit), None),
                    None => row,
                };
                session.rows.push(Row {
                    path: Some(path.name().into()),
                    op: Some("read".into()),
                    bytes,
                    blocks,
                    p99: Some(p99),
                    rounds: posts,
                    ..row
                });
            }
        }
    }
    let (rounds, p99) = (loops.len(), p99(&mut loops));
    let row = Row::new("loop-20us", Unit::Microseconds, p99);
    let row = row.against("the same loop without a break", Some(LOOP * 1e6), None);
    session.rows.push(Row { p99: Some(p99), rounds, ..row });
    Ok(())
}

/// How long it takes a thread to have a processor for that many seconds, in which it calls nobody. It reads the clock: a step of
/// it that takes long is one that the machine or its host took from it, as they do from a call.
fn undisturbed(seconds: f64) -> f64 {
    const OWN: f64 = 2e-6;
    let start = Instant::now();
    let (mut last, mut had) = (start, 0.0);
    while had < seconds {
        let now = Instant::now();
        let step = (now - last).as_secs_f64();
        if step < OWN {
            had += step;
        }
        last = now;
    }
    (last - start).as_secs_f64()
}

/// The p99 of a bare request for that many bytes over the socket of such a path, without the reply; `None` for the other paths.
fn asking(worker: &mut Worker, path: Path, bytes: u64, times: usize) -> Outcome<Option<f64>> {
    let failed = |error| Failure::os("the bare socket", error);
    let Some(medium) = path.medium() else { return Ok(None) };
    let (op, style) = (Op::Read, Style::default());
    let ask = Ask::Sockets { medium, op, streams: 1, buffer: bytes, bulk: false };
    let address = match worker.ask(&ask)? {
        Reply::Address { address } => address,
        reply => return Err(worker.surprise(&reply)),
    };
    let mut client = Client::connect(medium, &address, op, bytes, false).map_err(failed)?;
    let mut asked = Vec::with_capacity(times);
    for _ in 0..times {
        let start = Instant::now();
        client.ask(bytes, style).map_err(failed)?;
        asked.push(start.elapsed().as_secs_f64());
        client.move_asked(bytes, style).map_err(failed)?;
    }
    Ok(Some(p99(&mut asked)))
}

/// The microseconds that 99 of 100 times do not exceed.
fn p99(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let rank = (times.len() * 99).div_ceil(100);
    times.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN) * 1e6
}

/// The time that this thread has had a processor for, in seconds.
fn own_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
