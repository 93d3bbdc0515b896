//! Registered memory and one-sided transfers between inference workers.
//!
//! Describe bytes once, register them, hand another worker a small [`Ticket`], and it reads or writes them at the
//! speed of the link in between.
//!
//! ```
//! use towline::{Access, Endpoint, SharedStorage, SystemStorage};
//!
//! // One worker owns the bytes and hands out a ticket.
//! let prefill = Endpoint::open("prefill")?;
//! let cache = prefill.register(SharedStorage::new(1 << 20)?, Access::READ)?;
//! let ticket: String = cache.ticket()?.to_string();
//!
//! // Another one, usually in another process, reads them.
//! let decode = Endpoint::open("decode")?;
//! let remote = decode.import(&ticket.parse()?)?;
//! let target = decode.register(SystemStorage::new(1 << 20)?, Access::NONE)?;
//! let transfer = decode.read(&remote, &target).notify("taken").start()?;
//! transfer.wait()?;                                   // or: transfer.await
//! println!("{} bytes over {}", transfer.bytes(), transfer.path());
//! # Ok::<(), towline::Error>(())
//! ```

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeExamples;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/site/nixl.md")]
struct NixlPageExamples;

mod bytes;
mod completion;
pub mod connect;
pub mod cuda;
mod ended;
mod endpoint;
mod fence;
mod fork;
mod interrupt;
pub mod memory;
pub mod nccl;
pub mod nixl;
mod notify;
mod operations;
mod region;
#[doc(hidden)]
pub mod room;
mod route;
mod runtime;
mod session;
#[cfg(test)]
#[path = "../../towline-testkit/src/skip.rs"]
#[allow(
    clippy::panic,
    unreachable_pub,
    reason = "it is the file of the test kit, which this crate cannot depend on"
)]
mod skip;
mod sync;
mod tls;
mod transfer;
mod transport;

#[doc(hidden)]
pub use completion::Completion;
pub use endpoint::{
    Endpoint, EndpointOptions, Part, PathStats, Pinned, Program, ProgramExplanation, ProgramPart, Remote,
    Request, Stats, Stretch, average, can_average, can_sum, sum,
};
#[doc(hidden)]
pub use fork::guard as fork_guard;
pub use interrupt::interruptible;
#[doc(hidden)]
pub use interrupt::{check as interrupt_check, turn as interrupt_turn};
pub use memory::{
    Arena, ArenaAllocator, ArenaBuffer, Buffer, DeviceStorage, DirectIo, DiskStorage, Dtype, ExternalStorage,
    HugePages, MemoryAccess, MemoryDescription, MemoryDescriptor, OffsetBuffer, OffsetView, PinnedStorage,
    Place, ReduceOp, SharedStorage, Storage, StorageKind, SystemStorage, create_buffer,
};
pub use notify::{MAX_MESSAGE, NextNotification, Notification};
pub use region::{
    Audit, Patience, PeerAudit, RegisterError, Registered, RegisteredView, Span, StillPinned,
    UnauthenticatedAudit,
};
pub use route::{Capabilities, ExplainedPath, Explanation, Isolation, Routing, Verdict};
#[doc(hidden)]
pub use runtime::{start_scoped_thread, start_thread};
pub use tls::Tls;
#[doc(hidden)]
pub use tls::TlsStream;
pub(crate) use towline_proto::identity;
pub(crate) use towline_proto::session::budget;
#[doc(hidden)]
pub use towline_proto::session::unauthenticated::Sparse as SparseLog;
pub use towline_proto::{
    Access, Dim, EndpointId, Error, Identity, Incarnation, IndexList, Indices, Kind, Layout, Narrow, Quotas,
    Reach, Result, Ticket, layout, ticket,
};
#[doc(hidden)]
pub use towline_proto::{crypto, wire};
pub use transfer::{BlockFailure, Limits, Transfer};
pub use transport::nixl::{NixlOptions, NixlPrefer, NixlStats};
pub use transport::{Contact, PathInfo, PathProperties, Probe, Serves, path_names, path_properties, paths};
