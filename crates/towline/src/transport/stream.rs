//! Bytes over sockets: TCP between hosts, and a Unix stream on one host where memory cannot be shared.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Attachment, Offer, Owner, Probe, Transport};
use crate::layout::{Piece, Plan};
use crate::route::Capabilities;
use crate::runtime::socket::Socket;
use crate::session::{self, GrantHandle, Run};
use crate::sync::lock;
use crate::transfer::{After, Op, TransferCore};
use crate::{Error, Kind, Result, runtime};

/// The transport over a Unix socket.
pub(crate) struct Unix;

/// The transport over TCP.
pub(crate) struct Tcp;

impl Transport for Unix {
    fn name(&self) -> &'static str {
        "unix"
    }

    fn summary(&self) -> &'static str {
        "the owner serves over a Unix socket on this host"
    }

    fn probe(&self) -> Probe {
        let mut name = *b"towline/probe/................";
        let random = getrandom::fill(&mut name[14..]);
        match random
            .map_err(|error| error.to_string())
            .and_then(|()| Socket::listen_unix_abstract(&name, 1).map_err(|error| error.to_string()))
        {
            Ok(_) => Probe::Works("abstract Unix sockets work".into()),
            Err(reason) => Probe::Missing { reason, mend: "allow Unix sockets in this container".into() },
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn enforced(&self) -> bool {
        true
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        attach(&Unix, offer)
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn summary(&self) -> &'static str {
        "the owner serves over TCP"
    }

    fn probe(&self) -> Probe {
        match Socket::listen_tcp(SocketAddr::from(([127, 0, 0, 1], 0))) {
            Ok(_) => Probe::Works("listening on loopback works".into()),
            Err(error) => Probe::Missing {
                reason: error.to_string(),
                mend: "bring the loopback interface up and allow TCP sockets".into(),
            },
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn enforced(&self) -> bool {
        true
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        attach(&Tcp, offer)
    }
}

fn attach(transport: &'static dyn Transport, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
    let Owner::There(handle) = offer.owner else {
        return Err(Error::new(Kind::Unavailable, "import", "the owner is in this process"));
    };
    let medium = handle.session().medium();
    if medium.name() != transport.name() {
        return Err(Error::new(Kind::Unavailable, "import", format!("the owner is reached by {medium}")));
    }
    Ok(Arc::new(Stream {
        transport,
        handle: Mutex::new(Arc::clone(handle)),
        renewing: Mutex::default(),
        waiting: Mutex::default(),
        runs: Mutex::default(),
    }))
}

/// A session bound to a granted region: another one once its connection has broken and something is asked for.
struct Stream {
    transport: &'static dyn Transport,
    handle: Mutex<Arc<GrantHandle>>,
    /// Held by the one thread that connects anew.
    renewing: Mutex<()>,
    /// The transfers that wait for a new connection: whoever takes one out reports for it.
    waiting: Mutex<Vec<Arc<TransferCore>>>,
    /// The transfers in flight, for the one that is stopped.
    runs: Mutex<Vec<std::sync::Weak<Run>>>,
}

impl Stream {
    fn handle(&self) -> Arc<GrantHandle> {
        Arc::clone(&lock(&self.handle))
    }

    fn begin_over(&self, handle: &Arc<GrantHandle>, transfer: &Arc<TransferCore>) {
        if let Some(message) = message_alone(transfer.op, transfer.plan.pieces(), &transfer.after) {
            return match handle.session().notify(message) {
                Ok(()) => transfer.unit_done(),
                Err(error) => transfer.unit_failed(0, error),
            };
        }
        let run = Run::start(handle, transfer);
        let mut runs = lock(&self.runs);
        runs.retain(|run| run.strong_count() > 0);
        runs.push(Arc::downgrade(&run));
        drop(runs);
        // A stop that came before the run was known here did not find it.
        if transfer.is_stopped() {
            self.stop(transfer);
        }
    }

    /// Begins it over a new connection. Blocks.
    fn begin_anew(&self, transfer: &Arc<TransferCore>) {
        let until = runtime::later(Instant::now(), transfer.limits.no_progress);
        let renewed = {
            let _one_connects = lock(&self.renewing);
            let handle = self.handle();
            if handle.is_renewable() { handle.renewed(until) } else { Ok(handle) }
                .inspect(|renewed| lock(&self.handle).clone_from(renewed))
        };
        if !self.take_waiting(transfer) {
            return;
        }
        match renewed {
            Ok(handle) => self.begin_over(&handle, transfer),
            Err(error) => fail_all(transfer, &error),
        }
    }

    fn take_waiting(&self, transfer: &TransferCore) -> bool {
        let mut waiting = lock(&self.waiting);
        let found = waiting.iter().position(|one| one.id == transfer.id);
        found.map(|at| waiting.swap_remove(at)).is_some()
    }
}

fn fail_all(transfer: &TransferCore, error: &Error) {
    for unit in 0..transfer.units.len() {
        transfer.unit_failed(unit, error.clone());
    }
}

/// The message, where there is nothing else: only that needs no answer.
fn message_alone<'a>(op: Op, pieces: &[Piece], after: &'a After) -> Option<&'a [u8]> {
    let alone = pieces.is_empty() && after.signal.is_none() && !matches!(op, Op::Atomic { .. });
    after.notify.as_deref().filter(|_| alone)
}

impl Attachment for Stream {
    fn transport(&self) -> &'static dyn Transport {
        self.transport
    }

    fn summary(&self) -> &'static str {
        if self.handle().session().is_encrypted() {
            return "tcp+tls: the owner serves over TCP, encrypted by TLS 1.3";
        }
        self.transport.summary()
    }

    #[allow(unsafe_code, reason = "implements the seam; touches no memory itself")]
    unsafe fn run_now(
        &self,
        op: Op,
        _local: *mut u8,
        pieces: &[Piece],
        _bytes: u64,
        after: &After,
    ) -> Option<Result<Option<u64>>> {
        let message = message_alone(op, pieces, after)?;
        let handle = self.handle();
        (!handle.is_renewable()).then(|| handle.session().notify(message).map(|()| None))
    }

    fn cut_portion(&self, op: Op, plan: Plan, after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        session::cut_portion(op, plan, after)
    }

    fn starts_later(&self, _op: Op, bytes: u64, blocks: u64) -> bool {
        session::starts_later(bytes, blocks)
    }

    fn cut(&self, op: Op, plan: Plan, after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        session::cut(op, plan, after)
    }

    fn start(self: Arc<Self>, transfer: &Arc<TransferCore>) {
        let handle = self.handle();
        if !handle.is_renewable() {
            return self.begin_over(&handle, transfer);
        }
        lock(&self.waiting).push(Arc::clone(transfer));
        let (this, waiting) = (Arc::clone(&self), Arc::clone(transfer));
        let connecting = runtime::contacts().spawn(Box::new(move || this.begin_anew(&waiting)));
        // A stop that came before it was known to wait here did not find it.
        let error = match connecting {
            Err(refused) => Some(refused.error),
            Ok(()) => transfer.is_stopped().then(|| transfer.stop_error()),
        };
        if let Some(error) = error.filter(|_| self.take_waiting(transfer)) {
            fail_all(transfer, &error);
        }
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        #[cfg(test)]
        session::moments::reach(session::moments::Moment::Stopping, &Some(transfer.local_base().addr()));
        if self.take_waiting(transfer) {
            return fail_all(transfer, &transfer.stop_error());
        }
        let run = lock(&self.runs)
            .iter()
            .filter_map(std::sync::Weak::upgrade)
            .find(|run| run.transfer.id == transfer.id);
        match run {
            // An atomic is one request, which has been sent: nobody has a run of it any more.
            _ if matches!(transfer.op, Op::Atomic { .. }) => self.handle().session().settle(),
            Some(run) => {
                run.session().stop(&run);
                run.fail_rest(&transfer.stop_error());
            }
            // Every unit has reported; what still names the memory is taken back.
            None => self.handle().session().take_all_back(transfer.id),
        }
    }

    fn alive(&self) -> Result<()> {
        self.handle().session().alive()
    }

    fn ready(&self) -> Result<()> {
        let handle = self.handle();
        if handle.is_renewable() { Ok(()) } else { handle.session().alive() }
    }
}
