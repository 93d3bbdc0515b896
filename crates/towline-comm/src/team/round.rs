//! Rounds: every rank announces a collective call to every other, and what it announced can be read by all.

use std::sync::atomic::Ordering;
use std::time::Instant;

use towline::{Kind, Transfer};

use super::layout::{ENTRY_HEAD, STATE_ROUND};
use super::{Call, MOST_GATHERED, PAYLOAD, Round, Team};
use crate::{Error, Result};

/// Offsets in an entry, behind its sequence.
const DIGEST: usize = 8;
const WORDS: usize = 16;
const LENGTH: usize = 48;
const NAME: usize = 56;

/// What a barrier announces.
const BARRIER: u64 = 0x6261_7272_6965_7221;
/// What the rounds of a gathering of bytes announce.
const GATHER: u64 = 0x6761_7468_6572_2121;

/// How far this rank is.
#[derive(Default)]
pub(super) struct Progress {
    round: u64,
    left: u64,
    /// The transfers that still read the staged entries, by slot.
    sent: [Vec<(usize, Transfer)>; 2],
}

impl Round<'_> {
    fn entry(&self, rank: usize) -> Option<usize> {
        (rank < self.team.nranks()).then(|| self.team.links.layout.entry(rank, self.number))
    }

    fn word(&self, rank: usize, offset: usize) -> u64 {
        // Every offset lies within the region, which this team holds.
        let word = self.entry(rank).and_then(|entry| self.team.links.region.load(entry + offset).ok());
        word.unwrap_or_default()
    }

    /// What that rank sent the others; zeros for a rank that does not exist.
    pub(crate) fn words(&self, rank: usize) -> [u64; 4] {
        std::array::from_fn(|index| self.word(rank, WORDS + 8 * index))
    }

    /// How many bytes rode along with that rank's announcement.
    pub(crate) fn payload_len(&self, rank: usize) -> usize {
        (self.word(rank, LENGTH) as usize).min(PAYLOAD)
    }

    /// Copies out the start of what rode along with that rank's announcement; returns how many bytes were copied.
    pub(crate) fn payload_into(&self, rank: usize, into: &mut [u8]) -> Result<usize> {
        let len = self.payload_len(rank).min(into.len());
        let Some(entry) = self.entry(rank) else { return Ok(0) };
        let links = &self.team.links;
        if self.team.reads_at_home() {
            // What a rank announced stays there until it has every rank's announcement of its next call.
            links.read_home(rank, entry + ENTRY_HEAD, &mut into[..len])?;
        } else {
            links.region.read_at(entry + ENTRY_HEAD, &mut into[..len])?;
        }
        Ok(len)
    }

    /// The start of the name of what that rank called.
    fn name(&self, rank: usize) -> String {
        let bytes = self.word(rank, NAME).to_le_bytes();
        let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    /// Compares what must be equal. Every rank comes to the same conclusion.
    fn agree(&self, name: &'static str) -> Result<()> {
        let ranks = 0..self.team.nranks();
        let first = self.word(0, DIGEST);
        if ranks.clone().all(|rank| self.word(rank, DIGEST) == first) {
            return Ok(());
        }
        let digests: Vec<u64> = ranks.clone().map(|rank| self.word(rank, DIGEST)).collect();
        let count = |digest: u64| digests.iter().filter(|one| **one == digest).count();
        // Of equally common ones, that of the lowest rank counts.
        let most = digests.iter().map(|digest| count(*digest)).max().unwrap_or_default();
        let common = digests.iter().copied().find(|digest| count(*digest) == most).unwrap_or(first);
        let differ: Vec<usize> = ranks.filter(|rank| digests[*rank] != common).collect();
        let usual = digests.iter().position(|digest| *digest == common).unwrap_or_default();
        let other = differ.first().copied().unwrap_or_default();
        let (usual_name, other_name) = (self.name(usual), self.name(other));
        let message = if usual_name == other_name {
            format!("rank {other} calls it with other arguments than rank {usual}")
        } else {
            format!("rank {other} calls {other_name:?} while rank {usual} calls {usual_name:?}")
        };
        Err(Error::invalid(name, message).about(differ))
    }
}

