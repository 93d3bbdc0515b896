//! Collective registration: every rank sends the others what it registers, and all come to the same verdict.

use std::sync::Arc;

use towline::{Access, Buffer, Endpoint, Kind, MemoryDescription, Registered, Remote, Routing, Span, Ticket};

use super::window::Parts;
use super::{Memory, RegisteredMemory, WindowCore, WindowFlag, WindowOptions, host_only};
use crate::team::Team;
use crate::{Error, Result};

const OP: &str = "register_window";

/// What one rank brings to a registration.
#[derive(Debug, PartialEq, Eq)]
struct Offer {
    /// Why this rank cannot take part.
    refusal: Option<(u8, String)>,
    flags: u32,
    unequal_sizes: bool,
    len: u64,
    offset: u64,
    next_id: u64,
    ticket: Vec<u8>,
}

impl Offer {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64 + self.ticket.len());
        match &self.refusal {
            None => bytes.push(u8::MAX),
            Some((kind, _)) => bytes.push(*kind),
        }
        bytes.push(u8::from(self.unequal_sizes));
        bytes.extend(self.flags.to_le_bytes());
        for word in [self.len, self.offset, self.next_id] {
            bytes.extend(word.to_le_bytes());
        }
        match &self.refusal {
            None => bytes.extend(&self.ticket),
            Some((_, why)) => bytes.extend(why.as_bytes()),
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Offer> {
        let short = || Error::protocol(OP, "a rank's announcement is too short");
        let word = |at: usize| -> Result<u64> {
            let bytes = bytes.get(at..at + 8).and_then(|slice| slice.first_chunk::<8>());
            bytes.map(|bytes| u64::from_le_bytes(*bytes)).ok_or_else(short)
        };
        let flags = bytes.get(2..6).and_then(|slice| slice.first_chunk::<4>()).ok_or_else(short)?;
        let rest = bytes.get(30..).ok_or_else(short)?;
        let refused = bytes[0] != u8::MAX;
        Ok(Offer {
            refusal: refused.then(|| (bytes[0], String::from_utf8_lossy(rest).into_owned())),
            flags: u32::from_le_bytes(*flags),
            unequal_sizes: bytes[1] != 0,
            len: word(6)?,
            offset: word(14)?,
            next_id: word(22)?,
            ticket: if refused { Vec::new() } else { rest.to_vec() },
        })
    }

    /// An offer that says why there is none.
    fn refusal(error: &Error) -> (u8, String) {
        let index = Kind::ALL.iter().position(|(kind, _)| *kind == error.kind()).unwrap_or(0);
        (index as u8, error.message().chars().take(512).collect())
    }
}

/// The verdict on what the ranks offered: the same on every rank, since all judge the same list.
fn judge(offers: &[Offer]) -> Result<()> {
    let refusing: Vec<usize> = (0..offers.len()).filter(|rank| offers[*rank].refusal.is_some()).collect();
    if let Some((code, why)) = refusing.first().and_then(|rank| offers[*rank].refusal.as_ref()) {
        let kind = Kind::ALL.get(usize::from(*code)).map_or(Kind::Internal, |(kind, _)| *kind);
        return Err(Error::new(kind, OP, format!("a rank cannot take part: {why}")).about(refusing));
    }
    agree(offers, "flags", |offer| u64::from(offer.flags) << 1 | u64::from(offer.unequal_sizes))?;
    let Some(first) = offers.first() else { return Ok(()) };
    if !first.unequal_sizes {
        agree(offers, "sizes", |offer| offer.len)?;
    }
    if first.flags & WindowFlag::COLL_SYMMETRIC.bits() != 0 {
        agree(offers, "offsets", |offer| offer.offset)?;
    }
    Ok(())
}

