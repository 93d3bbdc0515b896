//! The only policy: which path for this pair, and why.

use std::fmt;
use std::ops::BitOr;

use crate::{Error, Kind, Result};

/// What a path can do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Capabilities(u8);

impl Capabilities {
    /// Reads.
    pub const READ: Capabilities = Capabilities(1);
    /// Writes.
    pub const WRITE: Capabilities = Capabilities(2);
    /// 64-bit fetch-and-add and compare-and-swap.
    pub const ATOMIC: Capabilities = Capabilities(4);
    /// Reductions into the owner's memory.
    pub const REDUCE: Capabilities = Capabilities(8);
    /// Counters that are raised after the bytes.
    pub const SIGNAL: Capabilities = Capabilities(16);
    /// All of them.
    pub const ALL: Capabilities = Capabilities(31);

    /// Whether all of `other` are among these.
    pub fn contains(self, other: Capabilities) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Capabilities {
    type Output = Capabilities;

    fn bitor(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 | other.0)
    }
}

impl fmt::Debug for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Capabilities::READ, "read"),
            (Capabilities::WRITE, "write"),
            (Capabilities::ATOMIC, "atomic"),
            (Capabilities::REDUCE, "reduce"),
            (Capabilities::SIGNAL, "signal"),
        ];
        let held: Vec<_> =
            names.iter().filter(|(one, _)| self.contains(*one)).map(|(_, name)| *name).collect();
        f.write_str(&held.join("+"))
    }
}

/// Against whom bounds, rights and revocation must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Isolation {
    /// Between cooperating processes of one user: the fastest paths are allowed.
    #[default]
    Cooperative,
    /// Against a compromised peer too: only paths on which the owner checks every access.
    Enforced,
}

/// Which paths a caller allows.
///
/// ```
/// use towline::{Isolation, Routing};
/// let only_tcp = Routing::default().require("tcp")?;
/// let no_copies_behind_my_back = Routing::default().forbid("cma")?.isolation(Isolation::Enforced);
/// assert!(Routing::default().require("carrier-pigeon").is_err());
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    require: Vec<&'static str>,
    forbid: Vec<&'static str>,
    isolation: Isolation,
}

impl Routing {
    pub(crate) fn requiring(mut self, path: &'static str) -> Routing {
        self.require.push(path);
        self
    }

    pub(crate) fn forbidding(mut self, path: &'static str) -> Routing {
        self.forbid.push(path);
        self
    }

    /// Sets against whom bounds, rights and revocation must hold.
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> Routing {
        self.isolation = isolation;
        self
    }

    /// Whether only paths are allowed on which the owner checks every access.
    pub(crate) fn is_enforced(&self) -> bool {
        self.isolation == Isolation::Enforced
    }

    /// Whether that path is required by name.
    pub(crate) fn requires(&self, path: &str) -> bool {
        self.require.contains(&path)
    }

    /// Why that path is not allowed; `None` when it is.
    pub(crate) fn refusal(&self, path: &str, enforced: bool) -> Option<String> {
        if self.forbid.contains(&path) {
            return Some("forbidden by the caller".into());
        }
        if !self.require.is_empty() && !self.require.contains(&path) {
            return Some(format!("the caller requires {}", self.require.join(" or ")));
        }
        if self.isolation == Isolation::Enforced && !enforced {
            return Some("isolation is enforced, and the owner does not check accesses on this path".into());
        }
        None
    }
}

/// What became of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Transfers take it.
    Taken,
    /// It would work; a better one is taken. Serves what the better one cannot do.
    Possible,
    /// It cannot be used.
    Refused,
}

/// One path, what became of it and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedPath {
    /// The path's name.
    pub path: &'static str,
    /// What became of it.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
    /// Whether the owner checks every access on it.
    pub enforced: bool,
}

/// Every path to a remote region: which one is taken, and why the others are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The paths in order of preference.
    pub paths: Vec<ExplainedPath>,
}

