//! What a peer of the same user on this host is given, so that it can copy by itself.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use towline_proto::session::allowance::Allowance;

use super::Serving;
use super::heartbeat::GONE;
use crate::fence::applying::{ApplySlot, ApplySlots};
use crate::fence::pins::{PinPage, Side};
use crate::fence::watcher;
use crate::identity::Identity;
use crate::memory::Holder;
use crate::notify::{Mail, Mailbox};
use crate::region::{PeerPins, PeerProcess};
use crate::runtime::socket::Family;
use crate::session::connection::Connection;
use crate::session::{Sessions, sharing};
use crate::wire::{self, Message};
use crate::{Error, Kind, Result};

/// What it takes: the pages that are shared with it, which it can make this process hold as a whole.
pub(super) const LOCAL: usize = PinPage::BYTES + Mailbox::LEN + (4 << 10);

/// A peer of the same user on this host.
pub(in crate::session) struct Local {
    pub(in crate::session) pins: Arc<PeerPins>,
    pub(super) mail: Arc<Mail>,
    pub(super) alive: Mutex<Option<(Option<watcher::Hold>, Option<watcher::Watch>)>>,
    /// Segments that the peer may have mapped and that are gone.
    pub(super) gone: Mutex<Vec<u64>>,
    slots: Arc<ApplySlots>,
}

impl Local {
    /// Where the peer can see that something is applied which came over one of its connections.
    pub(super) fn apply_slot(&self) -> Option<ApplySlot> {
        self.slots.take(&self.pins.page)
    }

    /// What a peer gets that [may share memory](sharing) with this process: the table, a page for its pins, the doorbell and a mailbox.
    pub(super) fn offer(
        sessions: &Sessions,
        peer: &Identity,
        allowance: &Allowance,
        connection: &Arc<Connection>,
    ) -> Result<Option<(Local, Vec<OwnedFd>)>> {
        let socket = connection.socket().socket();
        // An owner that wants to check every access itself gives nobody its memory.
        if socket.family() != Family::Unix || sessions.settings.enforces_isolation {
            return Ok(None);
        }
        let neighbour = match sharing::may_share(socket, sessions.settings.shares_between_containers)? {
            Ok(neighbour) => neighbour,
            Err(apart) => {
                tracing::debug!(peer = peer.name, "no memory is shared: the peer is {apart}");
                return Ok(None);
            }
        };
        let (registry, failed) = (&sessions.registry, |error| Error::os("contact", "dup", error));
        let (Some(table), Some(doorbell)) = (registry.table.fd(), registry.bell.event()) else {
            return Err(Error::owner_gone("contact", "the owner has closed its endpoint"));
        };
        // As long as the pins count, which may be long after the session: until the process ends that holds them.
        let charge = allowance.charge("contact", LOCAL)?;
        let mut page = PinPage::create()?;
        let pins = page.take_fd().ok_or_else(|| Error::new(Kind::Internal, "contact", "no page"))?;
        let table = table.try_clone().map_err(failed)?;
        let doorbell = doorbell.try_clone().map_err(failed)?;
        let (mailbox, mailbox_file) = Mailbox::create()?;
        let page = Arc::new(page);
        let hold = watcher::hold(Arc::clone(&page), Side::Owner)
            .inspect_err(|error| tracing::debug!(%error, "no robust futex towards the peer"))
            .ok();
        let pins_of_peer = PeerPins::new(
            page,
            &peer.name,
            PeerProcess::of(neighbour.process, neighbour.pid),
            (registry, charge),
        );
        let weak = Arc::downgrade(connection);
        let mail = Arc::new(Mail {
            from: peer.clone(),
            mailbox,
            on_nonsense: Box::new(move |error| {
                if let Some(connection) = weak.upgrade() {
                    connection.close(error);
                }
            }),
        });
        registry.notifications.subscribe(&mail);
        let local = Local {
            pins: pins_of_peer,
            mail,
            alive: Mutex::new(Some((hold, None))),
            gone: Mutex::default(),
            slots: Arc::default(),
        };
        Ok(Some((local, vec![table, pins, doorbell, mailbox_file])))
    }
}

impl Holder for Serving {
    fn segment_gone(self: Arc<Self>, segment: u64) {
        let Some(local) = &self.local else { return };
        let mut gone = local.gone.lock();
        gone.push(segment);
        // The last use of a segment can end anywhere, also under a connection's lock: the event loop reports it.
        if gone.len() == 1 {
            self.at(Some(Instant::now()), GONE);
        }
    }
}

impl Serving {
    pub(super) fn tell_gone(&self) {
        let Some(local) = &self.local else { return };
        let gone = std::mem::take(&mut *local.gone.lock());
        let Some(control) = self.control() else { return };
        for segment in gone {
            let unmap = Message::from(wire::Unmap { segment }).frame(0, 0, 0);
            let _ = control.say(unmap);
        }
    }
}
