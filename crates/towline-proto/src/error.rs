//! The one error of the library: what was being done, over which path, with whom, and why it failed.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller can do about an [`Error`].
///
/// Which of them follows which event on which path is a table in `docs/decisions/0047-what-each-kind-promises.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The caller cancelled the operation.
    Canceled,
    /// The connection to the peer broke, or nobody answers where the ticket says; whether the peer lives is not known. Ask
    /// again: an import and, over `unix` and `tcp`, the next request connect anew, and say `Stale` where the peer is found to be gone.
    Disconnected,
    /// A limited resource is used up: descriptors, memory, table rows, queue space.
    Exhausted,
    /// The library broke one of its own rules; please report it.
    Internal,
    /// The request itself is wrong: a bad argument, a closed object, unequal lengths.
    Invalid,
    /// The operating system or a foreign library refused.
    Native,
    /// What was named does not exist.
    NotFound,
    /// The ticket, its lease, the secret or the credentials do not allow this.
    PermissionDenied,
    /// Bytes from outside do not follow the wire format.
    Protocol,
    /// The memory is gone for good: it was deregistered or recycled, or its owner has closed its endpoint, has ended or has restarted.
    /// The ticket never works again: ask for a new one.
    Stale,
    /// The deadline passed, or nothing moved for too long: the peer may be slow, stopped or out of reach. Ask again.
    Timeout,
    /// A library, device, kernel facility or path is missing here: nothing changes before the machine or the routing does.
    Unavailable,
    /// The path or the memory cannot do this.
    Unsupported,
}

impl Kind {
    /// Every kind with its stable name, as used on the wire and in Python.
    pub const ALL: [(Kind, &'static str); 13] = [
        (Kind::Canceled, "Canceled"),
        (Kind::Disconnected, "Disconnected"),
        (Kind::Exhausted, "Exhausted"),
        (Kind::Internal, "Internal"),
        (Kind::Invalid, "Invalid"),
        (Kind::Native, "Native"),
        (Kind::NotFound, "NotFound"),
        (Kind::PermissionDenied, "PermissionDenied"),
        (Kind::Protocol, "Protocol"),
        (Kind::Stale, "Stale"),
        (Kind::Timeout, "Timeout"),
        (Kind::Unavailable, "Unavailable"),
        (Kind::Unsupported, "Unsupported"),
    ];

    /// The stable name of the kind.
    pub fn name(self) -> &'static str {
        Kind::ALL[self as usize].1
    }

    /// The kind's number on the wire.
    #[doc(hidden)]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind with that number on the wire; an unknown number is `Internal`.
    #[doc(hidden)]
    pub fn from_code(code: u8) -> Kind {
        Kind::ALL.get(usize::from(code)).map_or(Kind::Internal, |(kind, _)| *kind)
    }
}

/// One error: kind, operation, transport, peer, message and cause.
///
/// ```
/// # use towline_proto as towline;
/// use towline::{Error, Kind};
/// let error = Error::new(Kind::Stale, "read", "the region was deregistered")
///     .on("mapped")
///     .with_peer("decode-3");
/// assert_eq!(error.kind(), Kind::Stale);
/// assert_eq!(
///     error.to_string(),
///     "read: the region was deregistered (Stale, path mapped, peer decode-3)"
/// );
/// assert!(!error.is_retryable());
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: Kind,
    op: &'static str,
    transport: Option<&'static str>,
    peer: Option<String>,
    owner_gone: bool,
    message: Cow<'static, str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

