//! Connections that did not become sessions: how many, why, from where, and a line in the log now and then.

#[cfg(test)]
mod log_tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use towline_proto::session::unauthenticated::{Origin, Sparse};

use crate::region::UnauthenticatedAudit;
use crate::{Error, Kind};

/// So many origins are told apart; what comes from others is counted together. A peer that connects can make up as many as it has
/// addresses.
const MOST_ORIGINS: usize = 64;

/// Why a connection did not become a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// The proof was wrong, the secret, the certificate, or there was no TLS where it is required.
    Proof,
    /// The ticket was genuine and is worth nothing any more.
    Ticket,
    /// It was meant for another life of this endpoint.
    Stale,
    /// There was no room: a quota, or descriptors.
    Room,
    /// What it said was no handshake.
    Protocol,
    /// It did not prove itself in time.
    Late,
    /// It hung up in the middle of its hello, or after it: it did not like the reply, or died.
    HungUp,
    Other,
}

impl Reason {
    const ALL: [(Reason, &'static str); 8] = [
        (Reason::Proof, "proof"),
        (Reason::Ticket, "ticket"),
        (Reason::Stale, "stale"),
        (Reason::Room, "room"),
        (Reason::Protocol, "protocol"),
        (Reason::Late, "late"),
        (Reason::HungUp, "hung_up"),
        (Reason::Other, "other"),
    ];

    fn of(error: &Error, proven: bool) -> Reason {
        match error.kind() {
            Kind::Stale | Kind::PermissionDenied if proven => Reason::Ticket,
            Kind::PermissionDenied => Reason::Proof,
            Kind::Stale => Reason::Stale,
            Kind::Exhausted => Reason::Room,
            Kind::Protocol => Reason::Protocol,
            Kind::Timeout => Reason::Late,
            Kind::Disconnected => Reason::HungUp,
            _ => Reason::Other,
        }
    }
}

/// Those of one endpoint.
#[derive(Default)]
pub(crate) struct Refusals {
    by_reason: [AtomicU64; Reason::ALL.len()],
    /// Those that had not proven anything.
    by_origin: Mutex<HashMap<Origin, u64>>,
    of_others: AtomicU64,
    log: Mutex<Sparse>,
    /// Of the moments in which no descriptor was left for a peer.
    shortages: Mutex<Sparse>,
}

impl Refusals {
    /// Counts one; `proven` is who it says it is, where it has proven to hold a ticket.
    pub(super) fn count(&self, endpoint: &str, origin: Origin, proven: Option<&str>, error: &Error) {
        let reason = Reason::of(error, proven.is_some());
        self.by_reason[reason as usize].fetch_add(1, Ordering::Relaxed);
        if proven.is_none() {
            self.count_origin(origin);
        }
        if let Some(suppressed) = self.log.lock().line(Instant::now()) {
            let peer = proven.unwrap_or("unproven");
            tracing::warn!(endpoint, %origin, peer, %error, suppressed, "a connection was refused");
        }
    }

    /// There was no descriptor for a peer; whether a line says so.
    pub(super) fn no_descriptor(&self, endpoint: &str, error: &Error) -> bool {
        let line = self.shortages.lock().line(Instant::now());
        if let Some(suppressed) = line {
            tracing::warn!(endpoint, %error, suppressed, "no descriptor is left for a new peer");
        }
        line.is_some()
    }

    fn count_origin(&self, origin: Origin) {
        let mut origins = self.by_origin.lock();
        if let Some(count) = origins.get_mut(&origin) {
            *count += 1;
        } else if origins.len() < MOST_ORIGINS {
            origins.insert(origin, 1);
        } else {
            self.of_others.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many there were, by reason.
    pub(crate) fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = self.by_reason.iter().map(|count| count.load(Ordering::Relaxed));
        Reason::ALL.iter().map(|(_, name)| *name).zip(counts)
    }

    pub(crate) fn total(&self) -> u64 {
        self.by_reason().map(|(_, count)| count).sum()
    }

    /// Where those came from that had not proven anything.
    pub(crate) fn audit(&self) -> Vec<UnauthenticatedAudit> {
        let mut all: Vec<UnauthenticatedAudit> = self
            .by_origin
            .lock()
            .iter()
            .map(|(origin, refused)| UnauthenticatedAudit { origin: origin.to_string(), refused: *refused })
            .collect();
        all.sort_by(|a, b| a.origin.cmp(&b.origin));
        let others = self.of_others.load(Ordering::Relaxed);
        if others > 0 {
            all.push(UnauthenticatedAudit { origin: "(others)".to_owned(), refused: others });
        }
        all
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_reason_has_its_place() {
        for (place, (reason, _)) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, place);
        }
    }

    #[test]
    fn origins_beyond_the_limit_are_counted_together() {
        let refusals = Refusals::default();
        let error = Error::protocol("contact", "no");
        for number in 0..MOST_ORIGINS + 36 {
            refusals.count("here", Origin::V4([10, 0, 0, number as u8]), None, &error);
            refusals.count("here", Origin::V4([10, 0, 0, number as u8]), Some("peer"), &error);
        }
        let audit = refusals.audit();
        assert_eq!(audit.len(), MOST_ORIGINS + 1);
        let others = audit.iter().find(|one| one.origin == "(others)").unwrap();
        assert_eq!(others.refused, 36);
        assert_eq!(audit.iter().map(|one| one.refused).sum::<u64>(), MOST_ORIGINS as u64 + 36);
        assert_eq!(refusals.total(), 2 * (MOST_ORIGINS as u64 + 36));
        let protocol = refusals.by_reason().find(|(name, _)| *name == "protocol").unwrap();
        assert_eq!(protocol.1, refusals.total());
    }

    #[test]
    fn a_shortage_of_descriptors_is_logged_once_a_second() {
        let (refusals, began) = (Refusals::default(), Instant::now());
        let error = Error::new(Kind::Exhausted, "accept", "too many open files");
        let lines = (0..10_000).filter(|_| refusals.no_descriptor("here", &error)).count();
        assert!(lines as u64 <= 1 + began.elapsed().as_secs(), "{lines} lines");
    }
}
