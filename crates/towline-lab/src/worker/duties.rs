//! What a worker does when it is asked.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use towline::memory::{MemoryDescription, Storage, create_buffer};
use towline::{
    Access, Buffer, DeviceStorage, DiskStorage, Endpoint, OffsetBuffer, Registered, Remote, Routing,
    SharedStorage, SystemStorage, Ticket,
};

use super::member::Member;
use super::protocol::{Ask, Guard, Memory, Op, Reply, Usage, nixl};
use super::sockets;
use crate::outcome::{Failure, Outcome};
use crate::pattern::{self, Shuffle};

/// How long an echo waits for the next message before it gives up.
const QUIET: Duration = Duration::from_secs(30);

pub(super) struct Duties {
    name: String,
    lends: bool,
    owner: Option<Endpoint>,
    mover: Option<Endpoint>,
    regions: Vec<Option<Registered<Buffer>>>,
    views: Vec<Registered<OffsetBuffer>>,
    others: Vec<(Endpoint, Option<Remote>)>,
    echo: Option<Remote>,
    member: Member,
}

impl Duties {
    pub(super) fn new(name: &str) -> Duties {
        Duties {
            name: name.to_owned(),
            lends: false,
            owner: None,
            mover: None,
            regions: Vec::new(),
            views: Vec::new(),
            others: Vec::new(),
            echo: None,
            member: Member::default(),
        }
    }

    pub(super) fn perform(&mut self, ask: Ask) -> Outcome<Reply> {
        Ok(match ask {
            Ask::Lend => {
                self.lends = true;
                Reply::Done
            }
            Ask::Register { memory, bytes, seed } => self.register(memory, bytes, seed)?,
            Ask::Fill { region, seed } => {
                pattern::fill(self.region(region)?.storage(), seed)?;
                Reply::Done
            }
            Ask::Release { region } => {
                if let Some(region) = self.regions.get_mut(region).and_then(Option::take) {
                    region.into_storage().map_err(towline::Error::from)?;
                }
                Reply::Done
            }
            Ask::Verify { region, seed, bytes } => {
                let wrong = pattern::first_wrong(self.region(region)?.storage(), seed, bytes)?;
                Reply::Verified { wrong }
            }
            Ask::VerifyBlocks { region, seed, blocks, block_size } => {
                let pieces = Shuffle::new(blocks, block_size)?.pieces();
                // A write: the source is the peer's local side.
                let pieces = pieces.into_iter().map(|(remote, local, len)| (local, remote, len));
                Reply::Verified { wrong: pattern::wrong_piece(self.region(region)?.storage(), seed, pieces)? }
            }
            Ask::Move { ticket, path, op, bytes, seed, repeat } => {
                self.transfer(&ticket, &path, op, bytes, seed, repeat)?
            }
            Ask::Echo { ticket } => {
                self.echo = Some(self.owner()?.import(&ticket)?);
                Reply::Done
            }
            Ask::Crowd { regions, bytes } => self.crowd(regions, bytes)?,
            Ask::Guarded { guard, bytes } => self.guarded(guard, bytes)?,
            Ask::Tickets { count } => self.tickets(count)?,
            Ask::Owners { count } => self.owners(count)?,
            Ask::Sockets { medium, op, streams, buffer, bulk } => {
                Reply::Address { address: sockets::serve(medium, op, streams, buffer, bulk)? }
            }
            Ask::Endpoints { count, ticket } => {
                for index in 0..count {
                    let endpoint = Endpoint::open(&format!("{}-{index}", self.name))?;
                    let remote = endpoint.import(&ticket)?;
                    self.others.push((endpoint, Some(remote)));
                }
                Reply::Done
            }
            Ask::Usage => Reply::Usage(Usage::now()),
            Ask::Comm { order } => Reply::Comm { answer: self.member.perform(order)? },
        })
    }

    /// What goes on after the reply: an echo listens here, in the thread that otherwise waits for orders.
    pub(super) fn after_reply(&mut self) -> towline::Result<()> {
        let (Some(remote), Some(owner)) = (self.echo.take(), &self.owner) else { return Ok(()) };
        while let Ok(notification) = owner.receive(QUIET) {
            if notification.message == b"stop" {
                break;
            }
            owner.notify(&remote, notification.message)?.wait()?;
        }
        Ok(())
    }

    fn owner(&mut self) -> Outcome<&Endpoint> {
        open_once(&mut self.owner, &self.name, self.lends)
    }

    fn region(&self, region: usize) -> Outcome<&Registered<Buffer>> {
        self.regions
            .get(region)
            .and_then(Option::as_ref)
            .ok_or_else(|| Failure::failed(format!("there is no region {region}")))
    }

