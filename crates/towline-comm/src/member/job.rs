//! Calls whose arguments were checked, and how they run.

use std::sync::Arc;

use super::Member;
use crate::Result;
use crate::collective::Message;
use crate::operation::Promise;
use crate::team::Team;

/// What a call does once its arguments were checked.
pub(crate) type Work = Box<dyn FnOnce(&Arc<Member>, &Arc<Team>) -> Result<()> + Send>;

/// A call whose arguments were checked.
pub(crate) enum Job {
    /// Runs alone.
    Call(Work),
    /// Waits for other ranks and touches no memory: handles may be closed meanwhile.
    Wait(Work),
    /// Runs together with the messages beside it, and reports its end to the promise that follows it.
    Message(Message, Option<Promise>),
}

/// Runs jobs in order, neighbouring messages together. All of them run; the error is the first.
pub(super) fn run(member: &Arc<Member>, team: &Arc<Team>, jobs: Vec<Job>) -> Result<()> {
    let mut outcome = Ok(());
    let mut jobs = jobs.into_iter().peekable();
    while let Some(job) = jobs.next() {
        let ended = match job {
            Job::Call(work) | Job::Wait(work) => work(member, team),
            Job::Message(message, promise) => {
                let (mut messages, mut waiting) = (vec![message], vec![promise]);
                while let Some(Job::Message(..)) = jobs.peek() {
                    if let Some(Job::Message(message, promise)) = jobs.next() {
                        messages.push(message);
                        waiting.push(promise);
                    }
                }
                let ended = member.collectives.run_together(team, messages);
                for one in waiting.into_iter().flatten() {
                    one.end(ended.clone().map(|()| 0));
                }
                ended
            }
        };
        outcome = outcome.and(ended);
    }
    outcome
}
