//! Lists of indices that can be handed over, and the blocks that two of them name.

use std::fmt;
use std::sync::Arc;

use super::{Indexed, Indices, Layout, OP, Plan};
use crate::{Error, Result, room};

/// Indices that a request takes: borrowed, or handed over.
///
/// A request of many blocks is checked and planned by a worker, behind the call that starts it. What is handed over (a `Vec`,
/// an `Arc`) goes there as it is; what is borrowed is copied first, which for a hundred thousand blocks takes longer than all
/// else in the call.
///
/// ```
/// # use towline_proto as towline;
/// use std::sync::Arc;
/// use towline::{IndexList, Indices};
///
/// let kept: Arc<Vec<u64>> = Arc::new(vec![3, 9, 10]);
/// let list = IndexList::from(Arc::clone(&kept));
/// assert_eq!(list.indices(), Indices::U64(&[3, 9, 10]));
/// ```
#[derive(Clone)]
pub enum IndexList<'a> {
    /// Indices of the caller's.
    Borrowed(Indices<'a>),
    /// Indices that were handed over.
    U32(Arc<dyn AsRef<[u32]> + Send + Sync>),
    /// Indices that were handed over.
    U64(Arc<dyn AsRef<[u64]> + Send + Sync>),
}

impl IndexList<'_> {
    /// The indices themselves.
    pub fn indices(&self) -> Indices<'_> {
        match self {
            IndexList::Borrowed(indices) => *indices,
            IndexList::U32(list) => Indices::U32((**list).as_ref()),
            IndexList::U64(list) => Indices::U64((**list).as_ref()),
        }
    }

    /// Owns them, copied where they are borrowed.
    ///
    /// # Errors
    /// `Exhausted` where there is no room for the copy.
    #[doc(hidden)]
    #[inline]
    pub fn into_owned(self) -> Result<IndexList<'static>> {
        Ok(match self {
            IndexList::Borrowed(Indices::All) => IndexList::Borrowed(Indices::All),
            IndexList::Borrowed(Indices::U32(list)) => room::copy(OP, list)?.into(),
            IndexList::Borrowed(Indices::U64(list)) => room::copy(OP, list)?.into(),
            IndexList::U32(list) => IndexList::U32(list),
            IndexList::U64(list) => IndexList::U64(list),
        })
    }
}

impl fmt::Debug for IndexList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.indices(), f)
    }
}

macro_rules! borrowed {
    ($($given:ty),*) => {$(
        impl<'a> From<$given> for IndexList<'a> {
            fn from(list: $given) -> Self {
                IndexList::Borrowed(list.into())
            }
        }
    )*};
}

borrowed!(&'a [u32], &'a [u64], &'a Vec<u32>, &'a Vec<u64>);

impl<'a> From<Indices<'a>> for IndexList<'a> {
    fn from(indices: Indices<'a>) -> Self {
        IndexList::Borrowed(indices)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for IndexList<'a> {
    fn from(list: &'a [u32; N]) -> Self {
        IndexList::Borrowed(list.into())
    }
}

impl<'a, const N: usize> From<&'a [u64; N]> for IndexList<'a> {
    fn from(list: &'a [u64; N]) -> Self {
        IndexList::Borrowed(list.into())
    }
}

macro_rules! handed_over {
    ($($variant:ident($element:ty)),*) => {$(
        impl From<Vec<$element>> for IndexList<'_> {
            fn from(list: Vec<$element>) -> Self {
                IndexList::$variant(Arc::new(list))
            }
        }

        impl From<Arc<Vec<$element>>> for IndexList<'_> {
            fn from(list: Arc<Vec<$element>>) -> Self {
                IndexList::$variant(list)
            }
        }

        impl From<Arc<[$element]>> for IndexList<'_> {
            fn from(list: Arc<[$element]>) -> Self {
                IndexList::$variant(Arc::new(list))
            }
        }
    )*};
}

handed_over!(U32(u32), U64(u64));

/// The layouts of two sides whose blocks pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairedLayouts {
    /// The owner's.
    pub remote: Layout,
    /// The one here.
    pub local: Layout,
}

/// Pairs of blocks that are not planned yet: the n-th remote index with the n-th local one.
#[derive(Debug, Clone)]
pub struct Listed<'a> {
    layouts: Arc<PairedLayouts>,
    remote_indices: IndexList<'a>,
    local_indices: IndexList<'a>,
}

