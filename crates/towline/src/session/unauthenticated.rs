//! Connections that have not proven themselves: how many there are, and which one goes when there are too many.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::connection::Connection;
use crate::runtime::socket::{PeerAddr, Socket};
use crate::sync::lock;

/// Where a connection comes from, as far as that costs its maker something to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    /// A user of this host.
    User(u32),
    /// A host.
    V4([u8; 4]),
    /// A network: one host has a whole one of these to itself.
    V6([u8; 8]),
}

impl Origin {
    pub(super) fn of(socket: &Socket, peer: &PeerAddr) -> Origin {
        match peer {
            PeerAddr::Unix => Origin::User(socket.peer_credentials().map_or(u32::MAX, |peer| peer.uid)),
            PeerAddr::Tcp(address) => match address.ip().to_canonical() {
                IpAddr::V4(address) => Origin::V4(address.octets()),
                IpAddr::V6(address) => {
                    let mut network = [0; 8];
                    network.copy_from_slice(&address.octets()[..8]);
                    Origin::V6(network)
                }
            },
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

/// One of them.
pub(super) struct Stranger {
    origin: Origin,
    spoke: AtomicBool,
    connection: Mutex<Weak<Connection>>,
}

impl Stranger {
    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    pub(super) fn is_silent(&self) -> bool {
        !self.spoke.load(Ordering::Relaxed)
    }

    /// It has said something that makes sense.
    pub(super) fn has_spoken(&self) {
        self.spoke.store(true, Ordering::Relaxed);
    }

    pub(super) fn belongs_to(&self, connection: &Arc<Connection>) {
        *lock(&self.connection) = Arc::downgrade(connection);
    }

    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        lock(&self.connection).upgrade()
    }
}

/// Those of one endpoint, the oldest first.
#[derive(Default)]
pub(crate) struct Strangers(Mutex<Vec<Arc<Stranger>>>);

impl Strangers {
    pub(super) fn enter(&self, origin: Origin) -> Arc<Stranger> {
        let stranger =
            Arc::new(Stranger { origin, spoke: AtomicBool::new(false), connection: Mutex::default() });
        lock(&self.0).push(Arc::clone(&stranger));
        stranger
    }

    pub(super) fn leave(&self, stranger: &Arc<Stranger>) {
        lock(&self.0).retain(|one| !Arc::ptr_eq(one, stranger));
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.0).len()
    }

    /// Takes out the one that goes so that there are fewer than that: of the origin that has the most, the oldest that
    /// is silent, or else the oldest.
    pub(super) fn make_room(&self, most: usize) -> Option<Arc<Stranger>> {
        let mut all = lock(&self.0);
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
        let of_crowd = |one: &Arc<Stranger>| Some(one.origin) == crowd;
        let goes = all
            .iter()
            .position(|one| of_crowd(one) && one.is_silent())
            .or_else(|| all.iter().position(of_crowd))?;
        Some(all.remove(goes))
    }

    /// Takes out the oldest that has said nothing.
    pub(super) fn oldest_silent(&self) -> Option<Arc<Stranger>> {
        let mut all = lock(&self.0);
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
        let strangers = Strangers::default();
        let alone = strangers.enter(HERE);
        let [spoke, silent, late] = [0; 3].map(|_| strangers.enter(THERE));
        spoke.has_spoken();
        assert!(strangers.make_room(5).is_none());
        assert!(Arc::ptr_eq(&strangers.make_room(4).unwrap(), &silent));
        assert!(Arc::ptr_eq(&strangers.make_room(3).unwrap(), &late));
        // One each: the origin that came first gives way, since nobody is a crowd.
        assert!(Arc::ptr_eq(&strangers.make_room(2).unwrap(), &alone));
        assert!(Arc::ptr_eq(&strangers.make_room(1).unwrap(), &spoke));
        assert!(strangers.make_room(0).is_none());
    }

    #[test]
    fn origins_are_named_by_what_costs_to_change() {
        let network = Origin::V6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 7]);
        assert_eq!(network.to_string(), "2001:db8:0:7::/64");
        assert_eq!((HERE.to_string(), THERE.to_string()), ("user 7 of this host".into(), "10.0.0.1".into()));
    }

    #[test]
    fn those_who_have_spoken_are_not_the_oldest_silent_one() {
        let strangers = Strangers::default();
        let [first, second] = [0; 2].map(|_| strangers.enter(HERE));
        first.has_spoken();
        assert!(Arc::ptr_eq(&strangers.oldest_silent().unwrap(), &second));
        assert!(strangers.oldest_silent().is_none());
        strangers.leave(&first);
        assert_eq!(strangers.count(), 0);
    }
}
