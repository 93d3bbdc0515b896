//! Counters between ranks: raised by the source after its data, waited for by the target.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use towline::Kind;

use super::{Member, Task};
use crate::operation::Operation;
use crate::team::Team;
use crate::{Error, Result};

/// Signals to wait for: how many, from whom, on which counter.
///
/// ```
/// use towline_comm::WaitSignal;
/// let two = WaitSignal { count: 2, ..WaitSignal::from_rank(3) };
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitSignal {
    /// The rank that raises the counter.
    pub peer: usize,
    /// How many signals to take; at least 1.
    pub count: u64,
    /// The context of the counter.
    pub context: u32,
    /// The counter within the context.
    pub index: u32,
}

impl WaitSignal {
    /// One signal from that rank, on counter 0 of context 0.
    pub fn from_rank(peer: usize) -> WaitSignal {
        WaitSignal { peer, count: 1, context: 0, index: 0 }
    }
}

pub(crate) fn check_counter(
    member: &Member,
    peer: usize,
    context: u32,
    index: u32,
    op: &'static str,
) -> Result<()> {
    let (_, nranks) = member.place(op)?;
    if peer >= nranks {
        return Err(Error::invalid(op, format!("there is no rank {peer} among {nranks}")));
    }
    let (contexts, signals) = (member.config.contexts, member.config.signals);
    if context >= contexts || index >= signals {
        return Err(Error::invalid(
            op,
            format!(
                "there is no counter {index} of context {context}: there are {contexts} contexts of {signals}"
            ),
        ));
    }
    Ok(())
}

pub(crate) fn check_wait(member: &Member, signals: &[WaitSignal]) -> Result<()> {
    if signals.is_empty() {
        return Err(Error::invalid("wait_signal", "there is nothing to wait for"));
    }
    for signal in signals {
        check_counter(member, signal.peer, signal.context, signal.index, "wait_signal")?;
        if signal.count == 0 {
            return Err(Error::invalid("wait_signal", "a wait for no signals").about([signal.peer]));
        }
    }
    Ok(())
}

/// Waits until all of those have come, and takes them.
pub(crate) fn wait(
    member: &Arc<Member>,
    team: &Arc<Team>,
    signals: &[WaitSignal],
    withdrawn: Option<&AtomicBool>,
) -> Result<()> {
    let mut targets: Vec<((usize, u32, u32), u64)> = towline::room::list("wait_signal", signals.len())?;
    {
        let mut awaited = member.awaited.lock();
        for signal in signals {
            let key = (signal.peer, signal.context, signal.index);
            let level = awaited.entry(key).or_default();
            *level = level.saturating_add(signal.count);
            match targets.iter_mut().find(|(known, _)| *known == key) {
                Some(target) => target.1 = *level,
                None => targets.push((key, *level)),
            }
        }
    }
    let arrived = |((peer, context, index), level): &((usize, u32, u32), u64)| {
        team.signals(*peer, *context, *index) >= *level
    };
    let missing = || targets.iter().filter(|target| !arrived(target)).map(|((peer, ..), _)| *peer).collect();
    let given_up = || withdrawn.is_some_and(|withdrawn| withdrawn.load(Ordering::Acquire));
    let canceled = || Err(Error::new(Kind::Canceled, "wait_signal", "the wait was cancelled"));
    let outcome = team.wait("wait_signal", missing, || match targets.iter().all(arrived) {
        true => Some(Ok(())),
        false => given_up().then(canceled),
    });
    let outcome = outcome.and_then(|ended| ended);
    if outcome.is_err() {
        // Nothing was taken: a signal that comes late serves the next wait.
        let mut awaited = member.awaited.lock();
        for signal in signals {
            if let Some(level) = awaited.get_mut(&(signal.peer, signal.context, signal.index)) {
                *level = level.saturating_sub(signal.count);
            }
        }
    }
    outcome
}

/// Raises the counter behind everything that is in flight to that rank.
pub(crate) fn signal(
    member: &Arc<Member>,
    team: &Arc<Team>,
    peer: usize,
    context: u32,
    index: u32,
) -> Operation {
    let lane = match member.lane_in_use(peer) {
        Some(lane) if !lane.is_idle() => lane,
        None | Some(_) if team.is_near(peer) => {
            return Operation::done(team.signal(peer, context, index, 1).map(|()| 0));
        }
        _ => member.lane(peer),
    };
    let (operation, done) = Operation::toward(peer, Arc::downgrade(team), "signal", member.config.timeout);
    let team = Arc::clone(team);
    lane.push(Task::After(Box::new(move || team.signal(peer, context, index, 1).map(|()| 0)), done));
    operation
}

/// Waits until everything that this rank has sent to that rank has landed.
pub(crate) fn flush(member: &Arc<Member>, peer: usize) -> Result<()> {
    let Some(lane) = member.lane_in_use(peer) else { return Ok(()) };
    let (operation, done) = Operation::toward(peer, member.weak_team(), "flush", member.config.timeout);
    lane.push(Task::After(Box::new(|| Ok(0)), done));
    operation.wait().map(|_| ())
}

pub(crate) fn flush_all(member: &Arc<Member>, team: &Team) -> Result<()> {
    let mut outcome = Ok(());
    for peer in 0..team.nranks() {
        outcome = outcome.and(flush(member, peer));
    }
    outcome
}
