//! What is on its way through a connection: unsent frames, and the places that payload goes to.
#![allow(unsafe_code, reason = "raw parts of registered memory")]

mod sink;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(super) use self::sink::{GivenUp, Landed, SCRATCH, Sink, hung_up};
use crate::budget::Charge;
use crate::bytes::{self, checked};
use crate::region::RegionUse;
use crate::runtime::socket::{MAX_PARTS, RawPart, RawPartMut};
use crate::session::initiator::UnitHold;
use crate::wire::Header;
use crate::{Error, Kind, Result};

/// What keeps the memory behind a payload in place.
#[derive(Clone)]
pub(super) enum Keep {
    /// A transfer of this process; the number is the request's.
    Transfer(UnitHold, u64),
    /// A region that this endpoint serves; the number is the request's.
    Region(Arc<RegionUse>, u64),
    /// Bytes of a file that this endpoint serves; the number is the request's.
    Bounce(Arc<dyn Bounced>, u64),
}

/// Bytes of a region that stop over in a buffer. Of no type, so that compilers need not follow all that a buffer names.
pub(super) trait Bounced: Send + Sync {
    fn generation(&self) -> u64;

    /// Whether the region is being taken back.
    fn is_closed(&self) -> bool;
}

impl Keep {
    pub(super) fn is_transfer(&self, id: u64) -> bool {
        matches!(self, Keep::Transfer(hold, _) if hold.transfer().id == id)
    }

    pub(super) fn is_generation(&self, generation: u64) -> bool {
        match self {
            Keep::Region(region, _) => region.core().generation == generation,
            Keep::Bounce(bounce, _) => bounce.generation() == generation,
            Keep::Transfer(..) => false,
        }
    }

    /// Whether the memory was lent to this process: pages of it may be gone.
    pub(super) fn is_lent(&self) -> bool {
        match self {
            Keep::Region(region, _) => region.core().lent,
            Keep::Transfer(hold, _) => hold.transfer().local_is_lent(),
            Keep::Bounce(..) => false,
        }
    }

    /// Whether the memory must not be touched any more.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Keep::Transfer(hold, _) => hold.transfer().is_stopped(),
            Keep::Region(region, _) => region.core().is_closed(),
            Keep::Bounce(bounce, _) => bounce.is_closed(),
        }
    }

    fn request(&self) -> u64 {
        match self {
            Keep::Transfer(_, request) | Keep::Region(_, request) | Keep::Bounce(_, request) => *request,
        }
    }
}

/// Parts of memory, with what keeps them in place: no frame and no sink names memory without that.
pub(super) struct Held {
    parts: Vec<RawPartMut>,
    keep: Keep,
}

impl Held {
    /// Parts that nothing is written to.
    pub(super) fn to_send(parts: Vec<RawPart>, keep: Keep) -> Held {
        let part = |part: RawPart| RawPartMut { ptr: part.ptr.cast_mut(), len: part.len };
        Held::new(parts.into_iter().map(part).collect(), keep)
    }

    /// Parts that stay in place as long as `keep` lives.
    pub(super) fn new(parts: Vec<RawPartMut>, keep: Keep) -> Held {
        Held { parts, keep }
    }

    /// The local memory of a unit, for the request of that number.
    pub(super) fn unit(hold: UnitHold, request: u64) -> Held {
        let (transfer, unit) = (hold.transfer(), hold.unit);
        let (base, pieces) = (transfer.base(transfer.units[unit].part), transfer.pieces(unit));
        let mut parts: Vec<RawPartMut> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let ptr = base.wrapping_add(piece.local as usize);
            match parts.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == ptr => last.len += piece.len as usize,
                _ => parts.push(RawPartMut { ptr, len: piece.len as usize }),
            }
        }
        Held::new(parts, Keep::Transfer(hold, request))
    }

    pub(super) fn parts(&self) -> &[RawPartMut] {
        &self.parts
    }
}

/// What follows the head of a frame that is sent, and whom the frame belongs to.
pub(super) enum Payload {
    /// Nothing; the frame belongs to nobody who could take it back.
    None,
    /// Nothing; the frame is taken back with what that keeps.
    Of(Keep),
    /// Parts of registered memory.
    Memory(Held),
}

