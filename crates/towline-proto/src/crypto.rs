//! SHA-256, HMAC-SHA-256 and comparison in constant time: the only use of cryptography outside of TLS, by what TLS stands on.

use ring::{digest, hmac};

/// SHA-256 over the parts one after the other.
pub fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    for part in parts {
        context.update(part);
    }
    bytes(context.finish().as_ref())
}

/// HMAC-SHA-256 over the parts one after the other, under a key of any length.
pub fn hmac_sha256(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    for part in parts {
        context.update(part);
    }
    bytes(context.sign().as_ref())
}

/// Whether that is the HMAC-SHA-256 of the parts under that key, in a time that does not say how much of it is right.
pub fn is_hmac_sha256(key: &[u8], parts: &[&[u8]], tag: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, key), &parts.concat(), tag).is_ok()
}

/// Whether both are the same, in a time that says only how long they are.
pub fn is_same(one: &[u8], other: &[u8]) -> bool {
    // What is compared, in constant time, are tags under the two as keys.
    let [one_key, other_key] = [one, other].map(|key| hmac::Key::new(hmac::HMAC_SHA256, key));
    one.len() == other.len() && hmac::verify(&other_key, &[], hmac::sign(&one_key, &[]).as_ref()).is_ok()
}

fn bytes(digest: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest);
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use data_encoding::HEXLOWER;

    use super::*;

    #[test]
    fn hashes_and_tags_are_those_of_the_standards() {
        let hash = HEXLOWER.encode(&sha256(&[b"a", b"", b"bc"]));
        assert_eq!(hash, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        // RFC 4231, test cases 2 and 6.
        let tag = HEXLOWER.encode(&hmac_sha256(b"Jefe", &[b"what do ya want ", b"for nothing?"]));
        assert!(is_hmac_sha256(
            b"Jefe",
            &[b"what do ya want ", b"for nothing?"],
            &HEXLOWER.decode(tag.as_bytes()).unwrap()
        ));
        assert!(!is_hmac_sha256(b"Jefe", &[b"what do ya want "], &HEXLOWER.decode(tag.as_bytes()).unwrap()));
        assert_eq!(tag, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let tag = HEXLOWER
            .encode(&hmac_sha256(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"]));
        assert_eq!(tag, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn only_the_same_bytes_are_the_same() {
        assert!(is_same(&[], &[]) && is_same(&[7; 32], &[7; 32]));
        for other in [&[7; 31][..], &[7; 33], &[[7; 31].as_slice(), &[6]].concat(), &[]] {
            assert!(!is_same(&[7; 32], other));
        }
        // A key is padded with zeros to the length of a block.
        assert!(!is_same(&[1], &[1, 0]));
    }
}