/// Refuses where the ranks do not all say the same; names those that differ from most.
fn agree(offers: &[Offer], what: &str, of: impl Fn(&Offer) -> u64) -> Result<()> {
    let values: Vec<u64> = offers.iter().map(of).collect();
    let votes = |value: u64| values.iter().filter(|other| **other == value).count();
    let Some(usual) =
        values.iter().copied().reduce(|best, next| if votes(next) > votes(best) { next } else { best })
    else {
        return Ok(());
    };
    let differing: Vec<usize> = (0..values.len()).filter(|rank| values[*rank] != usual).collect();
    if differing.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = values.iter().map(u64::to_string).collect();
    Err(Error::invalid(OP, format!("the ranks' {what} differ: {}", list.join(", "))).about(differing))
}

/// Makes this rank's memory reachable.
fn prepare(endpoint: &Endpoint, storage: Buffer) -> Result<(Registered<Buffer>, Ticket)> {
    host_only(OP, &storage)?;
    let region = endpoint.register(storage, Access::READ_WRITE)?;
    let ticket = region.ticket()?;
    Ok((region, ticket))
}

impl RegisteredMemory {
    /// Registers a window together with all other ranks, with this rank's memory or the reason why it has none.
    pub(crate) fn register_window(
        &self,
        team: &Arc<Team>,
        storage: Result<Buffer>,
        options: WindowOptions,
    ) -> Result<Arc<WindowCore>> {
        let _one_call = team.serialise();
        let segment = storage.as_ref().ok().and_then(|storage| storage.segment());
        let offset = segment.map_or(0, |slice| slice.offset as u64);
        let prepared = storage.and_then(|storage| prepare(self.endpoint(), storage));
        let mine = Offer {
            refusal: prepared.as_ref().err().map(Offer::refusal),
            flags: options.flags.bits(),
            unequal_sizes: options.unequal_sizes,
            len: prepared.as_ref().map_or(0, |(region, _)| region.size() as u64),
            offset,
            next_id: self.windows().next_id(),
            ticket: prepared.as_ref().map_or_else(|_| Vec::new(), |(_, ticket)| ticket.encode()),
        };
        let gathered = team.all_gather_bytes(OP, &mine.encode())?;
        // Ranks wait for the memory of windows that they closed before they came here and this one keeps open.
        self.windows().release_ended();
        let offers = gathered.iter().map(|bytes| Offer::decode(bytes)).collect::<Result<Vec<_>>>()?;
        let id = offers.iter().map(|offer| offer.next_id).max().unwrap_or(1);
        self.windows().use_up(id);
        judge(&offers)?;
        let (region, _) = prepared?;
        let imported = self.import(team, &offers);
        let remotes = all_or_none(team, OP, imported)?;
        let peers = offers.iter().map(|offer| offer.len as usize).zip(remotes).collect();
        let core = WindowCore::new(Parts {
            id,
            flags: options.flags,
            addr: region.addr(),
            local: Span::from(&region),
            region: Some(region),
            peers,
        });
        self.windows().insert(&core);
        Ok(core)
    }

    /// Makes a window of the registered buffers that the ranks use in one call. Every rank calls it.
    pub(super) fn share_buffers(&self, team: &Arc<Team>, mine: &Memory) -> Result<Arc<WindowCore>> {
        const OP: &str = "register_buffer";
        let buffer = mine.buffer().ok_or_else(|| Error::invalid(OP, "not a registered buffer"))?;
        let ticket = buffer.ticket(OP);
        let offer = Offer {
            refusal: ticket.as_ref().err().map(Offer::refusal),
            flags: 0,
            unequal_sizes: true,
            len: buffer.len() as u64,
            offset: 0,
            next_id: 0,
            ticket: ticket.map_or_else(|_| Vec::new(), |ticket| ticket.encode()),
        };
        let gathered = team.all_gather_bytes(OP, &offer.encode())?;
        let offers = gathered.iter().map(|bytes| Offer::decode(bytes)).collect::<Result<Vec<_>>>()?;
        judge(&offers)?;
        let remotes = all_or_none(team, OP, self.import(team, &offers))?;
        let peers = offers.iter().map(|offer| offer.len as usize).zip(remotes).collect();
        Ok(WindowCore::new(Parts {
            id: buffer.id(),
            flags: WindowFlag::DEFAULT,
            addr: buffer.addr(),
            local: buffer.local().clone(),
            region: None,
            peers,
        }))
    }