impl<'a> Listed<'a> {
    /// Keeps them as they are.
    #[inline]
    pub fn new(
        remote: &Layout,
        remote_indices: IndexList<'a>,
        local: &Layout,
        local_indices: IndexList<'a>,
    ) -> Listed<'a> {
        let layouts = Arc::new(PairedLayouts { remote: remote.clone(), local: local.clone() });
        Listed::of(layouts, remote_indices, local_indices)
    }

    /// The blocks of layouts that are kept.
    #[inline]
    pub fn of(
        layouts: Arc<PairedLayouts>,
        remote_indices: IndexList<'a>,
        local_indices: IndexList<'a>,
    ) -> Listed<'a> {
        Listed { layouts, remote_indices, local_indices }
    }

    /// How many bytes and blocks they are. Looks at no index.
    #[inline]
    pub fn size(&self) -> Result<(u64, u64)> {
        let PairedLayouts { remote, local } = &*self.layouts;
        paired(remote, self.remote_indices.indices(), local, self.local_indices.indices())
    }

    /// The list of pieces; every index is checked against its layout.
    pub fn plan(&self) -> Result<Plan> {
        let PairedLayouts { remote, local } = &*self.layouts;
        Plan::blocks(remote, self.remote_indices.indices(), local, self.local_indices.indices())
    }

    /// For code that takes the indices as they are.
    pub fn indexed(&self) -> Option<Indexed<'_>> {
        let (theirs, ours) = (self.remote_indices.indices(), self.local_indices.indices());
        Indexed::new(&self.layouts.remote, theirs, &self.layouts.local, ours)
    }

    /// Owns the indices, copied where they are borrowed.
    #[inline]
    pub fn into_owned(self) -> Result<Listed<'static>> {
        let Listed { layouts, remote_indices, local_indices } = self;
        Ok(Listed::of(layouts, remote_indices.into_owned()?, local_indices.into_owned()?))
    }
}

/// The bytes and the blocks of indices that pair.
#[inline]
pub(super) fn paired(
    remote: &Layout,
    remote_indices: Indices<'_>,
    local: &Layout,
    local_indices: Indices<'_>,
) -> Result<(u64, u64)> {
    if remote.block_len() != local.block_len() {
        let (theirs, ours) = (remote.block_len(), local.block_len());
        return Err(Error::invalid(OP, format!("remote blocks have {theirs} bytes, local ones {ours}")));
    }
    let (theirs, ours) = (remote_indices.len(remote), local_indices.len(local));
    if theirs != ours {
        return Err(Error::invalid(OP, format!("{theirs} remote blocks cannot pair with {ours} local ones")));
    }
    let bytes = ours
        .checked_mul(local.block_len())
        .ok_or_else(|| Error::invalid(OP, "the bytes to move do not fit in 64 bits"))?;
    Ok((bytes, ours))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Kind;

    #[test]
    fn what_is_handed_over_is_not_copied() {
        let list: Arc<Vec<u64>> = Arc::new(vec![2, 1]);
        let owned = IndexList::from(Arc::clone(&list)).into_owned().unwrap();
        let Indices::U64(seen) = owned.indices() else { unreachable!("64-bit indices were given") };
        assert_eq!(seen.as_ptr(), list.as_ptr());
    }

    #[test]
    fn every_way_to_give_indices_names_the_same_blocks() {
        let (narrow, wide) = (vec![3u32, 0], vec![3u64, 0]);
        let layout = Layout::contiguous(64, 8).unwrap();
        let all: [IndexList<'_>; 10] = [
            (&narrow).into(),
            narrow[..].into(),
            (&[3u32, 0]).into(),
            (&wide).into(),
            wide[..].into(),
            (&[3u64, 0]).into(),
            wide.clone().into(),
            Arc::new(narrow.clone()).into(),
            Arc::<[u32]>::from(narrow.clone()).into(),
            Indices::U64(&wide).into(),
        ];
        for one in all {
            let local = IndexList::from(Indices::U32(&[0, 1]));
            let plan = Listed::new(&layout, one, &layout, local).into_owned().unwrap().plan().unwrap();
            assert_eq!(plan.pieces().iter().map(|piece| piece.remote).collect::<Vec<_>>(), [24, 0]);
        }
    }

    #[test]
    fn lists_that_do_not_pair_are_refused_without_a_look_at_them() {
        let layout = Layout::contiguous(64, 8).unwrap();
        let other = Layout::contiguous(64, 16).unwrap();
        let size = |local: &Layout, ours: usize| {
            Listed::new(&layout, vec![99u32; 2].into(), local, vec![0u32; ours].into()).size()
        };
        assert_eq!(size(&layout, 2).unwrap(), (16, 2));
        assert_eq!(size(&layout, 3).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(size(&other, 2).unwrap_err().kind(), Kind::Invalid);
    }
}
