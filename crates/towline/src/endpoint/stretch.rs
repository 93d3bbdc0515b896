//! Memory of this process and of peers in one operation.
#![allow(unsafe_code, reason = "registered and pinned memory is reached by address")]

use super::Pinned;
use crate::memory::Dtype;
use crate::memory::sum::{self, Target, Total};
use crate::region::{RegionUse, Span};
use crate::{Access, Error, Result, room};

/// Memory from an offset on: of this process, or of a peer that shares it.
#[derive(Debug, Clone, Copy)]
pub enum Stretch<'m> {
    /// A part of this process's own memory.
    Own(&'m Span, usize),
    /// A part of a peer's memory.
    Pinned(&'m Pinned, usize),
}

impl Stretch<'_> {
    /// The address of that many bytes, which are checked, and what keeps them.
    fn hold(&self, op: &'static str, needed: Access, len: usize) -> Result<(*mut u8, Option<RegionUse>)> {
        match self {
            Stretch::Own(span, offset) => {
                let (at, held) = span.hold(op, *offset, len)?;
                Ok((at, Some(held)))
            }
            Stretch::Pinned(pinned, offset) => Ok((pinned.range(op, needed, *offset, len)?, None)),
        }
    }
}

/// Whether [`sum`] works on elements of that type, on this processor.
pub fn can_sum(dtype: Dtype) -> bool {
    sum::can_sum(Total::Sum, dtype)
}

/// Whether [`average`] works on elements of that type, on this processor.
pub fn can_average(dtype: Dtype) -> bool {
    sum::can_sum(Total::Average, dtype)
}

/// Adds up `len` bytes of all sources, element by element and in their order, and writes the result to every target: around the
/// cache where its flag says so, which pays for a portion of something long that nobody reads soon. Integers wrap around. Half-precision
/// elements are added up in single precision and rounded once.
///
/// Every byte is read once where it is and written once where it goes, with nothing in between. The owners and others may be writing
/// the same bytes: each is then old or new. A target may be one of the sources; where memories overlap otherwise, what arrives there
/// is unspecified.
///
/// ```
/// use towline::{Access, Dtype, Endpoint, SharedStorage, Span, Stretch};
/// let owner = Endpoint::open("owner")?;
/// let theirs = owner.register(SharedStorage::new(4096)?, Access::READ_WRITE)?;
/// let peer = Endpoint::open("peer")?;                    // usually another process
/// let mine = peer.register(SharedStorage::new(4096)?, Access::NONE)?;
/// let pinned = peer.import(&theirs.ticket()?)?.pin()?;
/// mine.store(0, 40)?;
/// pinned.store(64, 2)?;
///
/// let mine = Span::from(&mine);
/// if towline::can_sum(Dtype::U64) {
///     let (here, there) = (Stretch::Own(&mine, 0), Stretch::Pinned(&pinned, 64));
///     towline::sum(Dtype::U64, &[here, there], &[(here, false), (there, false)], 8)?;
///     assert_eq!((mine.load(0)?, pinned.load(64)?), (42, 42));
/// }
/// # Ok::<(), towline::Error>(())
/// ```
///
/// # Errors
/// `Unsupported` where it does [not work](can_sum), `Invalid` for no sources, for a part of an element and past the end of a memory,
/// `PermissionDenied` where a ticket does not allow it, `Stale` where a region of this process was revoked.
pub fn sum(dtype: Dtype, sources: &[Stretch<'_>], targets: &[(Stretch<'_>, bool)], len: usize) -> Result<()> {
    total(Total::Sum, dtype, sources, targets, len)
}

/// As [`sum`], and divides by the number of sources.
///
/// # Errors
/// As [`sum`]; `Unsupported` also for integers.
pub fn average(
    dtype: Dtype,
    sources: &[Stretch<'_>],
    targets: &[(Stretch<'_>, bool)],
    len: usize,
) -> Result<()> {
    total(Total::Average, dtype, sources, targets, len)
}

fn total(
    total: Total,
    dtype: Dtype,
    sources: &[Stretch<'_>],
    targets: &[(Stretch<'_>, bool)],
    len: usize,
) -> Result<()> {
    const OP: &str = "sum";
    if !sum::can_sum(total, dtype) {
        let message = format!("elements of {dtype} cannot be added up in place on this processor");
        return Err(Error::new(crate::Kind::Unsupported, OP, message));
    }
    if sources.is_empty() || !len.is_multiple_of(dtype.size()) {
        let message = format!("{len} bytes of {} memories are no sum of {dtype}", sources.len());
        return Err(Error::invalid(OP, message));
    }
    let mut guards = room::list(OP, sources.len() + targets.len())?;
    let mut hold = |one: &Stretch<'_>, needed| -> Result<*mut u8> {
        let (at, guard) = one.hold(OP, needed, len)?;
        guards.extend(guard);
        Ok(at)
    };
    let mut from = room::list(OP, sources.len())?;
    for one in sources {
        from.push(hold(one, Access::READ)?.cast_const());
    }
    let mut into = room::list(OP, targets.len())?;
    for (one, around_cache) in targets {
        into.push(Target { at: hold(one, Access::WRITE)?, around_cache: *around_cache });
    }
    // SAFETY: `hold` has checked every range, and the guards and pins keep them; no Rust reference to them exists.
    unsafe { sum::sum(total, dtype, &from, &into, len) };
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::skip::skip;
    use crate::{Endpoint, Kind, SharedStorage};

    #[test]
    fn a_sum_is_refused_past_an_end_without_the_right_and_for_parts_of_elements() {
        if !can_sum(Dtype::U64) {
            let test = "a_sum_is_refused_past_an_end_without_the_right_and_for_parts_of_elements";
            skip(test, "avx2", "there are no sums by vectors for this processor");
            return;
        }
        let owner = Endpoint::open("owner").unwrap();
        let region = owner.register(SharedStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        let peer = Endpoint::open("peer").unwrap();
        let pinned = peer.import(&region.ticket().unwrap()).unwrap().pin().unwrap();
        let readable = region.ticket().unwrap().narrow().access(Access::READ).finish().unwrap();
        let readable = peer.import(&readable).unwrap().pin().unwrap();
        let own = Span::from(&region);
        let len = own.len();
        let here = |at: usize| Stretch::Own(&own, at);
        let there = |at: usize| Stretch::Pinned(&pinned, at);
        let refused = |sources: &[Stretch<'_>], targets: &[(Stretch<'_>, bool)], len: usize| {
            sum(Dtype::U64, sources, targets, len).unwrap_err().kind()
        };
        assert_eq!(refused(&[here(len - 8)], &[(there(0), false)], 16), Kind::Invalid);
        assert_eq!(refused(&[there(usize::MAX)], &[(here(0), false)], 16), Kind::Invalid);
        assert_eq!(refused(&[here(0)], &[(there(len), true)], 8), Kind::Invalid);
        assert_eq!(refused(&[here(0)], &[(there(0), false)], 7), Kind::Invalid);
        assert_eq!(refused(&[], &[(there(0), false)], 8), Kind::Invalid);
        let denied = refused(&[there(0)], &[(Stretch::Pinned(&readable, 0), false)], 8);
        assert_eq!(denied, Kind::PermissionDenied);
        assert_eq!(average(Dtype::U64, &[here(0)], &[], 8).unwrap_err().kind(), Kind::Unsupported);
        drop((pinned, readable));
        drop(region);
        assert_eq!(refused(&[here(0)], &[], 8), Kind::Stale);
    }
}
