//! Communicators made from communicators: split by all ranks, shrunk by the survivors.
//!
//! **Split** needs the whole group: colours and keys, then the tickets of the new control regions, are exchanged
//! through the old one. **Shrink** must work when the old group does not: the lowest survivor opens a meeting, as for
//! a new communicator, and sends its id to the other survivors as a message to their endpoints, through the tickets
//! that all ranks know from the first meeting; so nothing depends on the dead.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline::crypto::sha256;
use towline::{Kind, Reach, Ticket};

use super::{Communicator, meet};
use crate::bootstrap::{UniqueIdOptions, open_meeting};
use crate::config::Config;
use crate::group;
use crate::member::{Member, Seating};
use crate::team::{Seat, Team};
use crate::unique_id::UniqueId;
use crate::{Error, Result, interrupt};

/// What begins the message that calls survivors to a meeting.
const CALL: &[u8; 16] = b"towline shrink 1";
/// How long a survivor looks for its message before it looks whether another communicator has found it.
const LOOK: Duration = Duration::from_millis(20);

impl Communicator {
    /// Splits the group: ranks of one colour form a new one, ordered by key, then by their old rank. Every rank calls
    /// it; a rank without a colour gets a null communicator.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Communicator> {
        self.split_with(color, key, None)
    }

    /// [`split`](Self::split) with settings of its own for the new communicator.
    pub fn split_with(&self, color: Option<u32>, key: i64, config: Option<Config>) -> Result<Communicator> {
        group::refuse("split")?;
        if let Some(cuda) = self.cuda() {
            let child = cuda.split(color, key, config.unwrap_or_else(|| cuda.config.clone()))?;
            return Ok(child.map_or_else(Communicator::null, Communicator::on_gpu));
        }
        let parent = self.member("split")?;
        parent.check_usable("split")?;
        let config = config.unwrap_or_else(|| parent.config.clone());
        config.check("split")?;
        let child = color.map(|_| Member::new(config, Arc::clone(&parent.station), None));
        let made = child.clone();
        let (child_now, from) = (child.clone(), Arc::clone(parent));
        let work = move || {
            let outcome =
                from.team("split").and_then(|team| split(&from, &team, color, key, child_now.as_ref()));
            if let Some(child) = child_now.filter(|_| !from.config.blocking) {
                child.worker.finish(outcome.clone());
            }
            outcome
        };
        if parent.config.blocking {
            work()?;
        } else {
            if let Some(child) = &child {
                child.worker.begin();
            }
            if let Err(error) = parent.worker.push(Box::new(work)) {
                if let Some(child) = &child {
                    child.worker.finish(Err(error.clone()));
                }
                return Err(error);
            }
        }
        Ok(made.map_or_else(Communicator::null, Communicator::from_inner))
    }

    /// Makes a group of all ranks but those. Only the survivors call it, with the same list; it also works after a
    /// rank has died or the communicator was revoked.
    pub fn shrink(&self, exclude: &[usize]) -> Result<Communicator> {
        self.shrink_with(exclude, None)
    }

    /// [`shrink`](Self::shrink) with settings of its own for the new communicator.
    pub fn shrink_with(&self, exclude: &[usize], config: Option<Config>) -> Result<Communicator> {
        group::refuse("shrink")?;
        if let Some(cuda) = self.cuda() {
            let child = cuda.shrink(exclude, config.unwrap_or_else(|| cuda.config.clone()))?;
            return Ok(Communicator::on_gpu(child));
        }
        let parent = self.member("shrink")?;
        let config = config.unwrap_or_else(|| parent.config.clone());
        config.check("shrink")?;
        let seating = parent.seating("shrink")?;
        let survivors = survivors(seating, exclude)?;
        let rank = survivors.iter().position(|survivor| *survivor == seating.rank).unwrap_or(0);
        let nth = {
            let mut shrinks = parent.shrinks.lock();
            *shrinks += 1;
            *shrinks
        };
        let child = Member::new(config, Arc::clone(&parent.station), Some((rank, survivors.len())));
        let made = Arc::clone(&child);
        let from = Arc::clone(parent);
        let work = move || shrink(&from, &child, &survivors, rank, nth);
        if parent.config.blocking {
            work()?;
        } else {
            made.worker.push(Box::new(work))?;
        }
        Ok(Communicator::from_inner(made))
    }
}