impl Explanation {
    /// The path that transfers take.
    pub fn taken(&self) -> Option<&'static str> {
        self.paths.iter().find(|one| one.verdict == Verdict::Taken).map(|one| one.path)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for one in &self.paths {
            let mark = match one.verdict {
                Verdict::Taken => "->",
                Verdict::Possible => " +",
                Verdict::Refused => " -",
            };
            let guard = match (&one.verdict, one.enforced) {
                (Verdict::Refused, _) => "",
                (_, true) => " [the owner checks every access]",
                (_, false) => " [rights hold between cooperating processes]",
            };
            writeln!(f, "{mark} {:<7} {}{guard}", one.path, one.reason)?;
        }
        Ok(())
    }
}

/// What a transport says of its path.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    pub(crate) name: &'static str,
    pub(crate) capabilities: Capabilities,
    /// Whether the owner checks every access on it.
    pub(crate) enforced: bool,
}

/// One path that can be used, with the attachment to it. What it can do is asked once and kept, since every request needs it.
pub(crate) struct UsablePath<A> {
    pub(crate) attachment: A,
    pub(crate) name: &'static str,
    capabilities: Capabilities,
    enforced: bool,
}

/// The paths to one remote region: the usable ones in order of preference, and what became of the others.
pub(crate) struct Paths<A> {
    pub(crate) usable: Vec<UsablePath<A>>,
    pub(crate) explanation: Explanation,
}

impl<A> Paths<A> {
    /// Tries every path, in order of preference. `attach` binds it to the region and says what it does, or why it cannot be used;
    /// `alive` says whether there still is an owner, if no path can be used.
    pub(crate) fn find<T>(
        routing: &Routing,
        paths: impl IntoIterator<Item = (Path, T)>,
        mut attach: impl FnMut(T) -> Result<(A, String)>,
        alive: impl FnOnce() -> Result<()>,
    ) -> Result<Paths<A>> {
        let mut usable: Vec<UsablePath<A>> = Vec::new();
        let mut explained = Vec::new();
        let mut ended = None;
        for (Path { name, capabilities, enforced }, path) in paths {
            let (verdict, reason) = match routing.refusal(name, enforced) {
                Some(reason) => (Verdict::Refused, reason),
                None => match attach(path) {
                    Ok((attachment, summary)) => {
                        let first = usable.is_empty();
                        usable.push(UsablePath { attachment, name, capabilities, enforced });
                        if first {
                            (Verdict::Taken, summary)
                        } else {
                            (Verdict::Possible, "a better path is taken".to_owned())
                        }
                    }
                    Err(error) => {
                        let reason = error.message().to_owned();
                        // Not a missing path, but a region or an owner that is gone: the caller treats that differently.
                        if matches!(error.kind(), Kind::Stale | Kind::Disconnected | Kind::Timeout) {
                            ended.get_or_insert(error);
                        }
                        (Verdict::Refused, reason)
                    }
                },
            };
            explained.push(ExplainedPath { path: name, verdict, reason, enforced });
        }
        let explanation = Explanation { paths: explained };
        if usable.is_empty() {
            // Nothing can be said of paths to an owner that has gone meanwhile.
            let ended = alive().err().or(ended);
            let message = |why: &str| format!("no path to the region can be used{why}:\n{explanation}");
            return Err(match ended {
                Some(cause) => cause
                    .clone()
                    .during("import")
                    .saying(message(&format!(", since {}", cause.message())))
                    .caused_by(cause),
                None => Error::new(Kind::Unavailable, "import", message("")),
            });
        }
        Ok(Paths { usable, explanation })
    }

    /// The best path that can do all of that and that the caller allows, and its index among the [usable](Self::usable) ones.
    #[inline]
    pub(crate) fn pick(
        &self,
        needs: Capabilities,
        routing: Option<&Routing>,
    ) -> Result<(usize, &UsablePath<A>)> {
        self.usable
            .iter()
            .enumerate()
            .find(|(_, path)| {
                path.capabilities.contains(needs)
                    && routing.is_none_or(|routing| routing.refusal(path.name, path.enforced).is_none())
            })
            .ok_or_else(|| {
                Error::new(
                    Kind::Unsupported,
                    "path",
                    format!("no usable path can do {needs:?} as required:\n{}", self.explanation),
                )
            })
    }
}
