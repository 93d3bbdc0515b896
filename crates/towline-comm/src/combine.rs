//! How elements of several ranks become one (pure).
//!
//! All of it works on private scratch memory: nothing here ever sees bytes that a peer may touch. Half-precision
//! types are widened to `f32` when they arrive, stay wide for the whole reduction, and are rounded once at its end.

use std::fmt;

use half::f16;
use half::slice::HalfFloatSliceExt;
use towline::Dtype;

use crate::{Error, Result};

/// How the elements of all ranks become one.
///
/// The result is the same, bit for bit, on every rank; the order in which the ranks' elements are combined depends
/// on the algorithm, so that floating-point results of two algorithms can differ in their last bits.
///
/// ```
/// use towline_comm::{Op, Scalar};
/// assert_eq!(Op::Avg.to_string(), "avg");
/// assert_eq!(Op::ScaledSum(Scalar::from(0.5)).to_string(), "scaled sum");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// Their sum; integers wrap around.
    Sum,
    /// Their product; integers wrap around.
    Prod,
    /// The smallest. One NaN gives a NaN, and -0 is smaller than +0.
    Min,
    /// The largest. One NaN gives a NaN, and +0 is larger than -0.
    Max,
    /// Their sum divided by the number of ranks. Integers: the sum wraps around, and the division rounds towards
    /// zero, as NCCL does.
    Avg,
    /// Each rank's elements times that rank's own scalar, summed. Ranks may pass different scalars.
    ScaledSum(Scalar),
}

impl Op {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Prod => "prod",
            Op::Min => "min",
            Op::Max => "max",
            Op::Avg => "avg",
            Op::ScaledSum(_) => "scaled sum",
        }
    }

    /// What the ranks of one call must agree on: the operation, not each one's scalar.
    pub(crate) fn code(self) -> u64 {
        match self {
            Op::Sum => 0,
            Op::Prod => 1,
            Op::Min => 2,
            Op::Max => 3,
            Op::Avg => 4,
            Op::ScaledSum(_) => 5,
        }
    }

    /// The scalar as a peer needs it to apply it: see [`Scalar::bits`]. Zero where the operation has none.
    pub(crate) fn scale(self, dtype: Dtype) -> Result<u64> {
        match self {
            Op::ScaledSum(scalar) => scalar.bits(dtype),
            _ => Ok(0),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a rank multiplies its elements by in [`Op::ScaledSum`].
///
/// Elements of a floating-point type take any scalar, rounded to the type in which they are summed (`f32` for the
/// half-precision ones). Integer elements take whole numbers of their own range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// A whole number.
    Int(i128),
    /// A floating-point number.
    Float(f64),
}

impl Scalar {
    /// The scalar as 64 bits: those of an `f64` for floating-point elements, two's complement for integers.
    fn bits(self, dtype: Dtype) -> Result<u64> {
        let range = match dtype {
            Dtype::U8 => 0..=i128::from(u8::MAX),
            Dtype::I8 => i128::from(i8::MIN)..=i128::from(i8::MAX),
            Dtype::U32 => 0..=i128::from(u32::MAX),
            Dtype::I32 => i128::from(i32::MIN)..=i128::from(i32::MAX),
            Dtype::U64 => 0..=i128::from(u64::MAX),
            Dtype::I64 => i128::from(i64::MIN)..=i128::from(i64::MAX),
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => {
                return Ok(match self {
                    Scalar::Float(scalar) => scalar.to_bits(),
                    Scalar::Int(scalar) => (scalar as f64).to_bits(),
                });
            }
        };
        match self {
            Scalar::Int(scalar) if range.contains(&scalar) => Ok(scalar as u64),
            _ => Err(Error::invalid("scaled sum", format!("{self} is not a factor for elements of {dtype}"))),
        }
    }
}

impl From<f64> for Scalar {
    fn from(scalar: f64) -> Scalar {
        Scalar::Float(scalar)
    }
}

impl From<i64> for Scalar {
    fn from(scalar: i64) -> Scalar {
        Scalar::Int(scalar.into())
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Int(scalar) => scalar.fmt(f),
            Scalar::Float(scalar) => scalar.fmt(f),
        }
    }
}

/// The type in which elements are combined.
pub(crate) fn wide(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F16 | Dtype::Bf16 => Dtype::F32,
        other => other,
    }
}

/// Private bytes, aligned for every element type.
#[derive(Default)]
pub(crate) struct Scratch(Vec<u64>);