fn split(
    parent: &Arc<Member>,
    team: &Arc<Team>,
    color: Option<u32>,
    key: i64,
    child: Option<&Arc<Member>>,
) -> Result<()> {
    const OP: &str = "split";
    let _one_call = team.serialise();
    let mut mine = color.map_or(-1, i64::from).to_le_bytes().to_vec();
    mine.extend(key.to_le_bytes());
    let gathered = team.all_gather_bytes(OP, &mine)?;
    let mut members = Vec::new();
    for (rank, bytes) in gathered.iter().enumerate() {
        let words = bytes.first_chunk::<8>().zip(bytes.last_chunk::<8>()).filter(|_| bytes.len() == 16);
        let (theirs, key) = words.ok_or_else(|| Error::protocol(OP, "a rank's announcement is too short"))?;
        if Some(i64::from_le_bytes(*theirs)) == color.map(i64::from) {
            members.push((i64::from_le_bytes(*key), rank));
        }
    }
    members.sort_unstable();
    let seat = child.map(|child| {
        let options = child.config.team_options(members.len());
        let seat = Seat::open(child.endpoint(), members.len(), options)?;
        let ticket = seat.ticket()?;
        Ok::<_, Error>((seat, ticket))
    });
    // Nothing stands for a rank that has no seat; the others of its colour must learn of it.
    let ticket = seat.as_ref().and_then(|seat| seat.as_ref().ok()).map(|(_, ticket)| ticket.encode());
    let gathered = team.all_gather_bytes(OP, &ticket.unwrap_or_default())?;
    let (Some(child), Some(seat)) = (child, seat) else { return Ok(()) };
    let (seat, _) = seat?;
    let without: Vec<usize> =
        members.iter().map(|(_, rank)| *rank).filter(|rank| gathered[*rank].is_empty()).collect();
    if !without.is_empty() {
        return Err(Error::new(Kind::Exhausted, OP, "a rank could not join").about(without));
    }
    let tickets: Vec<Ticket> =
        members.iter().map(|(_, rank)| Ok(Ticket::decode(&gathered[*rank])?)).collect::<Result<_>>()?;
    let old = parent.seating(OP)?;
    let rank = members.iter().position(|(_, member)| *member == old.rank);
    let rank = rank.ok_or_else(|| Error::new(Kind::Internal, OP, "this rank is not of its own colour"))?;
    // The tickets are new for every split, so their digest names the group.
    let mut about: Vec<&[u8]> = vec![&old.group_id];
    about.extend(tickets.iter().map(|ticket| ticket.public_bytes()));
    let group_id = *sha256(&about).first_chunk().unwrap_or(&[0; 16]);
    let nranks = members.len();
    let team = Team::assemble(seat, rank, tickets.clone()).map_err(|error| error.during(OP))?;
    child.seat(Seating { rank, nranks, tickets, group_id }, team)
}

/// The old ranks that stay, in order.
fn survivors(seating: &Seating, exclude: &[usize]) -> Result<Vec<usize>> {
    const OP: &str = "shrink";
    if exclude.is_empty() {
        return Err(Error::invalid(OP, "no rank is excluded"));
    }
    let outside: Vec<usize> = exclude.iter().copied().filter(|rank| *rank >= seating.nranks).collect();
    if !outside.is_empty() {
        let why = format!("there are only {} ranks", seating.nranks);
        return Err(Error::invalid(OP, why).about(outside));
    }
    if exclude.contains(&seating.rank) {
        return Err(Error::invalid(OP, "an excluded rank cannot take part").about([seating.rank]));
    }
    Ok((0..seating.nranks).filter(|rank| !exclude.contains(rank)).collect())
}

