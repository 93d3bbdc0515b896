//! What one peer has in flight, and how much of that it may have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::endpoint::Quotas;
use crate::{Error, Kind, Result};

/// What one peer has in flight.
pub(super) struct Allowance {
    quotas: Quotas,
    requests: AtomicUsize,
    bytes: AtomicU64,
}

/// One request in flight; gives back what it took when it is dropped.
pub(super) struct InFlight {
    allowance: Arc<Allowance>,
    bytes: u64,
}

impl Allowance {
    pub(super) fn new(quotas: Quotas) -> Arc<Allowance> {
        Arc::new(Allowance { quotas, requests: AtomicUsize::new(0), bytes: AtomicU64::new(0) })
    }

    /// Lets a request for that many bytes begin.
    pub(super) fn take(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<InFlight> {
        // Taken first and looked at after: two requests that come at once cannot both get the last place.
        let flight = InFlight { allowance: Arc::clone(self), bytes };
        let requests = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if requests > self.quotas.requests {
            return Err(exhausted(op, format!("{} requests", self.quotas.requests), "in flight"));
        }
        if all > self.quotas.bytes {
            return Err(exhausted(op, format!("{} bytes", self.quotas.bytes), "in flight"));
        }
        Ok(flight)
    }

    /// Refuses one grant more than the peer may hold.
    pub(super) fn check_grants(&self, held: usize) -> Result<()> {
        if held >= self.quotas.grants {
            return Err(exhausted("import", format!("{} grants", self.quotas.grants), "at a time"));
        }
        Ok(())
    }

    /// What is in flight: requests and bytes.
    pub(super) fn load(&self) -> (usize, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

/// The error of a peer that asks for more than its share.
pub(super) fn exhausted(op: &'static str, what: String, when: &str) -> Error {
    Error::new(Kind::Exhausted, op, format!("the owner allows a peer {what} {when}, and not one more"))
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.allowance.requests.fetch_sub(1, Ordering::Relaxed);
        self.allowance.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_in_flight_is_bounded_and_comes_back() {
        let allowance = Allowance::new(Quotas { requests: 2, bytes: 100, grants: 1, ..Quotas::default() });
        let first = allowance.take("read", 60).unwrap();
        assert_eq!(allowance.take("read", 41).err().unwrap().kind(), Kind::Exhausted);
        let _second = allowance.take("read", 40).unwrap();
        assert!(allowance.take("read", 0).err().unwrap().message().contains("2 requests"));
        assert_eq!(allowance.load(), (2, 100));
        drop(first);
        assert_eq!(allowance.load(), (1, 40));
        assert!(allowance.check_grants(0).is_ok());
        assert_eq!(allowance.check_grants(1).unwrap_err().kind(), Kind::Exhausted);
    }
}