    fn import(&self, team: &Team, offers: &[Offer]) -> Result<Vec<Remote>> {
        let within = team.options().timeout;
        let mut tickets = offers
            .iter()
            .enumerate()
            .map(|(rank, offer)| Ok((rank, Ticket::decode(&offer.ticket)?)))
            .collect::<Result<Vec<_>>>()?;
        // What the caller allows concerns other ranks: a rank always reaches itself directly.
        let (_, own) = tickets.remove(team.rank());
        let own = self.endpoint().import_within(&own, &Routing::default(), within);
        let mut remotes = team.import(self.endpoint(), self.routing(), within, tickets)?;
        remotes.insert(team.rank(), own);
        let about = |(rank, remote): (usize, towline::Result<Remote>)| {
            remote.map_err(|error| Error::from(error).about([rank]))
        };
        remotes.into_iter().enumerate().map(about).collect()
    }
}

/// The same outcome on every rank: what this rank has, or the error of the first rank that has none.
fn all_or_none<T>(team: &Team, op: &'static str, mine: Result<T>) -> Result<T> {
    // Whom the error is about, one more than the rank: the one that cannot be reached is to blame, not who says so.
    let gathered = match &mine {
        Ok(_) => Vec::new(),
        Err(error) => {
            let (kind, why) = Offer::refusal(error);
            let about = error.ranks().first().map_or(0, |rank| *rank as u32 + 1);
            std::iter::once(kind).chain(about.to_le_bytes()).chain(why.into_bytes()).collect()
        }
    };
    let answers = team.all_gather_bytes(op, &gathered)?;
    let failing = answers.iter().enumerate().filter_map(|(rank, answer)| {
        let (code, rest) = answer.split_first()?;
        let (about, why) = rest.split_first_chunk::<4>()?;
        let blamed =
            (u32::from_le_bytes(*about) as usize).checked_sub(1).filter(|peer| *peer < answers.len());
        Some((*code, blamed.unwrap_or(rank), String::from_utf8_lossy(why)))
    });
    let failing: Vec<_> = failing.collect();
    let Some((code, _, why)) = failing.first() else { return mine };
    let kind = Kind::ALL.get(usize::from(*code)).map_or(Kind::Internal, |(kind, _)| *kind);
    let error = Error::new(kind, op, format!("a rank cannot reach another: {why}"))
        .about(failing.iter().map(|(_, blamed, _)| *blamed));
    // A rank that died after it had announced its part is missed only here.
    Err(if kind == Kind::Disconnected { team.fail(error) } else { error })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn offer(len: u64, flags: u32, offset: u64) -> Offer {
        Offer { refusal: None, flags, unequal_sizes: false, len, offset, next_id: 1, ticket: vec![1, 2] }
    }

    #[test]
    fn an_offer_survives_the_wire_and_a_torn_one_is_refused() {
        let mut whole = offer(77, 3, 4096);
        assert_eq!(Offer::decode(&whole.encode()).unwrap(), whole);
        for cut in 0..30 {
            assert!(Offer::decode(&whole.encode()[..cut]).is_err());
        }
        whole.refusal = Some((4, "no".into()));
        whole.ticket.clear();
        assert_eq!(Offer::decode(&whole.encode()).unwrap(), whole);
    }

    #[test]
    fn ranks_that_differ_from_most_are_named() {
        let offers = [offer(8, 0, 0), offer(16, 0, 0), offer(8, 0, 0)];
        assert_eq!(judge(&offers).unwrap_err().ranks(), [1]);
        let offers = [offer(8, 1, 0), offer(8, 1, 0), offer(8, 1, 64)];
        assert_eq!(judge(&offers).unwrap_err().ranks(), [2]);
        let offers = [offer(8, 0, 0), offer(8, 0, 64)];
        assert!(judge(&offers).is_ok());
    }
}
