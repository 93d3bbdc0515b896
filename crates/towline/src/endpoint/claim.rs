//! Claiming a peer's operation: the import that takes it, and the word by which it is given back.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::EndpointCore;
use super::import::{self, Remote};
use crate::cuda::Mark;
use crate::operations::Claimer;
use crate::route::Routing;
use crate::session::{GrantHandle, HEARTBEAT, Imported, Importing, Session, proven};
use crate::transport::{self, Offer, Owner};
use crate::wire::{Finish, OperationId};
use crate::{Error, Kind, Result, Ticket, fork, runtime};

/// An operation of a peer that this endpoint has claimed. Its owner is notified once of how it ended.
pub(crate) struct Claim {
    operation: OperationId,
    of: Of,
    reported: AtomicBool,
    /// How long this side may stand still.
    limit: Duration,
}

enum Of {
    Here(Weak<EndpointCore>, Claimer),
    There(Arc<Session>, Vec<Arc<GrantHandle>>),
}

fn ended(why: &str) -> Error {
    Error::new(Kind::Stale, "claim", format!("the owner has ended the operation: {why}"))
}

impl Claim {
    fn new(wanted: &Wanted, of: Of) -> Claim {
        // Between two pings of the owner no message need come.
        let limit = wanted.endpoint.limits().no_progress.max(2 * HEARTBEAT);
        Claim { operation: wanted.operation, of, reported: AtomicBool::new(false), limit }
    }

    /// Reports to the owner how it ended; only the first report counts. An error where the owner had ended it before, as far as can be
    /// known here: a success counts only where the owner agrees.
    pub(crate) fn finish(&self, outcome: &Result<()>) -> Result<()> {
        if self.reported.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        match &self.of {
            Of::Here(owner, claimer) => match owner.upgrade() {
                Some(owner) => owner.operations.finish(&self.operation, *claimer, outcome.clone()),
                None => Err(ended("its endpoint is gone")),
            },
            Of::There(session, grants) => {
                let known = self.still_claimed(session, grants);
                let outcome = outcome.clone().and(known.clone()).map_err(|error| (&error).into());
                // Where the session is over, the owner knows by that.
                let sent = session.send_one_way(Finish { operation: self.operation, outcome });
                known.and(sent)
            }
        }
    }

    /// Whether the owner has not ended it yet. On one host its table shows that. Elsewhere the clock does: an owner pings its claimer twice a
    /// second, and a claimer that has received no ping for as long as its limit was not there to reply.
    fn still_claimed(&self, session: &Session, grants: &[Arc<GrantHandle>]) -> Result<()> {
        if grants.iter().any(|grant| grant.is_revoked()) {
            return Err(ended(
                "the owner received nothing from this side in time, or cancelled the operation",
            ));
        }
        if session.silence() > self.limit {
            let limit = self.limit.as_secs_f64();
            let message = format!("this side stood still, or was not reached, for more than {limit:.3} s");
            return Err(Error::new(Kind::Timeout, "claim", message));
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !fork::in_child() {
            let _ = self.finish(&Err(Error::new(
                Kind::Canceled,
                "claim",
                "the claimer has dropped the operation",
            )));
        }
    }
}

/// A claimed operation and its regions, in the order of the tickets.
pub(crate) struct Claimed {
    pub(crate) claim: Claim,
    pub(crate) remotes: Vec<Remote>,
}

/// What is to be claimed.
#[derive(Clone)]
struct Wanted {
    endpoint: Arc<EndpointCore>,
    operation: OperationId,
    tickets: Vec<Ticket>,
    routing: Routing,
    until: Instant,
}

/// Claims an operation with the tickets of its regions: one round trip, after first contact where there was none.
pub(crate) fn claim(
    endpoint: &Arc<EndpointCore>,
    operation: OperationId,
    tickets: Vec<Ticket>,
) -> Result<Claimed> {
    let wanted = Wanted::new(endpoint, operation, tickets)?;
    runtime::may_block("import")?;
    wanted.claim()
}

/// [`claim`] as a future. Dropped early, it gives the operation back.
pub(crate) fn claim_async(
    endpoint: &Arc<EndpointCore>,
    operation: OperationId,
    tickets: Vec<Ticket>,
) -> Claiming {
    let begun = Wanted::new(endpoint, operation, tickets).and_then(|wanted| {
        if let Some(owner) = wanted.owner_here() {
            return Ok(Claiming(if owner.operations.is_ready(&wanted.operation) {
                Doing::Done(Some(wanted.claim_here(&owner)))
            } else {
                Doing::Contacting(Box::pin(import::on_a_thread(move || wanted.claim())))
            }));
        }
        match import::known_session(&wanted.endpoint, &wanted.tickets[0], &wanted.routing) {
            Some(session) => {
                let importing = wanted.ask(&session)?;
                Ok(Claiming(Doing::Asked(wanted, session, importing)))
            }
            None => Ok(Claiming(Doing::Contacting(Box::pin(import::on_a_thread(move || wanted.claim()))))),
        }
    });
    begun.unwrap_or_else(|error| Claiming(Doing::Done(Some(Err(error)))))
}

impl Wanted {
    fn new(endpoint: &Arc<EndpointCore>, operation: OperationId, tickets: Vec<Ticket>) -> Result<Wanted> {
        fork::guard("import")?;
        endpoint.registry.check_open("import")?;
        let Some(first) = tickets.first() else {
            return Err(Error::invalid("import", "an operation without memory cannot be claimed"));
        };
        let owner = &first.body().identity;
        if tickets.iter().any(|ticket| ticket.body().identity != *owner) {
            return Err(Error::protocol("import", "the tickets of one operation name different owners"));
        }
        let routing = endpoint.routing().clone();
        let until = runtime::later(Instant::now(), endpoint.limits().no_progress);
        Ok(Wanted { endpoint: Arc::clone(endpoint), operation, tickets, routing, until })
    }

