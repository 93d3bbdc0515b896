//! What the fuzz targets call: everything here that decodes a peer's bytes.

use super::{RegDescList, XferDescList, embedded};

/// Decodes the bytes as everything that a peer could send.
pub fn all(data: &[u8]) {
    embedded::fuzz_metadata(data);
    let _ = RegDescList::deserialize(data);
    if let Ok(list) = XferDescList::deserialize(data)
        && let Ok(again) = list.serialize()
    {
        assert_eq!(XferDescList::deserialize(&again).ok(), Some(list));
    }
}