// Cold, all that make one: calls that go well then do not carry the code for it between their own.
impl Error {
    /// An error of that kind in that operation.
    #[cold]
    pub fn new(kind: Kind, op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Inner {
            kind,
            op,
            transport: None,
            peer: None,
            owner_gone: false,
            message: message.into(),
            source: None,
        }))
    }

    /// An [`Kind::Invalid`] error.
    #[cold]
    pub fn invalid(op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Invalid, op, message)
    }

    /// A [`Kind::Protocol`] error.
    #[cold]
    pub fn protocol(op: &'static str, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Protocol, op, message)
    }

    /// A [`Kind::Stale`] error: not only the memory is gone, its owner is.
    #[cold]
    #[doc(hidden)]
    pub fn owner_gone(op: &'static str, why: impl fmt::Display) -> Error {
        let mut error =
            Error::new(Kind::Stale, op, format!("{why}: its tickets are no longer valid: get new ones"));
        error.0.owner_gone = true;
        error
    }

    /// What the operating system said, with the kind that says what the caller can do about it.
    #[cold]
    pub fn os(op: &'static str, call: &'static str, error: impl Into<std::io::Error>) -> Error {
        let error = error.into();
        let kind = match error.raw_os_error() {
            Some(
                libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC | libc::ENOBUFS | libc::EAGAIN,
            ) => Kind::Exhausted,
            Some(libc::EPERM | libc::EACCES) => Kind::PermissionDenied,
            Some(libc::ENOSYS) => Kind::Unavailable,
            Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNREFUSED | libc::ESRCH | libc::ECONNABORTED) => {
                Kind::Disconnected
            }
            Some(libc::ETIMEDOUT) => Kind::Timeout,
            _ => Kind::Native,
        };
        Error::new(kind, op, format!("{call} failed: {error}")).caused_by(error)
    }

    /// Adds the path on which it happened.
    #[cold]
    #[must_use]
    pub fn on(mut self, transport: &'static str) -> Error {
        self.0.transport = Some(transport);
        self
    }

    /// Adds the peer with whom it happened.
    #[cold]
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<String>) -> Error {
        self.0.peer = Some(peer.into());
        self
    }

    /// Adds the cause.
    #[cold]
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Replaces the operation: used where an inner step fails on behalf of what the user asked for.
    #[cold]
    #[must_use]
    pub fn during(mut self, op: &'static str) -> Error {
        self.0.op = op;
        self
    }

    /// Replaces the message: used where more is to be said than the cause says.
    #[cold]
    #[must_use]
    #[doc(hidden)]
    pub fn saying(mut self, message: String) -> Error {
        self.0.message = message.into();
        self
    }

    /// What the caller can do about it.
    #[inline]
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The operation that failed.
    #[inline]
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// The path on which it failed, where one was chosen.
    pub fn transport(&self) -> Option<&'static str> {
        self.0.transport
    }

    /// The peer's name, where one was involved.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// What happened, in words.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether it is `Stale` because the owner itself is gone.
    #[doc(hidden)]
    #[inline]
    pub fn is_owner_gone(&self) -> bool {
        self.0.owner_gone
    }

    /// Whether the same call may succeed later without the caller changing anything. After `Disconnected` on a path that shares memory
    /// that is the import of the ticket.
    pub fn is_retryable(&self) -> bool {
        matches!(self.0.kind, Kind::Disconnected | Kind::Exhausted | Kind::Timeout)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}", self.0.op, self.0.message, self.0.kind.name())?;
        if let Some(transport) = self.0.transport {
            write!(f, ", path {transport}")?;
        }
        if let Some(peer) = &self.0.peer {
            write!(f, ", peer {peer}")?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_keep_their_numbers_and_names() {
        for (index, (kind, name)) in Kind::ALL.iter().enumerate() {
            assert_eq!(kind.code() as usize, index);
            assert_eq!(Kind::from_code(kind.code()), *kind);
            assert_eq!(kind.name(), *name);
            assert_eq!(format!("{kind:?}"), *name);
        }
        assert_eq!(Kind::from_code(200), Kind::Internal);
    }

    #[test]
    fn an_os_error_keeps_its_cause_and_gets_a_useful_kind() {
        let error = Error::os("open", "socket", std::io::Error::from_raw_os_error(libc::EMFILE));
        assert_eq!(error.kind(), Kind::Exhausted);
        assert!(std::error::Error::source(&error).is_some());
        assert!(error.to_string().starts_with("open: socket failed"));
    }
}
