//! What one peer has in flight and takes of this process's memory, and how much of that it may have.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::Quotas;
use super::budget::{Account, Charge};
use crate::{Error, Kind, Result};

/// What a request takes while it is in flight, the list of its parts apart.
const REQUEST: u64 = 512;

/// What one peer has in flight.
pub struct Allowance {
    quotas: Quotas,
    requests: AtomicUsize,
    bytes: AtomicU64,
    memory: Arc<Account>,
}

/// One request in flight; gives back what it took when it is dropped.
pub struct InFlight {
    allowance: Arc<Allowance>,
    bytes: u64,
    charge: Option<Charge>,
    /// The region that it is about is served over its session for as long. Of no type, so that compilers need not follow all that it names.
    _served: Option<Arc<dyn Any + Send + Sync>>,
}

impl Allowance {
    /// What one peer may have, of that account.
    pub fn new(quotas: Quotas, memory: Arc<Account>) -> Arc<Allowance> {
        Arc::new(Allowance { quotas, requests: AtomicUsize::new(0), bytes: AtomicU64::new(0), memory })
    }

    /// Takes memory for something that this peer causes to be kept.
    pub fn charge(&self, op: &'static str, bytes: usize) -> Result<Charge> {
        self.memory.charge(op, bytes as u64)
    }

    /// Lets a request for that many bytes begin, whose list of parts takes so much memory.
    pub fn take(
        self: &Arc<Self>,
        op: &'static str,
        bytes: u64,
        list: usize,
        served: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<InFlight> {
        // Taken first and looked at after: two requests that come at once cannot both get the last place.
        let mut flight = InFlight { allowance: Arc::clone(self), bytes, charge: None, _served: served };
        let requests = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if requests > self.quotas.requests {
            return Err(exhausted(op, format!("{} requests", self.quotas.requests), "in flight"));
        }
        if all > self.quotas.bytes {
            return Err(exhausted(op, format!("{} bytes", self.quotas.bytes), "in flight"));
        }
        flight.charge = Some(self.memory.charge(op, REQUEST + list as u64)?);
        Ok(flight)
    }

    /// Refuses one grant more than the peer may hold.
    pub fn check_grants(&self, held: usize) -> Result<()> {
        if held >= self.quotas.grants {
            return Err(exhausted("import", format!("{} grants", self.quotas.grants), "at a time"));
        }
        Ok(())
    }

    /// What is in flight: requests and bytes.
    pub fn load(&self) -> (usize, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

/// The error of a peer that asks for more than its share.
pub fn exhausted(op: &'static str, what: String, when: &str) -> Error {
    Error::new(Kind::Exhausted, op, format!("quota exceeded: the owner allows a peer {what} {when}"))
}

impl InFlight {
    /// Takes memory for more of this request.
    pub fn charge(&self, op: &'static str, bytes: usize) -> Result<Charge> {
        self.allowance.charge(op, bytes)
    }
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
    use crate::session::budget::Budget;

    #[test]
    fn what_is_in_flight_is_bounded_and_comes_back() {
        let budget = Budget::new("tests", 1 << 20);
        let quotas = Quotas { requests: 2, bytes: 100, grants: 1, ..Quotas::default() };
        let allowance = Allowance::new(quotas, budget.account());
        let take = |bytes, parts: usize| allowance.take("read", bytes, 16 * parts, None);
        let first = take(60, 1).unwrap();
        assert_eq!(take(41, 1).err().unwrap().kind(), Kind::Exhausted);
        assert!(take(0, 1 << 20).err().unwrap().message().contains("1048576 bytes"), "the list of blocks");
        let _second = take(40, 1).unwrap();
        assert!(take(0, 1).err().unwrap().message().contains("2 requests"));
        assert_eq!(allowance.load(), (2, 100));
        assert_eq!(budget.used(), 2 * (REQUEST + 16));
        drop(first);
        assert_eq!(allowance.load(), (1, 40));
        assert!(allowance.check_grants(0).is_ok());
        assert_eq!(allowance.check_grants(1).unwrap_err().kind(), Kind::Exhausted);
    }
}
