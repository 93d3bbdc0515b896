//! Which algorithm a collective takes, and why (pure).

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// How the bytes of a collective travel.
///
/// Left to [`Auto`](Algorithm::Auto), the choice follows from the size, the group and the registrations, which all
/// ranks know of each other; [`Communicator::explain`](crate::Communicator::explain) gives it with its reason.
///
/// ```
/// use towline_comm::Algorithm;
/// assert_eq!("ring".parse::<Algorithm>()?, Algorithm::Ring);
/// assert_eq!(Algorithm::Direct.to_string(), "direct");
/// # Ok::<(), towline_comm::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// Chosen for each call.
    #[default]
    Auto,
    /// The data ride in the announcement of the call: one round, a few KiB at most.
    Tiny,
    /// Every rank reads and writes the others' memory: all on one host, all of the memory in windows or registered
    /// buffers.
    Direct,
    /// Every pair of ranks exchanges what it needs through its channel. Works for every group and any memory.
    Staged,
    /// From neighbour to neighbour, so that each rank sends and receives on one link only.
    Ring,
    /// Along a binomial tree: the fewest steps, for small data between hosts.
    Tree,
}

impl Algorithm {
    /// Every algorithm, in the order of the codes.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Auto,
        Algorithm::Tiny,
        Algorithm::Direct,
        Algorithm::Staged,
        Algorithm::Ring,
        Algorithm::Tree,
    ];

    /// The name, as `FromStr` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Tiny => "tiny",
            Algorithm::Direct => "direct",
            Algorithm::Staged => "staged",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| Error::invalid("parse", format!("no algorithm is called {name:?}")))
    }
}

/// A collective call by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    Send,
    Recv,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::AllGather => "all_gather",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Send => "send",
            Kind::Recv => "recv",
        }
    }

    /// Whether it combines elements.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Whether one rank differs from the others.
    pub(crate) fn is_rooted(self) -> bool {
        matches!(self, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
    }

    /// Whether data on one rank is one block per rank: the sender's, the receiver's.
    pub(crate) fn blocks(self) -> (bool, bool) {
        match self {
            Kind::AllReduce | Kind::Reduce | Kind::Broadcast | Kind::Send | Kind::Recv => (false, false),
            Kind::AllGather | Kind::Gather => (false, true),
            Kind::Scatter | Kind::ReduceScatter => (true, false),
            Kind::AllToAll => (true, true),
        }
    }

    fn has(self, algorithm: Algorithm) -> bool {
        match algorithm {
            Algorithm::Ring => {
                matches!(
                    self,
                    Kind::AllReduce | Kind::Reduce | Kind::Broadcast | Kind::AllGather | Kind::ReduceScatter
                )
            }
            Algorithm::Tree => matches!(self, Kind::AllReduce | Kind::Reduce | Kind::Broadcast),
            _ => true,
        }
    }
}

/// What the choice depends on: equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Situation {
    pub(crate) kind: Kind,
    /// What the sender with the most data sends.
    pub(crate) bytes: usize,
    pub(crate) nranks: usize,
    /// How many ranks cannot share memory with all others.
    pub(crate) far: usize,
    /// How many ranks' memory, where the direct path needs it, is in no window that all can reach.
    pub(crate) unregistered: usize,
}

/// The algorithm of a call, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) algorithm: Algorithm,
    reason: Reason,
    situation: Situation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Asked,
    Rides,
    Alone,
    Reachable,
    NotRegistered,
    Mixed,
    FarAndSmall,
    FarAndLarge,
    FarAndPairwise,
}

/// The most bytes that all ranks together send along with their announcements to one rank, if nobody says otherwise:
/// every rank writes its bytes to every other, which beats a second round up to here (measured with 2 and 4 ranks).
const TINY: usize = 64 << 10;

/// What always rides along, however many ranks there are.
const ALWAYS_TINY: usize = 256;

/// Up to this, ranks that share memory but not these bytes use a tree: half as many messages as between all pairs.
const SMALL: usize = 16 << 10;

