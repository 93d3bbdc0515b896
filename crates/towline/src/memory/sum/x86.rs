//! Sums by AVX2.
#![allow(unsafe_code, reason = "adds and copies bytes through raw pointers")]

use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm256_add_epi8, _mm256_add_epi32, _mm256_add_epi64,
    _mm256_add_pd, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_epi8, _mm256_castpd_si256,
    _mm256_castps_si256, _mm256_castsi256_pd, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_pd, _mm256_div_ps, _mm256_extracti128_si256,
    _mm256_or_si256, _mm256_packus_epi32, _mm256_set_m128i, _mm256_set1_epi32, _mm256_set1_pd,
    _mm256_set1_ps, _mm256_setzero_si256, _mm256_srli_epi32, _mm256_unpackhi_epi16, _mm256_unpacklo_epi16,
};

use super::Target;
use crate::bytes;

/// The bytes that are added up at a time.
const LINE: usize = 64;

/// How many of a kind are added up without a loop over them.
const FEW: usize = 2;

/// A line as it lies in memory.
type Line = [__m256i; 2];

/// What elements are. All of it wants AVX2 and F16C.
pub(super) trait Lanes {
    /// A line of elements in the type in which they are added up.
    type Wide: Copy;

    /// # Safety
    /// The processor has AVX2 and F16C.
    unsafe fn widen(line: Line) -> Self::Wide;

    /// # Safety
    /// As for `widen`.
    unsafe fn add(one: Self::Wide, other: Self::Wide) -> Self::Wide;

    /// Divides floating-point elements, and leaves others as they are.
    ///
    /// # Safety
    /// As for `widen`.
    unsafe fn over(sum: Self::Wide, count: usize) -> Self::Wide;

    /// # Safety
    /// As for `widen`.
    unsafe fn narrow(sum: Self::Wide) -> Line;
}

/// Elements that are added up as they are: how 32 bytes of them are added, and divided by a number.
macro_rules! lanes {
    ($($name:ident = |$one:ident, $other:ident| $add:expr, |$sum:ident, $count:ident| $over:expr;)*) => {$(
        pub(super) struct $name;

        impl Lanes for $name {
            type Wide = Line;

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn widen(line: Line) -> Line {
                line
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn add(one: Line, other: Line) -> Line {
                let add = |$one: __m256i, $other: __m256i| $add;
                [add(one[0], other[0]), add(one[1], other[1])]
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn over(sum: Line, $count: usize) -> Line {
                let over = |$sum: __m256i| $over;
                [over(sum[0]), over(sum[1])]
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn narrow(sum: Line) -> Line {
                sum
            }
        }
    )*};
}

lanes! {
    I8 = |one, other| _mm256_add_epi8(one, other), |sum, _count| sum;
    I32 = |one, other| _mm256_add_epi32(one, other), |sum, _count| sum;
    I64 = |one, other| _mm256_add_epi64(one, other), |sum, _count| sum;
    F32 = |one, other| _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(one), _mm256_castsi256_ps(other))),
        |sum, count| _mm256_castps_si256(_mm256_div_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps(count as f32)));
    F64 = |one, other| _mm256_castpd_si256(_mm256_add_pd(_mm256_castsi256_pd(one), _mm256_castsi256_pd(other))),
        |sum, count| _mm256_castpd_si256(_mm256_div_pd(_mm256_castsi256_pd(sum), _mm256_set1_pd(count as f64)));
}

/// Elements of 16 bits that are added up in single precision: how 32 bytes of them become two times as many, and back.
macro_rules! halves {
    ($($name:ident = |$half:ident| $widen:expr, |$low:ident, $high:ident| $narrow:expr;)*) => {$(
        pub(super) struct $name;

        impl Lanes for $name {
            type Wide = [Line; 2];

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn widen(line: Line) -> [Line; 2] {
                let widen = |$half: __m256i| -> Line { $widen };
                [widen(line[0]), widen(line[1])]
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn add(one: [Line; 2], other: [Line; 2]) -> [Line; 2] {
                // SAFETY: the caller's promise.
                unsafe { [F32::add(one[0], other[0]), F32::add(one[1], other[1])] }
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn over(sum: [Line; 2], count: usize) -> [Line; 2] {
                // SAFETY: the caller's promise.
                unsafe { [F32::over(sum[0], count), F32::over(sum[1], count)] }
            }

            #[target_feature(enable = "avx2,f16c")]
            #[inline]
            unsafe fn narrow(sum: [Line; 2]) -> Line {
                let narrow = |[$low, $high]: Line| $narrow;
                [narrow(sum[0]), narrow(sum[1])]
            }
        }
    )*};
}

halves! {
    F16 = |half| [
            _mm256_castps_si256(_mm256_cvtph_ps(_mm256_castsi256_si128(half))),
            _mm256_castps_si256(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half))),
        ],
        |low, high| _mm256_set_m128i(
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_castsi256_ps(high)),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_castsi256_ps(low)),
        );
    // Interleaved with zeros they are not in order, and packing restores it.
    Bf16 = |half| [
            _mm256_unpacklo_epi16(_mm256_setzero_si256(), half),
            _mm256_unpackhi_epi16(_mm256_setzero_si256(), half),
        ],
        |low, high| _mm256_packus_epi32(upper_half(low), upper_half(high));
}