// SAFETY: the parts are addresses; the `Keep` beside them pins the memory.
unsafe impl Send for Payload {}

/// What the queue is to learn, and has not yet.
pub(super) enum Late {
    Frame {
        head: Vec<u8>,
        files: Vec<OwnedFd>,
        payload: Payload,
    },
    /// A reply to that request has come.
    Answer(u64),
}

// SAFETY: as for `Payload`, whose memory the `Keep` pins. Said here, so that the compiler need not follow every transfer.
unsafe impl Send for Late {}

/// What a frame takes in its queue, its head apart; queues grow by doubling.
const FRAME: usize = 2 * size_of::<Frame>();

/// What may wait in a queue without being counted by itself, and by how much it is counted beyond that.
pub(super) const QUEUE: usize = 4 << 10;
const QUEUE_STEP: usize = 64 << 10;

/// A queue that has been emptied keeps room for so many frames.
const ROOM: usize = 8;

struct Frame {
    /// The request that it is, or 0.
    request: u64,
    head: Vec<u8>,
    files: Vec<OwnedFd>,
    payload: Vec<RawPart>,
    keep: Option<Keep>,
    /// How much of the head has been sent.
    head_sent: usize,
    /// The first part that has not been sent whole; parts that were cut short have their start moved.
    next: usize,
}

/// The request that a frame with that head is, or 0: what follows in one piece with it has the same number.
fn requested(head: &[u8]) -> u64 {
    let header = head.first_chunk().and_then(|head| Header::decode(head).ok());
    header.filter(|header| header.kind.is_answered()).map_or(0, |header| header.id)
}

impl Frame {
    fn cost(&self) -> usize {
        FRAME + self.head.capacity()
    }

    /// The request whose memory it keeps in place.
    fn kept_for(&self) -> Option<u64> {
        self.keep.as_ref().map(Keep::request)
    }

    fn started(&self) -> bool {
        self.head_sent > 0
    }

    /// Takes note of sent bytes; returns those that belong to the frames behind, `None` while some of this one are left.
    fn sent(&mut self, mut bytes: usize) -> Option<usize> {
        let of_head = bytes.min(self.head.len() - self.head_sent);
        self.head_sent += of_head;
        bytes -= of_head;
        if self.head_sent < self.head.len() {
            return None;
        }
        while let Some(part) = self.payload.get_mut(self.next) {
            if bytes < part.len {
                part.ptr = part.ptr.wrapping_add(bytes);
                part.len -= bytes;
                return None;
            }
            bytes -= part.len;
            self.next += 1;
        }
        Some(bytes)
    }
}

/// One system call is given at most about this many bytes: more than a local socket takes at once, and few enough that
/// the kernel does not look at parts which it will not reach.
pub(super) const PER_CALL: usize = 512 << 10;

/// The beginning of a part that is not longer than this is fetched into the cache before it is sent: while one part is
/// copied, nothing shows the processor where the next one is. Sent from 4 KiB parts, 4 % more went through loopback TCP.
const SHORT: usize = 16 << 10;

/// So many parts weigh as much as a frame.
const PARTS_PER_WEIGHT: usize = 256;

/// And so many bytes of heads.
const BYTES_PER_WEIGHT: usize = 4 << 10;

/// The frames that wait to be sent.
#[derive(Default)]
pub(super) struct Outgoing {
    frames: VecDeque<Frame>,
    gathered: Vec<RawPart>,
    parts: usize,
    /// Something that was gathered is in memory that was lent.
    lent: bool,
    /// The rest of a frame that was begun could not be kept, or another frame: nothing can be sent any more.
    broken: Option<Error>,
    memory: Memory,
    /// No request that waits has a lower number.
    lowest: u64,
    /// The reply to a request has come before all of the request was sent.
    early: bool,
    blocked: bool,
    /// What the event loop was last asked to watch for: reading, writing.
    pub(super) armed: (bool, bool),
}

