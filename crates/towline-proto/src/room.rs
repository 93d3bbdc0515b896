//! Room for what a user or a peer has chosen the size of: `Exhausted` where an ordinary allocation would end the process. And threads,
//! which need room too.
//!
//! What is promised: no list whose length a user or a peer chooses, and that can take more than about 1 MiB, ends the process where
//! there is no room for it. Shorter ones, and things that are allocated one by one (a region, a session, a transfer, the text of an
//! error), come from the ordinary allocator, and end it where the last page is gone: however many of them there are, each is small.
//! What peers have of these is bounded by quotas.

pub use bytemuck::Zeroable;

use crate::{Error, Kind, Result};

fn none<T>(op: &'static str, count: usize) -> Error {
    let bytes = count.saturating_mul(size_of::<T>());
    Error::new(Kind::Exhausted, op, format!("no memory for a list of {count}, {bytes} bytes"))
}

/// An empty list with room for so many.
pub fn list<T>(op: &'static str, count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|cause| none::<T>(op, count).caused_by(cause))?;
    Ok(list)
}

/// So many zeros. Large ones are not touched: the system has pages of zeros.
pub fn zeros<T: Zeroable>(op: &'static str, count: usize) -> Result<Vec<T>> {
    bytemuck::try_zeroed_vec(count).map_err(|()| none::<T>(op, count))
}

/// A copy.
pub fn copy<T: Copy>(op: &'static str, of: &[T]) -> Result<Vec<T>> {
    let mut copy = list(op, of.len())?;
    copy.extend_from_slice(of);
    Ok(copy)
}

/// What an iterator yields.
pub fn collect<T>(op: &'static str, some: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut all = list(op, some.size_hint().0)?;
    for one in some {
        push(op, &mut all, one)?;
    }
    Ok(all)
}

/// Adds one to a list of which nobody knows how long it gets.
pub fn push<T>(op: &'static str, list: &mut Vec<T>, one: T) -> Result<()> {
    list.try_reserve(1).map_err(|cause| none::<T>(op, list.len() + 1).caused_by(cause))?;
    list.push(one);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_there_is_no_room_for_is_exhausted_and_says_how_much_it_was() {
        let most = isize::MAX as usize;
        let errors = [
            list::<u64>("read", usize::MAX).unwrap_err(),
            list::<u8>("read", most).unwrap_err(),
            zeros::<u8>("read", most).unwrap_err(),
            zeros::<u64>("read", usize::MAX).unwrap_err(),
        ];
        for error in errors {
            assert!(error.kind() == Kind::Exhausted && error.message().contains("bytes"), "{error}");
        }
        assert_eq!(zeros::<u32>("read", 3).unwrap(), [0; 3]);
        assert_eq!(copy("read", &[1, 2]).unwrap(), [1, 2]);
        assert_eq!(collect("read", (0..9).filter(|one| one % 4 == 0)).unwrap(), [0, 4, 8]);
        assert_eq!(collect("read", std::iter::repeat_n(0u64, most)).unwrap_err().kind(), Kind::Exhausted);
    }
}
