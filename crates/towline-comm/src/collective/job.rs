//! One call with its arguments, checked before anything is announced (pure).

use std::borrow::Cow;

use towline::Dtype;

use super::choice::{Algorithm, Kind};
use crate::combine::Op;
use crate::memory::Memory;
use crate::{Error, Result};

/// What a caller asks for.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) kind: Kind,
    pub(crate) send: Option<&'a Memory>,
    pub(crate) recv: Option<&'a Memory>,
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    /// The root; the peer of a send or receive; 0 if there is none.
    pub(crate) root: usize,
    pub(crate) algorithm: Algorithm,
}

/// A call whose arguments make sense on this rank. Borrows the caller's memory while it runs immediately; one that is
/// [kept](Job::keep) owns what it touches, and can run later, at the end of a group.
#[derive(Debug, Clone)]
pub(crate) struct Job<'a> {
    pub(crate) kind: Kind,
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    pub(crate) root: usize,
    pub(crate) algorithm: Algorithm,
    /// The bytes of one block: what one rank contributes to or gets from a gather, and so on.
    pub(crate) block: usize,
    /// What this rank sends, exactly; `None` where it sends nothing.
    pub(crate) send: Option<Cow<'a, Memory>>,
    /// What this rank receives into, exactly; `None` where it receives nothing.
    pub(crate) recv: Option<Cow<'a, Memory>>,
    /// Memory whose window or buffer stands for what this rank does not send, or does not receive.
    idle_home: Option<Cow<'a, Memory>>,
    /// This rank's factor, as its peers need it.
    pub(crate) scale: u64,
}

impl<'a> Job<'a> {
    /// Checks everything that this rank can check alone: `Invalid` before any other rank learns of the call.
    pub(crate) fn new(rank: usize, nranks: usize, ask: Ask<'a>) -> Result<Job<'a>> {
        let Ask { kind, dtype, op, root, algorithm, .. } = ask;
        let name = kind.name();
        if root >= nranks {
            let what = if matches!(kind, Kind::Send | Kind::Recv) { "peer" } else { "root" };
            return Err(Error::invalid(name, format!("{what} {root} is not among {nranks} ranks")));
        }
        let is_root = rank == root;
        let sends = match kind {
            Kind::Broadcast | Kind::Scatter => is_root,
            Kind::Recv => false,
            _ => true,
        };
        let receives = match kind {
            Kind::Reduce | Kind::Gather => is_root,
            Kind::Send => false,
            // The root has the bytes already; it may want them in a second place.
            Kind::Broadcast => !is_root || ask.recv.is_some(),
            _ => true,
        };
        let send = if sends { Some(needed(name, "send", ask.send)?) } else { None };
        let recv = if receives { Some(needed(name, "receive", ask.recv)?) } else { None };
        let (many_sent, many_received) = kind.blocks();
        let times = |many: bool| if many { nranks } else { 1 };
        let block = match (send, recv) {
            (Some(send), _) if kind != Kind::Scatter => {
                whole_blocks(name, send.len(), times(many_sent), dtype)?
            }
            (_, Some(recv)) => whole_blocks(name, recv.len(), 1, dtype)?,
            (Some(_), None) | (None, None) => 0,
        };
        let sent = block * times(many_sent);
        let received = block * times(many_received);
        if let Some(send) = send.filter(|send| send.len() != sent) {
            return Err(Error::invalid(
                name,
                format!("{nranks} blocks of {block} bytes are {sent}, and {} are to be sent", send.len()),
            ));
        }
        if let Some(recv) = recv {
            let exact = matches!(kind, Kind::Broadcast);
            if recv.len() < received || (exact && recv.len() != received) {
                return Err(Error::invalid(
                    name,
                    format!("{received} bytes arrive, and there is room for {}", recv.len()),
                ));
            }
        }
        let recv = match recv {
            Some(recv) if recv.len() == received => Some(Cow::Borrowed(recv)),
            Some(recv) => Some(Cow::Owned(recv.part(0, received)?)),
            None => None,
        };
        let idle_home = match (send, &recv) {
            (Some(_), Some(_)) => None,
            (None, _) => ask.send.or(ask.recv).map(Cow::Borrowed),
            (_, None) => ask.recv.or(ask.send).map(Cow::Borrowed),
        };
        let job = Job {
            kind,
            dtype,
            op,
            root,
            algorithm,
            block,
            idle_home,
            send: send.map(Cow::Borrowed),
            recv,
            scale: op.scale(dtype).map_err(|error| error.during(name))?,
        };
        job.no_overlap(rank)?;
        Ok(job)
    }

    /// The same call, with its own hold on all that it touches.
    pub(crate) fn keep(self) -> Job<'static> {
        let owned = |memory: Option<Cow<'a, Memory>>| memory.map(|memory| Cow::Owned(memory.into_owned()));
        let (send, recv, idle_home) = (owned(self.send), owned(self.recv), owned(self.idle_home));
        let Job { kind, dtype, op, root, algorithm, block, scale, .. } = self;
        Job { kind, dtype, op, root, algorithm, block, send, recv, idle_home, scale }
    }

