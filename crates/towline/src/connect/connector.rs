//! The front door of the operations API.

use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use data_encoding::HEXLOWER;
use parking_lot::Mutex;

use super::active::{self, ReadOperation, WriteOperation};
use super::descriptor::Descriptors;
use super::passive::{self, ReadableOperation, WritableOperation};
use super::{OperationKind, RdmaMetadata};
use crate::crypto::sha256;
use crate::identity::Incarnation;
use crate::{Endpoint, Error, Identity, Kind, Limits, Result};

/// How long a passive operation waits to be claimed, unless set otherwise.
const UNCLAIMED_LIMIT: Duration = Duration::from_secs(600);

/// The longest name of a connector, in bytes.
const MAX_NAME: usize = 1024;

/// An active operation that is about to begin.
pub type Beginning<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// Makes operations. Cheap to clone; clones are the same connector.
///
/// Its endpoint is opened when it is first needed, and closed by [`close`](Self::close) or with the last
/// operation, registration and clone.
///
/// ```
/// use towline::connect::{Connector, Descriptor};
/// use towline::{MemoryAccess, SharedStorage, SystemStorage};
///
/// // One worker offers memory and sends the metadata by its own channel.
/// let encode = Connector::named("encode-0")?;
/// let source = SharedStorage::new(4096)?;
/// source.write_at(0, b"embeddings")?;
/// let readable = encode.create_readable(Descriptor::new(source))?;
/// let sent = readable.metadata()?.to_json()?;
///
/// // Another one, usually in another process, reads it.
/// let decode = Connector::named("decode-0")?;
/// let target = Descriptor::new(SystemStorage::new(4096)?);
/// let read = decode.begin_read(&sent.parse()?, &target)?;
/// read.wait(None)?;                                     // or: read.await
/// readable.wait(None)?;                                 // the memory is free again
///
/// let mut bytes = [0; 10];
/// target.storage().unwrap().read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"embeddings");
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Connector(Arc<Inner>);

struct Inner {
    name: String,
    hostname: String,
    state: Mutex<State>,
    unclaimed_limit: Mutex<Option<Duration>>,
}

enum State {
    Unopened,
    Open(Endpoint),
    /// With the endpoint, until nobody uses its memory any more.
    Closed(Option<Endpoint>),
}

impl Connector {
    /// A connector with a random name of 32 hex digits.
    pub fn new() -> Result<Connector> {
        let mut name = [0; 16];
        getrandom::fill(&mut name)
            .map_err(|error| Error::new(Kind::Native, "connector", format!("no random bytes: {error}")))?;
        Ok(Connector::build(HEXLOWER.encode(&name), State::Unopened))
    }

    /// A connector with that name: 1 to 1024 bytes.
    pub fn named(name: &str) -> Result<Connector> {
        if name.is_empty() || name.len() > MAX_NAME {
            let message = format!("the name of a connector has 1 to {MAX_NAME} bytes, not {}", name.len());
            return Err(Error::invalid("connector", message));
        }
        Ok(Connector::build(name.to_owned(), State::Unopened))
    }

    /// A connector over an endpoint that was opened with settings of its own.
    pub fn with_endpoint(endpoint: Endpoint) -> Connector {
        Connector::build(endpoint.identity().name.clone(), State::Open(endpoint))
    }

