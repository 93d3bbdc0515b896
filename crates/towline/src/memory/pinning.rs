//! Memory files that are mapped here, made reachable for GPUs when that begins to pay.
#![allow(unsafe_code, reason = "registers a mapping with the driver")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::cuda::{Gpu, HostRegistration};

/// Pinning takes about 50 microseconds a MiB: it is done once this share of the bytes has gone to or from a GPU.
const SHARE: u64 = 8;

/// Files up to this size are pinned at once.
const SMALL: u64 = 16 << 20;

/// Whether a mapping is registered with CUDA. Declared before the mapping, so that it is dropped first.
#[derive(Debug, Default)]
pub(crate) struct Pinning {
    moved: AtomicU64,
    registration: OnceLock<Option<HostRegistration>>,
}

impl Pinning {
    /// The address of the first byte for that GPU, after registering the mapping where it was not and where `bytes` more make
    /// that worth it; `None` where it is not, or cannot be.
    ///
    /// # Safety
    /// `len` bytes are mapped at `start`, and stay so for as long as this value lives; no GPU uses them by then.
    pub(crate) unsafe fn address(
        &self,
        gpu: &Arc<Gpu>,
        start: *mut u8,
        len: usize,
        writable: bool,
        bytes: u64,
    ) -> Option<u64> {
        if self.registration.get().is_none() {
            let moved = self.moved.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
            if len as u64 > SMALL && moved < len as u64 / SHARE {
                return None;
            }
        }
        let registration = self.registration.get_or_init(|| {
            // SAFETY: the caller's promise.
            unsafe { HostRegistration::register(gpu, start, len, !writable) }
                .inspect_err(|error| tracing::debug!(%error, "a memory file is not pinned"))
                .ok()
        });
        registration.as_ref().map(HostRegistration::device_address)
    }
}
