//! What the paths over sockets share: the owner serves, over the session with it.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::{Attachment, Offer, Owner, Transport, gpu, joint};
use crate::session::{self, GrantHandle, Medium, Run};
use crate::transfer::submission::{Link, Started, Submission};
use crate::transfer::{Op, Several, TransferCore};
use crate::{Error, Kind, Result, runtime};

/// Attaches a region whose owner is reached by such a medium.
pub(super) fn attach(
    transport: &'static dyn Transport,
    offer: &Offer<'_>,
    is_medium: fn(&Medium) -> bool,
) -> Result<Arc<dyn Attachment>> {
    let Owner::There(handle) = offer.owner else {
        return Err(Error::new(Kind::Unavailable, "import", "the owner is in this process"));
    };
    let medium = handle.session().medium;
    if !is_medium(&medium) {
        return Err(Error::new(Kind::Unavailable, "import", format!("the owner is reached by {medium}")));
    }
    Ok(Arc::new_cyclic(|me| Stream {
        transport,
        me: Weak::clone(me),
        handle: Mutex::new(Arc::clone(handle)),
        renewing: Mutex::default(),
        waiting: Mutex::default(),
        runs: Mutex::default(),
    }))
}

/// A granted region attached to the session with its owner: another one once its connection has broken and something is asked for.
struct Stream {
    transport: &'static dyn Transport,
    me: Weak<Stream>,
    handle: Mutex<Arc<GrantHandle>>,
    /// Held by the one thread that connects anew.
    renewing: Mutex<()>,
    /// The transfers that wait for a new connection: the thread that takes one out reports for it.
    waiting: Mutex<Vec<Arc<TransferCore>>>,
    /// The transfers in flight, for the one that is stopped.
    runs: Mutex<Vec<Weak<Run>>>,
}

impl Stream {
    fn handle(&self) -> Arc<GrantHandle> {
        Arc::clone(&self.handle.lock())
    }

    /// What was granted for each part.
    fn handles(&self, transfer: &TransferCore) -> Result<Several<Arc<GrantHandle>>> {
        let mut handles = Several::one(self.handle());
        for part in transfer.parts.iter().skip(1) {
            handles.push(transfer.op.name(), of(&*part.region)?.handle())?;
        }
        Ok(handles)
    }

    fn begin_over(&self, handles: Several<Arc<GrantHandle>>, transfer: &Arc<TransferCore>) {
        if let Some(message) = message_alone(transfer) {
            return match handles.first().session().notify(message) {
                Ok(()) => transfer.unit_done(),
                Err(error) => transfer.unit_failed(0, error),
            };
        }
        let session = handles.first().session();
        if handles.iter().any(|handle| !Arc::ptr_eq(handle.session(), session)) {
            let message = "the connection to the owner has broken, and not every part has been granted anew";
            return transfer.all_failed(&Error::new(Kind::Disconnected, transfer.op.name(), message));
        }
        let run = Run::start(handles, transfer);
        let mut runs = self.runs.lock();
        runs.retain(|run| run.strong_count() > 0);
        runs.push(Arc::downgrade(&run));
        drop(runs);
        // A stop that came before the run was known here did not find it.
        if transfer.is_stopped() {
            self.stop(transfer);
        }
    }

    /// The same region granted again, over a new connection where its own has broken. Blocks.
    fn renew(&self, until: Instant) -> Result<Arc<GrantHandle>> {
        let _one_connects = self.renewing.lock();
        let handle = self.handle();
        if handle.is_renewable() { handle.renewed(until) } else { Ok(handle) }
            .inspect(|renewed| self.handle.lock().clone_from(renewed))
    }

    /// Begins it over a new connection. Blocks.
    fn begin_anew(&self, transfer: &Arc<TransferCore>) {
        let until = runtime::later(Instant::now(), transfer.limits.no_progress);
        let all = || {
            let mut handles = Several::one(self.renew(until)?);
            for part in transfer.parts.iter().skip(1) {
                handles.push(transfer.op.name(), of(&*part.region)?.renew(until)?)?;
            }
            Ok(handles)
        };
        let renewed = all();
        if !self.take_waiting(transfer) {
            return;
        }
        match renewed {
            Ok(handles) => self.begin_over(handles, transfer),
            Err(error) => transfer.all_failed(&error),
        }
    }

