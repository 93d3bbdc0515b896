//! The owner's side of a bench: in this process or in another one, with the same calls.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use towline::{Access, Endpoint, Layout, OffsetBuffer, Registered, Storage, Ticket};

use super::{Setting, options_for};
use crate::lending;
use crate::oracle::{Stamp, Wrong};
use crate::process::{Failure, Process};
use crate::worker::{register_views, storage};

type Result<T> = std::result::Result<T, Failure>;

/// An endpoint whose memory is used.
pub enum Owner {
    /// In this process.
    Here(Endpoint),
    /// In a worker.
    There(Box<Mutex<Process>>),
}

/// What the owner counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerStats {
    /// Regions that are registered.
    pub regions: u64,
    /// Storages that wait for their last users.
    pub parked: u64,
    /// Accesses that were refused.
    pub refused: u64,
}

impl Owner {
    /// Opens an owner that can be reached by that path; there is no secret where `secret` is empty.
    pub fn open(path: &str, name: &str, setting: Setting, secret: &str) -> Owner {
        match setting {
            Setting::OneProcess => {
                let options = options_for(path, name);
                let options = if secret.is_empty() { options } else { options.secret(secret.as_bytes()) };
                Owner::Here(options.open().unwrap())
            }
            Setting::TwoProcesses => {
                let lends = lending::words(path);
                let secret = if secret.is_empty() { String::new() } else { format!("secret={secret}") };
                Owner::There(Box::new(Mutex::new(Process::open(name, &format!("{lends} {secret}")))))
            }
        }
    }

    /// Registers a new storage.
    pub fn register(&self, len: usize, kind: &str, access: Access) -> Result<OwnerRegion<'_>> {
        let inner = match self {
            Owner::Here(endpoint) => {
                let region = endpoint.register(storage(len, kind)?, access).map_err(|failed| failed.error)?;
                Inner::Here(Cell::new(Some(region)))
            }
            Owner::There(process) => {
                Inner::There(process, ask(process, &format!("register {len} {kind} {access}"))?.number(0))
            }
        };
        Ok(OwnerRegion { inner, len })
    }

    /// Registers storages of these lengths, each filled with the stamp of its part; and their tickets.
    pub fn register_parts(
        &self,
        lens: &[usize],
        kind: &str,
        stamp: Stamp,
    ) -> Result<(Vec<OwnerRegion<'_>>, Vec<Ticket>)> {
        match self {
            Owner::Here(_) => {
                let register = |len: &usize| self.register(*len, kind, Access::READ_WRITE);
                let regions = lens.iter().map(register).collect::<Result<Vec<_>>>()?;
                fill_parts(&regions, stamp);
                let tickets = regions.iter().map(OwnerRegion::try_ticket).collect::<Result<_>>()?;
                Ok((regions, tickets))
            }
            Owner::There(process) => {
                let order = words(&format!("register-parts {kind}"), stamp, lens.iter());
                let reply = ask(process, &order)?;
                let ids = reply.number(0)..;
                let region =
                    |(id, len): (u64, &usize)| OwnerRegion { inner: Inner::There(process, id), len: *len };
                let tickets = String::from_utf8_lossy(&reply.payload);
                let tickets = tickets.lines().map(|line| Ok(line.parse()?)).collect::<Result<_>>()?;
                Ok((ids.zip(lens).map(region).collect(), tickets))
            }
        }
    }

    /// Registers overlapping views of one storage: `count` of them, `step` apart, `len` long.
    pub fn views(&self, count: usize, step: usize, len: usize, kind: &str, stamp: Stamp) -> Views {
        match self {
            Owner::Here(endpoint) => {
                Views::Here(register_views(endpoint, count, step, len, kind, stamp).unwrap())
            }
            Owner::There(process) => {
                let Stamp { region, generation } = stamp;
                let reply = ask(process, &format!("views {count} {step} {len} {kind} {region} {generation}"))
                    .unwrap();
                Views::There(String::from_utf8(reply.payload).unwrap())
            }
        }
    }

    /// The next message: who sent it, and what.
    pub fn receive(&self, within: Duration) -> Result<(String, Vec<u8>)> {
        match self {
            Owner::Here(endpoint) => {
                let notification = endpoint.receive(within)?;
                Ok((notification.from.name, notification.message))
            }
            Owner::There(process) => {
                let reply = ask(process, &format!("receive {}", within.as_millis()))?;
                Ok((reply.text(0).to_owned(), reply.payload))
            }
        }
    }

    /// What it counts.
    pub fn stats(&self) -> OwnerStats {
        match self {
            Owner::Here(endpoint) => {
                let stats = endpoint.stats();
                let (regions, parked) = (stats.regions as u64, stats.parked.0 as u64);
                OwnerStats { regions, parked, refused: stats.refused }
            }
            Owner::There(process) => {
                let reply = ask(process, "stats").unwrap();
                OwnerStats { regions: reply.number(0), parked: reply.number(1), refused: reply.number(3) }
            }
        }
    }

    /// Closes the endpoint.
    pub fn close(&self) {
        match self {
            // Laws about pins find out by themselves what is still held.
            Owner::Here(endpoint) => drop(endpoint.close()),
            Owner::There(process) => drop(ask(process, "close").unwrap()),
        }
    }
}

