//! NCCL, where the machine has it: groups of ranks whose memory is that of GPUs. Found and loaded at run time, never needed.
//!
//! [`Comm`] is one rank's membership in a group of NCCL's. Work goes into CUDA streams as a [`Job`], alone or [together
//! with others](run_together), and reports its end through a [`Pending`]. Memory is kept until the streams have got past
//! what uses it; handles are closed once, after that and before the group. Every wait has a limit: at its end the group is
//! revoked, or aborted where NCCL cannot revoke, and the error says what it was waiting for.
//!
//! `towline_comm::Communicator` is the front door; this is the engine behind it.
//!
//! ```
//! use towline::nccl::{Availability, availability};
//! match availability() {
//!     Availability::Found { version, supports, .. } => println!("NCCL {version}: {}", supports.join(", ")),
//!     Availability::Missing { tried, .. } => println!("no NCCL: {}", tried.join("; ")),
//!     _ => {}
//! }
//! ```

mod availability;
mod comm;
mod error;
mod handles;
mod job;
mod life;
mod memory;
mod pending;
mod registered;
mod turn;
mod watch;

pub use availability::{Availability, availability, load_library, unique_id};
pub use comm::{Comm, CommOptions};
pub use handles::{RegisteredBuffer, Window};
pub use job::{Element, Job, Part, Reduce, run_together};
pub use memory::NcclStorage;
pub use pending::Pending;
pub use towline_sys::nccl::{Call, Progress, SETTING, WaitDescription};

pub(crate) use error::failed;