/// Below this, the steps of a ring cost more than the bytes that a tree sends twice.
const TREE: usize = 64 << 10;

/// Whether the data ride in the announcement: known before any rank has announced anything.
pub(crate) fn rides(
    kind: Kind,
    bytes: usize,
    nranks: usize,
    wanted: Algorithm,
    limit: usize,
) -> Result<bool> {
    match wanted {
        Algorithm::Auto => Ok(bytes <= limit && (bytes <= ALWAYS_TINY || bytes * nranks <= TINY)),
        Algorithm::Tiny if bytes <= limit => Ok(true),
        Algorithm::Tiny => Err(refused(
            kind,
            wanted,
            format!("{bytes} bytes are more than the {limit} that an announcement carries"),
        )),
        _ if !kind.has(wanted) => {
            Err(refused(kind, wanted, "it does not exist for this operation".to_owned()))
        }
        _ => Ok(false),
    }
}

/// Chooses once every rank's announcement is known. The same on all ranks, refusals included.
pub(crate) fn choose(situation: Situation, wanted: Algorithm, rides: bool) -> Result<Choice> {
    let Situation { kind, bytes, nranks, far, unregistered } = situation;
    let (algorithm, reason) = match wanted {
        Algorithm::Direct if nranks > 1 && far > 0 => {
            return Err(refused(
                kind,
                wanted,
                format!("{far} of {nranks} ranks do not share memory with all others"),
            ));
        }
        Algorithm::Direct if nranks > 1 && unregistered > 0 => {
            return Err(refused(
                kind,
                wanted,
                format!(
                    "the memory of {unregistered} of {nranks} ranks is not in a window or registered buffer that all ranks can map"
                ),
            ));
        }
        Algorithm::Auto if rides => (Algorithm::Tiny, Reason::Rides),
        Algorithm::Auto if nranks == 1 => (Algorithm::Direct, Reason::Alone),
        Algorithm::Auto if far == 0 && unregistered == 0 => (Algorithm::Direct, Reason::Reachable),
        Algorithm::Auto if far == 0 && kind == Kind::Broadcast && nranks > 2 => {
            (Algorithm::Ring, Reason::NotRegistered)
        }
        Algorithm::Auto if far == 0 && kind.has(Algorithm::Tree) && bytes <= SMALL => {
            (Algorithm::Tree, Reason::NotRegistered)
        }
        Algorithm::Auto if far == 0 => (Algorithm::Staged, Reason::NotRegistered),
        Algorithm::Auto if kind.has(Algorithm::Tree) && bytes <= TREE && nranks > 2 => {
            (Algorithm::Tree, Reason::FarAndSmall)
        }
        Algorithm::Auto if kind.has(Algorithm::Ring) && nranks > 2 && far < nranks => {
            (Algorithm::Ring, Reason::Mixed)
        }
        Algorithm::Auto if kind.has(Algorithm::Ring) && nranks > 2 => (Algorithm::Ring, Reason::FarAndLarge),
        Algorithm::Auto => (Algorithm::Staged, Reason::FarAndPairwise),
        asked => (asked, Reason::Asked),
    };
    Ok(Choice { algorithm, reason, situation })
}