/// Overlapping views of one storage; in a worker they stay until it ends.
pub enum Views {
    /// In this process.
    Here(Vec<Registered<OffsetBuffer>>),
    /// In a worker: their tickets.
    There(String),
}

impl Views {
    /// The ticket of each.
    pub fn tickets(&self) -> Vec<Ticket> {
        match self {
            Views::Here(regions) => regions.iter().map(|region| region.ticket().unwrap()).collect(),
            Views::There(text) => text.lines().map(|line| line.parse().unwrap()).collect(),
        }
    }
}

/// Fills regions of one owner, each with the stamp of its part.
pub(super) fn fill_parts(regions: &[OwnerRegion<'_>], stamp: Stamp) {
    match there(regions) {
        Some((process, ids)) => drop(ask(process, &words("fill-parts", stamp, ids.iter())).unwrap()),
        None => regions.iter().enumerate().for_each(|(part, region)| region.fill(stamp.of_part(part))),
    }
}

/// Says whether regions of one owner are what they were filled with.
pub(super) fn check_parts(regions: &[OwnerRegion<'_>], stamp: Stamp) -> std::result::Result<(), String> {
    match there(regions) {
        Some((process, ids)) => {
            let checked = ask(process, &words("check-parts", stamp, ids.iter()));
            checked.map(drop).map_err(|failure| failure.message)
        }
        None => regions.iter().enumerate().try_for_each(|(part, region)| {
            region
                .check(stamp.of_part(part), 0, region.len())
                .map_err(|wrong| format!("part {part}: {wrong}"))
        }),
    }
}

/// The process of regions that are in another one, and their numbers.
fn there<'a>(regions: &[OwnerRegion<'a>]) -> Option<(&'a Mutex<Process>, Vec<u64>)> {
    let mut found = None;
    let mut ids = Vec::new();
    for region in regions {
        if let Inner::There(process, id) = &region.inner {
            found = Some(*process);
            ids.push(*id);
        }
    }
    found.map(|process| (process, ids))
}

fn words<T: std::fmt::Display>(order: &str, stamp: Stamp, rest: impl Iterator<Item = T>) -> String {
    rest.fold(format!("{order} {} {}", stamp.region, stamp.generation), |order, word| {
        format!("{order} {word}")
    })
}

fn ask(process: &Mutex<Process>, order: &str) -> Result<crate::process::Reply> {
    process.lock().ask(order)
}

enum Inner<'a> {
    Here(Cell<Option<Registered<Arc<dyn Storage>>>>),
    There(&'a Mutex<Process>, u64),
}

/// A region of the owner.
pub struct OwnerRegion<'a> {
    inner: Inner<'a>,
    len: usize,
}

