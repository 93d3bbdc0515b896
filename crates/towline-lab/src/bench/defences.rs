//! What each defence costs a request: the same transfer with it and without it, in turns.

use towline::{Access, Endpoint, Registered, Remote, Routing, SystemStorage};

use super::Session;
use super::report::{Row, Unit};
use crate::measure;
use crate::outcome::Outcome;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Guard, Op, Reply};

/// One request over the control connection, and one that is spread over lanes.
const SIZES: [(&str, u64); 2] = [("4k", 4 << 10), ("1m", 1 << 20)];

/// What is compared: its name, how an endpoint is without it and with it, and over which path.
struct Defence {
    name: &'static str,
    without: Guard,
    with: Guard,
    /// Only this path, where it is not the defence that decides.
    path: Option<&'static str>,
}

const DEFENCES: [Defence; 4] = [
    // The counting cannot be turned off: limits that nobody reaches stand for that there are none.
    Defence { name: "quotas", without: Guard::Unlimited, with: Guard::None, path: Some("tcp") },
    Defence { name: "crc", without: Guard::None, with: Guard::Checksums, path: Some("tcp") },
    Defence { name: "tls", without: Guard::None, with: Guard::Tls, path: Some("tcp") },
    Defence { name: "isolation", without: Guard::None, with: Guard::Enforced, path: None },
];

/// A user and an owner in another process, both guarded in that way.
struct Pair {
    endpoint: Endpoint,
    remote: Remote,
    local: Registered<SystemStorage>,
}

impl Pair {
    fn open(worker: &mut Worker, guard: Guard, path: Option<&'static str>, bytes: u64) -> Outcome<Pair> {
        let reply = worker.ask(&Ask::Guarded { guard, bytes })?;
        let Reply::Ticket { ticket } = reply else { return Err(worker.surprise(&reply)) };
        let endpoint = guard.options("bench-defence")?.open()?;
        let remote = match path {
            Some(path) => endpoint.import_with(&ticket, &Routing::default().require(path)?)?,
            None => endpoint.import(&ticket)?,
        };
        let local = endpoint
            .register(SystemStorage::new(bytes as usize)?, Access::NONE)
            .map_err(towline::Error::from)?;
        Ok(Pair { endpoint, remote, local })
    }

    fn step(&self, op: Op, bytes: u64) -> Outcome<()> {
        let request = match op {
            Op::Read => self.endpoint.read(&self.remote, &self.local),
            Op::Write => self.endpoint.write(&self.remote, &self.local),
        };
        Ok(request.at(0, 0, bytes).start()?.wait()?)
    }
}

/// All of them, reading and writing.
pub(super) fn measure(session: &mut Session) -> Outcome<()> {
    let most = SIZES.into_iter().map(|(_, bytes)| bytes).max().unwrap_or(0);
    for defence in DEFENCES {
        let mut worker = Worker::start("defended")?;
        let without = Pair::open(&mut worker, defence.without, defence.path, most)?;
        let with = Pair::open(&mut worker, defence.with, defence.path, most)?;
        for (size, bytes) in SIZES {
            for op in Op::BOTH {
                let (mut ours, mut limit) = (|| with.step(op, bytes), || without.step(op, bytes));
                let times = measure::medians(session.pace, &mut ours, Some(&mut limit))?;
                let name = format!("defence-{}-{size}", defence.name);
                let against = match with.remote.path() == without.remote.path() {
                    true => "without it".to_owned(),
                    false => format!("without it, by {}", without.remote.path()),
                };
                let row = Row::new(name, Unit::Microseconds, times.ours * 1e6).against(
                    against,
                    times.limit.map(|time| time * 1e6),
                    None,
                );
                session.rows.push(Row {
                    path: Some(with.remote.path().into()),
                    op: Some(op.name().into()),
                    bytes,
                    blocks: 1,
                    p99: times.p99.map(|time| time * 1e6),
                    rounds: times.rounds,
                    ..row
                });
            }
        }
    }
    Ok(())
}
