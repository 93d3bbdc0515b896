//! How a window is registered.

use std::ops::BitOr;

/// How a window is registered. Flags combine by `|`.
///
/// ```
/// use towline_comm::WindowFlag;
/// let flags = WindowFlag::COLL_SYMMETRIC | WindowFlag::STRICT_ORDERING;
/// assert_eq!(flags.bits(), 3);
/// assert!(flags.contains(WindowFlag::COLL_SYMMETRIC));
/// assert!(WindowFlag::from_bits(1 << 20).is_none());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WindowFlag(pub(crate) u32);

impl WindowFlag {
    /// Default window registration.
    pub const DEFAULT: WindowFlag = WindowFlag(0);
    /// The buffers lie at equal offsets in their allocations on all ranks; checked.
    pub const COLL_SYMMETRIC: WindowFlag = WindowFlag(1);
    /// Puts to one peer become visible in the order in which they were asked for.
    pub const STRICT_ORDERING: WindowFlag = WindowFlag(2);

    /// The flags as bits: 1 and 2.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The flags with those bits; `None` where an unknown bit is set.
    pub const fn from_bits(bits: u32) -> Option<WindowFlag> {
        if bits & !3 == 0 { Some(WindowFlag(bits)) } else { None }
    }

    /// Whether every flag in `other` is set.
    pub const fn contains(self, other: WindowFlag) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for WindowFlag {
    type Output = WindowFlag;

    fn bitor(self, other: WindowFlag) -> WindowFlag {
        WindowFlag(self.0 | other.0)
    }
}

/// How a window is registered: flags, and what the ranks may differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowOptions {
    /// The flags; equal on all ranks.
    pub flags: WindowFlag,
    /// Whether the ranks' buffers may have different sizes; equal on all ranks.
    pub unequal_sizes: bool,
}

impl From<WindowFlag> for WindowOptions {
    fn from(flags: WindowFlag) -> WindowOptions {
        WindowOptions { flags, unequal_sizes: false }
    }
}
