//! Collectives and messages: the calls that a communicator offers.

use std::sync::Arc;

use towline::Dtype;

use super::Communicator;
use crate::collective::{Algorithm, Ask, Job, Kind, Message, digest};
use crate::combine::Op;
use crate::member::{self, Member};
use crate::memory::Memory;
use crate::team::Team;
use crate::{Error, Result};

/// The collectives of a communicator by an algorithm that the caller names: see [`Communicator::using`].
#[derive(Clone, Copy)]
pub struct Using<'c> {
    comm: &'c Communicator,
    algorithm: Algorithm,
}

/// What has no operation and no root.
const PLAIN: (Op, usize) = (Op::Sum, 0);

impl Using<'_> {
    fn call(
        self,
        kind: Kind,
        memory: (Option<&Memory>, Option<&Memory>),
        dtype: Dtype,
        (op, root): (Op, usize),
    ) -> Result<()> {
        let (send, recv) = memory;
        let ask = Ask { kind, send, recv, dtype, op, root, algorithm: self.algorithm };
        if let Some(cuda) = self.comm.cuda() {
            return cuda.collective(ask);
        }
        let run = |member: &Arc<Member>, team: &Arc<Team>, job: &Job<'_>| member.collectives.run(team, job);
        self.comm.submit_call(
            kind.name(),
            |member| checked(member, ask),
            run,
            |job| {
                let job = job.keep();
                member::Job::Call(Box::new(move |member, team| member.collectives.run(team, &job)))
            },
        )
    }

    /// [`Communicator::all_reduce`] by this algorithm.
    pub fn all_reduce(self, send: &Memory, recv: &Memory, dtype: Dtype, op: Op) -> Result<()> {
        self.call(Kind::AllReduce, (Some(send), Some(recv)), dtype, (op, 0))
    }

    /// [`Communicator::reduce`] by this algorithm.
    pub fn reduce(
        self,
        send: &Memory,
        recv: Option<&Memory>,
        dtype: Dtype,
        op: Op,
        root: usize,
    ) -> Result<()> {
        self.call(Kind::Reduce, (Some(send), recv), dtype, (op, root))
    }

    /// [`Communicator::broadcast`] by this algorithm.
    pub fn broadcast(
        self,
        send: Option<&Memory>,
        recv: Option<&Memory>,
        dtype: Dtype,
        root: usize,
    ) -> Result<()> {
        self.call(Kind::Broadcast, (send, recv), dtype, (Op::Sum, root))
    }

    /// [`Communicator::all_gather`] by this algorithm.
    pub fn all_gather(self, send: &Memory, recv: &Memory, dtype: Dtype) -> Result<()> {
        self.call(Kind::AllGather, (Some(send), Some(recv)), dtype, PLAIN)
    }

    /// [`Communicator::gather`] by this algorithm.
    pub fn gather(self, send: &Memory, recv: Option<&Memory>, dtype: Dtype, root: usize) -> Result<()> {
        self.call(Kind::Gather, (Some(send), recv), dtype, (Op::Sum, root))
    }

    /// [`Communicator::scatter`] by this algorithm.
    pub fn scatter(self, send: Option<&Memory>, recv: &Memory, dtype: Dtype, root: usize) -> Result<()> {
        self.call(Kind::Scatter, (send, Some(recv)), dtype, (Op::Sum, root))
    }

    /// [`Communicator::reduce_scatter`] by this algorithm.
    pub fn reduce_scatter(self, send: &Memory, recv: &Memory, dtype: Dtype, op: Op) -> Result<()> {
        self.call(Kind::ReduceScatter, (Some(send), Some(recv)), dtype, (op, 0))
    }

    /// [`Communicator::all_to_all`] by this algorithm.
    pub fn all_to_all(self, send: &Memory, recv: &Memory, dtype: Dtype) -> Result<()> {
        self.call(Kind::AllToAll, (Some(send), Some(recv)), dtype, PLAIN)
    }
}

