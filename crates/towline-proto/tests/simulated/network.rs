//! Connections whose bytes take time, come in portions of any size, and may vanish.

use std::collections::VecDeque;
use std::time::Instant;

use towline_proto::wire::{HEADER_LEN, Header};
use towline_proto::{Error, Result};

/// Bytes that an owner's kernel keeps for it, on each connection.
pub(crate) const INBOX: usize = 700;

/// Numbers that follow from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end
    }

    /// Once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Memory that a payload comes from, or goes to, and what keeps it in place.
pub(crate) trait Memory {
    fn get(&self, at: usize) -> u8;
    fn put(&self, at: usize, byte: u8);
}

/// A frame on its way out.
pub(crate) struct Frame<M> {
    /// The request that it is, or answers.
    pub(crate) request: u64,
    /// What it belongs to that may be stopped: a transfer, or a region.
    pub(crate) of: Option<u64>,
    pub(crate) head: Vec<u8>,
    pub(crate) payload: Option<(M, usize)>,
    pub(crate) sent: usize,
}

impl<M: Memory> Frame<M> {
    pub(crate) fn bare(request: u64, of: Option<u64>, head: Vec<u8>) -> Frame<M> {
        Frame { request, of, head, payload: None, sent: 0 }
    }

    fn len(&self) -> usize {
        self.head.len() + self.payload.as_ref().map_or(0, |(_, len)| *len)
    }

    fn byte(&self, at: usize) -> u8 {
        match (self.head.get(at), &self.payload) {
            (Some(byte), _) => *byte,
            (None, Some((memory, _))) => memory.get(at - self.head.len()),
            (None, None) => 0,
        }
    }
}

/// The frames that wait to be sent.
pub(crate) struct Outgoing<M>(pub(crate) VecDeque<Frame<M>>);

impl<M: Memory> Outgoing<M> {
    pub(crate) fn take(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(first) = self.0.front_mut() {
            while first.sent < first.len() && bytes.len() < most {
                bytes.push(first.byte(first.sent));
                first.sent += 1;
            }
            if first.sent < first.len() {
                break;
            }
            self.0.pop_front();
        }
        bytes
    }

    /// Takes back what belongs to that and has not been sent; what is half sent lets go of the memory.
    pub(crate) fn withdraw(&mut self, of: u64) -> Vec<u64> {
        let mut requests = Vec::new();
        self.0.retain_mut(|frame| {
            if frame.of != Some(of) {
                return true;
            }
            if frame.sent == 0 {
                requests.push(frame.request);
                return false;
            }
            frame.head = (0..frame.len()).map(|at| frame.byte(at)).collect();
            frame.payload = None;
            frame.of = None;
            true
        });
        requests
    }

    pub(crate) fn unsent(&self) -> Vec<u64> {
        self.0.iter().filter(|frame| frame.sent == 0).map(|frame| frame.request).collect()
    }
}

/// What has come.
pub(crate) enum Came<M> {
    Frame(Header, Vec<u8>),
    /// A payload is to follow: the caller [places](Incoming::place) it.
    Payload(Header, Vec<u8>),
    /// It has come whole, and gone there; none where it went nowhere.
    Whole(Header, Vec<u8>, Option<M>),
}

enum Reading<M> {
    Head,
    Unplaced(Header, Vec<u8>),
    Payload(Header, Vec<u8>, Option<M>, usize),
}

/// Frames out of bytes that come in portions.
pub(crate) struct Incoming<M> {
    bytes: VecDeque<u8>,
    reading: Reading<M>,
}

impl<M: Memory> Incoming<M> {
    pub(crate) fn new() -> Incoming<M> {
        Incoming { bytes: VecDeque::new(), reading: Reading::Head }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Where the payload goes that was announced.
    pub(crate) fn place(&mut self, memory: Option<M>) {
        if let Reading::Unplaced(header, body) = std::mem::replace(&mut self.reading, Reading::Head) {
            self.reading = Reading::Payload(header, body, memory, 0);
        }
    }

    /// Lets what is coming in go nowhere, where it goes to such memory.
    pub(crate) fn discard(&mut self, belongs: impl Fn(&M) -> bool) {
        if let Reading::Payload(_, _, memory, _) = &mut self.reading
            && memory.as_ref().is_some_and(belongs)
        {
            *memory = None;
        }
    }

    /// The next that is there.
    pub(crate) fn next(&mut self) -> Result<Option<Came<M>>> {
        match &mut self.reading {
            Reading::Head => {
                if self.bytes.len() < HEADER_LEN {
                    return Ok(None);
                }
                let bytes = self.bytes.make_contiguous();
                let start = bytes.first_chunk::<HEADER_LEN>();
                let header = Header::decode(start.ok_or_else(|| Error::protocol("frame", "cut"))?)?;
                header.check(true)?;
                let end = HEADER_LEN + header.rest();
                if bytes.len() < end {
                    return Ok(None);
                }
                let body = header.body(&bytes[HEADER_LEN..end])?.to_vec();
                self.bytes.drain(..end);
                if header.payload_len == 0 {
                    return Ok(Some(Came::Frame(header, body)));
                }
                self.reading = Reading::Unplaced(header, body.clone());
                Ok(Some(Came::Payload(header, body)))
            }
            Reading::Unplaced(..) => Ok(None),
            Reading::Payload(header, _, memory, filled) => {
                while (*filled as u64) < header.payload_len {
                    let Some(byte) = self.bytes.pop_front() else { return Ok(None) };
                    if let Some(memory) = memory {
                        memory.put(*filled, byte);
                    }
                    *filled += 1;
                }
                match std::mem::replace(&mut self.reading, Reading::Head) {
                    Reading::Payload(header, body, memory, _) => Ok(Some(Came::Whole(header, body, memory))),
                    _ => Ok(None),
                }
            }
        }
    }
}

/// One connection.
pub(crate) struct Wire<U, O> {
    /// What is in the air towards the owner, or waits in its kernel.
    pub(crate) towards: usize,
    pub(crate) inbox: VecDeque<u8>,
    pub(crate) requests: Outgoing<U>,
    pub(crate) at_user: Incoming<U>,
    pub(crate) at_owner: Incoming<O>,
    /// When the last bytes of each direction arrive: they keep their order.
    pub(crate) last: [Instant; 2],
    /// Bytes vanish.
    pub(crate) dead: bool,
    /// The user has ended it, or knows that it is over.
    pub(crate) ended: bool,
    /// The user has reset it.
    pub(crate) forsaken: bool,
    /// The owner's kernel knows that the user has.
    pub(crate) hung_up: bool,
    /// The owner has ended it, and applies nothing more of it.
    pub(crate) ended_by_owner: bool,
    /// Bytes have arrived since the last query.
    pub(crate) moved: bool,
}

impl<U: Memory, O: Memory> Wire<U, O> {
    pub(crate) fn new(now: Instant) -> Wire<U, O> {
        Wire {
            towards: 0,
            inbox: VecDeque::new(),
            requests: Outgoing(VecDeque::new()),
            at_user: Incoming::new(),
            at_owner: Incoming::new(),
            last: [now; 2],
            dead: false,
            ended: false,
            forsaken: false,
            hung_up: false,
            ended_by_owner: false,
            moved: false,
        }
    }
}
