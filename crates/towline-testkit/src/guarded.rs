//! Memory between two pages that nobody may touch: an access beyond it ends the process.
#![allow(unsafe_code, reason = "maps memory, and vouches for it as a storage")]

use std::any::Any;
use std::ptr;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use towline::{MemoryDescription, Storage, StorageKind};

/// Whole pages of private memory, which begin and end at a page without any right.
#[derive(Debug)]
pub struct Guarded {
    first: *mut u8,
    len: usize,
}

// SAFETY: an address range of the process; nothing is read or written through the pointer here.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    /// At least that many bytes.
    pub fn new(len: usize) -> Guarded {
        let page = rustix::param::page_size();
        let len = len.next_multiple_of(page);
        // SAFETY: a fresh mapping where the kernel likes.
        let base =
            unsafe { mmap_anonymous(ptr::null_mut(), len + 2 * page, ProtFlags::empty(), MapFlags::PRIVATE) }
                .unwrap()
                .cast::<u8>();
        base.expose_provenance();
        let first = base.wrapping_add(page);
        // SAFETY: inside of the fresh mapping, which nobody else knows.
        unsafe { mprotect(first.cast(), len, MprotectFlags::READ | MprotectFlags::WRITE) }.unwrap();
        Guarded { first, len }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let page = rustix::param::page_size();
        // SAFETY: mapped by `new` with this length, and nobody uses a storage that is dropped.
        unsafe { munmap(self.first.wrapping_sub(page).cast(), self.len + 2 * page) }.unwrap();
    }
}

impl MemoryDescription for Guarded {
    fn addr(&self) -> usize {
        self.first.addr()
    }

    fn size(&self) -> usize {
        self.len
    }

    fn storage_kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: one mapping, exposed, readable and writable, which stays until the value is dropped; its fields never change, and nothing
// gives out a reference to its bytes.
unsafe impl Storage for Guarded {}