    fn owner_here(&self) -> Option<Arc<EndpointCore>> {
        let owner = EndpointCore::here(&self.tickets[0].body().identity.incarnation);
        owner.filter(|_| transport::contacts(&self.routing).nothing)
    }

    fn claim(&self) -> Result<Claimed> {
        if let Some(owner) = self.owner_here() {
            wait_for("import", &owner.operations.not_before(&self.operation), self.until)?;
            return self.claim_here(&owner);
        }
        let session = import::contact(&self.endpoint, &self.tickets[0], &self.routing, self.until)?;
        let imported = self.ask(&session)?.wait()?;
        self.granted(&session, imported)
    }

    fn claim_here(&self, owner: &Arc<EndpointCore>) -> Result<Claimed> {
        let claimer = Claimer::here();
        let challenge = proven(b"one process", Some(&self.operation));
        let mut claim = None;
        let remotes = self.tickets.iter().map(|ticket| {
            let (region, claims) =
                owner.registry.verify(ticket.public_bytes(), &ticket.proof(&challenge), &challenge)?;
            let of = (region.row, region.generation);
            owner.operations.claim(&self.operation, claimer, self.endpoint.name(), of, claims.access)?;
            claim.get_or_insert_with(|| Claim::new(self, Of::Here(Arc::downgrade(owner), claimer)));
            let grant = region.grant(&claims, false, 0);
            Remote::new(&self.endpoint, Owner::Here(&region), grant, owner.name(), self.wishes())
        });
        let remotes = remotes.collect();
        settle(claim, remotes)
    }

    fn ask(&self, session: &Arc<Session>) -> Result<Importing> {
        let tickets: Vec<&Ticket> = self.tickets.iter().collect();
        session.import(&tickets, Some(self.operation), self.until)
    }

    fn wishes(&self) -> (&Routing, Instant) {
        (&self.routing, self.until)
    }

    /// Whether finding the ways to what was granted would block.
    fn blocks(&self, imported: &Imported) -> bool {
        imported.outcomes.iter().flatten().any(|(grant, handle)| {
            let owner = Owner::There(handle);
            let (routing, until) = self.wishes();
            transport::blocks(&Offer { context: &self.endpoint.transports, owner, grant, routing, until })
        })
    }

