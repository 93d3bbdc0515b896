//! Elements of NCCL's types, combined one by one.

use std::ffi::c_int;

use half::{bf16, f16};

/// A number of any type.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

pub(crate) fn size(datatype: c_int) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1].get(usize::try_from(datatype).ok()?).copied()
}

fn read(datatype: c_int, bytes: &[u8]) -> Number {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(word);
    match datatype {
        0 => Number::Int((bits as i8).into()),
        1 => Number::Int((bits as u8).into()),
        2 => Number::Int((bits as i32).into()),
        3 => Number::Int((bits as u32).into()),
        4 => Number::Int((bits as i64).into()),
        5 => Number::Int(bits.into()),
        6 => Number::Float(f16::from_bits(bits as u16).to_f64()),
        7 => Number::Float(f32::from_bits(bits as u32).into()),
        8 => Number::Float(f64::from_bits(bits)),
        9 => Number::Float(bf16::from_bits(bits as u16).to_f64()),
        // Eight-bit floats are moved here, not combined.
        _ => Number::Int((bits as u8).into()),
    }
}

fn write(datatype: c_int, number: Number, bytes: &mut [u8]) {
    let word = match (datatype, number) {
        (6, Number::Float(value)) => u64::from(f16::from_f64(value).to_bits()),
        (7, Number::Float(value)) => u64::from((value as f32).to_bits()),
        (9, Number::Float(value)) => u64::from(bf16::from_f64(value).to_bits()),
        (_, Number::Float(value)) => value.to_bits(),
        (_, Number::Int(value)) => value as u64,
    };
    let len = bytes.len();
    bytes.copy_from_slice(&word.to_le_bytes()[..len]);
}

/// How elements become one: an operation, or a sum of each rank's elements times its factor.
#[derive(Clone)]
pub(crate) enum How {
    Plain(c_int),
    Scaled(Vec<u8>),
}

impl How {
    /// This rank's elements, as they go into the sum.
    pub(crate) fn scaled(&self, datatype: c_int, bytes: &mut [u8]) {
        let (How::Scaled(factor), Some(size)) = (self, size(datatype)) else { return };
        let factor = read(datatype, &factor[..size]);
        for element in bytes.chunks_exact_mut(size) {
            let product = match (read(datatype, element), factor) {
                (Number::Int(a), Number::Int(b)) => Number::Int(a.wrapping_mul(b)),
                (Number::Float(a), Number::Float(b)) => Number::Float(a * b),
                (a, _) => a,
            };
            write(datatype, product, element);
        }
    }
}

/// The elements of all ranks, as one.
pub(crate) fn combine(how: &How, datatype: c_int, ranks: &[Vec<u8>]) -> Vec<u8> {
    let Some(size) = size(datatype) else { return Vec::new() };
    let op = match how {
        How::Plain(op) => *op,
        How::Scaled(_) => 0,
    };
    let mut whole = ranks.first().cloned().unwrap_or_default();
    for (index, into) in whole.chunks_exact_mut(size).enumerate() {
        let at = index * size..(index + 1) * size;
        let mut numbers = ranks.iter().map(|bytes| read(datatype, &bytes[at.clone()]));
        let Some(first) = numbers.next() else { continue };
        let total = numbers.fold(first, |a, b| match (a, b) {
            (Number::Int(a), Number::Int(b)) => Number::Int(match op {
                1 => a.wrapping_mul(b),
                2 => a.max(b),
                3 => a.min(b),
                _ => a.wrapping_add(b),
            }),
            (Number::Float(a), Number::Float(b)) => Number::Float(match op {
                1 => a * b,
                2 => a.max(b),
                3 => a.min(b),
                _ => a + b,
            }),
            (a, _) => a,
        });
        let total = match total {
            Number::Int(sum) if op == 4 => Number::Int(sum / ranks.len() as i128),
            Number::Float(sum) if op == 4 => Number::Float(sum / ranks.len() as f64),
            total => total,
        };
        write(datatype, total, into);
    }
    whole
}
