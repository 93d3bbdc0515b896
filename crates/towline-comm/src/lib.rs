//! A fixed group of workers that register buffers together, open windows over their memory, and put, get, signal and
//! reduce through them.
//!
//! Ranks are threads, processes of one host, or processes of several hosts, mixed. One process makes a [`UniqueId`];
//! every rank joins with it. Every wait has a deadline, and its error names the ranks that it is about.
//!
//! ```
//! use towline_comm::{Communicator, Config, WaitSignal, WindowFlag, get_unique_id, mem_alloc};
//!
//! let id = get_unique_id()?;                                  // hand it to all ranks, as text or bytes
//! let rank = |rank: usize| {
//!     let id = id.clone();
//!     std::thread::spawn(move || -> towline_comm::Result<()> { // usually a process
//!         let comm = Communicator::init(2, rank, &id, Config::default())?;
//!         let window = comm.register_window(mem_alloc(1 << 20)?, WindowFlag::DEFAULT)?.expect("windows");
//!         if rank == 0 {
//!             window.put_signal_bytes(1, 4096, b"forty-two", 0, 0)?.wait()?;
//!         } else {
//!             comm.wait_signal(&[WaitSignal::from_rank(0)])?;
//!             let mut bytes = [0; 9];
//!             window.memory()?.read_at(4096, &mut bytes)?;
//!             assert_eq!(&bytes, b"forty-two");
//!         }
//!         comm.finalize()
//!     })
//! };
//! for thread in [rank(0), rank(1)] {
//!     thread.join().expect("no panic")?;
//! }
//! # Ok::<(), towline_comm::Error>(())
//! ```
#![forbid(unsafe_code)]

mod bootstrap;
mod collective;
mod combine;
mod communicator;
mod config;
mod cuda;
mod error;
mod group;
mod interrupt;
mod member;
mod memory;
mod operation;
mod team;
mod unique_id;
mod window;

#[doc(hidden)]
pub use bootstrap::fuzzing;
pub use bootstrap::{UniqueIdOptions, get_unique_id, get_unique_id_with};
pub use collective::Algorithm;
pub use combine::{Op, Scalar};
pub use communicator::{Communicator, Using};
pub use config::Config;
pub use cuda::{Stream, StreamHandle, in_stream, mem_alloc_on, use_stream};
pub use error::{Error, Result};
pub use group::{group, group_end, group_start};
pub use member::{Progress, WaitSignal};
pub use memory::{Memory, WindowFlag, WindowOptions, mem_alloc};
pub use operation::Operation;
pub use towline::{Patience, interruptible};
pub use unique_id::{UNIQUE_ID_LEN, UniqueId, get_nccl_unique_id};
pub use window::{Epoch, PeerView, RegisteredBuffer, Window};
