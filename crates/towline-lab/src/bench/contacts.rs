//! First contact: a new endpoint's import of tickets whose owners it has never met.

use std::time::Instant;

use towline::{Endpoint, Ticket};

use super::Session;
use super::costs::one_region;
use super::report::{Row, Unit};
use crate::measure::median;
use crate::outcome::Outcome;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Reply};

/// Milliseconds that one contact may take, however many there are.
const TARGET: f64 = 2.0;

/// Processes with owners; each has one endpoint, or more where more peers are wanted.
const PROCESSES: u32 = 8;

/// One owner.
pub(super) fn one(session: &mut Session) -> Outcome<()> {
    let mut worker = Worker::start("contact")?;
    let ticket = one_region(&mut worker, 4096)?;
    let (mut times, mut path) = (Vec::new(), None);
    for _ in 0..20 {
        let endpoint = Endpoint::open("bench-contact")?;
        let start = Instant::now();
        let remote = endpoint.import(&ticket)?;
        times.push(start.elapsed().as_secs_f64());
        path = Some(remote.path());
    }
    let row = Row::new("first-contact", Unit::Milliseconds, median(&mut times) * 1e3).target(Some(TARGET));
    session.rows.push(Row { path: path.map(Into::into), rounds: times.len(), ..row });
    Ok(())
}

/// Eight owners, each in a process of its own, and sixty-four in those eight processes.
pub(super) fn many(session: &mut Session) -> Outcome<()> {
    let mut workers = Vec::new();
    for number in 0..PROCESSES {
        workers.push(Worker::start(&format!("contact-{number}"))?);
    }
    for each in [1, 8] {
        let mut tickets = Vec::new();
        for worker in &mut workers {
            match worker.ask(&Ask::Owners { count: each })? {
                Reply::Tickets { tickets: theirs } => tickets.extend(theirs),
                reply => return Err(worker.surprise(&reply)),
            }
        }
        contacts(session, &tickets)?;
    }
    Ok(())
}

/// One endpoint meets all of them with one call; the time of one contact is its share.
fn contacts(session: &mut Session, tickets: &[Ticket]) -> Outcome<()> {
    let (mut times, mut path) = (Vec::new(), None);
    for _ in 0..session.pace.fewest {
        let endpoint = Endpoint::open("bench-contacts")?;
        let start = Instant::now();
        let remotes = endpoint.import_many(tickets)?;
        times.push(start.elapsed().as_secs_f64() / tickets.len() as f64);
        for remote in remotes {
            path = Some(remote?.path());
        }
    }
    let name = format!("first-contact-{}-peers", tickets.len());
    let row = Row::new(name, Unit::Milliseconds, median(&mut times) * 1e3).target(Some(TARGET));
    session.rows.push(Row {
        path: path.map(Into::into),
        blocks: tickets.len() as u64,
        rounds: times.len(),
        ..row
    });
    Ok(())
}
