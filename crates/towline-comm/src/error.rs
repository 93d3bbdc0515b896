//! The error of a group: what was being done, which ranks it is about, and why it failed.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use towline::Kind;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One error: kind, operation, the ranks that it is about, message and cause.
///
/// ```
/// use towline::Kind;
/// use towline_comm::Error;
/// let error = Error::new(Kind::Timeout, "all_reduce", "nothing came in 5.000 s").about([2, 5]);
/// assert_eq!(error.ranks(), [2, 5]);
/// assert_eq!(error.to_string(), "all_reduce: nothing came in 5.000 s (Timeout, ranks 2, 5)");
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: Kind,
    op: &'static str,
    ranks: Vec<usize>,
    message: Cow<'static, str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of that kind in that operation.
    pub fn new(kind: Kind, op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Inner { kind, op, ranks: Vec::new(), message: message.into(), source: None }))
    }

    /// An [`Kind::Invalid`] error.
    pub fn invalid(op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Invalid, op, message)
    }

    /// A [`Kind::Protocol`] error.
    pub fn protocol(op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Protocol, op, message)
    }

    /// Sets the ranks that it is about: did not arrive, died, differ.
    #[must_use]
    pub fn about(mut self, ranks: impl IntoIterator<Item = usize>) -> Error {
        let mut ranks: Vec<usize> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        self.0.ranks = ranks;
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Replaces the operation: used where an member step fails on behalf of what the user asked for.
    #[must_use]
    pub fn during(mut self, op: &'static str) -> Error {
        self.0.op = op;
        self
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The operation that failed.
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// The ranks that it is about, in order: those that did not arrive, died, or differ.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// What happened, in words.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the same call may succeed later without the caller changing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self.0.kind, Kind::Disconnected | Kind::Exhausted | Kind::Timeout)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}", self.0.op, self.0.message, self.0.kind.name())?;
        for (index, rank) in self.0.ranks.iter().enumerate() {
            match (index, self.0.ranks.len()) {
                (0, 1) => write!(f, ", rank {rank}")?,
                (0, _) => write!(f, ", ranks {rank}")?,
                _ => write!(f, ", {rank}")?,
            }
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error[{self}]")?;
        match &self.0.source {
            Some(source) => write!(f, " caused by {source:?}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn std::error::Error + 'static))
    }
}

impl From<towline::Error> for Error {
    fn from(error: towline::Error) -> Error {
        let mut message = error.message().to_owned();
        for (what, value) in [("path", error.transport()), ("peer", error.peer())] {
            if let Some(value) = value {
                message = format!("{message} ({what} {value})");
            }
        }
        // Among ranks this distinguishes a rank that has died or left from a window that was closed.
        let kind = if error.is_owner_gone() { Kind::Disconnected } else { error.kind() };
        Error::new(kind, error.op(), message).caused_by(error)
    }
}

impl<T> From<towline::RegisterError<T>> for Error {
    fn from(failed: towline::RegisterError<T>) -> Error {
        failed.error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_are_named_once_each_and_in_order() {
        let error = Error::new(Kind::Disconnected, "barrier", "gone").about([3, 1, 3]);
        assert_eq!(error.ranks(), [1, 3]);
        assert_eq!(error.to_string(), "barrier: gone (Disconnected, ranks 1, 3)");
        let one = Error::invalid("reduce", "differs").about([7]);
        assert_eq!(one.to_string(), "reduce: differs (Invalid, rank 7)");
        assert_eq!(Error::invalid("reduce", "differs").to_string(), "reduce: differs (Invalid)");
    }

    #[test]
    fn an_error_of_the_core_keeps_its_kind_operation_and_cause() {
        let core = towline::Error::new(Kind::Stale, "read", "was deregistered").on("tcp").with_peer("b");
        let error = Error::from(core);
        assert_eq!((error.kind(), error.op()), (Kind::Stale, "read"));
        assert_eq!(error.message(), "was deregistered (path tcp) (peer b)");
        assert!(std::error::Error::source(&error).is_some());
    }
}