/// Rounds single precision to its upper half, to the nearest, ties to even; a NaN stays one.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn upper_half(wide: __m256i) -> __m256i {
    let upper = _mm256_srli_epi32::<16>(wide);
    let last = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(wide, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
    let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(_mm256_castsi256_ps(wide), _mm256_castsi256_ps(wide));
    _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, _mm256_castps_si256(nan))
}

/// Adds up, and divides where it is over a count.
///
/// # Safety
/// As for [`super::sum`]; the processor has AVX2 and F16C.
pub(super) unsafe fn sum<L: Lanes>(
    sources: &[*const u8],
    targets: &[Target],
    len: usize,
    over: Option<usize>,
) {
    let whole = len - len % LINE;
    // SAFETY: the caller's promise.
    unsafe {
        match (<[*const u8; FEW]>::try_from(sources), <[Target; FEW]>::try_from(targets)) {
            (Ok(sources), Ok(targets)) => lines::<L>(sources, targets, whole, over),
            _ => lines::<L>(sources, targets, whole, over),
        }
        if whole < len {
            end::<L>(sources, targets, whole..len, over);
        }
    }
}

/// # Safety
/// As for [`sum`]; `len` is a number of whole lines.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn lines<L: Lanes>(
    sources: impl AsRef<[*const u8]>,
    targets: impl AsRef<[Target]>,
    len: usize,
    over: Option<usize>,
) {
    const HALF: usize = LINE / 2;
    let streams = |target: &Target| target.around_cache && target.at.addr().is_multiple_of(HALF);
    let Some((first, others)) = sources.as_ref().split_first() else { return };
    let mut at = 0;
    while at < len {
        // SAFETY: `at` and the line behind it lie within what the caller promises. Asking for lines ahead makes it slower: the
        // processor does so itself, and better.
        unsafe {
            let mut sum = L::widen(load(first.add(at)));
            for other in others {
                sum = L::add(sum, L::widen(load(other.add(at))));
            }
            if let Some(count) = over {
                sum = L::over(sum, count);
            }
            let [low, high] = L::narrow(sum);
            for target in targets.as_ref() {
                let into = target.at.add(at);
                // BYTES MOVE HERE
                if streams(target) {
                    asm!("vmovntdq [{0}], {1}", "vmovntdq [{0} + 32], {2}", in(reg) into, in(ymm_reg) low, in(ymm_reg) high,
                        options(nostack, preserves_flags));
                } else {
                    store(into, [low, high]);
                }
            }
        }
        at += LINE;
    }
    // SAFETY: orders the stores around the cache before whatever publishes them.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

/// The rest behind the whole lines, which is shorter than one.
///
/// # Safety
/// As for [`sum`], of the bytes in `rest`.
#[target_feature(enable = "avx2,f16c")]
unsafe fn end<L: Lanes>(
    sources: &[*const u8],
    targets: &[Target],
    rest: std::ops::Range<usize>,
    over: Option<usize>,
) {
    let mut line = [0_u8; LINE];
    let (own, len) = (line.as_mut_ptr(), rest.len().min(LINE));
    let mut sum = None;
    // SAFETY: what the caller promises, and a line of this function's own.
    unsafe {
        for source in sources {
            bytes::copy(own, source.add(rest.start), len);
            let more = L::widen(load(own));
            sum = Some(sum.map_or(more, |sum| L::add(sum, more)));
        }
        let Some(mut sum) = sum else { return };
        if let Some(count) = over {
            sum = L::over(sum, count);
        }
        store(own, L::narrow(sum));
        for target in targets {
            bytes::copy(target.at.add(rest.start), own, len);
        }
    }
}

/// # Safety
/// The line is valid for reads.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn load(from: *const u8) -> Line {
    let (low, high);
    // SAFETY: the caller's promise. Machine code takes what it finds.
    unsafe {
        // BYTES MOVE HERE
        asm!("vmovdqu {1}, [{0}]", "vmovdqu {2}, [{0} + 32]", in(reg) from, lateout(ymm_reg) low, lateout(ymm_reg) high,
            options(nostack, preserves_flags, readonly));
    }
    [low, high]
}

/// # Safety
/// The line is valid for writes.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn store(into: *mut u8, [low, high]: Line) {
    // SAFETY: the caller's promise.
    unsafe {
        // BYTES MOVE HERE
        asm!("vmovdqu [{0}], {1}", "vmovdqu [{0} + 32], {2}", in(reg) into, in(ymm_reg) low, in(ymm_reg) high,
            options(nostack, preserves_flags));
    }
}