    fn build(name: String, state: State) -> Connector {
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Connector(Arc::new(Inner {
            name,
            hostname,
            state: Mutex::new(state),
            unclaimed_limit: Mutex::new(Some(UNCLAIMED_LIMIT)),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The name of this host.
    pub fn hostname(&self) -> &str {
        &self.0.hostname
    }

    /// Sets how long passive operations wait to be claimed where they do not say: 10 minutes at first, `None` for
    /// ever (they can be cancelled).
    pub fn set_unclaimed_limit(&self, limit: Option<Duration>) {
        *self.0.unclaimed_limit.lock() = limit;
    }

    /// The endpoint, opened now if it was not.
    pub fn endpoint(&self) -> Result<Endpoint> {
        crate::fork::guard("connector")?;
        let mut state = self.0.state.lock();
        match &*state {
            State::Open(endpoint) => {
                endpoint.core().registry.check_open("connector")?;
                Ok(endpoint.clone())
            }
            State::Unopened => {
                let endpoint = Endpoint::open(&endpoint_name(&self.0.name))?;
                *state = State::Open(endpoint.clone());
                Ok(endpoint)
            }
            State::Closed(_) => {
                Err(Error::invalid("connector", format!("the connector {} is closed", self.0.name)))
            }
        }
    }

    pub(super) fn is_open_as(&self, incarnation: &Incarnation) -> bool {
        matches!(&*self.0.state.lock(), State::Open(endpoint) if endpoint.identity().incarnation == *incarnation)
    }

    /// Offers memory for one peer to read, once.
    pub fn create_readable(&self, local: impl Into<Descriptors>) -> Result<ReadableOperation> {
        let limit = *self.0.unclaimed_limit.lock();
        self.create_readable_within(local, limit)
    }

    /// [`create_readable`](Self::create_readable), to be claimed within that time; `None` sets no limit.
    pub fn create_readable_within(
        &self,
        local: impl Into<Descriptors>,
        unclaimed: Option<Duration>,
    ) -> Result<ReadableOperation> {
        passive::open(self, OperationKind::Read, local.into(), unclaimed).map(ReadableOperation)
    }

    /// Offers memory for one peer to write, once.
    pub fn create_writable(&self, local: impl Into<Descriptors>) -> Result<WritableOperation> {
        let limit = *self.0.unclaimed_limit.lock();
        self.create_writable_within(local, limit)
    }

    /// [`create_writable`](Self::create_writable), to be claimed within that time; `None` sets no limit.
    pub fn create_writable_within(
        &self,
        local: impl Into<Descriptors>,
        unclaimed: Option<Duration>,
    ) -> Result<WritableOperation> {
        passive::open(self, OperationKind::Write, local.into(), unclaimed).map(WritableOperation)
    }

    /// Claims a readable operation and starts to read from it into local memory.
    ///
    /// Blocks for the claim: one round trip, and contact with the peer if there was none. An error means that no byte
    /// has moved.
    pub fn begin_read(&self, remote: &RdmaMetadata, local: impl Into<Descriptors>) -> Result<ReadOperation> {
        active::begin(self, OperationKind::Read, remote, local.into()).map(ReadOperation)
    }

    /// [`begin_read`](Self::begin_read) as a future. The claim is in flight when this returns; dropping the future
    /// gives it back.
    pub fn begin_read_async(
        &self,
        remote: &RdmaMetadata,
        local: impl Into<Descriptors>,
    ) -> Beginning<ReadOperation> {
        let begun = active::begin_async(self, OperationKind::Read, remote, local.into());
        Box::pin(async move { begun.await.map(ReadOperation) })
    }

    /// Claims a writable operation and starts to write local memory to it. Otherwise as [`begin_read`](Self::begin_read).
    pub fn begin_write(
        &self,
        local: impl Into<Descriptors>,
        remote: &RdmaMetadata,
    ) -> Result<WriteOperation> {
        active::begin(self, OperationKind::Write, remote, local.into()).map(WriteOperation)
    }

    /// [`begin_write`](Self::begin_write) as a future.
    pub fn begin_write_async(
        &self,
        local: impl Into<Descriptors>,
        remote: &RdmaMetadata,
    ) -> Beginning<WriteOperation> {
        let begun = active::begin_async(self, OperationKind::Write, remote, local.into());
        Box::pin(async move { begun.await.map(WriteOperation) })
    }

    /// Ends every operation and closes the endpoint, and waits until nobody touches its memory any more, within the endpoint's
    /// limit without progress; what is still used then is logged, and parked where it is dropped. Closing twice is harmless.
    pub fn close(&self) {
        let within = self.limits().no_progress;
        if let Err(error) = self.close_within(within) {
            tracing::warn!(%error, "a connector is closed, and memory of it is still in use");
        }
    }

    /// [`close`](Self::close) with a limit of its own, which says what is still in use then. Closing again waits again.
    pub fn close_within(&self, within: Duration) -> Result<()> {
        if crate::fork::in_child() {
            return Ok(());
        }
        let endpoint = {
            let mut state = self.0.state.lock();
            if let State::Open(endpoint) = &*state {
                *state = State::Closed(Some(endpoint.clone()));
            }
            match &*state {
                State::Closed(endpoint) => endpoint.clone(),
                _ => None,
            }
        };
        if let Some(endpoint) = endpoint {
            endpoint.close_within(within)?;
        }
        *self.0.state.lock() = State::Closed(None);
        Ok(())
    }

    /// How long things may take: those of its endpoint.
    pub fn limits(&self) -> Limits {
        match &*self.0.state.lock() {
            State::Open(endpoint) | State::Closed(Some(endpoint)) => endpoint.limits(),
            _ => Limits::default(),
        }
    }
}

/// Endpoints have shorter names than connectors may have: a long one is cut, and its hash makes it unique.
fn endpoint_name(name: &str) -> String {
    if Identity::new(name, Incarnation([0; 16])).is_ok() {
        return name.to_owned();
    }
    let hash = sha256(&[name.as_bytes()]);
    let mut shown: String = name.chars().filter(|one| !one.is_control()).collect();
    while shown.len() > 40 {
        shown.pop();
    }
    format!("{shown}~{}", HEXLOWER.encode(&hash[..8]))
}

impl PartialEq for Connector {
    fn eq(&self, other: &Connector) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for Connector {}

impl Hash for Connector {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.name)
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.0.state.lock() {
            State::Unopened => "not opened yet",
            State::Open(_) => "open",
            State::Closed(_) => "closed",
        };
        write!(f, "Connector({:?} on {}, {state})", self.0.name, self.0.hostname)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn names_that_an_endpoint_cannot_have_are_cut_and_told_apart() {
        assert_eq!(endpoint_name("decode-3"), "decode-3");
        let long = "worker-".repeat(20);
        let (one, other) = (endpoint_name(&format!("{long}1")), endpoint_name(&format!("{long}2")));
        assert_ne!(one, other);
        for name in [one, other, endpoint_name("two\nlines"), endpoint_name(&"é".repeat(200))] {
            Identity::new(name, Incarnation([0; 16])).unwrap();
        }
    }

    #[test]
    fn connectors_are_equal_by_name() {
        let (one, same) = (Connector::named("a").unwrap(), Connector::named("a").unwrap());
        assert_eq!(one, same);
        assert_ne!(one, Connector::new().unwrap());
        assert_eq!(std::collections::HashSet::from([one.clone(), same]).len(), 1);
        assert_eq!(one.to_string(), "a");
        let random = Connector::new().unwrap();
        assert!(random.name().len() == 32 && random.name().bytes().all(|digit| digit.is_ascii_hexdigit()));
        for bad in ["", &"x".repeat(MAX_NAME + 1)] {
            assert_eq!(Connector::named(bad).unwrap_err().kind(), Kind::Invalid);
        }
    }

    #[test]
    fn a_closed_connector_says_so() {
        let connector = Connector::named("closing").unwrap();
        let endpoint = connector.endpoint().unwrap();
        connector.close();
        connector.close();
        let error = connector.endpoint().unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.message().contains("closed"), "{error}");
        assert!(endpoint.core().registry.check_open("use").is_err());
        let never_opened = Connector::new().unwrap();
        never_opened.close();
        assert!(never_opened.endpoint().is_err());
    }
}
