//! The operations API: [`Connector`], [`Descriptor`] and the four operations.
//!
//! One worker offers memory, to be read or to be written: a *passive* operation. It sends the operation's
//! [metadata](RdmaMetadata) to another worker by a channel of its own (an HTTP body, NATS, a file). That one pairs it with an
//! *active* operation, which claims the passive one, moves the bytes, and ends both.
//!
//! | passive | active | bytes go |
//! | --- | --- | --- |
//! | [`create_readable`](Connector::create_readable) | [`begin_read`](Connector::begin_read) | to the active side |
//! | [`create_writable`](Connector::create_writable) | [`begin_write`](Connector::begin_write) | to the passive side |
//!
//! Every operation is a future; it can be waited for, polled, cancelled and dropped, and its status never goes back. When it
//! has ended, nobody touches its memory any more. A passive operation has one claimer. It ends when its claimer is done, or
//! has failed or died; when nobody claimed it in time (10 minutes unless set otherwise); when a claimer that says nothing has
//! used up the endpoint's [limits](crate::Limits); or when it is cancelled. Both sides learn why.
//!
//! An operation registers its memory for itself alone and takes the registration back at its end, so metadata of an ended
//! operation gives `Stale`, though the memory may be registered by the user or used by other operations.

mod active;
mod connector;
mod descriptor;
mod device;
mod envelope;
#[doc(hidden)]
pub mod fuzzing;
mod kinds;
mod metadata;
mod passive;
mod portion;
mod set;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

pub use self::active::{ReadOperation, WriteOperation};
pub use self::connector::{Beginning, Connector};
pub use self::descriptor::{Descriptor, Descriptors};
pub use self::device::{Device, DeviceKind};
pub use self::envelope::MAX_DESCRIPTORS;
pub use self::kinds::{OperationKind, OperationStatus};
pub use self::metadata::{RdmaMetadata, SerializedDescriptor};
pub use self::passive::{ReadableOperation, WritableOperation};
use crate::{Error, Kind, Result, fork};

macro_rules! operations {
    ($($name:ident)*) => {$(
        impl $name {
            /// What the active side does.
            pub fn kind(&self) -> OperationKind {
                self.0.kind
            }

            /// The local memory.
            pub fn descriptors(&self) -> &[Descriptor] {
                &self.0.local
            }

            /// How far it is. What is final stays.
            pub fn status(&self) -> OperationStatus {
                self.0.status()
            }

            /// How it ended, or `None` while it has not.
            pub fn result(&self) -> Option<Result<()>> {
                self.0.completion().result()
            }

            /// Why it failed or was cancelled, where it was.
            pub fn error(&self) -> Option<Error> {
                self.result().and_then(Result::err)
            }

            /// Waits for its end. `None`: its own limits bound the wait. Otherwise at most that long, and then `Timeout`,
            /// which does not end the operation: look at its status.
            pub fn wait(&self, within: Option<Duration>) -> Result<()> {
                fork::guard(self.0.name())?;
                let until = within.and_then(|within| Instant::now().checked_add(within));
                self.0.completion().wait(self.0.name(), until).unwrap_or_else(|| {
                    let waited = within.unwrap_or_default().as_secs_f64();
                    let message = format!("the operation goes on after {waited:.3} s ({})", self.status());
                    Err(Error::new(Kind::Timeout, self.0.name(), message))
                })
            }

            /// How it ended, or wakes that task when it has. For event loops of one's own; otherwise await the operation.
            pub fn poll_end(&self, cx: &mut Context<'_>) -> Poll<Result<()>> {
                if let Err(error) = fork::guard(self.0.name()) {
                    return Poll::Ready(Err(error));
                }
                self.0.completion().poll(cx)
            }

            /// Asks it to stop; the other side learns of it. It ends, cancelled, once the memory is safe to reuse: wait for that. One
            /// that has ended stays as it ended.
            pub fn cancel(&self) {
                if !fork::in_child() {
                    self.0.cancel("cancelled by the caller");
                }
            }

            /// Whether nothing of it can touch the local memory any more. False after its end only where a stopped peer
            /// did not let go in time; the memory is then kept alive until it does.
            pub fn quiet(&self) -> bool {
                self.0.is_quiet()
            }
        }

        impl Future for $name {
            type Output = Result<()>;

            fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
                self.poll_end(cx)
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if !fork::in_child() {
                    self.0.cancel("the operation was dropped before its end");
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("status", &self.status())
                    .field("descriptors", &self.0.local)
                    .field("error", &self.error())
                    .finish()
            }
        }
    )*};
}

operations!(ReadableOperation WritableOperation ReadOperation WriteOperation);

impl std::str::FromStr for RdmaMetadata {
    type Err = Error;

    /// Reads the JSON form.
    fn from_str(text: &str) -> Result<RdmaMetadata> {
        RdmaMetadata::from_json(text)
    }
}
