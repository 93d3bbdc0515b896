//! Keys: the region's, which never leaves the owner, and the tag, which is a key for the holder of the ticket.

use std::fmt;

use crate::crypto::{hmac_sha256, is_hmac_sha256};

/// A proof is no tag of a narrower ticket: no caveat begins like this.
const PROOF: &[u8] = b"towline import";

/// The key of one registration; tickets are signed with it. It never leaves the owner.
pub struct RegionKey([u8; 32]);

impl RegionKey {
    /// Derives the key of a row's generation from the endpoint's master key.
    pub fn derive(master: &[u8; 32], row: u32, generation: u64) -> RegionKey {
        RegionKey(hmac_sha256(master, &[b"towline region", &row.to_le_bytes(), &generation.to_le_bytes()]))
    }

    /// Signs the head of a ticket.
    pub(crate) fn sign(&self, head: &[u8]) -> Tag {
        Tag(hmac_sha256(&self.0, &[head]))
    }
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegionKey(..)")
    }
}

/// The tag of a ticket: proves the ticket, and is the secret between its holder and the owner.
pub struct Tag(pub(crate) [u8; 32]);

impl Tag {
    /// Makes the tag that results when a caveat is added.
    pub(crate) fn extend(&self, caveat: &[u8]) -> Tag {
        Tag(hmac_sha256(&self.0, &[caveat]))
    }

    /// Proves possession of the tag for one connection.
    pub fn proof(&self, challenge: &[u8]) -> [u8; 32] {
        hmac_sha256(&self.0, &[PROOF, challenge])
    }

    /// Returns whether `proof` was made with this tag for that challenge, in constant time.
    pub fn verify_proof(&self, challenge: &[u8], proof: &[u8; 32]) -> bool {
        is_hmac_sha256(&self.0, &[PROOF, challenge], proof)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tag(..)")
    }
}
