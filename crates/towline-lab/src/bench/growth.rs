//! Whether a transfer costs more when more is registered.

use towline::memory::create_buffer;
use towline::{Access, Endpoint, OffsetBuffer, Registered, Remote, Routing, SystemStorage};

use super::Session;
use super::report::{Row, Unit};
use super::shapes::Path;
use crate::measure;
use crate::outcome::{Failure, Outcome};
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Reply};

const BYTES: u64 = 4096;
const FEW: u32 = 1;
const MANY: [u32; 2] = [1_000, 100_000];

pub(super) fn measure(session: &mut Session) -> Outcome<()> {
    let mut worker = Worker::start("crowd")?;
    for path in Path::all().filter(|path| path.is_asked()) {
        let outcome = one_path(session, &mut worker, path);
        if let Err(failure) = outcome {
            session.fail("growth".to_owned(), Some(path.name()), &failure);
        }
    }
    Ok(())
}

fn one_path(session: &mut Session, worker: &mut Worker, path: Path) -> Outcome<()> {
    let few = Side::new(worker, path, FEW)?;
    for count in MANY {
        let many = Side::new(worker, path, count)?;
        let pace = session.pace.asked(path.medium().is_some());
        let times = measure::latencies(pace, &mut || many.read(), Some(&mut || few.read()))?;
        let row = Row::new(format!("growth-{count}"), Unit::Microseconds, times.ours * 1e6).against(
            "one registration",
            times.limit.map(|time| time * 1e6),
            Some(0.9),
        );
        session.rows.push(Row {
            path: Some(path.name().into()),
            op: Some("read".into()),
            bytes: BYTES,
            blocks: 1,
            block_size: BYTES,
            p99: times.p99.map(|time| time * 1e6),
            rounds: times.rounds,
            ..row
        });
    }
    Ok(())
}

/// Two endpoints, one here and one at the worker, with that many registrations each.
struct Side {
    endpoint: Endpoint,
    remote: Remote,
    locals: Vec<Registered<OffsetBuffer>>,
}

impl Side {
    fn new(worker: &mut Worker, path: Path, count: u32) -> Outcome<Side> {
        let reply = worker.ask(&Ask::Crowd { regions: count, bytes: BYTES })?;
        let Reply::Ticket { ticket } = reply else { return Err(worker.surprise(&reply)) };
        let endpoint = Endpoint::open(&format!("bench-growth-{count}"))?;
        let storage = create_buffer(SystemStorage::new(BYTES as usize)?);
        let mut locals = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let view = OffsetBuffer::new(storage.clone(), 0, BYTES as usize)?;
            locals.push(endpoint.register(view, Access::NONE).map_err(towline::Error::from)?);
        }
        let remote = endpoint.import_with(&ticket, &Routing::default().require(path.name())?)?;
        Ok(Side { endpoint, remote, locals })
    }

    fn read(&self) -> Outcome<()> {
        let Some(local) = self.locals.last() else { return Err(Failure::failed("nothing is registered")) };
        Ok(self.endpoint.read(&self.remote, local).start()?.wait()?)
    }
}