    fn register(&mut self, memory: Memory, bytes: u64, seed: u64) -> Outcome<Reply> {
        let storage = match memory {
            Memory::Shared => create_buffer(SharedStorage::new(bytes as usize)?),
            Memory::System => create_buffer(SystemStorage::new(bytes as usize)?),
            Memory::Disk => {
                let mut file = DiskStorage::new(bytes as usize)?;
                // A worker that is killed leaves nothing behind.
                file.unlink()?;
                create_buffer(file)
            }
            Memory::Device => create_buffer(DeviceStorage::new(bytes as usize, 0)?),
        };
        pattern::fill(&storage, seed)?;
        let file = storage.segment().map(|slice| slice.segment.file().as_raw_fd());
        let addr = storage.addr() as u64;
        let region = self.owner()?.register(storage, Access::READ_WRITE).map_err(towline::Error::from)?;
        let ticket = region.ticket()?;
        self.regions.push(Some(region));
        Ok(Reply::Region { region: self.regions.len() - 1, ticket, addr, file })
    }

    fn transfer(
        &mut self,
        ticket: &Ticket,
        path: &str,
        op: Op,
        bytes: u64,
        seed: u64,
        repeat: u32,
    ) -> Outcome<Reply> {
        let routing = Routing::default().require(path)?;
        let name = format!("{}-mover", self.name);
        let mover = open_once(&mut self.mover, &name, false)?;
        let remote = mover.import_with(ticket, &routing)?;
        let local = mover
            .register(SystemStorage::new(bytes as usize)?, Access::NONE)
            .map_err(towline::Error::from)?;
        if op == Op::Write {
            pattern::fill(local.storage(), seed)?;
        }
        let request = || match op {
            Op::Read => mover.read(&remote, &local).start(),
            Op::Write => mover.write(&remote, &local).start(),
        };
        let first = request()?;
        first.wait()?;
        let wrong = match op {
            Op::Read => pattern::first_wrong(local.storage(), seed, bytes)?,
            Op::Write => None,
        };
        let mut times = Vec::new();
        for _ in 0..repeat.max(1) {
            let start = Instant::now();
            request()?.wait()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(Reply::Moved { seconds: times[times.len() / 2], path: first.path().to_owned(), wrong })
    }

    fn crowd(&mut self, regions: u32, bytes: u64) -> Outcome<Reply> {
        let endpoint = Endpoint::open(&format!("{}-crowd-{regions}", self.name))?;
        let storage = create_buffer(SharedStorage::new(bytes as usize)?);
        for _ in 0..regions {
            let view = OffsetBuffer::new(storage.clone(), 0, bytes as usize)?;
            self.views.push(endpoint.register(view, Access::READ_WRITE).map_err(towline::Error::from)?);
        }
        self.others.push((endpoint, None));
        match self.views.last() {
            Some(last) => Ok(Reply::Ticket { ticket: last.ticket()? }),
            None => Err(Failure::failed("a crowd of nobody")),
        }
    }

    fn guarded(&mut self, guard: Guard, bytes: u64) -> Outcome<Reply> {
        let endpoint = guard.options(&format!("{}-{guard:?}", self.name))?.open()?;
        let storage = create_buffer(SharedStorage::new(bytes as usize)?);
        let view = OffsetBuffer::new(storage, 0, bytes as usize)?;
        let region = endpoint.register(view, Access::READ_WRITE).map_err(towline::Error::from)?;
        let ticket = region.ticket()?;
        self.views.push(region);
        self.others.push((endpoint, None));
        Ok(Reply::Ticket { ticket })
    }

    fn owners(&mut self, count: u32) -> Outcome<Reply> {
        let storage = create_buffer(SharedStorage::new(4096)?);
        let mut tickets = Vec::new();
        for index in 0..count {
            let endpoint = Endpoint::open(&format!("{}-owner-{index}", self.name))?;
            let view = OffsetBuffer::new(storage.clone(), 0, 4096)?;
            let region = endpoint.register(view, Access::READ).map_err(towline::Error::from)?;
            tickets.push(region.ticket()?);
            self.views.push(region);
            self.others.push((endpoint, None));
        }
        Ok(Reply::Tickets { tickets })
    }

    fn tickets(&mut self, count: u32) -> Outcome<Reply> {
        let storage = create_buffer(SharedStorage::new(4096)?);
        let mut tickets = Vec::new();
        for _ in 0..count {
            let view = OffsetBuffer::new(storage.clone(), 0, 4096)?;
            let region = self.owner()?.register(view, Access::READ).map_err(towline::Error::from)?;
            tickets.push(region.ticket()?);
            self.views.push(region);
        }
        Ok(Reply::Tickets { tickets })
    }
}

fn open_once<'a>(endpoint: &'a mut Option<Endpoint>, name: &str, lends: bool) -> Outcome<&'a Endpoint> {
    if endpoint.is_none() {
        *endpoint = Some(Endpoint::options(name).nixl(nixl(lends)).open()?);
    }
    endpoint.as_ref().ok_or_else(|| Failure::failed("no endpoint"))
}
