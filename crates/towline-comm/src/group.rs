//! Calls that start together: deferred on this thread until the outermost group ends.
//!
//! An error inside a group poisons it: nothing of it is launched and its end gives that error again. The calls of
//! several communicators run side by side, so that one thread can drive several ranks; those of one communicator run
//! in order, and neighbouring messages of it together.

use std::cell::RefCell;
use std::sync::Arc;

use towline::start_scoped_thread;

use crate::member::job::Work;
use crate::member::{Job, Member};
use crate::operation::{self, Operation, Promise};
use crate::team::Team;
use crate::{Error, Result, interrupt};

struct Group {
    depth: usize,
    jobs: Vec<(Arc<Member>, Job)>,
    /// Of communicators on GPUs: they are one group of NCCL's.
    on_gpu: Vec<towline::nccl::Job>,
    error: Option<Error>,
}

thread_local! {
    static OPEN: RefCell<Option<Group>> = const { RefCell::new(None) };
    /// What is notified of how the call that this thread is making ends.
    static FOLLOWER: RefCell<Option<Promise>> = const { RefCell::new(None) };
}

/// Begins a group of calls on this thread: they are launched by the [`group_end`] that matches the first start.
///
/// ```
/// towline_comm::group_start();
/// // calls on one or several communicators
/// towline_comm::group_end()?;
/// assert!(towline_comm::group_end().is_err());
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub fn group_start() {
    operation::hold_back(true);
    OPEN.with_borrow_mut(|open| match open {
        Some(group) => group.depth += 1,
        None => *open = Some(Group { depth: 1, jobs: Vec::new(), on_gpu: Vec::new(), error: None }),
    });
}

/// Ends a group of calls; the outermost end launches them. `Invalid` where no group was begun.
///
/// # Errors
/// The first error that a call inside the group gave: then nothing was launched. Otherwise the first error of the
/// calls as they ran.
pub fn group_end() -> Result<()> {
    let ended = OPEN.with_borrow_mut(|open| {
        let Some(group) = open else {
            return Err(Error::invalid("group_end", "no group was started on this thread"));
        };
        group.depth -= 1;
        if group.depth > 0 {
            return Ok(None);
        }
        operation::hold_back(false);
        Ok(open.take())
    })?;
    match ended {
        Some(Group { error: Some(error), .. }) => Err(error),
        Some(group) => {
            // These are put into streams and wait for nobody, so that the others go after them.
            let put = towline::nccl::run_together(group.on_gpu).map_err(Error::from);
            put.and(launch(group.jobs))
        }
        None => Ok(()),
    }
}

/// Runs the body as a group of calls. Where it errs, nothing is launched.
///
/// ```
/// # let id = towline_comm::get_unique_id()?;
/// # let comm = towline_comm::Communicator::init(1, 0, &id, towline_comm::Config::default())?;
/// towline_comm::group(|| {
///     comm.signal(0, 0, 0)?;
///     comm.signal(0, 0, 1)
/// })?;
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub fn group<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    /// Ends the group without launching it where the body does not come back.
    struct Abandon(bool);
    impl Drop for Abandon {
        fn drop(&mut self) {
            if self.0 {
                poison(Error::invalid("group", "the group was left by a panic"));
                let _ = group_end();
            }
        }
    }
    group_start();
    let mut abandon = Abandon(true);
    let outcome = body();
    abandon.0 = false;
    match outcome {
        Ok(value) => group_end().map(|()| value),
        Err(error) => {
            let error = poison(error);
            let _ = group_end();
            Err(error)
        }
    }
}

/// Whether a group is open on this thread.
#[inline]
pub(crate) fn is_open() -> bool {
    operation::is_held_back()
}

/// Keeps the group that is open on this thread, if any, from being launched. Gives the error back.
pub(crate) fn poison(error: Error) -> Error {
    OPEN.with_borrow_mut(|open| {
        if let Some(group) = open {
            group.error.get_or_insert(error.clone());
        }
    });
    error
}

/// Puts a job into the group that is open on this thread; gives it back if no group is open. In both cases the job
/// reports its end to the promise that follows the call.
pub(crate) fn defer(member: &Arc<Member>, job: Job) -> Option<Job> {
    let job = followed(job);
    OPEN.with_borrow_mut(|open| match open {
        Some(group) => {
            group.jobs.push((Arc::clone(member), job));
            None
        }
        None => Some(job),
    })
}