/// What a queue takes of this process's memory, payload apart, which is not in it.
#[derive(Default)]
struct Memory {
    used: usize,
    /// What its session pays for it; nothing where no peer causes it.
    charge: Option<Charge>,
    /// What of that is for other things than the queue.
    apart: u64,
}

impl Memory {
    fn add(&mut self, bytes: usize) -> Result<()> {
        self.used += bytes;
        let Some(charge) = &mut self.charge else { return Ok(()) };
        let beyond = self.used.saturating_sub(QUEUE) as u64;
        if self.apart + beyond <= charge.bytes() {
            return Ok(());
        }
        charge.resize_briefly("answer", self.apart + beyond.next_multiple_of(QUEUE_STEP as u64))
    }

    fn sub(&mut self, bytes: usize) {
        self.used -= bytes;
        if self.used == 0
            && let Some(charge) = &mut self.charge
            && charge.bytes() > self.apart
        {
            // Giving back is never refused.
            let _ = charge.resize("answer", self.apart);
        }
    }
}

// SAFETY: as for `Payload`; `gathered` is scratch space that is filled and used under one lock.
unsafe impl Send for Outgoing {}

impl Outgoing {
    /// From now on a session pays for what is in it, beside what it has paid already.
    pub(super) fn paid_by(&mut self, charge: Charge) {
        self.memory.apart = charge.bytes();
        self.memory.charge = Some(charge);
    }

    pub(super) fn push(&mut self, head: Vec<u8>, files: Vec<OwnedFd>, payload: Payload) {
        if self.broken.is_some() {
            return;
        }
        let (payload, keep) = match payload {
            Payload::None => (Vec::new(), None),
            Payload::Of(keep) => (Vec::new(), Some(keep)),
            Payload::Memory(held) => (readable(held.parts), Some(held.keep)),
        };
        let request = requested(&head);
        let frame = Frame { request, head, files, payload, keep, head_sent: 0, next: 0 };
        if let Err(error) = self.memory.add(frame.cost()) {
            self.broken = Some(error);
            self.clear();
            return;
        }
        if request != 0 {
            self.lowest = self.lowest.min(request);
        }
        self.parts += frame.payload.len();
        self.frames.push_back(frame);
    }

    /// A reply to that request has come: refused where some of the request has not been sent.
    pub(super) fn answered(&mut self, request: u64) -> Result<()> {
        // Answers come in about the order of their requests, so that few of them have to look.
        if request >= self.lowest {
            self.lowest = u64::MAX;
            for waiting in self.frames.iter().map(|frame| frame.request).filter(|request| *request != 0) {
                self.lowest = self.lowest.min(waiting);
                self.early |= waiting == request;
            }
        }
        self.check_answers()
    }

    /// Refuses a reply that came too early.
    pub(super) fn check_answers(&self) -> Result<()> {
        match self.early {
            false => Ok(()),
            true => Err(Error::protocol("receive", "the owner answered before all of the request was sent")),
        }
    }

    /// How much is waiting: frames, the bytes of their heads, and the parts of memory that they name.
    pub(super) fn weight(&self) -> usize {
        self.frames.len() + self.parts / PARTS_PER_WEIGHT + self.memory.used / BYTES_PER_WEIGHT
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether there is nothing that a flush could move now.
    pub(super) fn is_idle(&self) -> bool {
        self.blocked || self.frames.is_empty()
    }

    /// Whether the socket was full at the last attempt.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    pub(super) fn set_blocked(&mut self, blocked: bool) {
        self.blocked = blocked;
    }

    /// Whether payload comes next, and no descriptors.
    pub(super) fn begins_with_payload(&self) -> bool {
        self.frames.front().is_some_and(|frame| !frame.payload.is_empty() && frame.files.is_empty())
    }

    /// The head of the first frame and its descriptors, where these have not been sent yet.
    pub(super) fn descriptors(&self) -> Option<(&[u8], &[OwnedFd])> {
        let first = self.frames.front().filter(|frame| !frame.started() && !frame.files.is_empty())?;
        Some((&first.head, &first.files))
    }

