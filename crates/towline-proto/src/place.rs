//! Where bytes live.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where bytes live: this decides which paths can move them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// Memory that the CPU reads and writes.
    Host,
    /// Memory of the GPU with that ordinal.
    Cuda(u32),
    /// A file.
    Disk,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("host"),
            Place::Cuda(index) => write!(f, "cuda:{index}"),
            Place::Disk => f.write_str("disk"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn places_have_their_names() {
        assert_eq!(Place::Host.to_string(), "host");
        assert_eq!(Place::Cuda(7).to_string(), "cuda:7");
        assert_eq!(Place::Disk.to_string(), "disk");
    }

    #[test]
    fn places_survive_serialisation() {
        let text = serde_json::to_string(&Place::Cuda(3)).unwrap();
        assert_eq!(serde_json::from_str::<Place>(&text).unwrap(), Place::Cuda(3));
    }
}
