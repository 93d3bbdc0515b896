//! How much memory peers may cause an endpoint to hold: all of them together, and each of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Kind, Result};

/// The bytes that all peers together may take.
pub struct Budget {
    what: &'static str,
    most: u64,
    used: AtomicU64,
}

/// What one peer takes of a budget: the more is taken, the less a single one may have. Alone it gets three eighths; where many take
/// all that they can get, the share that is left falls only as their number rises.
pub struct Account {
    budget: Arc<Budget>,
    used: AtomicU64,
    /// What it may have; `None` for a share of what is left.
    limit: Option<u64>,
}

/// So much each may have as long as there is some: an ordinary session with a few grants.
const LEAST: u64 = 256 << 10;

/// And so much more for a frame that comes in or goes out, while an eighth of all is left: a peer that has used up its share gets an error, and is not
/// cut off.
const BRIEFLY: u64 = 1 << 20;

/// Bytes that were taken; gives them back when it is dropped.
pub struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Budget {
    /// `what` says in errors what the bytes are for.
    pub fn new(what: &'static str, most: u64) -> Arc<Budget> {
        Arc::new(Budget { what, most, used: AtomicU64::new(0) })
    }

    pub fn account(self: &Arc<Self>) -> Arc<Account> {
        Arc::new(Account { budget: Arc::clone(self), used: AtomicU64::new(0), limit: None })
    }

    /// An account that may have so much, and no share.
    pub fn part(self: &Arc<Self>, limit: u64) -> Arc<Account> {
        Arc::new(Account { budget: Arc::clone(self), used: AtomicU64::new(0), limit: Some(limit) })
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

impl Account {
    /// Takes that many bytes.
    pub fn charge(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<Charge> {
        self.take(op, bytes, 0)?;
        Ok(Charge { account: Arc::clone(self), bytes })
    }

    fn take(&self, op: &'static str, bytes: u64, beyond: u64) -> Result<()> {
        // Taken first and looked at after: two that come at once cannot both get the last bytes.
        let own = self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let all = self.budget.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let most = self.budget.most;
        if all <= most {
            let own_part = self.limit.unwrap_or_else(|| share(most, most - all));
            if own <= own_part || own <= own_part.saturating_add(beyond) && all <= most - most / 8 {
                return Ok(());
            }
        }
        self.give_back(bytes);
        Err(Error::new(
            Kind::Exhausted,
            op,
            format!(
                "quota exceeded: the owner has {most} bytes for {} of all peers; {} are in use, {} of them by this peer, and {bytes} more do not fit",
                self.budget.what,
                all - bytes,
                own - bytes
            ),
        ))
    }

    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What one may have where so much of the whole is left. A peer that takes all of it again and again, by ever new names, leaves one part
/// in two, in three, in four, instead of half of a half of a half.
fn share(most: u64, left: u64) -> u64 {
    let part = u128::from(left) * u128::from(left) / u128::from(most.max(1));
    LEAST.max(part as u64)
}

impl Charge {
    /// Takes more, or gives some back. An error leaves it as it is.
    pub fn resize(&mut self, op: &'static str, bytes: u64) -> Result<()> {
        self.set(op, bytes, 0)
    }

    /// The same for what is soon gone: may go beyond the share by a little.
    pub fn resize_briefly(&mut self, op: &'static str, bytes: u64) -> Result<()> {
        self.set(op, bytes, BRIEFLY)
    }

    fn set(&mut self, op: &'static str, bytes: u64, beyond: u64) -> Result<()> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.account.take(op, more, beyond)?,
            None => self.account.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// For more of the same peer.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn all_together_never_take_more_than_there_is_and_another_finds_some() {
        const MOST: u64 = 1 << 30;
        let budget = Budget::new("tests", MOST);
        let mut held = Vec::new();
        for greedy in 1..=40 {
            let account = budget.account();
            let another = account.charge("test", LEAST);
            assert!(another.is_ok(), "number {greedy} finds nothing");
            held.extend(another);
            while let Ok(charge) = account.charge("test", 64 << 10) {
                held.push(charge);
            }
            let left = MOST - budget.used();
            assert!(left >= MOST / (greedy + 2), "{greedy} have left {left}");
        }
        // By then each may have the least, until there is nothing.
        let small = std::iter::from_fn(|| budget.account().charge("test", LEAST).ok());
        held.extend(small);
        assert!(budget.used() <= MOST && budget.used() > MOST - LEAST);
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_charge_grows_and_shrinks_and_comes_back() {
        let budget = Budget::new("tests", 4 * LEAST);
        let (first, second) = (budget.account(), budget.account());
        let mut charge = first.charge("test", LEAST).unwrap();
        let error = charge.resize("test", 3 * LEAST).unwrap_err();
        assert_eq!((error.kind(), charge.bytes(), budget.used()), (Kind::Exhausted, LEAST, LEAST));
        let other = second.charge("test", LEAST).unwrap();
        assert!(second.charge("test", LEAST).is_err(), "more than its share");
        charge.resize_briefly("test", LEAST + LEAST / 2).unwrap();
        assert!(charge.resize_briefly("test", 3 * LEAST).is_err(), "more than seven eighths of all");
        charge.resize("test", 10).unwrap();
        assert_eq!(budget.used(), LEAST + 10);
        drop((charge, other));
        assert_eq!(budget.used(), 0);
    }
}
