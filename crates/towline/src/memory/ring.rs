//! Pinned memory through which bytes pass between a GPU and host memory that it does not reach, both copies at once.
#![allow(unsafe_code, reason = "copies between addresses of registered memory")]

mod stopover;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

pub(crate) use self::stopover::{then, wait_idly, when_done};
use super::PinnedStorage;
use crate::cuda::{CopyOptions, Copying, Gpu, Run};
use crate::layout::Piece;
use crate::{Result, bytes, room};

/// The bytes of one slot: long enough that the bus shows no gaps, short enough for a cache.
pub(crate) const SLOT: usize = 4 << 20;

/// Slots that one copy uses: one is filled while the other is emptied.
const EACH: usize = 2;

/// Slots that are kept for the next copy: as many as sixteen workers use at once, and a few more.
const KEPT: usize = 40;

static FREE: Mutex<Vec<PinnedStorage>> = Mutex::new(Vec::new());

/// One slot, given back when it is dropped.
pub(crate) struct Slot(Option<PinnedStorage>);

impl Slot {
    /// A free slot, where there is one at once.
    pub(crate) fn ready() -> Option<Slot> {
        FREE.lock().pop().map(|storage| Slot(Some(storage)))
    }

    /// Whether there is a free slot now.
    pub(crate) fn is_ready() -> bool {
        !FREE.lock().is_empty()
    }

    /// A free slot; they are pinned for all GPUs.
    pub(crate) fn take(gpu: &Gpu) -> Result<Slot> {
        let free = FREE.lock().pop();
        let storage = match free {
            Some(storage) => storage,
            None => PinnedStorage::options().near(gpu.ordinal()).private(true).allocate(SLOT)?,
        };
        Ok(Slot(Some(storage)))
    }

    /// Its first byte, for the CPU.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.as_ref().map_or(std::ptr::null_mut(), PinnedStorage::as_ptr)
    }

    /// Its first `len` bytes, as far as there are so many. No GPU writes to them meanwhile: what does has the slot.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        match &self.0 {
            // SAFETY: the slot is this value's alone, and as long as that; it was zeroed or written before.
            Some(storage) => unsafe { std::slice::from_raw_parts(storage.as_ptr(), len.min(SLOT)) },
            None => &[],
        }
    }

    /// Its first byte, for GPUs.
    pub(crate) fn device(&self) -> u64 {
        self.0.as_ref().map_or(0, PinnedStorage::device_address)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(storage) = self.0.take() else { return };
        if crate::fork::in_child() {
            std::mem::forget(storage);
            return;
        }
        let mut free = FREE.lock();
        if free.len() < KEPT {
            free.push(storage);
        }
    }
}

/// Bytes in a slot that a GPU fills or empties now.
pub(crate) struct Passing {
    copying: Option<Copying>,
    slot: Slot,
    pieces: Vec<Piece>,
}

