//! The native half of the Python package `towline`: converts, releases the GIL, calls the core, converts.
//!
//! No thread of the library ever takes the GIL. What ends is queued and an eventfd is signalled
//! ([`completions`]); what the core lets go of is queued and released by a Python thread ([`owners`]).

mod asked;
mod attention;
mod audit;
mod buffer;
mod completions;
mod connect;
mod dlpack;
mod endpoint;
mod errors;
mod import;
mod interpreter;
mod layout;
mod lender;
mod nccl;
mod nixl;
mod number;
mod owners;
mod process;
mod program;
mod queue;
mod quotas;
mod region;
mod remote;
mod request;
mod shared;
mod stats;
mod terms;
mod ticket;
mod tls;
mod transfer;

use pyo3::prelude::*;

/// The private native half of `towline`.
#[pymodule(gil_used = true)]
#[allow(non_upper_case_globals, reason = "Python's names")]
mod _native {
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    // A figure of a debug build means little: who measures has to know.
    #[pymodule_export]
    const __build__: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

    #[pymodule_export]
    use crate::audit::{Audit, PeerAudit};
    #[pymodule_export]
    use crate::completions::{Completions, Waiter};
    #[pymodule_export]
    use crate::connect::connector::{Beginning, Connector};
    #[pymodule_export]
    use crate::connect::descriptor::Descriptor;
    #[pymodule_export]
    use crate::connect::metadata::{device_from_text, metadata_from_json, metadata_owner};
    #[pymodule_export]
    use crate::connect::operation::Operation;
    #[pymodule_export]
    use crate::endpoint::{Endpoint, Notification, cuda_device_of, paths};
    #[pymodule_export]
    use crate::import::Import;
    #[pymodule_export]
    use crate::interpreter::is_main_interpreter;
    #[pymodule_export]
    use crate::layout::Layout;
    #[pymodule_export]
    use crate::nccl::communicator::{Communicator, array_type};
    #[pymodule_export]
    use crate::nccl::config::CommConfig;
    #[pymodule_export]
    use crate::nccl::device::{DeviceArray, nccl_found, nccl_unique_id, use_stream};
    #[pymodule_export]
    use crate::nccl::group::{group_end, group_poison, group_start};
    #[pymodule_export]
    use crate::nccl::unique_id::{unique_id, unique_id_from_text, unique_id_texts};
    #[pymodule_export]
    use crate::nccl::view::PeerView;
    #[pymodule_export]
    use crate::nccl::window::{RegisteredBuffer, Window};
    #[pymodule_export]
    use crate::nccl::work::Work;
    #[pymodule_export]
    use crate::nixl::{Agent, Region as NixlRegion, Request as NixlRequest, nixl_pack, nixl_unpack};
    #[pymodule_export]
    use crate::owners::held;
    #[pymodule_export]
    use crate::program::Program;
    #[pymodule_export]
    use crate::quotas::Quotas;
    #[pymodule_export]
    use crate::region::{Region, Span};
    #[pymodule_export]
    use crate::remote::{ExplainedPath, Explanation, Remote};
    #[pymodule_export]
    use crate::shared::SharedArray;
    #[pymodule_export]
    use crate::stats::{PathStats, Stats};
    #[pymodule_export]
    use crate::ticket::Ticket;
    #[pymodule_export]
    use crate::tls::Tls;
    #[pymodule_export]
    use crate::transfer::Transfer;
}