fn refused(kind: Kind, wanted: Algorithm, why: String) -> Error {
    Error::invalid(kind.name(), format!("algorithm {wanted} cannot do this: {why}"))
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Situation { kind, bytes, nranks, far, unregistered } = self.situation;
        write!(f, "{} of {bytes} bytes among {nranks}: {}, because ", kind.name(), self.algorithm)?;
        match self.reason {
            Reason::Asked => write!(f, "the caller asked for it"),
            Reason::Rides => write!(f, "so few bytes fit into the announcement"),
            Reason::Alone => write!(f, "there is no other rank"),
            Reason::Reachable => write!(f, "all ranks share memory, and what they touch is in windows"),
            Reason::NotRegistered => {
                write!(
                    f,
                    "the memory of {unregistered} ranks is not in a window or registered buffer that all ranks can map"
                )
            }
            Reason::Mixed => write!(f, "{far} of {nranks} ranks do not share memory with all others"),
            Reason::FarAndSmall => {
                write!(
                    f,
                    "{far} of {nranks} ranks are far, and at most {TREE} bytes are limited by the number of steps"
                )
            }
            Reason::FarAndLarge => {
                write!(f, "all ranks are far, and more than {TREE} bytes are limited by the links")
            }
            Reason::FarAndPairwise => {
                write!(f, "{far} of {nranks} ranks are far, and each pair has its own bytes to exchange")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    const NEAR: Situation =
        Situation { kind: Kind::AllReduce, bytes: 1 << 20, nranks: 4, far: 0, unregistered: 0 };

    fn chosen(situation: Situation) -> Algorithm {
        let Situation { kind, bytes, nranks, .. } = situation;
        let rides = rides(kind, bytes, nranks, Algorithm::Auto, 8 << 10).unwrap();
        choose(situation, Algorithm::Auto, rides).unwrap().algorithm
    }

    #[test]
    fn the_choice_follows_from_size_group_and_registration() {
        assert_eq!(chosen(NEAR), Algorithm::Direct);
        assert_eq!(chosen(Situation { bytes: 1024, ..NEAR }), Algorithm::Tiny);
        assert_eq!(chosen(Situation { bytes: 8 << 10, ..NEAR }), Algorithm::Tiny);
        assert_eq!(chosen(Situation { bytes: 8 << 10, nranks: 64, ..NEAR }), Algorithm::Direct);
        assert_eq!(chosen(Situation { bytes: 64, nranks: 4096, ..NEAR }), Algorithm::Tiny);
        assert_eq!(chosen(Situation { unregistered: 1, ..NEAR }), Algorithm::Staged);
        assert_eq!(chosen(Situation { unregistered: 1, bytes: 16 << 10, ..NEAR }), Algorithm::Tree);
        assert_eq!(chosen(Situation { unregistered: 1, kind: Kind::Broadcast, ..NEAR }), Algorithm::Ring);
        assert_eq!(chosen(Situation { far: 2, ..NEAR }), Algorithm::Ring);
        assert_eq!(chosen(Situation { far: 4, bytes: 16 << 10, ..NEAR }), Algorithm::Tree);
        assert_eq!(chosen(Situation { far: 4, kind: Kind::AllToAll, ..NEAR }), Algorithm::Staged);
        assert_eq!(chosen(Situation { nranks: 1, unregistered: 1, ..NEAR }), Algorithm::Direct);
    }

    #[test]
    fn an_override_that_cannot_work_is_invalid_with_its_reason() {
        for (situation, wanted, why) in [
            (Situation { far: 1, ..NEAR }, Algorithm::Direct, "do not share memory"),
            (Situation { unregistered: 2, ..NEAR }, Algorithm::Direct, "2 of 4 ranks is not in a window"),
            (NEAR, Algorithm::Tiny, "more than the 8192"),
            (Situation { kind: Kind::AllToAll, ..NEAR }, Algorithm::Tree, "does not exist"),
        ] {
            let error = rides(situation.kind, situation.bytes, situation.nranks, wanted, 8 << 10)
                .and_then(|rides| choose(situation, wanted, rides))
                .unwrap_err();
            assert_eq!(error.kind(), towline::Kind::Invalid);
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn an_override_that_can_work_is_taken() {
        for wanted in [Algorithm::Staged, Algorithm::Ring, Algorithm::Tree, Algorithm::Direct] {
            assert_eq!(choose(NEAR, wanted, false).unwrap().algorithm, wanted);
        }
    }

    #[test]
    fn the_reason_is_shown_in_words() {
        let choice = choose(Situation { unregistered: 3, ..NEAR }, Algorithm::Auto, false).unwrap();
        assert_eq!(
            choice.to_string(),
            "all_reduce of 1048576 bytes among 4: staged, because the memory of 3 ranks is not in a window or \
             registered buffer that all ranks can map"
        );
    }
}
