//! Who an endpoint is: a stable id from its name, and an incarnation for each time it opens.

use std::fmt;

use data_encoding::HEXLOWER;

use crate::crypto::sha256;
use crate::{Error, Result};

/// The longest name of an endpoint, in bytes.
pub(crate) const MAX_NAME: usize = 64;

/// The stable id of an endpoint: the first 16 bytes of the SHA-256 of its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub [u8; 16]);

impl EndpointId {
    /// Derives the id of the endpoint with that name.
    pub fn of(name: &str) -> EndpointId {
        let mut id = [0; 16];
        id.copy_from_slice(&sha256(&[name.as_bytes()])[..16]);
        EndpointId(id)
    }

    /// Returns the bytes of the id.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// One life of an endpoint: random, chosen each time it opens.
///
/// A restarted process has the same [`EndpointId`] and another incarnation, so that its old tickets are
/// `Stale` rather than wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub [u8; 16]);

impl Incarnation {
    /// Returns the bytes of the incarnation.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

macro_rules! shown_as_hex {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&HEXLOWER.encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

shown_as_hex!(EndpointId);
shown_as_hex!(Incarnation);

/// The identity of an endpoint: its name, the id that follows from it, and its incarnation.
///
/// ```
/// # use towline_proto as towline;
/// use towline::{Identity, Incarnation};
/// let identity = Identity::new("prefill-0", Incarnation([7; 16]))?;
/// assert_eq!(identity.id, towline::EndpointId::of("prefill-0"));
/// assert!(Identity::new("two\nlines", Incarnation([7; 16])).is_err());
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The stable id.
    pub id: EndpointId,
    /// The life of the endpoint that is meant.
    pub incarnation: Incarnation,
    /// The name: 1 to 64 bytes of UTF-8 without control characters.
    pub name: String,
}

impl Identity {
    /// Builds an identity from its name; the id follows from the name.
    pub fn new(name: impl Into<String>, incarnation: Incarnation) -> Result<Identity> {
        let name = name.into();
        let identity = Identity { id: EndpointId::of(&name), incarnation, name };
        identity.check().map_err(|why| Error::invalid("open", why))?;
        Ok(identity)
    }

    /// Says what is wrong with the identity, where something is.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if self.name.is_empty() {
            return Err("the name of an endpoint cannot be empty");
        }
        if self.name.len() > MAX_NAME {
            return Err("the name of an endpoint is longer than 64 bytes");
        }
        if self.name.chars().any(char::is_control) {
            return Err("the name of an endpoint contains a control character");
        }
        if self.id != EndpointId::of(&self.name) {
            return Err("the id of the endpoint does not follow from its name");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::Kind;

    #[test]
    fn an_id_is_the_first_half_of_the_hash_of_the_name() {
        assert_eq!(EndpointId::of("abc").to_string(), "ba7816bf8f01cfea414140de5dae2223");
        assert_eq!(format!("{:?}", Incarnation([0xab; 16])), format!("Incarnation({})", "ab".repeat(16)));
    }

    #[test]
    fn names_that_cannot_be_shown_are_refused() {
        let life = Incarnation([1; 16]);
        for bad in ["", "tab\t", "nul\0", "c1\u{85}", "a\u{7f}", &"x".repeat(65)] {
            assert_eq!(Identity::new(bad, life).unwrap_err().kind(), Kind::Invalid, "{bad:?}");
        }
        for good in ["a", "décodage-3", "with space", &"x".repeat(64)] {
            assert!(Identity::new(good, life).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn an_id_of_another_name_is_noticed() {
        let mut identity = Identity::new("a", Incarnation([1; 16])).unwrap();
        identity.id = EndpointId::of("b");
        assert!(identity.check().is_err());
    }
}