impl Scratch {
    pub(crate) fn bytes(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() * 8 < len {
            self.0.resize(len.div_ceil(8), 0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    fn seen(&self, len: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..len]
    }
}

/// One stretch of elements during a reduction.
///
/// `start`, then `take` or `take_partial` once per rank, then `finish` or `partial`; then the next stretch.
pub(crate) struct Accumulator {
    op: Op,
    dtype: Dtype,
    elements: usize,
    taken: usize,
    sum: Scratch,
    arrived: Scratch,
    widened: Scratch,
    narrowed: Scratch,
}

/// The memory of an accumulator that has done its work, for the next one.
#[derive(Default)]
pub(crate) struct Spent([Scratch; 4]);

impl Accumulator {
    pub(crate) fn new(op: Op, dtype: Dtype) -> Accumulator {
        Accumulator::reusing(op, dtype, Spent::default())
    }

    /// One that takes over the memory of another.
    pub(crate) fn reusing(op: Op, dtype: Dtype, spent: Spent) -> Accumulator {
        let Spent([sum, arrived, widened, narrowed]) = spent;
        Accumulator { op, dtype, elements: 0, taken: 0, sum, arrived, widened, narrowed }
    }

    pub(crate) fn spend(self) -> Spent {
        Spent([self.sum, self.arrived, self.widened, self.narrowed])
    }

    /// Begins a stretch of that many elements.
    pub(crate) fn start(&mut self, elements: usize) {
        self.elements = elements;
        self.taken = 0;
    }

    /// Takes one rank's elements, which `read` puts into the given bytes, times that rank's scale.
    pub(crate) fn take(&mut self, scale: u64, read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let narrow = self.elements * self.dtype.size();
        let full = self.elements * wide(self.dtype).size();
        let first = self.taken == 0;
        self.taken += 1;
        if wide(self.dtype) == self.dtype {
            let target = if first { self.sum.bytes(full) } else { self.arrived.bytes(full) };
            read(target)?;
            self.scaled(first, false, full, scale);
            return Ok(());
        }
        read(self.arrived.bytes(narrow))?;
        let target = if first { &mut self.sum } else { &mut self.widened };
        let target: &mut [f32] = bytemuck::cast_slice_mut(target.bytes(full));
        match self.dtype {
            Dtype::F16 => {
                bytemuck::cast_slice::<u8, f16>(self.arrived.seen(narrow)).convert_to_f32_slice(target)
            }
            _ => widen(bytemuck::cast_slice(self.arrived.seen(narrow)), target),
        }
        self.scaled(first, true, full, scale);
        Ok(())
    }

    /// Takes what several ranks have combined already, in the wide type.
    pub(crate) fn take_partial(&mut self, read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let full = self.elements * wide(self.dtype).size();
        let first = self.taken == 0;
        self.taken += 1;
        if first {
            return read(self.sum.bytes(full));
        }
        read(self.arrived.bytes(full))?;
        fold(self.op, wide(self.dtype), self.sum.bytes(full), self.arrived.seen(full));
        Ok(())
    }

    /// What has been combined so far, in the wide type.
    pub(crate) fn partial(&mut self) -> &[u8] {
        self.sum.seen(self.elements * wide(self.dtype).size())
    }

    /// The result over `ranks` ranks, in the type of the elements.
    pub(crate) fn finish(&mut self, ranks: usize) -> &[u8] {
        let full = self.elements * wide(self.dtype).size();
        if self.op == Op::Avg {
            divide(wide(self.dtype), self.sum.bytes(full), ranks);
        }
        if wide(self.dtype) == self.dtype {
            return self.sum.seen(full);
        }
        let narrow = self.elements * self.dtype.size();
        let result: &[f32] = bytemuck::cast_slice(self.sum.seen(full));
        let target = self.narrowed.bytes(narrow);
        match self.dtype {
            Dtype::F16 => bytemuck::cast_slice_mut::<u8, f16>(target).convert_from_f32_slice(result),
            _ => narrow_bf16(result, bytemuck::cast_slice_mut(target)),
        }
        self.narrowed.seen(narrow)
    }

    /// Scales what was just taken and combines it with what was there.
    fn scaled(&mut self, first: bool, widened: bool, full: usize, scale: u64) {
        let source = match (first, widened) {
            (true, _) => &mut self.sum,
            (false, true) => &mut self.widened,
            (false, false) => &mut self.arrived,
        };
        if let Op::ScaledSum(_) = self.op {
            multiply(wide(self.dtype), source.bytes(full), scale);
        }
        if !first {
            let source = if widened { &self.widened } else { &self.arrived };
            fold(self.op, wide(self.dtype), self.sum.bytes(full), source.seen(full));
        }
    }
}

/// `half` converts these one by one with a branch; without it the loop becomes vector instructions.
fn widen(from: &[u16], into: &mut [f32]) {
    for (into, &bits) in into.iter_mut().zip(from) {
        *into = f32::from_bits(u32::from(bits) << 16);
    }
}

/// Rounds to the nearest, ties to even; a NaN stays one. As `bf16::from_f32`, but as vector instructions.
fn narrow_bf16(from: &[f32], into: &mut [u16]) {
    for (into, &value) in into.iter_mut().zip(from) {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        *into = if value.is_nan() { quiet as u16 } else { rounded as u16 };
    }
}

/// Calls a generic function with the element type that the accumulator has for that dtype.
macro_rules! with_type {
    ($dtype:expr, $call:ident ( $($argument:expr),* )) => {
        match $dtype {
            Dtype::U8 => $call::<u8>($($argument),*),
            Dtype::I8 => $call::<i8>($($argument),*),
            Dtype::U32 => $call::<u32>($($argument),*),
            Dtype::I32 => $call::<i32>($($argument),*),
            Dtype::U64 => $call::<u64>($($argument),*),
            Dtype::I64 => $call::<i64>($($argument),*),
            Dtype::F64 => $call::<f64>($($argument),*),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => $call::<f32>($($argument),*),
        }
    };
}

fn fold(op: Op, dtype: Dtype, into: &mut [u8], from: &[u8]) {
    with_type!(dtype, fold_as(op, into, from))
}

fn divide(dtype: Dtype, values: &mut [u8], ranks: usize) {
    with_type!(dtype, divide_as(values, ranks))
}

fn multiply(dtype: Dtype, values: &mut [u8], scale: u64) {
    with_type!(dtype, multiply_as(values, scale))
}

/// A type in which elements are combined.
trait Element: bytemuck::Pod {
    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
    fn scale_from(bits: u64) -> Self;
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, other: $type) -> $type {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn prod(self, other: $type) -> $type {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: $type) -> $type {
                self.min(other)
            }

            #[inline(always)]
            fn most(self, other: $type) -> $type {
                self.max(other)
            }

            #[inline(always)]
            fn over(self, ranks: usize) -> $type {
                match <$type>::try_from(ranks) {
                    Ok(ranks) => self / ranks,
                    Err(_) => (self as i128 / ranks as i128) as $type,
                }
            }

            fn scale_from(bits: u64) -> $type {
                bits as $type
            }
        }
    )*};
}