fn shrink(
    parent: &Arc<Member>,
    child: &Arc<Member>,
    survivors: &[usize],
    rank: usize,
    nth: u64,
) -> Result<()> {
    const OP: &str = "shrink";
    let seating = parent.seating(OP)?;
    let survivors_said: Vec<u8> =
        survivors.iter().flat_map(|survivor| (*survivor as u64).to_le_bytes()).collect();
    let digest = sha256(&[&seating.group_id, &nth.to_le_bytes(), &survivors_said]);
    let about = *digest.first_chunk::<8>().unwrap_or(&[0; 8]);
    // The call is for this shrink of this communicator; who is called is compared at the meeting.
    let mut call = CALL.to_vec();
    call.extend(seating.group_id);
    call.extend(nth.to_le_bytes());
    let id = if rank == 0 {
        let (id, root) = open_meeting(&meeting_place(parent, &seating.tickets[survivors[0]]))
            .map_err(|error| error.during(OP))?;
        call.extend(id.as_bytes());
        for survivor in &survivors[1..] {
            if let Err(error) = send_call(parent, &seating.tickets[*survivor], &call) {
                let why = format!("a survivor cannot be reached: {}", error.message());
                let error = Error::new(error.kind(), OP, why).about([*survivor]);
                root.call_off(error.clone());
                return Err(error);
            }
        }
        id
    } else {
        receive_call(parent, &call, survivors[0], child.config.timeout)?
    };
    meet(child, survivors.len(), rank, &id, u64::from_le_bytes(about), OP)
}

/// A meeting where this rank's endpoint is reached, on a port of its own.
fn meeting_place(parent: &Member, ticket: &Ticket) -> UniqueIdOptions {
    let mut reached: Vec<SocketAddr> = Vec::new();
    for reach in &ticket.body().reach {
        if let Reach::Tcp(address) = reach
            && !reached.iter().any(|known| known.ip() == address.ip())
        {
            reached.push(SocketAddr::new(address.ip(), 0));
        }
    }
    // Other hosts first: an id has room for a few only.
    reached.sort_by_key(|address| address.ip().is_loopback());
    reached.truncate(3);
    let tls = parent.config.tls.is_some();
    match &parent.config.listen[..] {
        // The endpoint chose these itself, so they are addresses of this host.
        [] => UniqueIdOptions { listen: reached, tls, ..UniqueIdOptions::default() },
        listen => UniqueIdOptions {
            listen: listen.iter().map(|address| SocketAddr::new(address.ip(), 0)).collect(),
            advertise: if listen.len() == 1 { reached } else { Vec::new() },
            tls,
            unjoined: None,
        },
    }
}

fn send_call(parent: &Member, ticket: &Ticket, call: &[u8]) -> Result<()> {
    let remote = parent.endpoint().import(ticket)?;
    let transfer = parent.endpoint().notify(&remote, call.to_vec())?;
    loop {
        if let Some(ended) = transfer.wait_for(interrupt::turn(Duration::MAX)) {
            return Ok(ended?);
        }
        interrupt::check("shrink")?;
    }
}

/// Waits for the call of the lowest survivor.
fn receive_call(parent: &Member, call: &[u8], caller: usize, timeout: Duration) -> Result<UniqueId> {
    const OP: &str = "shrink";
    let started = Instant::now();
    loop {
        {
            let mut mail = parent.station.mail.lock();
            if let Some(index) = mail.iter().position(|message| message.starts_with(call)) {
                let message = mail.swap_remove(index);
                return UniqueId::from_bytes(&message[call.len()..]).map_err(|error| error.during(OP));
            }
        }
        interrupt::check(OP)?;
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            let waited = started.elapsed().as_secs_f64();
            let why = format!("the lowest survivor did not call the others in {waited:.3} s");
            return Err(Error::new(Kind::Timeout, OP, why).about([caller]));
        }
        match parent.endpoint().receive(left.min(LOOK)) {
            Ok(notification) if notification.message.starts_with(CALL) => {
                let mut mail = parent.station.mail.lock();
                mail.push(notification.message);
            }
            Ok(_) => {}
            Err(error) if error.kind() == Kind::Timeout => {}
            Err(error) => return Err(Error::from(error).during(OP)),
        }
    }
}