impl Passing {
    /// Starts copying between a slot, in which the pieces lie one after the other, and memory of the GPU.
    ///
    /// # Safety
    /// What `device` says of each piece is that many bytes of the GPU's memory until the value is dropped.
    pub(crate) unsafe fn start(
        gpu: &Arc<Gpu>,
        to_device: bool,
        slot: Slot,
        pieces: Vec<Piece>,
        device: impl Fn(&Piece) -> u64,
    ) -> Result<Passing> {
        let mut at = slot.device();
        let runs = pieces.iter().map(|piece| {
            let (near, far) = (at, device(piece));
            at += piece.len;
            let (from, to) = if to_device { (near, far) } else { (far, near) };
            Run { from, to, len: piece.len }
        });
        let runs = room::collect("copy on a GPU", runs)?;
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        let options = CopyOptions { bytes, host: true, after: None };
        // SAFETY: the slot is pinned and stays until the value is dropped, which waits; the rest is the caller's promise.
        let copying = unsafe { gpu.copy(runs, &options) }?;
        Ok(Passing { copying: Some(copying), slot, pieces })
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    /// Looks again and again until then at most; whether the bytes are there, or never will be.
    pub(crate) fn wait_until(&self, until: Instant) -> bool {
        self.copying.as_ref().is_none_or(|copying| copying.wait(Some(until)).unwrap_or(true))
    }

    /// Whether the bytes are there.
    pub(crate) fn is_done(&self) -> Result<bool> {
        self.copying.as_ref().map_or(Ok(true), Copying::is_done)
    }

    /// Waits until the bytes are there.
    pub(crate) fn wait(&mut self) -> Result<()> {
        match self.copying.take() {
            Some(copying) => copying.wait(None).map(drop),
            None => Ok(()),
        }
    }

    /// The slot, once the bytes are there.
    pub(crate) fn into_slot(mut self) -> Result<Slot> {
        self.wait()?;
        Ok(Slot(self.slot.0.take()))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// The pieces in portions of at most that many bytes, and of a slot; long ones are cut.
pub(crate) fn portions<'a>(
    op: &'static str,
    pieces: &'a [Piece],
    most: usize,
) -> impl Iterator<Item = Result<Vec<Piece>>> + 'a {
    let mut rest = pieces.iter().copied();
    let mut open = rest.next();
    std::iter::from_fn(move || {
        let (mut portion, mut room) = (Vec::new(), most.clamp(1, SLOT) as u64);
        while let Some(piece) = open.filter(|_| room > 0) {
            let len = piece.len.min(room);
            if let Err(error) = room::push(op, &mut portion, Piece { len, ..piece }) {
                return Some(Err(error));
            }
            room -= len;
            let left = Piece { remote: piece.remote + len, local: piece.local + len, len: piece.len - len };
            open = if left.len > 0 { Some(left) } else { rest.next() };
        }
        (!portion.is_empty()).then_some(Ok(portion))
    })
}

/// Copies the pieces between memory of a GPU and host memory that it does not reach; `device` and `host` say where they are.
/// The CPU copies one portion while the GPU copies another. Blocks.
///
/// # Safety
/// What `device` and `host` say of each piece, and of every part of it, is that many bytes of such memory for the whole call.
pub(crate) unsafe fn pass(
    gpu: &Arc<Gpu>,
    to_device: bool,
    pieces: &[Piece],
    device: impl Fn(&Piece) -> u64,
    host: impl Fn(&Piece) -> u64,
) -> Result<()> {
    let by_cpu = |slot: &Slot, pieces: &[Piece]| {
        let mut at = slot.ptr();
        for piece in pieces {
            let there: *mut u8 = std::ptr::with_exposed_provenance_mut(host(piece) as usize);
            let (from, to) = if to_device { (there, at) } else { (at, there) };
            // SAFETY: the slot has room for the portion, nobody else uses it, and the host's side is the caller's promise.
            unsafe { bytes::copy(to, from, piece.len as usize) };
            at = at.wrapping_add(piece.len as usize);
        }
    };
    let mut flying: VecDeque<Passing> = VecDeque::with_capacity(EACH);
    for portion in portions("copy on a GPU", pieces, SLOT) {
        let portion = portion?;
        let mut slot = None;
        if flying.len() == EACH
            && let Some(mut passing) = flying.pop_front()
        {
            passing.wait()?;
            if !to_device {
                by_cpu(&passing.slot, &passing.pieces);
            }
            slot = Some(passing.into_slot()?);
        }
        let slot = match slot {
            Some(slot) => slot,
            None => Slot::take(gpu)?,
        };
        if to_device {
            by_cpu(&slot, &portion);
        }
        // SAFETY: the caller's promise; however this returns, the values are dropped, and wait.
        flying.push_back(unsafe { Passing::start(gpu, to_device, slot, portion, &device) }?);
    }
    for mut passing in flying {
        passing.wait()?;
        if !to_device {
            by_cpu(&passing.slot, &passing.pieces);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_carry_every_byte_once_and_fit_their_slot() {
        let slot = SLOT as u64;
        let lens = [1, slot - 1, slot, 3 * slot + 5, 7, 7];
        let mut at = 0;
        let pieces: Vec<Piece> = lens
            .iter()
            .map(|len| {
                at += len + 3;
                Piece { remote: at, local: 2 * at, len: *len }
            })
            .collect();
        for most in [SLOT, SLOT / 3, 10 * SLOT] {
            let mut whole: Vec<Piece> = Vec::new();
            for portion in portions("read", &pieces, most).map(Result::unwrap) {
                assert!(portion.iter().map(|piece| piece.len).sum::<u64>() <= slot.min(most as u64));
                for piece in portion {
                    match whole.last_mut() {
                        Some(last)
                            if last.remote + last.len == piece.remote
                                && last.local + last.len == piece.local =>
                        {
                            last.len += piece.len;
                        }
                        _ => whole.push(piece),
                    }
                }
            }
            assert_eq!(whole, pieces);
        }
        assert_eq!(portions("read", &[], SLOT).count(), 0);
    }
}
