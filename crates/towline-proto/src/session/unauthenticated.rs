//! Connections that have not proven themselves: how many there are, and which one goes when there are too many.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Where a connection comes from, as far as that costs its maker something to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A user of this host.
    User(u32),
    /// A host.
    V4([u8; 4]),
    /// A network: one host has a whole one of these to itself.
    V6([u8; 8]),
}

impl Origin {
    /// Where a connection over a network comes from.
    pub fn host(address: IpAddr) -> Origin {
        match address.to_canonical() {
            IpAddr::V4(address) => Origin::V4(address.octets()),
            IpAddr::V6(address) => {
                let mut network = [0; 8];
                network.copy_from_slice(&address.octets()[..8]);
                Origin::V6(network)
            }
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::User(u32::MAX) => f.write_str("an unknown user of this host"),
            Origin::User(uid) => write!(f, "user {uid} of this host"),
            Origin::V4(address) => Ipv4Addr::from(*address).fmt(f),
            Origin::V6(network) => {
                let mut address = [0; 16];
                address[..8].copy_from_slice(network);
                write!(f, "{}/64", Ipv6Addr::from(address))
            }
        }
    }
}

/// At most one line in this time.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// When a line of the log is written of what an unauthenticated peer may cause as often as it likes.
#[derive(Debug, Default)]
pub struct Sparse {
    last: Option<Instant>,
    suppressed: u64,
}

impl Sparse {
    /// How many lines were left out since the last one; `None` where this one is left out too.
    pub fn line(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < LOG_EVERY) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// One of them; `C` is its connection.
pub struct Entrant<C> {
    origin: Origin,
    spoke: AtomicBool,
    connection: OnceLock<C>,
}

impl<C> Entrant<C> {
    /// Where it comes from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether it has said nothing yet.
    pub fn is_silent(&self) -> bool {
        !self.spoke.load(Ordering::Relaxed)
    }

    /// It has said something that makes sense.
    pub fn has_spoken(&self) {
        self.spoke.store(true, Ordering::Relaxed);
    }

    /// Says which one it is.
    pub fn belongs_to(&self, connection: C) {
        let _ = self.connection.set(connection);
    }

    /// Which one it is.
    pub fn connection(&self) -> Option<&C> {
        self.connection.get()
    }
}

/// Those of one endpoint, the oldest first.
pub struct Unauthenticated<C>(Vec<Arc<Entrant<C>>>);

impl<C> Default for Unauthenticated<C> {
    fn default() -> Unauthenticated<C> {
        Unauthenticated(Vec::new())
    }
}

impl<C> Unauthenticated<C> {
    /// One more has come from there.
    pub fn enter(&mut self, origin: Origin) -> Arc<Entrant<C>> {
        let one = Arc::new(Entrant { origin, spoke: AtomicBool::new(false), connection: OnceLock::new() });
        self.0.push(Arc::clone(&one));
        one
    }

    /// It has proven itself, or is gone.
    pub fn leave(&mut self, gone: &Arc<Entrant<C>>) {
        self.0.retain(|one| !Arc::ptr_eq(one, gone));
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Takes out the one that goes so that there are fewer than that: of the origin that has the most, the oldest that
    /// is silent, or else the oldest.
    pub fn make_room(&mut self, most: usize) -> Option<Arc<Entrant<C>>> {
        let all = &mut self.0;
        if all.len() < most.max(1) {
            return None;
        }
        let mut counts: Vec<(Origin, usize)> = Vec::new();
        for one in all.iter() {
            match counts.iter_mut().find(|(origin, _)| *origin == one.origin) {
                Some((_, count)) => *count += 1,
                None => counts.push((one.origin, 1)),
            }
        }
        let (mut crowd, mut largest) = (None, 0);
        for (origin, count) in counts {
            if count > largest {
                (crowd, largest) = (Some(origin), count);
            }
        }
        let of_crowd = |one: &Arc<Entrant<C>>| Some(one.origin) == crowd;
        let goes = all
            .iter()
            .position(|one| of_crowd(one) && one.is_silent())
            .or_else(|| all.iter().position(of_crowd))?;
        Some(all.remove(goes))
    }

    /// Takes out the oldest that has said nothing.
    pub fn oldest_silent(&mut self) -> Option<Arc<Entrant<C>>> {
        let all = &mut self.0;
        let goes = all.iter().position(|one| one.is_silent())?;
        Some(all.remove(goes))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const HERE: Origin = Origin::User(7);
    const THERE: Origin = Origin::V4([10, 0, 0, 1]);

    #[test]
    fn a_crowd_displaces_itself_its_oldest_silent_member_first() {
        let mut all = Unauthenticated::<()>::default();
        let alone = all.enter(HERE);
        let [spoke, silent, late] = [0; 3].map(|_| all.enter(THERE));
        spoke.has_spoken();
        assert!(all.make_room(5).is_none());
        assert!(Arc::ptr_eq(&all.make_room(4).unwrap(), &silent));
        assert!(Arc::ptr_eq(&all.make_room(3).unwrap(), &late));
        // One each: the origin that came first gives way, since nobody is a crowd.
        assert!(Arc::ptr_eq(&all.make_room(2).unwrap(), &alone));
        assert!(Arc::ptr_eq(&all.make_room(1).unwrap(), &spoke));
        assert!(all.make_room(0).is_none());
    }

    #[test]
    fn origins_are_named_by_what_costs_to_change() {
        let network = Origin::V6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 7]);
        assert_eq!(network.to_string(), "2001:db8:0:7::/64");
        assert_eq!((HERE.to_string(), THERE.to_string()), ("user 7 of this host".into(), "10.0.0.1".into()));
    }

    #[test]
    fn those_who_have_spoken_are_not_the_oldest_silent_one() {
        let mut all = Unauthenticated::<()>::default();
        let [first, second] = [0; 2].map(|_| all.enter(HERE));
        first.has_spoken();
        assert!(Arc::ptr_eq(&all.oldest_silent().unwrap(), &second));
        assert!(all.oldest_silent().is_none());
        all.leave(&first);
        assert_eq!(all.count(), 0);
    }
    #[test]
    fn the_log_gets_one_line_a_second_with_the_number_of_those_left_out() {
        let mut log = Sparse::default();
        let start = Instant::now();
        assert_eq!(log.line(start), Some(0));
        for millis in 1..1000 {
            assert_eq!(log.line(start + Duration::from_millis(millis)), None);
        }
        assert_eq!(log.line(start + LOG_EVERY), Some(999));
        assert_eq!(log.line(start + LOG_EVERY), None);
        assert_eq!(log.line(start + 3 * LOG_EVERY), Some(1));
    }
}