    fn take_waiting(&self, transfer: &TransferCore) -> bool {
        let mut waiting = self.waiting.lock();
        let found = waiting.iter().position(|one| one.id == transfer.id);
        found.map(|at| waiting.swap_remove(at)).is_some()
    }

    /// Starts a transfer, once the owner is connected to.
    fn start(&self, transfer: &Arc<TransferCore>) -> Result<()> {
        let handles = self.handles(transfer)?;
        if !handles.iter().any(|handle| handle.is_renewable()) {
            self.begin_over(handles, transfer);
            return Ok(());
        }
        self.waiting.lock().push(Arc::clone(transfer));
        let (this, waiting) = (Weak::clone(&self.me), Arc::clone(transfer));
        let connecting = runtime::contacts().spawn(Box::new(move || {
            if let Some(this) = this.upgrade() {
                this.begin_anew(&waiting);
            }
        }));
        // A stop that came before it was known to wait here did not find it.
        let error = match connecting {
            Err(refused) => Some(refused.error),
            Ok(()) => transfer.is_stopped().then(|| transfer.stop_error()),
        };
        if let Some(error) = error.filter(|_| self.take_waiting(transfer)) {
            transfer.all_failed(&error);
        }
        Ok(())
    }
}

/// The region of another part, which goes by the same path.
fn of(region: &dyn Link) -> Result<&Stream> {
    let region: &dyn Any = region;
    region.downcast_ref::<Stream>().ok_or_else(|| {
        Error::new(Kind::Internal, "transfer", "a part is attached to another link than the first")
    })
}

/// The message, where there is nothing else: only that needs no reply.
fn message_alone(transfer: &TransferCore) -> Option<&[u8]> {
    let alone =
        transfer.bytes() == 0 && transfer.after.signal.is_none() && !matches!(transfer.op, Op::Atomic { .. });
    transfer.after.notify.as_deref().filter(|_| alone)
}

impl Link for Stream {
    fn path(&self) -> &'static str {
        self.transport.name()
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        if submission.is_on_gpu() {
            return if submission.parts.len() > 1 {
                joint::submit(submission)
            } else {
                gpu::staged(submission)
            };
        }
        let (bytes, blocks) = submission.size()?;
        let atomic = matches!(submission.op, Op::Atomic { .. });
        if bytes == 0
            && submission.inline
            && !atomic
            && submission.after.signal.is_none()
            && let Some(message) = &submission.after.notify
        {
            let handle = self.handle();
            if !handle.is_renewable() {
                return Ok(Started::Done(handle.session().notify(message).map(|()| None)));
            }
        }
        if submission.deferrable && session::takes_long(bytes, blocks) {
            return Ok(Started::Deferred);
        }
        let link = Arc::clone(submission.parts.first().region);
        let transfer = session::cut(submission, link, bytes)?;
        if let Err(error) = self.start(&transfer) {
            transfer.all_failed(&error);
        }
        Ok(Started::Running(transfer))
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        #[cfg(test)]
        session::moments::reach(session::moments::Moment::Stopping, &Some(transfer.base(0).addr()));
        if self.take_waiting(transfer) {
            return transfer.all_failed(&transfer.stop_error());
        }
        let run =
            self.runs.lock().iter().filter_map(Weak::upgrade).find(|run| run.transfer.id == transfer.id);
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
}

impl Attachment for Stream {
    fn transport(&self) -> &'static dyn Transport {
        self.transport
    }

    fn summary(&self) -> &'static str {
        if self.handle().session().is_encrypted() {
            return "tcp+tls: the owner serves over TCP, encrypted by TLS 1.3";
        }
        self.transport.properties().summary
    }

    fn alive(&self) -> Result<()> {
        self.handle().session().alive()
    }

    fn ready(&self) -> Result<()> {
        let handle = self.handle();
        if handle.is_renewable() { Ok(()) } else { handle.session().alive() }
    }
}