impl Team {
    /// Announces a collective call and waits for every rank's announcement. A digest that differs is `Invalid` on
    /// every rank and names those that differ from most; the team stays usable.
    pub(crate) fn enter(&self, call: Call<'_>) -> Result<Round<'_>> {
        self.enter_with(call, call.payload)
    }

    /// [`enter`](Self::enter) of a rank that does not read back its own payload: the round has none of it.
    pub(crate) fn enter_knowing(&self, call: Call<'_>) -> Result<Round<'_>> {
        self.enter_with(call, &[])
    }

    fn enter_with(&self, call: Call<'_>, own: &[u8]) -> Result<Round<'_>> {
        self.working(call.name)?;
        if call.payload.len() > PAYLOAD {
            let message = format!("{} bytes do not ride along, {PAYLOAD} do", call.payload.len());
            return Err(Error::invalid(call.name, message));
        }
        let mut progress = self.progress.lock();
        progress.round += 1;
        let round = progress.round;
        self.announce(&call, own, &mut progress).map_err(|error| self.fail(error))?;
        // Ranks are looked at in turn: an announcement does not go away.
        let (links, nranks) = (&self.links, self.nranks());
        let came =
            |rank: usize| links.region.load(links.layout.entry(rank, round)).is_ok_and(|seen| seen >= round);
        let mut next = 0;
        let check = || {
            while next < nranks && came(next) {
                next += 1;
            }
            (next == nranks).then_some(())
        };
        self.wait_together(call.name, || (0..nranks).filter(|rank| !came(*rank)).collect(), check)?;
        drop(progress);
        let round = Round { team: self, number: round };
        round.agree(call.name)?;
        Ok(round)
    }

    fn announce(&self, call: &Call<'_>, own: &[u8], progress: &mut Progress) -> Result<()> {
        let round = progress.round;
        let mut head = [0; ENTRY_HEAD - 8];
        let mut set = |offset: usize, word: u64| {
            head[offset - 8..offset].copy_from_slice(&word.to_le_bytes());
        };
        set(DIGEST, call.digest);
        for (index, word) in call.words.iter().enumerate() {
            set(WORDS + 8 * index, *word);
        }
        set(LENGTH, call.payload.len() as u64);
        let mut name = [0; 8];
        let len = call.name.len().min(name.len());
        name[..len].copy_from_slice(&call.name.as_bytes()[..len]);
        set(NAME, u64::from_le_bytes(name));

        let links = &self.links;
        if links.has_far() {
            self.unstage(call.name, &mut progress.sent[(round % 2) as usize])?;
            links.stage_entry(round, &head, call.payload)?;
        }
        links.region.store(STATE_ROUND, round)?;
        let sent = &mut progress.sent[(round % 2) as usize];
        let mut failed = None;
        let at_home = self.reads_at_home();
        // This rank's own entry comes first: the others may look there as soon as they are notified.
        for places in 0..self.nranks() {
            let peer = (self.rank() + places) % self.nranks();
            let payload = match (places == 0, at_home) {
                (true, true) | (false, false) => call.payload,
                (true, false) => own,
                (false, true) => &[],
            };
            match links.post_entry(peer, round, &head, payload) {
                Ok(None) => {}
                Ok(Some(transfer)) => sent.push((peer, transfer)),
                // The others are notified all the same: they wait for this rank.
                Err(error) => failed = failed.or(Some(lost(call.name, peer, &error))),
            }
        }
        // Every rank has the bytes before the first system call that wakes one.
        self.wake_others();
        failed.map_or(Ok(()), Err)
    }

    /// Whether what rides along is read where its rank has it: each byte then moves once to each rank, not twice.
    fn reads_at_home(&self) -> bool {
        self.all_near.load(Ordering::Relaxed)
    }

    fn wake_others(&self) {
        for peer in (0..self.nranks()).filter(|peer| *peer != self.rank()) {
            self.links.wake(peer);
        }
    }

    /// Waits until nothing reads the staged entry any more.
    fn unstage(&self, op: &'static str, sent: &mut Vec<(usize, Transfer)>) -> Result<()> {
        let mut failed = None;
        for (peer, transfer) in sent.drain(..) {
            if let Err(error) = self.links.wait_for(peer, &transfer) {
                failed = failed.or(Some(lost(op, peer, &error.into())));
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits until the announcements to far ranks have arrived, or until then.
    pub(super) fn settle_entries(&self, until: Instant) {
        let mut progress = self.progress.lock();
        for (_, transfer) in progress.sent.iter_mut().flat_map(|sent| sent.drain(..)) {
            if transfer.wait_for(until.saturating_duration_since(Instant::now())).is_none() {
                return;
            }
        }
    }

    /// Returns when every rank has left: what peers read or wrote in this round may be reused.
    pub(crate) fn leave(&self, round: Round<'_>) -> Result<()> {
        const OP: &str = "leave";
        debug_assert!(std::ptr::eq(round.team, self));
        self.working(OP)?;
        let mut progress = self.progress.lock();
        progress.left += 1;
        let left = progress.left;
        let (links, nranks) = (&self.links, self.nranks());
        let mine = links.layout.left(self.rank());
        for peer in 0..nranks {
            links.set(peer, mine, left, 1).map_err(|error| self.fail(lost(OP, peer, &error)))?;
        }
        self.wake_others();
        let gone = |rank: usize| links.region.load(links.layout.left(rank)).is_ok_and(|seen| seen >= left);
        let mut next = 0;
        let check = || {
            while next < nranks && gone(next) {
                next += 1;
            }
            (next == nranks).then_some(())
        };
        self.wait_together(OP, || (0..nranks).filter(|rank| !gone(*rank)).collect(), check)
    }

    /// Returns when every rank has called it.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.enter(Call { name: "barrier", digest: BARRIER, words: [0; 4], payload: &[] }).map(drop)
    }

    /// Gives every rank the bytes of all, by rank; at most [`MOST_GATHERED`] of each, of any length. Too many of one
    /// rank are `Invalid` on all.
    pub(crate) fn all_gather_bytes(&self, name: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let digest =
            name.bytes().fold(GATHER, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let sound = if mine.len() <= MOST_GATHERED { mine } else { &[] };
        let mut chunks = sound.chunks(PAYLOAD);
        let words = [mine.len() as u64, 0, 0, 0];
        let mut round =
            self.enter(Call { name, digest, words, payload: chunks.next().unwrap_or_default() })?;
        let lengths: Vec<usize> = (0..self.nranks()).map(|rank| round.words(rank)[0] as usize).collect();
        let long: Vec<usize> = (0..self.nranks()).filter(|rank| lengths[*rank] > MOST_GATHERED).collect();
        if let Some(rank) = long.first() {
            let message = format!("rank {rank} gives {} bytes, more than {MOST_GATHERED}", lengths[*rank]);
            return Err(Error::invalid(name, message).about(long));
        }
        let room_for = |len: &usize| towline::room::list(name, *len);
        let mut all = lengths.iter().map(room_for).collect::<towline::Result<Vec<Vec<u8>>>>()?;
        let mut buffer = vec![0; PAYLOAD];
        let rounds = lengths.iter().max().map_or(1, |most| most.div_ceil(PAYLOAD).max(1));
        for number in 1..=rounds {
            for (rank, bytes) in all.iter_mut().enumerate() {
                let copied = round.payload_into(rank, &mut buffer)?;
                let wanted = copied.min(lengths[rank] - bytes.len());
                bytes.extend_from_slice(&buffer[..wanted]);
            }
            if number < rounds {
                let payload = chunks.next().unwrap_or_default();
                round = self.enter(Call { name, digest: digest ^ 1, words, payload })?;
            }
        }
        match (0..self.nranks()).find(|rank| all[*rank].len() != lengths[*rank]) {
            None => Ok(all),
            Some(rank) => {
                Err(Error::protocol(name, format!("rank {rank} gave fewer bytes than it announced"))
                    .about([rank]))
            }
        }
    }
}

/// The error of a rank to which something could not be sent.
pub(super) fn lost(op: &'static str, peer: usize, error: &Error) -> Error {
    let kind = match error.kind() {
        Kind::Stale => Kind::Disconnected,
        kind => kind,
    };
    Error::new(kind, op, format!("rank {peer} cannot be reached: {}", error.message()))
        .about([peer])
        .caused_by(error.clone())
}
