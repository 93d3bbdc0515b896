//! Checksums of blocks: made where bytes leave, compared where they have arrived.
#![allow(unsafe_code, reason = "reads raw parts of registered memory")]

use crate::wire::{Block, Check, Message};
use crate::{Error, Result, bytes};

/// The checksums of blocks that lie at those addresses.
///
/// # Safety
/// Each range stays readable until this returns.
pub(super) unsafe fn of_memory(blocks: impl Iterator<Item = (*const u8, usize)>) -> Vec<u32> {
    // SAFETY: the caller's promise.
    blocks.map(|(ptr, len)| unsafe { bytes::crc32c(ptr, len) }).collect()
}

/// The checksums of blocks whose bytes follow one another.
pub(super) fn of_bytes(blocks: &[Block], mut bytes: &[u8]) -> Vec<u32> {
    let next = |block: &Block| {
        let (now, rest) = bytes.split_at((block.len as usize).min(bytes.len()));
        bytes = rest;
        crc32c::crc32c(now)
    };
    blocks.iter().map(next).collect()
}

/// Compares what has arrived with what was sent; the error names the first block that differs.
pub(super) fn compare(op: &'static str, blocks: &[Block], sent: &[u32], arrived: &[u32]) -> Result<()> {
    if sent.len() != blocks.len() {
        let message = format!("{} checksums came for {} blocks", sent.len(), blocks.len());
        return Err(Error::protocol(op, message));
    }
    let differs = sent.iter().zip(arrived).position(|(sent, arrived)| sent != arrived);
    differs.and_then(|at| Some((at, blocks.get(at)?))).map_or(Ok(()), |(at, block)| {
        let (len, offset) = (block.len, block.offset);
        let message = format!(
            "block {at} of a request, {len} bytes at offset {offset}, did not arrive as it was sent: its checksum is \
             {:08x} and not {:08x}",
            arrived[at], sent[at]
        );
        Err(Error::protocol(op, message))
    })
}

/// A frame behind the checksums of its blocks, in one piece: nothing comes between the two.
pub(super) fn before(checks: Vec<u32>, request: u64, mut frame: Vec<u8>) -> Vec<u8> {
    let mut both = Message::from(Check { checks }).frame(request, 0, 0);
    both.append(&mut frame);
    both
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_block_that_differs_is_named() {
        let blocks = [Block { offset: 0, len: 9 }, Block { offset: 64, len: 2 }];
        let bytes = b"123456789ab";
        let sent = of_bytes(&blocks, bytes);
        // The check value of CRC-32C.
        assert_eq!(sent[0], 0xe306_9283);
        let ranges = [(bytes.as_ptr(), 9), (bytes[9..].as_ptr(), 2)];
        // SAFETY: the ranges are parts of a slice.
        assert_eq!(unsafe { of_memory(ranges.into_iter()) }, sent);
        assert!(compare("read", &blocks, &sent, &sent).is_ok());
        let error = compare("read", &blocks, &sent, &of_bytes(&blocks, b"123456789aB")).unwrap_err();
        assert!(error.message().contains("block 1 of a request, 2 bytes at offset 64"), "{error}");
        assert!(compare("read", &blocks, &sent[..1], &sent).is_err());
    }
}