integer! { u8, i8, u32, i32, u64, i64 }

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, other: $type) -> $type {
                self + other
            }

            #[inline(always)]
            fn prod(self, other: $type) -> $type {
                self * other
            }

            #[inline(always)]
            fn least(self, other: $type) -> $type {
                let mine = (self < other) | self.is_nan() | ((self == other) & self.is_sign_negative());
                if mine { self } else { other }
            }

            #[inline(always)]
            fn most(self, other: $type) -> $type {
                let mine = (self > other) | self.is_nan() | ((self == other) & self.is_sign_positive());
                if mine { self } else { other }
            }

            #[inline(always)]
            fn over(self, ranks: usize) -> $type {
                self / ranks as $type
            }

            fn scale_from(bits: u64) -> $type {
                f64::from_bits(bits) as $type
            }
        }
    )*};
}

float! { f32, f64 }

fn fold_as<E: Element>(op: Op, into: &mut [u8], from: &[u8]) {
    match op {
        Op::Sum | Op::Avg | Op::ScaledSum(_) => each(into, from, E::sum),
        Op::Prod => each(into, from, E::prod),
        Op::Min => each(into, from, E::least),
        Op::Max => each(into, from, E::most),
    }
}

#[inline(always)]
fn each<E: Element>(into: &mut [u8], from: &[u8], combine: impl Fn(E, E) -> E) {
    let into: &mut [E] = bytemuck::cast_slice_mut(into);
    for (into, &from) in into.iter_mut().zip(bytemuck::cast_slice::<u8, E>(from)) {
        *into = combine(*into, from);
    }
}

fn divide_as<E: Element>(values: &mut [u8], ranks: usize) {
    for value in bytemuck::cast_slice_mut::<u8, E>(values) {
        *value = value.over(ranks);
    }
}

fn multiply_as<E: Element>(values: &mut [u8], scale: u64) {
    let scale = E::scale_from(scale);
    for value in bytemuck::cast_slice_mut::<u8, E>(values) {
        *value = value.prod(scale);
    }
}

#[cfg(test)]
mod tests;