/// Collectives and messages. All ranks make the same collective calls in the same order. The number of elements follows
/// from the memory. Ranks that differ in size, type, operation, root or algorithm all get `Invalid`, nothing has
/// happened, and the communicator stays usable. A call on no elements moves nothing, but the ranks still agree on it.
///
/// The calls of one communicator run one after another, whichever thread makes them: a thread that waits for a message
/// holds up the others. What must run at the same time belongs into a [`group`](crate::group()), or on two communicators.
impl Communicator {
    /// Combines the elements of all ranks and gives every rank the result. `recv` is at least as long as `send`; in place:
    /// both start at the same byte.
    ///
    /// ```
    /// use towline::{Dtype, SharedStorage};
    /// use towline_comm::{Communicator, Op};
    ///
    /// let ranks = Communicator::init_all(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &ranks {
    ///         scope.spawn(move || -> towline_comm::Result<()> {
    ///             let memory = comm.memory(SharedStorage::new(4096)?)?;
    ///             memory.write_at(0, &1.5f32.to_ne_bytes())?;
    ///             comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum)?;
    ///             let mut sum = [0; 4];
    ///             memory.read_at(0, &mut sum)?;
    ///             assert_eq!(f32::from_ne_bytes(sum), 3.0);
    ///             assert!(comm.explain()?.contains("tiny"));
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), towline_comm::Error>(())
    /// ```
    pub fn all_reduce(&self, send: &Memory, recv: &Memory, dtype: Dtype, op: Op) -> Result<()> {
        self.using(Algorithm::Auto).all_reduce(send, recv, dtype, op)
    }

    /// Combines the elements of all ranks and gives the root the result. Other ranks need no `recv`; in place: both start
    /// at the same byte.
    pub fn reduce(
        &self,
        send: &Memory,
        recv: Option<&Memory>,
        dtype: Dtype,
        op: Op,
        root: usize,
    ) -> Result<()> {
        self.using(Algorithm::Auto).reduce(send, recv, dtype, op, root)
    }

    /// Gives every rank the root's elements. Only the root needs `send`; where it also has `recv`, of the same length, it
    /// gets a copy there.
    pub fn broadcast(
        &self,
        send: Option<&Memory>,
        recv: Option<&Memory>,
        dtype: Dtype,
        root: usize,
    ) -> Result<()> {
        self.using(Algorithm::Auto).broadcast(send, recv, dtype, root)
    }

    /// Gives every rank the elements of all ranks, by rank. In place: `send` is this rank's own block of `recv`.
    pub fn all_gather(&self, send: &Memory, recv: &Memory, dtype: Dtype) -> Result<()> {
        self.using(Algorithm::Auto).all_gather(send, recv, dtype)
    }

    /// Gives the root the elements of all ranks, by rank. Other ranks need no `recv`; in place: `send` is the root's own
    /// block of `recv`.
    pub fn gather(&self, send: &Memory, recv: Option<&Memory>, dtype: Dtype, root: usize) -> Result<()> {
        self.using(Algorithm::Auto).gather(send, recv, dtype, root)
    }

    /// Gives each rank its block of the root's elements. Only the root needs `send`, one block per rank; in place: `recv`
    /// is the root's own block of `send`.
    pub fn scatter(&self, send: Option<&Memory>, recv: &Memory, dtype: Dtype, root: usize) -> Result<()> {
        self.using(Algorithm::Auto).scatter(send, recv, dtype, root)
    }

    /// Combines the elements of all ranks and gives each rank its block of the result. Elements that do not divide among
    /// the ranks are refused; in place: `recv` is this rank's own block of `send`.
    pub fn reduce_scatter(&self, send: &Memory, recv: &Memory, dtype: Dtype, op: Op) -> Result<()> {
        self.using(Algorithm::Auto).reduce_scatter(send, recv, dtype, op)
    }

    /// Gives each rank its block of every rank's elements, by rank. Elements that do not divide among the ranks are
    /// refused; there is no form in place.
    pub fn all_to_all(&self, send: &Memory, recv: &Memory, dtype: Dtype) -> Result<()> {
        self.using(Algorithm::Auto).all_to_all(send, recv, dtype)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            return cuda.barrier();
        }
        fn meet(team: &Team) -> Result<()> {
            let _one_call = team.serialise();
            team.barrier().map_err(|error| error.during("barrier"))
        }
        let later = |()| member::Job::Call(Box::new(|_, team| meet(team)));
        self.submit_call("barrier", |_| Ok(()), |_, team, ()| meet(team), later)
    }

    /// Sends elements to a rank that receives as many of the same type; returns when they have arrived. A difference is
    /// `Invalid` on both sides. Ranks that send to each other do so in a [`group`](crate::group()).
    pub fn send(&self, memory: &Memory, dtype: Dtype, peer: usize) -> Result<()> {
        self.message(Kind::Send, memory, dtype, peer)
    }

    /// Receives elements from a rank that sends as many of the same type.
    pub fn recv(&self, memory: &Memory, dtype: Dtype, peer: usize) -> Result<()> {
        self.message(Kind::Recv, memory, dtype, peer)
    }

    fn message(&self, kind: Kind, memory: &Memory, dtype: Dtype, peer: usize) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            let (send, recv) = if kind == Kind::Send { (Some(memory), None) } else { (None, Some(memory)) };
            let (op, algorithm) = (Op::Sum, Algorithm::Auto);
            return cuda.collective(Ask { kind, send, recv, dtype, op, root: peer, algorithm });
        }
        self.submit(kind.name(), |member| {
            let (send, recv) = if kind == Kind::Send { (Some(memory), None) } else { (None, Some(memory)) };
            let ask = Ask { kind, send, recv, dtype, op: Op::Sum, root: peer, algorithm: Algorithm::Auto };
            let job = checked(member, ask)?;
            let message = Message {
                peer,
                digest: digest(&[u64::from(dtype.code()), job.block as u64]),
                memory: memory.clone(),
                incoming: kind == Kind::Recv,
            };
            Ok(member::Job::Message(message, None))
        })
    }

    /// The same calls by an algorithm that the caller names, equal on all ranks. One that cannot work is `Invalid` on every
    /// rank, with the reason.
    pub fn using(&self, algorithm: Algorithm) -> Using<'_> {
        Using { comm: self, algorithm }
    }

    /// The algorithm of the latest collective call on this communicator, with its reason, in words. Local.
    pub fn explain(&self) -> Result<String> {
        if let Some(cuda) = self.cuda() {
            return Ok(format!("NCCL {} chooses", cuda.open("explain")?.version()));
        }
        let last = self.member("explain")?.collectives.last();
        Ok(last.map_or_else(|| "no collective has run yet".to_owned(), |choice| choice.to_string()))
    }

    /// The algorithm of the latest collective call on this communicator. Local.
    pub fn last_algorithm(&self) -> Result<Option<Algorithm>> {
        Ok(self.member("last_algorithm")?.collectives.last().map(|choice| choice.algorithm))
    }
}

fn checked<'a>(member: &Arc<Member>, ask: Ask<'a>) -> Result<Job<'a>> {
    for memory in [ask.send, ask.recv].into_iter().flatten() {
        memory.span().map_err(|error| error.during(ask.kind.name()))?;
    }
    let (rank, nranks) = member.place(ask.kind.name())?;
    if nranks == 0 {
        return Err(Error::invalid(ask.kind.name(), "the group has no ranks"));
    }
    Job::new(rank, nranks, ask)
}
