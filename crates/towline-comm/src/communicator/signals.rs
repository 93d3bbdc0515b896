//! Counters between ranks: raised by the source after its data, waited for by the target.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use towline::Kind;

use super::{Communicator, Inner};
use crate::group::Job;
use crate::team::Team;
use crate::window::{Operation, Task};
use crate::{Error, Result, group};

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

impl Communicator {
    /// Raises a counter of `peer` by one, after everything that this rank has put there. Local.
    pub fn signal(&self, peer: usize, context: u32, index: u32) -> Result<Operation> {
        if let Some(cuda) = self.cuda() {
            return cuda.signal(peer, context, index);
        }
        let prepared = self.inner("signal").and_then(|inner| {
            inner.check_usable("signal")?;
            check_counter(inner, peer, context, index, "signal")?;
            Ok(inner)
        });
        let inner = prepared.map_err(group::poison)?;
        one_sided(inner, "signal", move |inner, team| Ok(signal(inner, team, peer, context, index)))
    }

    /// Waits until all of those signals have come, and takes them: each wait takes its own, in the order of the
    /// calls. Signals that came before are remembered. All that their sources had put before is visible then.
    pub fn wait_signal(&self, signals: &[WaitSignal]) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            return cuda.wait_signal(signals).map(drop);
        }
        let signals = signals.to_vec();
        self.submit("wait_signal", move |inner| {
            check_wait(inner, &signals)?;
            Ok(Job::Wait(Box::new(move |inner, team| wait(inner, team, &signals, None))))
        })
    }

    /// [`wait_signal`](Self::wait_signal) as a future: a thread that lives only for it does the waiting.
    pub fn signaled(&self, signals: &[WaitSignal]) -> Result<Operation> {
        self.signaled_unless(signals, Arc::default())
    }

    /// [`signaled`](Self::signaled), which can be given up: once `withdrawn` is true it soon ends with `Canceled`, and has
    /// taken nothing.
    pub fn signaled_unless(&self, signals: &[WaitSignal], withdrawn: Arc<AtomicBool>) -> Result<Operation> {
        if let Some(cuda) = self.cuda() {
            return cuda.wait_signal(signals);
        }
        let inner = self.inner("wait_signal")?;
        inner.check_usable("wait_signal")?;
        check_wait(inner, signals)?;
        let (operation, done) = Operation::live("wait_signal", inner.config.timeout, false);
        let (inner, signals) = (Arc::clone(inner), signals.to_vec());
        let waiting = move || {
            let team = inner.team("wait_signal");
            let outcome = team.and_then(|team| wait(&inner, &team, &signals, Some(&withdrawn)));
            done.tell(outcome.map(|()| 0));
        };
        towline::room::thread("wait_signal", "towline-signal", waiting)?;
        Ok(operation)
    }

    /// How many signals have come on that counter so far, taken or not. Local.
    pub fn signals(&self, peer: usize, context: u32, index: u32) -> Result<u64> {
        let inner = self.inner("signals")?;
        check_counter(inner, peer, context, index, "signals")?;
        Ok(inner.team("signals")?.signals(peer, context, index))
    }
}

pub(crate) fn check_counter(
    inner: &Inner,
    peer: usize,
    context: u32,
    index: u32,
    op: &'static str,
) -> Result<()> {
    let (_, nranks) = inner.place(op)?;
    if peer >= nranks {
        return Err(Error::invalid(op, format!("there is no rank {peer} among {nranks}")));
    }
    let (contexts, signals) = (inner.config.contexts, inner.config.signals);
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

fn check_wait(inner: &Inner, signals: &[WaitSignal]) -> Result<()> {
    if signals.is_empty() {
        return Err(Error::invalid("wait_signal", "there is nothing to wait for"));
    }
    for signal in signals {
        check_counter(inner, signal.peer, signal.context, signal.index, "wait_signal")?;
        if signal.count == 0 {
            return Err(Error::invalid("wait_signal", "a wait for no signals").about([signal.peer]));
        }
    }
    Ok(())
}

fn wait(
    inner: &Arc<Inner>,
    team: &Arc<Team>,
    signals: &[WaitSignal],
    withdrawn: Option<&AtomicBool>,
) -> Result<()> {
    let mut targets: Vec<((usize, u32, u32), u64)> = towline::room::list("wait_signal", signals.len())?;
    {
        let mut awaited = inner.awaited.lock().unwrap_or_else(PoisonError::into_inner);
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
    let canceled = || Err(Error::new(Kind::Canceled, "wait_signal", "the wait was given up"));
    let outcome = team.wait("wait_signal", missing, || match targets.iter().all(arrived) {
        true => Some(Ok(())),
        false => given_up().then(canceled),
    });
    let outcome = outcome.and_then(|ended| ended);
    if outcome.is_err() {
        // Nothing was taken: a signal that comes late serves the next wait.
        let mut awaited = inner.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        for signal in signals {
            if let Some(level) = awaited.get_mut(&(signal.peer, signal.context, signal.index)) {
                *level = level.saturating_sub(signal.count);
            }
        }
    }
    outcome
}

/// Raises the counter behind everything that is on its way to that rank.
pub(crate) fn signal(
    inner: &Arc<Inner>,
    team: &Arc<Team>,
    peer: usize,
    context: u32,
    index: u32,
) -> Operation {
    let lane = match inner.lane_in_use(peer) {
        Some(lane) if !lane.is_idle() => lane,
        None | Some(_) if team.is_near(peer) => {
            return Operation::done(team.signal(peer, context, index, 1).map(|()| 0));
        }
        _ => inner.lane(peer),
    };
    let (operation, done) = Operation::toward(peer, Arc::downgrade(team), "signal", inner.config.timeout);
    let team = Arc::clone(team);
    lane.push(Task::After(Box::new(move || team.signal(peer, context, index, 1).map(|()| 0)), done));
    operation
}

/// Waits until everything that this rank has sent to that one has landed.
pub(crate) fn flush(inner: &Arc<Inner>, peer: usize) -> Result<()> {
    let Some(lane) = inner.lane_in_use(peer) else { return Ok(()) };
    let (operation, done) = Operation::toward(peer, inner.weak_team(), "flush", inner.config.timeout);
    lane.push(Task::After(Box::new(|| Ok(0)), done));
    operation.wait().map(|_| ())
}

pub(crate) fn flush_all(inner: &Arc<Inner>, team: &Team) -> Result<()> {
    let mut outcome = Ok(());
    for peer in 0..team.nranks() {
        outcome = outcome.and(flush(inner, peer));
    }
    outcome
}

/// Runs a one-sided operation: now, at the end of the group, or on the communicator's thread.
pub(crate) fn one_sided(
    inner: &Arc<Inner>,
    op: &'static str,
    start: impl FnOnce(&Arc<Inner>, &Arc<Team>) -> Result<Operation> + Send + 'static,
) -> Result<Operation> {
    if inner.config.blocking && !group::is_open() {
        let team = inner.team(op)?;
        return start(inner, &team);
    }
    let (operation, done) = Operation::live(op, inner.config.timeout, true);
    let job = Job::Call(Box::new(move |inner, team| {
        let outcome = start(inner, team).and_then(|operation| operation.wait());
        let told = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        done.tell(outcome);
        told
    }));
    if let Some(job) = group::defer(inner, job) {
        inner.launch(vec![job])?;
    }
    Ok(operation)
}