    fn granted(&self, session: &Arc<Session>, mut imported: Imported) -> Result<Claimed> {
        let handles = imported.outcomes.iter().flatten().map(|(_, handle)| Arc::clone(handle));
        let grants: Vec<_> = handles.collect();
        let claim = (!grants.is_empty()).then(|| Claim::new(self, Of::There(Arc::clone(session), grants)));
        let remotes = imported.outcomes.drain(..).map(|granted| {
            let (grant, handle) = granted?;
            Remote::new(&self.endpoint, Owner::There(&handle), grant, session.peer_name(), self.wishes())
        });
        let remotes = remotes.collect();
        settle(claim, remotes)
    }
}

/// Waits for the work of GPUs that comes before an operation.
pub(crate) fn wait_for(op: &'static str, marks: &[Mark], until: Instant) -> Result<()> {
    for mark in marks {
        if !mark.wait(until)? {
            let message = "the work of a GPU that comes before it was not done in time";
            return Err(Error::new(Kind::Timeout, op, message));
        }
    }
    Ok(())
}

/// All of it, or nothing: where part of it failed, the owner learns why.
fn settle(claim: Option<Claim>, remotes: Result<Vec<Remote>>) -> Result<Claimed> {
    match (claim, remotes) {
        (Some(claim), Ok(remotes)) => Ok(Claimed { claim, remotes }),
        (Some(claim), Err(error)) => {
            let _ = claim.finish(&Err(error.clone()));
            Err(error)
        }
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Err(Error::new(Kind::Internal, "import", "nothing was asked for")),
    }
}

/// A claim on its way.
pub(crate) struct Claiming(Doing);

enum Doing {
    Done(Option<Result<Claimed>>),
    Asked(Wanted, Arc<Session>, Importing),
    Contacting(Pin<Box<dyn Future<Output = Result<Claimed>> + Send>>),
}

impl Future for Claiming {
    type Output = Result<Claimed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Claimed>> {
        let outcome = match &mut self.0 {
            Doing::Done(outcome) => outcome.take(),
            Doing::Asked(wanted, session, importing) => match importing.poll(cx) {
                Poll::Pending => return Poll::Pending,
                // Finding the ways may take long, and this is a future: a thread does it.
                Poll::Ready(Ok(imported)) if wanted.blocks(&imported) => {
                    let (wanted, session) = (wanted.clone(), Arc::clone(session));
                    let granted = import::on_a_thread(move || wanted.granted(&session, imported));
                    let mut contacting: Pin<Box<dyn Future<Output = Result<Claimed>> + Send>> =
                        Box::pin(granted);
                    match contacting.as_mut().poll(cx) {
                        Poll::Ready(claimed) => Some(claimed),
                        Poll::Pending => {
                            self.0 = Doing::Contacting(contacting);
                            return Poll::Pending;
                        }
                    }
                }
                Poll::Ready(imported) => {
                    Some(imported.and_then(|imported| wanted.granted(session, imported)))
                }
            },
            Doing::Contacting(contacting) => match contacting.as_mut().poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(claimed) => Some(claimed),
            },
        };
        self.0 = Doing::Done(None);
        let again = || Err(Error::invalid("import", "the claim was polled after its end"));
        Poll::Ready(outcome.unwrap_or_else(again))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::memory::{Buffer, SystemStorage};
    use crate::operations::{Offered, Passive};
    use crate::{Access, Endpoint};

    const LONG: Duration = Duration::from_secs(60);

    struct Scene {
        passive: Arc<Passive>,
        claimed: Claimed,
        _ends: (Endpoint, Endpoint),
    }

    /// An operation that was claimed by that path.
    fn claimed_over(path: &str) -> Scene {
        let owner = Endpoint::open("owner").unwrap();
        let storage = Buffer::new(SystemStorage::new(64).unwrap());
        let region = owner.register(storage, Access::READ).unwrap();
        let ticket = region.ticket().unwrap();
        let offered = vec![Offered { region, keep: Box::new(()) }];
        let passive = Passive::open(
            &owner.core().operations,
            owner.limits(),
            "readable",
            Access::READ,
            offered,
            Some(LONG),
        )
        .unwrap();
        let routing = Routing::default().require(path).unwrap();
        let user = Endpoint::options("user").routing(routing).open().unwrap();
        let claimed = claim(user.core(), passive.id, vec![ticket]).unwrap();
        Scene { passive, claimed, _ends: (owner, user) }
    }

    #[test]
    fn the_end_that_a_claimer_tells_is_the_owners_too() {
        for path in ["inproc", "unix", "tcp"] {
            let scene = claimed_over(path);
            scene.claimed.claim.finish(&Ok(())).unwrap();
            scene.passive.completion.wait("test", Some(Instant::now() + LONG)).unwrap().unwrap();
        }
    }

    #[test]
    fn a_claimer_whose_owner_has_ended_it_before_does_not_succeed() {
        for path in ["inproc", "unix"] {
            let scene = claimed_over(path);
            scene.passive.end(Err(Error::new(Kind::Timeout, "readable", "nothing was received")));
            let error = scene.claimed.claim.finish(&Ok(())).unwrap_err();
            assert_eq!(error.kind(), Kind::Stale, "{path}: {error}");
        }
    }

    #[test]
    fn a_claimer_without_a_table_that_stood_still_for_its_limit_does_not_succeed() {
        let mut scene = claimed_over("tcp");
        scene.claimed.claim.limit = Duration::from_millis(20);
        let Of::There(session, _) = &scene.claimed.claim.of else { panic!("the owner is reached by tcp") };
        // As after a stop: time has passed, and what the owner asked meanwhile was not read yet.
        std::thread::sleep(Duration::from_millis(100));
        session.restart_silence();
        let error = scene.claimed.claim.finish(&Ok(())).unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout, "{error}");
        // The owner learns it, and says the same.
        let ended = scene.passive.completion.wait("test", Some(Instant::now() + LONG)).unwrap();
        assert_eq!(ended.unwrap_err().kind(), Kind::Timeout);
    }

    #[test]
    fn a_claimer_whose_session_is_over_does_not_succeed() {
        let scene = claimed_over("tcp");
        let Of::There(session, _) = &scene.claimed.claim.of else { panic!("the owner is reached by tcp") };
        session.fail(Error::new(Kind::Disconnected, "session", "cut off"));
        assert_eq!(scene.claimed.claim.finish(&Ok(())).unwrap_err().kind(), Kind::Disconnected);
        assert!(scene.passive.completion.wait("test", Some(Instant::now() + LONG)).unwrap().is_err());
    }
}