    /// The parts to send next, of as many frames as one system call takes, up to one that has descriptors; and whether some may
    /// be gone.
    pub(super) fn gather(&mut self) -> (&[RawPart], bool) {
        self.gathered.clear();
        self.lent = false;
        let mut len = 0;
        for (index, frame) in self.frames.iter().enumerate() {
            if index > 0 && !frame.files.is_empty() {
                break;
            }
            self.lent |= frame.keep.as_ref().is_some_and(Keep::is_lent);
            let unsent = &frame.head[frame.head_sent..];
            let head = RawPart { ptr: unsent.as_ptr(), len: unsent.len() };
            let parts =
                std::iter::once(&head).filter(|head| head.len > 0).chain(&frame.payload[frame.next..]);
            for part in parts {
                if self.gathered.len() == MAX_PARTS || len >= PER_CALL {
                    return (&self.gathered, self.lent);
                }
                if part.len <= SHORT {
                    bytes::expect(part.ptr, part.len);
                }
                self.gathered.push(*part);
                len += part.len;
            }
        }
        (&self.gathered, self.lent)
    }

    /// That many bytes have been sent.
    pub(super) fn sent(&mut self, mut bytes: usize) {
        while let Some(first) = self.frames.front_mut() {
            let rest = first.sent(bytes);
            if let Some(Keep::Transfer(hold, _)) = &first.keep {
                hold.transfer().progressed(0);
            }
            let Some(rest) = rest else { return };
            bytes = rest;
            self.parts -= first.payload.len();
            self.memory.sub(first.cost());
            self.frames.pop_front();
            if self.frames.is_empty() {
                self.frames.shrink_to(ROOM);
            }
            if bytes == 0 {
                return;
            }
        }
    }

    /// Takes back the frames that belong to something that is being stopped; returns their requests. Of a frame that
    /// is half sent the rest is copied first, since the stream must stay whole.
    pub(super) fn withdraw(&mut self, belongs: impl Fn(&Keep) -> bool) -> Vec<u64> {
        let mut requests = Vec::new();
        self.frames.retain_mut(|frame| {
            let Some(keep) = frame.keep.as_ref().filter(|keep| belongs(keep)) else { return true };
            self.parts -= frame.payload.len();
            if !frame.started() {
                self.memory.sub(frame.cost());
                requests.push(keep.request());
                return false;
            }
            let left = frame.payload.iter().skip(frame.next).map(|part| part.len).sum::<usize>();
            if let Err(error) = self.memory.add(left) {
                self.broken = Some(error);
                return true;
            }
            let before = frame.cost() + left;
            let mut rest = frame.head.split_off(frame.head_sent);
            if let Err(cause) = rest.try_reserve_exact(left) {
                let message = format!("no memory for the {left} bytes of a frame that is half sent");
                self.broken = Some(Error::new(Kind::Exhausted, "send", message).caused_by(cause));
                return true;
            }
            for part in frame.payload.drain(..).skip(frame.next) {
                let start = rest.len();
                rest.resize(start + part.len, 0);
                // SAFETY: the frame's `Keep` still pins the part's memory; `rest` has room for it.
                unsafe {
                    let into = rest.as_mut_ptr().add(start);
                    if keep.is_lent() {
                        let read = checked::read("read", into, part.ptr, part.len);
                        self.broken = self.broken.take().or(read.err().map(|_| checked::gone("read")));
                    } else {
                        bytes::copy(into, part.ptr, part.len);
                    }
                }
            }
            // What is left is a frame without a head of its own; its descriptors went with the first byte.
            frame.head = rest;
            frame.files.clear();
            (frame.head_sent, frame.next) = (0, 0);
            frame.keep = None;
            // What it was counted with beside its own cost goes again.
            self.memory.used = self.memory.used + frame.cost() - before;
            true
        });
        if self.broken.is_some() {
            self.clear();
        }
        requests
    }

    /// The requests of which nothing has been sent.
    pub(super) fn unsent(&self) -> Vec<u64> {
        self.frames.iter().filter(|frame| !frame.started()).filter_map(Frame::kept_for).collect()
    }

