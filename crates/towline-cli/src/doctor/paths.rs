//! The paths, each probed and then tried with a second process.

use std::time::Instant;

use towline::{Access, Contact, Endpoint, PathProperties, Probe, Routing, SystemStorage, Ticket};
use towline_lab::outcome::{Failure, Outcome};
use towline_lab::size;
use towline_lab::worker::{Memory, Worker, nixl};

use super::{Check, Status};

const GROUP: &str = "Paths";
const BYTES: u64 = 1 << 20;
const SEED: u64 = 5;

/// Checks every path; returns those over which another process was reached.
pub(super) fn check(checks: &mut Vec<Check>) -> Vec<&'static str> {
    let start = Instant::now();
    let endpoint = Endpoint::options("doctor").nixl(nixl(false)).open();
    let opened = start.elapsed();
    let mut other = endpoint.as_ref().map_err(|error| error.clone().into()).and_then(|_| Other::start());
    let mut usable = Vec::new();
    for path in towline::paths() {
        let enforced = if path.enforced { "; the owner checks every access" } else { "" };
        let check = match (&path.probe, &endpoint, &mut other) {
            (Probe::Missing { reason, mend }, ..) => match path.may_be_missing {
                // Nothing here needs it, and the groups below say where it was looked for.
                Some(what) => Check::new(GROUP, path.name, Status::Note, what).mend(mend),
                None => Check::new(GROUP, path.name, Status::Missing, reason).mend(mend),
            },
            (Probe::Works(_), Ok(_), _) if path.contact == Contact::Nothing => {
                Check::new(GROUP, path.name, Status::Ok, path.summary)
            }
            (Probe::Works(_), Ok(endpoint), Ok(other)) => match other.reach(endpoint, &path) {
                Ok(time) => {
                    usable.push(path.name);
                    let found = format!("{}; {} read in {time}{enforced}", path.summary, size::bytes(BYTES));
                    Check::new(GROUP, path.name, Status::Ok, found)
                }
                Err(failure) => {
                    Check::new(GROUP, path.name, Status::Missing, failure.message).mend(path.mend)
                }
            },
            (Probe::Works(remark), ..) => Check::new(
                GROUP,
                path.name,
                Status::Note,
                format!("{remark} (not tried with another process)"),
            ),
        };
        checks.push(check);
    }
    match &endpoint {
        Ok(_) => checks.push(Check::new(
            "Contact",
            "open an endpoint",
            Status::Ok,
            size::seconds(opened.as_secs_f64()),
        )),
        Err(error) => {
            checks.push(Check::new("Contact", "open an endpoint", Status::Missing, error.to_string()))
        }
    }
    match &other {
        Ok(other) => checks.extend(other.first_contact()),
        Err(failure) => {
            checks.push(Check::new("Contact", "second process", Status::Missing, &failure.message))
        }
    }
    usable
}

/// A second process with regions of its own.
struct Other {
    worker: Worker,
    shared: Ticket,
}

impl Other {
    fn start() -> Outcome<Other> {
        let mut worker = Worker::start("patient")?;
        worker.lend()?;
        let shared = worker.register(Memory::Shared, BYTES, SEED)?.ticket;
        Ok(Other { worker, shared })
    }

    /// Reads the other process's bytes over that path, compares them, and says how long it took.
    fn reach(&mut self, endpoint: &Endpoint, path: &PathProperties) -> Outcome<String> {
        let ticket = self.worker.register(Memory::served_by(path), BYTES, SEED)?.ticket;
        let remote = endpoint.import_with(&ticket, &Routing::default().require(path.name)?)?;
        let local = endpoint
            .register(SystemStorage::new(BYTES as usize)?, Access::NONE)
            .map_err(towline::Error::from)?;
        endpoint.read(&remote, &local).start()?.wait()?;
        if let Some(offset) = towline_lab::pattern::first_wrong(local.storage(), SEED, BYTES)? {
            return Err(Failure::failed(format!("the byte at offset {offset} came wrong")));
        }
        let start = Instant::now();
        endpoint.read(&remote, &local).start()?.wait()?;
        Ok(size::seconds(start.elapsed().as_secs_f64()))
    }

    /// How long a new endpoint needs to open, and to make contact with the other process.
    fn first_contact(&self) -> Vec<Check> {
        let contact = || -> Outcome<_> {
            let start = Instant::now();
            let endpoint = Endpoint::open("doctor-contact")?;
            let opened = start.elapsed();
            let start = Instant::now();
            let remote = endpoint.import(&self.shared)?;
            Ok((opened, start.elapsed(), remote.path()))
        };
        match contact() {
            Ok((opened, contacted, path)) => vec![
                Check::new("Contact", "open a second one", Status::Ok, size::seconds(opened.as_secs_f64())),
                Check::new(
                    "Contact",
                    "first contact",
                    Status::Ok,
                    format!("{}; {path} is taken", size::seconds(contacted.as_secs_f64())),
                ),
            ],
            Err(failure) => vec![Check::new("Contact", "first contact", Status::Missing, failure.message)],
        }
    }
}
