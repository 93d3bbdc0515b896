//! Signals: the calls that a communicator offers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Communicator;
use crate::member::{Job, WaitSignal, signals};
use crate::operation::Operation;
use crate::{Result, group};

impl Communicator {
    /// Raises a counter of `peer` by one, after everything that this rank has put there. Local.
    pub fn signal(&self, peer: usize, context: u32, index: u32) -> Result<Operation> {
        if let Some(cuda) = self.cuda() {
            return cuda.signal(peer, context, index);
        }
        let prepared = self.member("signal").and_then(|member| {
            member.check_usable("signal")?;
            signals::check_counter(member, peer, context, index, "signal")?;
            Ok(member)
        });
        let member = prepared.map_err(group::poison)?;
        group::one_sided(member, "signal", move |member, team| {
            Ok(signals::signal(member, team, peer, context, index))
        })
    }

    /// Waits until all of those signals have come, and takes them: each wait takes its own, in the order of the
    /// calls. Signals that came before are remembered. All that their sources had put before is visible then.
    pub fn wait_signal(&self, signals: &[WaitSignal]) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            return cuda.wait_signal(signals).map(drop);
        }
        let signals = signals.to_vec();
        self.submit("wait_signal", move |member| {
            signals::check_wait(member, &signals)?;
            Ok(Job::Wait(Box::new(move |member, team| signals::wait(member, team, &signals, None))))
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
        let member = self.member("wait_signal")?;
        member.check_usable("wait_signal")?;
        signals::check_wait(member, signals)?;
        let (operation, done) = Operation::live("wait_signal", member.config.timeout, false);
        let (member, signals) = (Arc::clone(member), signals.to_vec());
        let waiting = move || {
            let team = member.team("wait_signal");
            let outcome = team.and_then(|team| signals::wait(&member, &team, &signals, Some(&withdrawn)));
            done.end(outcome.map(|()| 0));
        };
        towline::start_thread("wait_signal", "towline-signal", waiting)?;
        Ok(operation)
    }

    /// How many signals have come on that counter so far, taken or not. Local.
    pub fn signals(&self, peer: usize, context: u32, index: u32) -> Result<u64> {
        let member = self.member("signals")?;
        signals::check_counter(member, peer, context, index, "signals")?;
        Ok(member.team("signals")?.signals(peer, context, index))
    }
}