impl OwnerRegion<'_> {
    /// How many bytes it has.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its ticket.
    pub fn ticket(&self) -> Ticket {
        self.try_ticket().unwrap()
    }

    /// Its ticket, if it still has one.
    pub fn try_ticket(&self) -> Result<Ticket> {
        match &self.inner {
            Inner::Here(_) => Ok(self.here(|region| region.ticket())?),
            Inner::There(process, id) => Ok(ask(process, &format!("ticket {id}"))?.text(0).parse()?),
        }
    }

    /// A ticket with a layout of one dimension.
    pub fn ticket_with_blocks(&self, base: u64, block_len: u64, count: u64, stride: u64) -> Ticket {
        match &self.inner {
            Inner::Here(_) => {
                let layout = Layout::blocks(base, block_len, count, stride).unwrap();
                self.here(|region| region.ticket_with_layout(layout)).unwrap()
            }
            Inner::There(process, id) => {
                let order = format!("ticket-layout {id} {base} {block_len} {count} {stride}");
                ask(process, &order).unwrap().text(0).parse().unwrap()
            }
        }
    }

    /// Fills it.
    pub fn fill(&self, stamp: Stamp) {
        match &self.inner {
            Inner::Here(_) => self.here(|region| stamp.fill_storage(region.storage())).unwrap(),
            Inner::There(process, id) => {
                ask(process, &format!("fill {id} {} {}", stamp.region, stamp.generation)).unwrap();
            }
        }
    }

    /// Says whether part of it is what it was filled with.
    pub fn check(&self, stamp: Stamp, offset: usize, len: usize) -> std::result::Result<(), String> {
        match &self.inner {
            Inner::Here(_) => self
                .here(|region| Ok(stamp.verify_storage(region.storage(), offset, len)))
                .unwrap()
                .map_err(|wrong: Wrong| wrong.to_string()),
            Inner::There(process, id) => {
                let order = format!("check {id} {} {} {offset} {len}", stamp.region, stamp.generation);
                ask(process, &order).map(drop).map_err(|failure| failure.message)
            }
        }
    }

    /// Its bytes.
    pub fn take(&self, offset: usize, len: usize) -> Vec<u8> {
        match &self.inner {
            Inner::Here(_) => self
                .here(|region| {
                    let mut bytes = vec![0; len];
                    region.read_at(offset, &mut bytes).map(|()| bytes)
                })
                .unwrap(),
            Inner::There(process, id) => ask(process, &format!("take {id} {offset} {len}")).unwrap().payload,
        }
    }

    /// Changes its bytes.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        match &self.inner {
            Inner::Here(_) => self.here(|region| region.write_at(offset, bytes)).unwrap(),
            Inner::There(process, id) => {
                process.lock().ask_with(&format!("put {id} {offset}"), bytes).unwrap();
            }
        }
    }

    /// A word of it.
    pub fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.take(offset, 8).try_into().unwrap())
    }

    /// Waits for a counter.
    pub fn wait_signal(&self, offset: usize, at_least: u64, within: Duration) -> Result<u64> {
        match &self.inner {
            Inner::Here(_) => Ok(self.here(|region| region.wait_signal(offset, at_least, within))?),
            Inner::There(process, id) => {
                let order = format!("wait-signal {id} {offset} {at_least} {}", within.as_millis());
                Ok(ask(process, &order)?.number(0))
            }
        }
    }

    /// Deregisters it and frees its storage; where a peer is still inside, it stays registered for another try.
    pub fn deregister(&self, within: Duration) -> Result<()> {
        match &self.inner {
            Inner::Here(cell) => match cell.take().unwrap().into_storage_within(within) {
                Ok(_) => Ok(()),
                Err(pinned) => {
                    cell.set(Some(pinned.registration));
                    Err(pinned.error.into())
                }
            },
            Inner::There(process, id) => {
                ask(process, &format!("deregister {id} {}", within.as_millis())).map(drop)
            }
        }
    }

    /// Takes its memory back, fills it, and registers it again: the region that it is then.
    pub fn recycle(self, stamp: Stamp, within: Duration) -> Result<Self> {
        let Inner::There(process, id) = &self.inner else { panic!("only workers recycle their regions") };
        let order = format!("recycle {id} {} {} {}", stamp.region, stamp.generation, within.as_millis());
        let id = ask(process, &order)?.number(0);
        Ok(OwnerRegion { inner: Inner::There(process, id), len: self.len })
    }

    fn here<T>(
        &self,
        body: impl FnOnce(&Registered<Arc<dyn Storage>>) -> towline::Result<T>,
    ) -> towline::Result<T> {
        let Inner::Here(cell) = &self.inner else { panic!("the region is in another process") };
        let region = cell.take().expect("the region was deregistered");
        let outcome = body(&region);
        cell.set(Some(region));
        outcome
    }
}

impl Drop for OwnerRegion<'_> {
    fn drop(&mut self) {
        if let Inner::There(process, id) = &self.inner {
            let _ = process.lock().ask(&format!("drop {id}"));
        }
    }
}
