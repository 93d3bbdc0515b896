//! Claiming a peer's operation: the import that takes it, and the word by which it is given back.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use super::EndpointCore;
use super::import::{self, Remote};
use super::operations::Claimer;
use crate::cuda::Mark;
use crate::route::Routing;
use crate::transport::tcp::{Imported, Importing, Session, proven};
use crate::transport::{self, Offer, Owner};
use crate::wire::{Finish, OperationId};
use crate::{Error, Kind, Result, Ticket, fork, progress};

/// An operation of a peer that this endpoint has claimed. Its owner is told once how it ended.
pub(crate) struct Claim {
    operation: OperationId,
    of: Of,
    told: AtomicBool,
}

enum Of {
    Here(Weak<EndpointCore>, Claimer),
    There(Arc<Session>),
}

impl Claim {
    fn new(operation: OperationId, of: Of) -> Claim {
        Claim { operation, of, told: AtomicBool::new(false) }
    }

    /// Tells the owner how it ended; only the first word counts.
    pub(crate) fn finish(&self, outcome: &Result<()>) {
        if self.told.swap(true, Ordering::AcqRel) {
            return;
        }
        match &self.of {
            Of::Here(owner, claimer) => {
                if let Some(owner) = owner.upgrade() {
                    owner.operations.finish(&self.operation, *claimer, outcome.clone());
                }
            }
            Of::There(session) => {
                let outcome = outcome.clone().map_err(|error| (&error).into());
                // Where the session is over, the owner knows by that.
                let _ = session.tell(Finish { operation: self.operation, outcome });
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !fork::in_child() {
            self.finish(&Err(Error::new(Kind::Canceled, "claim", "the claimer has let go of it")));
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
    progress::may_block("import")?;
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
        endpoint.check_open("import")?;
        let Some(first) = tickets.first() else {
            return Err(Error::invalid("import", "an operation without memory cannot be claimed"));
        };
        let owner = &first.body().identity;
        if tickets.iter().any(|ticket| ticket.body().identity != *owner) {
            return Err(Error::protocol("import", "the tickets of one operation name different owners"));
        }
        let routing = endpoint.routing().clone();
        let until = progress::later(Instant::now(), endpoint.limits().no_progress);
        Ok(Wanted { endpoint: Arc::clone(endpoint), operation, tickets, routing, until })
    }

    fn owner_here(&self) -> Option<Arc<EndpointCore>> {
        let owner = EndpointCore::here(&self.tickets[0].body().identity.incarnation);
        owner.filter(|_| self.routing.allows("inproc"))
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
                owner.verify(ticket.public_bytes(), &ticket.proof(&challenge), &challenge)?;
            let of = (region.row, region.generation);
            owner.operations.claim(&self.operation, claimer, self.endpoint.name(), of, claims.access)?;
            claim.get_or_insert_with(|| Claim::new(self.operation, Of::Here(Arc::downgrade(owner), claimer)));
            let grant = region.grant(&claims, 0, false);
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
            transport::blocks(&Offer { endpoint: &self.endpoint, owner, grant, routing, until })
        })
    }

    fn granted(&self, session: &Arc<Session>, mut imported: Imported) -> Result<Claimed> {
        let any = imported.outcomes.iter().any(Result::is_ok);
        let claim = any.then(|| Claim::new(self.operation, Of::There(Arc::clone(session))));
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
            claim.finish(&Err(error.clone()));
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
