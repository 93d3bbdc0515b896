//! A region that is pinned for a series of accesses.

use std::sync::Arc;

use crate::fence::pins::ProcessPin;
use crate::fence::table::Row;
use crate::memory::Mapping;
use crate::region::RegionUse;
use crate::session::GrantHandle;

/// A region that is pinned for long, with what keeps its memory reachable here.
pub(crate) enum Held {
    /// A region of this process, and where in it the grant begins.
    Here { used: RegionUse, offset: usize },
    /// A region of another process, and where in the mapping the grant begins.
    There { pin: Arc<ProcessPin>, handle: Arc<GrantHandle>, mapping: Arc<Mapping>, start: usize },
}

impl Held {
    /// The first byte of the grant.
    pub(crate) fn base(&self) -> usize {
        match self {
            Held::Here { used, offset } => used.core().addr + offset,
            Held::There { mapping, start, .. } => mapping.ptr().expose_provenance() + start,
        }
    }

    /// Whether it is memory that was lent to this process.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self, Held::Here { used, .. } if used.core().lent)
    }

    /// The region's row in its owner's table.
    #[inline]
    pub(crate) fn row(&self) -> Option<&Row> {
        match self {
            Held::Here { used, .. } => used.core().registry.table.row(used.core().row),
            Held::There { handle, .. } => handle.row(),
        }
    }

    /// Whether the owner wants the region back, or is gone.
    pub(crate) fn is_stale(&self) -> bool {
        match self {
            Held::Here { used, .. } => used.core().is_closed(),
            Held::There { pin, handle, .. } => {
                handle.session().alive().is_err() || handle.row().is_none_or(|row| pin.is_unwanted(row))
            }
        }
    }
}
