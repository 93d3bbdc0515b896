//! An owner's file, open in this process and registered with this endpoint's agent.
#![allow(unsafe_code, reason = "hands descriptors of open files to NIXL")]

use std::sync::Arc;

use towline_sys::nixl::{Descriptor, MemoryKind, Registration, RegistrationList};

use super::engine::{Engine, Reach};
use super::of_nixl;
use crate::Result;
use crate::layout::Piece;
use crate::memory::{FILE_ALIGNMENT, FileSlice, shorter};

/// A file that NIXL reads and writes here.
pub(super) struct OpenFile {
    /// Before the file: NIXL lets go of a descriptor before that is closed.
    _registrations: Vec<Registration>,
    file: FileSlice,
    len: u64,
}

impl OpenFile {
    /// Registers `len` bytes of it with the agent.
    pub(super) fn register(engine: &Arc<Engine>, file: FileSlice, len: u64) -> Result<OpenFile> {
        let options = engine.options(Reach::Files)?;
        let (buffered, direct) = file.numbers();
        let mut registrations = Vec::new();
        for device in std::iter::once(buffered).chain(direct) {
            let range = Descriptor { address: file.offset(), length: len, device };
            let list = RegistrationList::new(&engine.nixl, MemoryKind::File, [range]).map_err(of_nixl)?;
            // SAFETY: the descriptor stays open for as long as `file`, which is dropped after the registrations; requests keep
            // the attachment that has both.
            registrations.push(unsafe { engine.agent.register(list, &options) }.map_err(of_nixl)?);
        }
        Ok(OpenFile { _registrations: registrations, file, len })
    }

    /// All of it, through the page cache.
    pub(super) fn range(&self) -> Descriptor {
        Descriptor { address: self.file.offset(), length: self.len, device: self.file.numbers().0 }
    }

    /// The descriptor by which these pieces go: around the page cache where all of them are whole pages on both sides.
    pub(super) fn descriptor_for(&self, base: usize, pieces: &[Piece]) -> u64 {
        let page = FILE_ALIGNMENT as u64;
        let whole = |piece: &Piece| {
            (base as u64 + piece.local).is_multiple_of(page)
                && (self.file.offset() + piece.remote).is_multiple_of(page)
                && piece.len.is_multiple_of(page)
        };
        match self.file.numbers() {
            (_, Some(direct)) if pieces.iter().all(whole) => direct,
            (buffered, _) => buffered,
        }
    }

    /// Whether the bytes are all there: POSIX reports a read beyond the end of a file that was shortened, and others
    /// need not.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        if self.file.file_len(op)? < self.file.offset() + self.len {
            return Err(shorter(op));
        }
        Ok(())
    }
}
