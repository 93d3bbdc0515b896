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

/// Whether [`sum`] has machine code for elements of that type on this processor.
pub(crate) fn can_sum(dtype: Dtype) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let known = !matches!(dtype, Dtype::U8 | Dtype::I8 | Dtype::F16 | Dtype::Bf16);
        known && std::arch::is_x86_feature_detected!("avx2")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = dtype;
        false
    }
}

/// Adds up `len` bytes of all sources, element by element in their order, and writes the result to every target; integers wrap
/// around. Nothing, and `false`, where it [cannot](can_sum).
///
/// Somebody else may be writing the sources or the targets meanwhile: which bytes are taken or arrive is then unspecified, byte by
/// byte, and nothing else is. All of it is loaded and stored by machine code that takes what it finds, as by [`bytes::copy`](super::bytes::copy). What
/// was written is visible to who sees a release store that follows.
///
/// A target may be one of the sources. Where memories overlap otherwise, what arrives there is unspecified.
///
/// # Safety
/// Sources are valid for reads and targets for writes of `len` bytes for the whole call.
pub(crate) unsafe fn sum(dtype: Dtype, sources: &[*const u8], targets: &[Target], len: usize) -> bool {
    if !can_sum(dtype) || sources.is_empty() || !len.is_multiple_of(dtype.size()) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; `can_sum` has looked for the instructions.
    unsafe {
        match dtype {
            Dtype::F32 => x86::sum::<x86::F32>(sources, targets, len),
            Dtype::F64 => x86::sum::<x86::F64>(sources, targets, len),
            Dtype::U32 | Dtype::I32 => x86::sum::<x86::I32>(sources, targets, len),
            Dtype::U64 | Dtype::I64 => x86::sum::<x86::I64>(sources, targets, len),
            Dtype::U8 | Dtype::I8 | Dtype::F16 | Dtype::Bf16 => return false,
        }
    }
    let _ = targets;
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, _mm256_add_epi32, _mm256_add_epi64, _mm256_add_pd, _mm256_add_ps, _mm256_castpd_si256,
        _mm256_castps_si256, _mm256_castsi256_pd, _mm256_castsi256_ps,
    };

    use super::Target;
    use crate::memory::bytes;

    /// The bytes that are added up at a time.
    const LINE: usize = 64;

    /// How many of a kind are added up without a loop over them.
    const FEW: usize = 2;

    /// What elements are.
    pub(super) trait Lanes {
        /// The sum of 32 bytes of elements.
        ///
        /// # Safety
        /// The processor has AVX2.
        unsafe fn add(one: __m256i, other: __m256i) -> __m256i;
    }

    macro_rules! lanes {
        ($($name:ident = |$one:ident, $other:ident| $add:expr;)*) => {$(
            pub(super) struct $name;

            impl Lanes for $name {
                #[target_feature(enable = "avx2")]
                #[inline]
                unsafe fn add($one: __m256i, $other: __m256i) -> __m256i {
                    $add
                }
            }
        )*};
    }

    lanes! {
        F32 = |one, other| _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(one), _mm256_castsi256_ps(other)));
        F64 = |one, other| _mm256_castpd_si256(_mm256_add_pd(_mm256_castsi256_pd(one), _mm256_castsi256_pd(other)));
        I32 = |one, other| _mm256_add_epi32(one, other);
        I64 = |one, other| _mm256_add_epi64(one, other);
    }

    /// # Safety
    /// As for [`super::sum`]; the processor has AVX2.
    pub(super) unsafe fn sum<L: Lanes>(sources: &[*const u8], targets: &[Target], len: usize) {
        let whole = len - len % LINE;
        // SAFETY: the caller's promise.
        unsafe {
            match (<&[*const u8; FEW]>::try_from(sources), <&[Target; FEW]>::try_from(targets)) {
                (Ok(sources), Ok(targets)) => lines::<L>(sources, targets, whole),
                _ => lines::<L>(sources, targets, whole),
            }
        }
        if whole < len {
            let mut ends = [[0; LINE]; 2];
            let [sum, other] = &mut ends;
            for (index, source) in sources.iter().enumerate() {
                let into = if index == 0 { &mut *sum } else { &mut *other };
                // SAFETY: the rest of the source, which is shorter than a line.
                unsafe { bytes::copy(into.as_mut_ptr(), source.add(whole), len - whole) };
                if index > 0 {
                    let (own, sources) = (sum.as_mut_ptr(), [sum.as_ptr(), other.as_ptr()]);
                    // SAFETY: whole lines of this function's own, the target one of the sources.
                    unsafe { lines::<L>(&sources, &[Target { at: own, around_cache: false }], LINE) };
                }
            }
            for target in targets {
                // SAFETY: the rest of the target, as above.
                unsafe { bytes::copy(target.at.add(whole), sum.as_ptr(), len - whole) };
            }
        }
    }

    /// # Safety
    /// As for [`sum`]; `len` is a number of whole lines.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn lines<L: Lanes>(sources: &[*const u8], targets: &[Target], len: usize) {
        const HALF: usize = LINE / 2;
        let streams = |target: &Target| target.around_cache && target.at.addr().is_multiple_of(HALF);
        let Some((first, others)) = sources.split_first() else { return };
        let mut at = 0;
        while at < len {
            // SAFETY: `at` and the line behind it lie within what the caller promises. Asking for lines ahead makes it slower: the
            // processor does so itself, and better.
            unsafe {
                let (mut low, mut high) = load(first.add(at));
                for other in others {
                    let (more_low, more_high) = load(other.add(at));
                    low = L::add(low, more_low);
                    high = L::add(high, more_high);
                }
                for target in targets {
                    let into = target.at.add(at);
                    // BYTES MOVE HERE
                    if streams(target) {
                        asm!("vmovntdq [{0}], {1}", "vmovntdq [{0} + 32], {2}", in(reg) into, in(ymm_reg) low, in(ymm_reg) high,
                            options(nostack, preserves_flags));
                    } else {
                        asm!("vmovdqu [{0}], {1}", "vmovdqu [{0} + 32], {2}", in(reg) into, in(ymm_reg) low, in(ymm_reg) high,
                            options(nostack, preserves_flags));
                    }
                }
            }
            at += LINE;
        }
        // SAFETY: orders the stores around the cache before whatever publishes them.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) };
    }

    /// # Safety
    /// The line is valid for reads.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn load(from: *const u8) -> (__m256i, __m256i) {
        let (low, high);
        // SAFETY: the caller's promise. Machine code takes what it finds.
        unsafe {
            // BYTES MOVE HERE
            asm!("vmovdqu {1}, [{0}]", "vmovdqu {2}, [{0} + 32]", in(reg) from, lateout(ymm_reg) low, lateout(ymm_reg) high,
                options(nostack, preserves_flags, readonly));
        }
        (low, high)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    /// The sum of two elements, by the plain rules of the type.
    fn plain(dtype: Dtype, one: &[u8], other: &[u8]) -> Vec<u8> {
        macro_rules! add {
            ($type:ty, $add:expr) => {{
                let of = |bytes: &[u8]| <$type>::from_ne_bytes(bytes.try_into().unwrap());
                $add(of(one), of(other)).to_ne_bytes().to_vec()
            }};
        }
        match dtype {
            Dtype::F32 => add!(f32, |one: f32, other| one + other),
            Dtype::F64 => add!(f64, |one: f64, other| one + other),
            Dtype::U32 | Dtype::I32 => add!(u32, u32::wrapping_add),
            Dtype::U64 | Dtype::I64 => add!(u64, u64::wrapping_add),
            Dtype::U8 | Dtype::I8 | Dtype::F16 | Dtype::Bf16 => panic!("there are none"),
        }
    }

    const SUMMED: [Dtype; 6] = [Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64, Dtype::F32, Dtype::F64];

    /// Bytes that make finite numbers of every type.
    fn finite(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed) & 0x3f).collect()
    }

    proptest! {
        #[test]
        fn a_sum_is_that_of_its_elements_in_order_wherever_the_memories_lie_and_nothing_else_is_written(
            dtype in prop::sample::select(&SUMMED[..]),
            elements in 0usize..90,
            shifts in prop::collection::vec(0usize..70, 1..6),
            places in prop::collection::vec((0usize..70, any::<bool>()), 0..5),
            onto_a_source in any::<bool>(),
        ) {
            if !can_sum(dtype) {
                return Ok(());
            }
            let len = elements * dtype.size();
            let mut sources: Vec<Vec<u8>> =
                shifts.iter().enumerate().map(|(seed, shift)| finite(seed as u8, shift + len + 9)).collect();
            let expected: Vec<u8> = (0..elements)
                .flat_map(|element| {
                    let of = |source: usize| {
                        let start = shifts[source] + element * dtype.size();
                        sources[source][start..start + dtype.size()].to_vec()
                    };
                    (1..sources.len()).fold(of(0), |sum, source| plain(dtype, &sum, &of(source)))
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
            let summed = unsafe { sum(dtype, &from, &into, len) };
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
        for dtype in [Dtype::U8, Dtype::I8, Dtype::F16, Dtype::Bf16] {
            assert!(!can_sum(dtype));
            let target = Target { at: into.as_mut_ptr(), around_cache: false };
            // SAFETY: both are of this function.
            assert!(!unsafe { sum(dtype, &[from.as_ptr()], &[target], 16) });
        }
        let target = Target { at: into.as_mut_ptr(), around_cache: false };
        // SAFETY: as above.
        assert!(!unsafe { sum(Dtype::F32, &[from.as_ptr()], &[target], 15) });
        // SAFETY: as above.
        assert!(!unsafe { sum(Dtype::F32, &[], &[target], 16) });
        assert_eq!(into, [1; 16]);
    }
}
