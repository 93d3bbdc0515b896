//! Sums of several memories, written to several: each line is read once, added up in registers, and written once.
#![allow(unsafe_code, reason = "adds and copies bytes through raw pointers")]

use super::Dtype;

/// Memory that a sum is written to.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there is machine code for x86-64 only"))]
pub(crate) struct Target {
    pub(crate) at: *mut u8,
    /// The bytes go around the cache, where they lie so that they can.
    pub(crate) around_cache: bool,
}

/// What becomes of the elements of all sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Total {
    /// Their sum; integers wrap around.
    Sum,
    /// The sum divided by the number of sources.
    Average,
}

/// Whether [`sum`] has machine code for that and elements of that type on this processor.
pub(crate) fn can_sum(total: Total, dtype: Dtype) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // Whole numbers have no division by vectors.
        let known =
            total == Total::Sum || matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
        known && std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (total, dtype);
        false
    }
}

/// Adds up `len` bytes of all sources, element by element in their order, and writes the total to every target. Half-precision
/// elements are added up, and divided, in single precision and rounded once. Nothing, and `false`, where it [cannot](can_sum).
///
/// Others may be writing the sources or the targets meanwhile: which bytes are taken or arrive is then unspecified, byte by
/// byte, and nothing else is. All of it is loaded and stored by machine code that takes what it finds, as by [`bytes::copy`](crate::bytes::copy). What
/// was written is visible to a thread that sees a release store that follows.
///
/// A target may be one of the sources. Where memories overlap otherwise, what arrives there is unspecified.
///
/// # Safety
/// Sources are valid for reads and targets for writes of `len` bytes for the whole call.
pub(crate) unsafe fn sum(
    total: Total,
    dtype: Dtype,
    sources: &[*const u8],
    targets: &[Target],
    len: usize,
) -> bool {
    if !can_sum(total, dtype) || sources.is_empty() || !len.is_multiple_of(dtype.size()) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; `can_sum` has looked for the instructions.
    unsafe {
        let over = (total == Total::Average).then_some(sources.len());
        match dtype {
            // One source is a copy, whatever its elements are.
            _ if sources.len() == 1 => x86::sum::<x86::I64>(sources, targets, len, None),
            Dtype::U8 | Dtype::I8 => x86::sum::<x86::I8>(sources, targets, len, over),
            Dtype::U32 | Dtype::I32 => x86::sum::<x86::I32>(sources, targets, len, over),
            Dtype::U64 | Dtype::I64 => x86::sum::<x86::I64>(sources, targets, len, over),
            Dtype::F16 => x86::sum::<x86::F16>(sources, targets, len, over),
            Dtype::Bf16 => x86::sum::<x86::Bf16>(sources, targets, len, over),
            Dtype::F32 => x86::sum::<x86::F32>(sources, targets, len, over),
            Dtype::F64 => x86::sum::<x86::F64>(sources, targets, len, over),
        }
    }
    let _ = targets;
    true
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::skip::skip;

    const NO_VECTORS: &str = "there are no sums by vectors for this processor";

    /// The total of elements, by the plain rules of the type.
    fn plain(total: Total, dtype: Dtype, elements: &[&[u8]]) -> Vec<u8> {
        macro_rules! fold {
            ($type:ty, $widen:expr, $add:expr, $over:expr, $narrow:expr) => {{
                let of = |bytes: &&[u8]| $widen(<$type>::from_ne_bytes((*bytes).try_into().unwrap()));
                let sum = elements.iter().map(of).reduce($add).unwrap();
                let result = if total == Total::Average { $over(sum) } else { sum };
                $narrow(result).to_ne_bytes().to_vec()
            }};
        }
        let count = elements.len();
        match dtype {
            Dtype::U8 | Dtype::I8 => fold!(u8, |one| one, u8::wrapping_add, |sum| sum, |one: u8| one),
            Dtype::U32 | Dtype::I32 => fold!(u32, |one| one, u32::wrapping_add, |sum| sum, |one: u32| one),
            Dtype::U64 | Dtype::I64 => fold!(u64, |one| one, u64::wrapping_add, |sum| sum, |one: u64| one),
            Dtype::F32 => fold!(f32, |one| one, |a: f32, b| a + b, |sum| sum / count as f32, |one: f32| one),
            Dtype::F64 => fold!(f64, |one| one, |a: f64, b| a + b, |sum| sum / count as f64, |one: f64| one),
            Dtype::F16 => fold!(f16, f16::to_f32, |a: f32, b| a + b, |sum| sum / count as f32, f16::from_f32),
            Dtype::Bf16 => {
                fold!(bf16, bf16::to_f32, |a: f32, b| a + b, |sum| sum / count as f32, bf16::from_f32)
            }
        }
    }

    /// Bytes that make finite numbers of every type.
    fn finite(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed) & 0x3f).collect()
    }

    proptest! {
        #[test]
        fn a_sum_is_that_of_its_elements_in_order_wherever_the_memories_lie_and_nothing_else_is_written(
            dtype in prop::sample::select(&Dtype::ALL[..]),
            average in any::<bool>(),
            elements in 0usize..90,
            shifts in prop::collection::vec(0usize..70, 1..6),
            places in prop::collection::vec((0usize..70, any::<bool>()), 0..5),
            onto_a_source in any::<bool>(),
        ) {
            let total = if average { Total::Average } else { Total::Sum };
            if !can_sum(total, dtype) {
                // On no processor there is a mean of whole numbers.
                if !average || matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64) {
                    let test = "a_sum_is_that_of_its_elements_in_order_wherever_the_memories_lie_and_nothing_else_is_written";
                    skip(test, "avx2", NO_VECTORS);
                }
                return Ok(());
            }
            let len = elements * dtype.size();
            let mut sources: Vec<Vec<u8>> =
                shifts.iter().enumerate().map(|(seed, shift)| finite(seed as u8, shift + len + 9)).collect();
            let expected: Vec<u8> = (0..elements)
                .flat_map(|element| {
                    let of = |source: usize| {
                        let start = shifts[source] + element * dtype.size();
                        &sources[source][start..start + dtype.size()]
                    };
                    plain(total, dtype, &(0..sources.len()).map(of).collect::<Vec<_>>())
                })
                .collect();
            let before = sources.clone();
            let mut targets: Vec<Vec<u8>> =
                places.iter().map(|(shift, _)| vec![0xee; shift + len + 70]).collect();
            let mut into: Vec<Target> = targets
                .iter_mut()
                .zip(&places)
                .map(|(target, (shift, around_cache))| Target {
                    at: target.as_mut_ptr().wrapping_add(*shift),
                    around_cache: *around_cache,
                })
                .collect();
            let from: Vec<*mut u8> = sources
                .iter_mut()
                .zip(&shifts)
                .map(|(source, shift)| source.as_mut_ptr().wrapping_add(*shift))
                .collect();
            if onto_a_source {
                into.push(Target { at: from[0], around_cache: false });
            }
            let from: Vec<*const u8> = from.into_iter().map(<*mut u8>::cast_const).collect();
            // SAFETY: all ranges lie within their vectors, which nobody else uses meanwhile.
            let summed = unsafe { sum(total, dtype, &from, &into, len) };
            prop_assert!(summed);
            for (target, (shift, _)) in targets.iter().zip(&places) {
                prop_assert_eq!(&target[*shift..shift + len], &expected[..]);
                prop_assert!(target[..*shift].iter().chain(&target[shift + len..]).all(|byte| *byte == 0xee));
            }
            for (number, (source, before)) in sources.iter().zip(&before).enumerate() {
                if onto_a_source && number == 0 {
                    prop_assert_eq!(&source[shifts[0]..shifts[0] + len], &expected[..]);
                } else {
                    prop_assert_eq!(source, before);
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_added_up_is_refused_and_nothing_is_written() {
        let (from, mut into) = ([7_u8; 16], [1_u8; 16]);
        let target = Target { at: into.as_mut_ptr(), around_cache: false };
        for dtype in [Dtype::U8, Dtype::I8, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64] {
            assert!(!can_sum(Total::Average, dtype));
            // SAFETY: both are of this function.
            assert!(!unsafe { sum(Total::Average, dtype, &[from.as_ptr()], &[target], 16) });
        }
        // SAFETY: as above.
        assert!(!unsafe { sum(Total::Sum, Dtype::F32, &[from.as_ptr()], &[target], 15) });
        // SAFETY: as above.
        assert!(!unsafe { sum(Total::Sum, Dtype::F32, &[], &[target], 16) });
        assert_eq!(into, [1; 16]);
    }

    #[test]
    fn half_precision_is_rounded_to_even_and_keeps_what_is_no_number() {
        let zeros = vec![0_u8; 2 << 16];
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        for dtype in [Dtype::F16, Dtype::Bf16] {
            if !can_sum(Total::Average, dtype) {
                skip("half_precision_is_rounded_to_even_and_keeps_what_is_no_number", "avx2", NO_VECTORS);
                return;
            }
            // The third of each number is between two others.
            let mut into = zeros.clone();
            let target = Target { at: into.as_mut_ptr(), around_cache: false };
            let from = [all.as_ptr(), zeros.as_ptr(), zeros.as_ptr()];
            // SAFETY: all are of this function, and equally long.
            assert!(unsafe { sum(Total::Average, dtype, &from, &[target], all.len()) });
            for (bits, third) in (0..=u16::MAX).zip(into.chunks_exact(2)) {
                let third = u16::from_ne_bytes(third.try_into().unwrap());
                let (third, plain) = match dtype {
                    Dtype::F16 => (
                        f16::from_bits(third).to_f32(),
                        f16::from_f32(f16::from_bits(bits).to_f32() / 3.0).to_f32(),
                    ),
                    _ => (
                        bf16::from_bits(third).to_f32(),
                        bf16::from_f32(bf16::from_bits(bits).to_f32() / 3.0).to_f32(),
                    ),
                };
                assert!(
                    third == plain || third.is_nan() && plain.is_nan(),
                    "{dtype} {bits:#x}: {third}, not {plain}"
                );
            }
        }
    }
}