/// Puts a job of a GPU into the group that is open on this thread; gives it back if no group is open.
pub(crate) fn defer_on_gpu(job: towline::nccl::Job) -> Option<towline::nccl::Job> {
    OPEN.with_borrow_mut(|open| match open {
        Some(group) => {
            group.on_gpu.push(job);
            None
        }
        None => Some(job),
    })
}

/// Makes a call; the job that it submits ends that operation.
pub(crate) fn follow(promise: Promise, call: impl FnOnce() -> Result<()>) -> Result<()> {
    FOLLOWER.with_borrow_mut(|follower| *follower = Some(promise));
    let outcome = call();
    // Still there where the call submitted nothing; dropped outside of the borrow, since that wakes others.
    let unused = FOLLOWER.with_borrow_mut(Option::take);
    drop(unused);
    outcome
}

/// The job, which also reports its end to the promise that follows the call.
fn followed(job: Job) -> Job {
    let Some(promise) = FOLLOWER.with_borrow_mut(Option::take) else { return job };
    let ending = |work: Work, promise: Promise| -> Work {
        Box::new(move |member, team| {
            let outcome = work(member, team);
            promise.end(outcome.clone().map(|()| 0));
            outcome
        })
    };
    match job {
        Job::Call(work) => Job::Call(ending(work, promise)),
        Job::Wait(work) => Job::Wait(ending(work, promise)),
        Job::Message(message, _) => Job::Message(message, Some(promise)),
    }
}

/// Refuses what makes or ends communicators inside a group: it would wait for calls that the group holds back.
pub(crate) fn refuse(op: &'static str) -> Result<()> {
    if is_open() {
        return Err(poison(Error::invalid(op, "cannot be called inside a group")));
    }
    Ok(())
}

fn launch(jobs: Vec<(Arc<Member>, Job)>) -> Result<()> {
    let mut by_communicator: Vec<(Arc<Member>, Vec<Job>)> = Vec::new();
    for (member, job) in jobs {
        match by_communicator.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &member)) {
            Some((_, jobs)) => jobs.push(job),
            None => by_communicator.push((member, vec![job])),
        }
    }
    let mut outcomes = Vec::new();
    std::thread::scope(|scope| {
        let mut rest = by_communicator.into_iter();
        let first = rest.next();
        let others: Vec<_> = rest
            .map(|(member, jobs)| {
                let launched = Arc::clone(&member);
                let work = move || launched.launch(jobs);
                (member, start_scoped_thread(scope, "group_end", "towline-group", work))
            })
            .collect();
        outcomes.extend(first.map(|(member, jobs)| member.launch(jobs)));
        for (member, other) in others {
            let stop = |why: &Error| {
                if let Ok(team) = member.team("group_end") {
                    team.abort(&why.clone().about([team.rank()]));
                }
            };
            outcomes.push(match other {
                Ok(thread) => interrupt::join(thread, "group_end", stop).unwrap_or_else(|_| {
                    Err(Error::new(towline::Kind::Internal, "group_end", "a thread of the group panicked"))
                }),
                // Other ranks wait for its calls, and would do so to their limit.
                Err(error) => {
                    let error = Error::from(error);
                    stop(&error);
                    Err(error)
                }
            });
        }
    });
    outcomes.into_iter().collect()
}

/// Runs a one-sided operation: now, at the end of the group, or on the communicator's thread.
pub(crate) fn one_sided(
    member: &Arc<Member>,
    op: &'static str,
    start: impl FnOnce(&Arc<Member>, &Arc<Team>) -> Result<Operation> + Send + 'static,
) -> Result<Operation> {
    if member.config.blocking && !is_open() {
        let team = member.team(op)?;
        return start(member, &team);
    }
    let (operation, done) = Operation::live(op, member.config.timeout, true);
    let job = Job::Call(Box::new(move |member, team| {
        let outcome = start(member, team).and_then(|operation| operation.wait());
        let result = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        done.end(outcome);
        result
    }));
    if let Some(job) = defer(member, job) {
        member.launch(vec![job])?;
    }
    Ok(operation)
}
