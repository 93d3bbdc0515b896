//! How ranks find each other: a root waits for all of them and sends everyone the list, or what went wrong.
//!
//! The root is a thread in the process that made the id. It listens on a Unix socket and on TCP, asleep in `poll`.
//! A rank proves that it knows the id's secret without sending it, and what it sends and receives afterwards is
//! encrypted. Unauthenticated connections, garbage, silence and slow senders cost the root a descriptor and a few hundred bytes for a
//! few seconds, and the others nothing.

pub mod fuzzing;
mod join;
mod meeting;
mod opening;
mod root;
mod wire;

pub(crate) use self::join::{Joining, join};
pub(crate) use self::opening::open_meeting;
pub use self::opening::{UniqueIdOptions, get_unique_id, get_unique_id_with};

/// The most ranks of a group.
pub(crate) const MOST_RANKS: usize = 1024;