    /// Whose window or buffer stands for what this rank sends when the ranks compare them: also where it does not send,
    /// so that all can name the same.
    pub(crate) fn send_home(&self) -> Option<&Memory> {
        self.send.as_deref().or(self.idle_home.as_deref())
    }

    /// [`send_home`](Self::send_home) for what this rank receives.
    pub(crate) fn recv_home(&self) -> Option<&Memory> {
        self.recv.as_deref().or(self.idle_home.as_deref())
    }

    /// How many bytes the sender with the most data sends.
    pub(crate) fn bytes(&self, nranks: usize) -> usize {
        if self.kind.blocks().0 { self.block * nranks } else { self.block }
    }

    /// The number of elements in a block.
    pub(crate) fn elements(&self) -> usize {
        self.block / self.dtype.size()
    }

    /// What all ranks must agree on, in 64 bits.
    pub(crate) fn digest(&self) -> u64 {
        digest(&[
            1 + self.kind as u64,
            self.dtype.code().into(),
            self.block as u64,
            if self.kind.reduces() { self.op.code() } else { 0 },
            if self.kind.is_rooted() { self.root as u64 } else { 0 },
            self.algorithm as u64,
        ])
    }

    /// Refuses memory that is both sent and received, except in place as NCCL defines it.
    fn no_overlap(&self, rank: usize) -> Result<()> {
        let (Some(send), Some(recv)) = (&self.send, &self.recv) else { return Ok(()) };
        let (from, to) = (send.addr(), recv.addr());
        if from >= to + recv.len() || to >= from + send.len() {
            return Ok(());
        }
        let in_place = match self.kind.blocks() {
            (false, false) => from == to,
            (false, true) => from == to + rank * self.block,
            (true, false) => to == from + rank * self.block,
            (true, true) => false,
        };
        if in_place {
            return Ok(());
        }
        let allowed = match self.kind.blocks() {
            (false, false) => "both must start at the same byte",
            (false, true) => "what is sent must be this rank's own block of what is received",
            (true, false) => "what is received must be this rank's own block of what is sent",
            (true, true) => "this call cannot work in place",
        };
        Err(Error::invalid(self.kind.name(), format!("the memory to send and to receive overlap: {allowed}")))
    }
}

fn needed<'a>(name: &'static str, what: &str, memory: Option<&'a Memory>) -> Result<&'a Memory> {
    memory.ok_or_else(|| Error::invalid(name, format!("this rank has to {what}, but gave no memory for it")))
}

/// The bytes of one of `parts` equal blocks of whole elements.
fn whole_blocks(name: &'static str, len: usize, parts: usize, dtype: Dtype) -> Result<usize> {
    let size = dtype.size();
    if !len.is_multiple_of(size) {
        return Err(Error::invalid(name, format!("{len} bytes are not whole elements of {dtype}")));
    }
    let count = len / size;
    if !count.is_multiple_of(parts) {
        return Err(Error::invalid(
            name,
            format!("{count} elements among {parts} ranks leave a remainder of {}", count % parts),
        ));
    }
    Ok(len / parts)
}

/// Mixes numbers into one; equal lists give equal digests on every machine.
pub(crate) fn digest(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |state: u64, &number| {
        let mixed = (state ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xc4ce_b9fe_1a85_ec53).rotate_left(29)
    })
}
