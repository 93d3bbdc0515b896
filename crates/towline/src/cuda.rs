//! GPUs, where the machine has them: the driver is found and loaded at run time, and never needed.
//!
//! [`Gpu`] is one device with what is needed to copy on it: its primary context, streams, and pinned memory for lists. It
//! copies any number of pieces between device memory and pinned host memory, in one launch where they are many. The
//! storages are [`DeviceStorage`](crate::memory::DeviceStorage) and [`PinnedStorage`](crate::memory::PinnedStorage).
//!
//! The calling thread's current CUDA context is never changed: what needs one pushes the primary context and pops it again. (One
//! exception: [`close`](crate::nccl::RegisteredBuffer::close).)
//!
//! ```
//! use towline::cuda::{Availability, availability};
//! match availability() {
//!     Availability::Found { devices, .. } => println!("{} GPUs", devices.len()),
//!     Availability::Missing { tried, .. } => println!("no CUDA: {}", tried.join("; ")),
//!     _ => {}
//! }
//! ```

mod availability;
mod blocks;
mod copy;
mod error;
mod find;
mod gpu;
mod host;
mod lane;
mod list;
mod mark;
pub(crate) mod watch;

pub use availability::{Availability, DeviceFacts, availability, load_driver};
pub use blocks::Blocks;
pub use copy::{CopyOptions, Copying, Run};
pub use find::device_of;
pub use gpu::Gpu;
pub use host::HostRegistration;
#[doc(hidden)]
pub use lane::Tuning;
pub use mark::Mark;
pub use towline_sys::cuda::{Entered, IpcHandle, MemoryType, PointerFacts, SETTING, StreamHandle};

pub(crate) use error::{failed, not_given_back};
pub(crate) use mark::pause;