    /// Takes back the frame that belongs to that request, unless it has been begun.
    pub(super) fn withdraw_whole(&mut self, request: u64) -> bool {
        let at = self.frames.iter().position(|frame| frame.kept_for() == Some(request) && !frame.started());
        let withdrawn = at.and_then(|at| self.frames.remove(at));
        if let Some(frame) = &withdrawn {
            self.parts -= frame.payload.len();
            self.memory.sub(frame.cost());
        }
        withdrawn.is_some()
    }

    /// Why the stream cannot be made whole any more, where that is so.
    pub(super) fn why_broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    pub(super) fn clear(&mut self) {
        self.frames = VecDeque::new();
        self.parts = 0;
        self.memory.sub(self.memory.used);
    }
}

/// The same parts to send from.
fn readable(parts: Vec<RawPartMut>) -> Vec<RawPart> {
    parts.into_iter().map(|part| RawPart { ptr: part.ptr, len: part.len }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::budget::Budget;
    use crate::{Access, Endpoint, MemoryDescription as _, SystemStorage};

    fn ended(whys: &[GivenUp]) -> Result<()> {
        let mut sink = Sink::buffer(64, None).unwrap().with_body(b"asked").unwrap();
        for why in whys {
            sink.give_up(*why);
        }
        assert_eq!(sink.take_body(), b"asked");
        sink.outcome("write")
    }

    #[test]
    fn a_session_pays_for_what_waits_to_be_sent_and_is_ended_where_it_cannot() {
        let budget = Budget::new("tests", 8 << 20);
        let mut outgoing = Outgoing::default();
        outgoing.paid_by(budget.account().charge("test", 5000).unwrap());
        let push = |outgoing: &mut Outgoing| {
            outgoing.push(vec![0; 4000], Vec::new(), Payload::None);
            budget.used()
        };
        for number in 1..=100 {
            assert!(push(&mut outgoing) >= 5000 + number * 4000 - QUEUE as u64);
        }
        while !outgoing.is_empty() {
            outgoing.sent(4000);
        }
        assert_eq!(budget.used(), 5000, "what was sent costs nothing");
        let pushed = (0..).take_while(|_| push(&mut outgoing) > 5000).count() as u64;
        assert!(pushed * 4000 < 8 << 20 && outgoing.is_empty());
        assert_eq!(outgoing.why_broken().unwrap().kind(), Kind::Exhausted);
        drop(outgoing);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_payload_says_why_it_went_nowhere() {
        ended(&[]).unwrap();
        assert_eq!(ended(&[GivenUp::NotWanted]).unwrap_err().kind(), Kind::Stale);
        let error = ended(&[GivenUp::HungUp]).unwrap_err();
        assert_eq!((error.kind(), error.op()), (Kind::Disconnected, "write"));
        assert!(error.message().contains("hung up"), "{error}");
    }

    #[test]
    fn the_first_reason_stays() {
        let both = [GivenUp::NotWanted, GivenUp::HungUp];
        assert_eq!(ended(&both).unwrap_err().kind(), Kind::Stale);
        let mut refused = Sink::discard().refused(Error::new(Kind::PermissionDenied, "write", "no"));
        refused.give_up(GivenUp::HungUp);
        assert_eq!(refused.outcome("write").unwrap_err().kind(), Kind::PermissionDenied);
    }

    #[test]
    fn bytes_whose_sender_has_hung_up_go_nowhere_and_say_so() {
        let endpoint = Endpoint::open("owner").unwrap();
        let region = endpoint.register(SystemStorage::new(64).unwrap(), Access::READ_WRITE).unwrap();
        let using = Arc::new(region.span(0, 64).unwrap().core().begin_use("write").unwrap());
        let part = RawPartMut { ptr: region.addr() as *mut u8, len: 64 };
        let mut sink = Sink::memory(Held::new(vec![part], Keep::Region(using, 1)));
        // SAFETY: the part is the region's memory, which is in use, and the bytes fit.
        unsafe { sink.fill_if(&[7; 64], &|| false) };
        assert_eq!(sink.outcome("write").unwrap_err().kind(), Kind::Disconnected);
        let mut memory = [9; 64];
        region.read_at(0, &mut memory).unwrap();
        assert_eq!(memory, [0; 64]);
    }
}
