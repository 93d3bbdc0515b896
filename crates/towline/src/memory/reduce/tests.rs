#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Barrier;

use proptest::prelude::*;

use super::*;
use crate::Kind;
use crate::memory::{MemoryAccess, MemoryDescription, SystemStorage};

/// One element of the plain model, as a number that holds it exactly.
#[derive(Debug, Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

fn decode(bytes: &[u8], dtype: Dtype) -> Number {
    use Number::{Float, Integer};
    match dtype {
        Dtype::U8 => Integer(bytes[0].into()),
        Dtype::I8 => Integer(i8::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::U32 => Integer(u32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::I32 => Integer(i32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::U64 => Integer(u64::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::I64 => Integer(i64::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::F16 => Float(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f64()),
        Dtype::Bf16 => Float(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64()),
        Dtype::F32 => Float(f32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::F64 => Float(f64::from_ne_bytes(bytes.try_into().unwrap())),
    }
}

/// The low bytes of an integer, or the nearest float: both are what one machine operation would give.
fn encode(number: Number, dtype: Dtype) -> Vec<u8> {
    match number {
        Number::Integer(value) => value.to_le_bytes()[..dtype.size()].to_vec(),
        Number::Float(value) => match dtype {
            Dtype::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
            Dtype::F32 => (value as f32).to_ne_bytes().to_vec(),
            _ => value.to_ne_bytes().to_vec(),
        },
    }
}

fn model(a: Number, b: Number, op: ReduceOp) -> Number {
    use Number::{Float, Integer};
    match (a, b) {
        (Integer(a), Integer(b)) => Integer(match op {
            ReduceOp::Sum => a + b,
            ReduceOp::Prod => a.wrapping_mul(b),
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
        }),
        (Float(a), Float(b)) => Float(match op {
            ReduceOp::Sum => a + b,
            ReduceOp::Prod => a * b,
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Min if a.total_cmp(&b).is_lt() => a,
            ReduceOp::Max if a.total_cmp(&b).is_gt() => a,
            _ => b,
        }),
        _ => unreachable!(),
    }
}

fn same(found: &[u8], expected: &[u8], dtype: Dtype) -> bool {
    match (decode(found, dtype), decode(expected, dtype)) {
        (Number::Float(a), Number::Float(b)) if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
        _ => found == expected,
    }
}

/// Reduces `src`, placed at an odd address, into `dst`: plainly, and upon looks, which comes to the same.
fn reduced(dst: &[u8], src: &[u8], op: ReduceOp, dtype: Dtype) -> Vec<u8> {
    let into = SystemStorage::new(dst.len().max(1)).unwrap();
    into.write_at(0, dst).unwrap();
    let from = SystemStorage::new(src.len() + 1).unwrap();
    from.write_at(1, src).unwrap();
    // SAFETY: both ranges lie inside their storages.
    unsafe { reduce(into.as_ptr(), from.as_ptr().add(1), dst.len(), op, dtype) }.unwrap();
    let mut result = vec![0; dst.len()];
    into.read_at(0, &mut result).unwrap();
    into.write_at(0, dst).unwrap();
    // SAFETY: as above.
    let all =
        unsafe { reduce_if(&|| true, into.as_ptr(), from.as_ptr().add(1), dst.len(), op, dtype) }.unwrap();
    let mut upon_looks = vec![0; dst.len()];
    into.read_at(0, &mut upon_looks).unwrap();
    assert!(all);
    // Of two NaNs either may be what comes out, and the compiler need not take the same one in both.
    for (one, other) in upon_looks.chunks(dtype.size()).zip(result.chunks(dtype.size())) {
        assert!(same(one, other, dtype), "{op} as {dtype}: {one:?} upon looks, and {other:?}");
    }
    result
}

fn check(dst: &[u8], src: &[u8], op: ReduceOp, dtype: Dtype) -> Result<(), TestCaseError> {
    let size = dtype.size();
    let whole = dst.len() / size * size;
    let result = reduced(&dst[..whole], &src[..whole], op, dtype);
    for at in (0..whole).step_by(size) {
        let part = at..at + size;
        let (a, b) = (decode(&dst[part.clone()], dtype), decode(&src[part.clone()], dtype));
        let expected = encode(model(a, b, op), dtype);
        prop_assert!(
            same(&result[part.clone()], &expected, dtype),
            "{op} of {a:?} and {b:?} as {dtype}: {:?} where {expected:?} was expected",
            &result[part]
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_reduction_agrees_with_the_plain_model(
        pairs in prop::collection::vec(any::<(u8, u8)>(), 0..300),
        op in prop::sample::select(&ReduceOp::ALL),
        dtype in prop::sample::select(&Dtype::ALL),
    ) {
        let (dst, src): (Vec<u8>, Vec<u8>) = pairs.into_iter().unzip();
        check(&dst, &src, op, dtype)?;
    }
}

#[test]
fn every_reduction_agrees_with_the_plain_model_on_special_values() {
    let floats = [0.0, -0.0, 1.0, -1.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65_504.0, 1e-8, 3.4e38];
    let integers = [0, 1, -1, 127, -128, i128::from(i32::MAX), i128::from(i64::MIN), i128::from(u64::MAX)];
    for dtype in Dtype::ALL {
        let numbers: Vec<Number> = match dtype {
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => floats.map(Number::Float).to_vec(),
            _ => integers.map(Number::Integer).to_vec(),
        };
        let (mut dst, mut src) = (Vec::new(), Vec::new());
        for a in &numbers {
            for b in &numbers {
                dst.extend(encode(*a, dtype));
                src.extend(encode(*b, dtype));
            }
        }
        for op in ReduceOp::ALL {
            check(&dst, &src, op, dtype).unwrap();
        }
    }
}

#[test]
fn spans_longer_than_a_chunk_are_reduced_whole() {
    let elements = 3 * CHUNK / 4 + 5;
    let dst: Vec<u8> = (0..elements as u32).flat_map(u32::to_ne_bytes).collect();
    let result = reduced(&dst, &dst, ReduceOp::Sum, Dtype::U32);
    let expected: Vec<u8> = (0..elements as u32).flat_map(|value| (2 * value).to_ne_bytes()).collect();
    assert_eq!(result, expected);
}

#[test]
fn unaligned_destinations_and_broken_elements_are_invalid() {
    let storage = SystemStorage::new(64).unwrap();
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.size() > 1) {
        for (offset, len) in [(1, 16), (0, 17), (dtype.size() / 2, dtype.size())] {
            // SAFETY: both ranges lie inside the storage.
            let result = unsafe {
                reduce(storage.as_ptr().add(offset), storage.as_ptr().add(32), len, ReduceOp::Sum, dtype)
            };
            assert_eq!(result.unwrap_err().kind(), Kind::Invalid, "{dtype} {offset} {len}");
        }
    }
}

#[test]
fn four_threads_that_reduce_into_one_span_lose_nothing() {
    const ELEMENTS: usize = 16;
    const ROUNDS: usize = 20_000;
    let ones: [(Dtype, Vec<u8>, Vec<u8>); 5] = [
        (Dtype::F32, 1f32.to_ne_bytes().to_vec(), 80_000f32.to_ne_bytes().to_vec()),
        (Dtype::F64, 1f64.to_ne_bytes().to_vec(), 80_000f64.to_ne_bytes().to_vec()),
        (Dtype::I32, (-1i32).to_ne_bytes().to_vec(), (-80_000i32).to_ne_bytes().to_vec()),
        (Dtype::U8, vec![1], vec![(80_000 % 256) as u8]),
        // Half precision has 11 bits: multiples of 4 up to 8192 are exact.
        (Dtype::F16, f16::from_f32(4.0).to_ne_bytes().to_vec(), f16::from_f32(8000.0).to_ne_bytes().to_vec()),
    ];
    for (dtype, one, total) in ones {
        let rounds = if dtype == Dtype::F16 { 500 } else { ROUNDS };
        let into = SystemStorage::new(ELEMENTS * dtype.size()).unwrap();
        let from = one.repeat(ELEMENTS);
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    for _ in 0..rounds {
                        // SAFETY: both ranges have that length.
                        unsafe { reduce(into.as_ptr(), from.as_ptr(), from.len(), ReduceOp::Sum, dtype) }
                            .unwrap();
                    }
                });
            }
        });
        let mut result = vec![0; into.size()];
        into.read_at(0, &mut result).unwrap();
        assert_eq!(result, total.repeat(ELEMENTS), "{dtype}");
    }
}

#[test]
fn four_threads_that_count_on_one_word_lose_nothing() {
    const ROUNDS: u64 = 500_000;
    let storage = SystemStorage::new(16).unwrap();
    let together = Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                together.wait();
                let (added, swapped) = (storage.as_ptr(), storage.as_ptr().wrapping_add(8));
                let mut guess = 0;
                for _ in 0..ROUNDS {
                    // SAFETY: aligned words inside the storage, which outlives the threads.
                    unsafe {
                        fetch_add(added, 1);
                        loop {
                            let found = compare_swap(swapped, guess, guess + 1);
                            if found == guess {
                                break;
                            }
                            guess = found;
                        }
                    }
                    guess += 1;
                }
            });
        }
    });
    let mut words = [0; 16];
    storage.read_at(0, &mut words).unwrap();
    let word = |at| u64::from_ne_bytes(words[at..at + 8].try_into().unwrap());
    assert_eq!((word(0), word(8)), (4 * ROUNDS, 4 * ROUNDS));
}

#[test]
fn atomics_answer_with_what_was_there() {
    let storage = SystemStorage::new(16).unwrap();
    // SAFETY: eight aligned bytes inside the storage.
    unsafe {
        let at = storage.as_ptr().add(8);
        assert_eq!(fetch_add(at, 5), 0);
        assert_eq!(fetch_add(at, u64::MAX), 5);
        assert_eq!(compare_swap(at, 4, 9), 4);
        assert_eq!(compare_swap(at, 4, 1), 9);
        assert_eq!(fetch_add(at, 0), 9);
    }
}

#[test]
fn a_contested_counter_loses_nothing() {
    let storage = SystemStorage::new(8).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    // SAFETY: eight aligned bytes inside the storage.
                    unsafe { fetch_add(storage.as_ptr(), 3) };
                }
            });
        }
    });
    // SAFETY: as above.
    assert_eq!(unsafe { fetch_add(storage.as_ptr(), 0) }, 60_000);
}
