//! What a holder of a region may do with it.

use std::fmt;
use std::ops::BitOr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// A set of rights over a region: read, write, both or neither.
///
/// Write includes everything that changes the owner's bytes: writes, atomics, signals and reductions.
///
/// ```
/// # use towline_proto as towline;
/// use towline::Access;
/// let both = Access::READ | Access::WRITE;
/// assert!(both.contains(Access::READ));
/// assert!(!Access::READ.contains(both));
/// assert_eq!(both.to_string(), "read+write");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u8);

impl Access {
    /// Nothing is allowed.
    pub const NONE: Access = Access(0);
    /// Bytes may be read.
    pub const READ: Access = Access(1);
    /// Bytes may be changed.
    pub const WRITE: Access = Access(2);
    /// Bytes may be read and changed.
    pub const READ_WRITE: Access = Access(3);

    /// Returns whether every right in `other` is in this set too.
    #[inline]
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the set as bits: 1 for read, 2 for write.
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns the set with those bits; `None` where an unknown bit is set.
    #[inline]
    pub const fn from_bits(bits: u8) -> Option<Access> {
        if bits & !Access::READ_WRITE.0 == 0 { Some(Access(bits)) } else { None }
    }

    /// Returns the name of the set: `none`, `read`, `write` or `read+write`.
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "none",
            1 => "read",
            2 => "write",
            _ => "read+write",
        }
    }
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({})", self.name())
    }
}

impl FromStr for Access {
    type Err = Error;

    fn from_str(text: &str) -> Result<Access> {
        match text {
            "none" => Ok(Access::NONE),
            "read" => Ok(Access::READ),
            "write" => Ok(Access::WRITE),
            "read+write" => Ok(Access::READ_WRITE),
            _ => Err(Error::invalid("access", "an access is one of none, read, write, read+write")),
        }
    }
}

impl Serialize for Access {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Access {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Access, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error: Error| serde::de::Error::custom(error.message()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    const ALL: [Access; 4] = [Access::NONE, Access::READ, Access::WRITE, Access::READ_WRITE];

    #[test]
    fn every_set_survives_bits_text_and_json() {
        for access in ALL {
            assert_eq!(Access::from_bits(access.bits()), Some(access));
            assert_eq!(access.to_string().parse::<Access>().unwrap(), access);
            let json = serde_json::to_string(&access).unwrap();
            assert_eq!(serde_json::from_str::<Access>(&json).unwrap(), access);
        }
        assert_eq!(Access::READ | Access::WRITE, Access::READ_WRITE);
        assert_eq!(format!("{:?}", Access::READ_WRITE), "Access(read+write)");
    }

    #[test]
    fn unknown_bits_and_words_are_refused() {
        assert_eq!(Access::from_bits(4), None);
        assert!("rw".parse::<Access>().is_err());
        assert!(serde_json::from_str::<Access>("3").is_err());
    }

    #[test]
    fn a_set_contains_exactly_its_subsets() {
        assert!(
            ALL.iter().all(|access| Access::READ_WRITE.contains(*access) && access.contains(Access::NONE))
        );
        assert!(!Access::READ.contains(Access::WRITE));
        assert!(!Access::WRITE.contains(Access::READ_WRITE));
    }
}
