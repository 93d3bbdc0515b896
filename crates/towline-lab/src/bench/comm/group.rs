//! A group of rank processes as the bench sees it.

use crate::machine;
use crate::outcome::{Failure, Outcome};
use crate::worker::Worker;
use crate::worker::order::{Order, RankReply};
use crate::worker::protocol::{Ask, Reply};

/// Rank processes that have met; they end with this value.
pub(super) struct Group(Vec<Worker>);

impl Group {
    /// Starts that many ranks: each on a core of its own where there are enough. A waiter of a `spinning` group spins.
    pub(super) fn start(nranks: usize, spinning: bool) -> Outcome<Group> {
        let own_cores = nranks <= machine::cores();
        let start = |rank| Worker::start_on(own_cores.then_some(rank), &format!("rank-{rank}"));
        let mut group = Group((0..nranks).map(start).collect::<Outcome<_>>()?);
        let id = towline_comm::get_unique_id()?;
        group.each(|rank| Order::Join { nranks, rank, id: Box::new(id.clone()), spinning })?;
        Ok(group)
    }

    pub(super) fn nranks(&self) -> usize {
        self.0.len()
    }

    /// Gives every rank its order, then waits for all replies.
    pub(super) fn each(&mut self, order: impl Fn(usize) -> Order) -> Outcome<Vec<RankReply>> {
        for (rank, worker) in self.0.iter_mut().enumerate() {
            worker.send(&Ask::Comm { order: order(rank) })?;
        }
        // All replies are received, so that a failure leaves no reply for the next query.
        let reply: Vec<Outcome<Reply>> = self.0.iter_mut().map(Worker::reply).collect();
        reply
            .into_iter()
            .zip(&self.0)
            .map(|(reply, worker)| match reply? {
                Reply::Comm { answer } => Ok(answer),
                reply => Err(worker.surprise(&reply)),
            })
            .collect()
    }

    /// Gives all ranks the same order, and waits for the slowest one's seconds.
    pub(super) fn seconds(&mut self, order: &Order) -> Outcome<f64> {
        let answers = self.each(|_| order.clone())?;
        answers.into_iter().try_fold(0.0, |most: f64, answer| match answer {
            RankReply::Seconds(seconds) => Ok(most.max(seconds)),
            answer => Err(surprise(&answer)),
        })
    }

    /// Gives one rank an order that concerns nobody else.
    pub(super) fn one(&mut self, rank: usize, order: Order) -> Outcome<RankReply> {
        let Some(worker) = self.0.get_mut(rank) else { return Err(Failure::failed("there is no such rank")) };
        match worker.ask(&Ask::Comm { order })? {
            Reply::Comm { answer } => Ok(answer),
            reply => Err(worker.surprise(&reply)),
        }
    }
}

/// The failure of a reply that is not the one asked for.
pub(super) fn surprise(answer: &RankReply) -> Failure {
    Failure::failed(format!("a rank answered something else: {answer:?}"))
}
