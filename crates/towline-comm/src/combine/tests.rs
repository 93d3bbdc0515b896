#![allow(clippy::unwrap_used, clippy::panic)]

use half::bf16;
use proptest::prelude::*;

use super::*;

/// One element as the reference sees it: exact for integers, the accumulator's own precision for the others.
#[derive(Debug, Clone, Copy)]
enum Value {
    Whole(i128),
    Single(f32),
    Double(f64),
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Value {
    match dtype {
        Dtype::U8 => Value::Whole(bytes[0].into()),
        Dtype::I8 => Value::Whole((bytes[0] as i8).into()),
        Dtype::U32 => Value::Whole(u32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::I32 => Value::Whole(i32::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::U64 => Value::Whole(u64::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::I64 => Value::Whole(i64::from_ne_bytes(bytes.try_into().unwrap()).into()),
        Dtype::F16 => Value::Single(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
        Dtype::Bf16 => Value::Single(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
        Dtype::F32 => Value::Single(f32::from_ne_bytes(bytes.try_into().unwrap())),
        Dtype::F64 => Value::Double(f64::from_ne_bytes(bytes.try_into().unwrap())),
    }
}

/// The whole number as that type holds it after wrapping around.
fn wrap(dtype: Dtype, value: i128) -> i128 {
    match dtype {
        Dtype::U8 => (value as u8).into(),
        Dtype::I8 => (value as i8).into(),
        Dtype::U32 => (value as u32).into(),
        Dtype::I32 => (value as i32).into(),
        Dtype::U64 => (value as u64).into(),
        _ => (value as i64).into(),
    }
}

fn combined(op: Op, dtype: Dtype, a: Value, b: Value) -> Value {
    match (a, b) {
        (Value::Whole(a), Value::Whole(b)) => Value::Whole(wrap(
            dtype,
            match op {
                Op::Prod => a.wrapping_mul(b),
                Op::Min => a.min(b),
                Op::Max => a.max(b),
                _ => a + b,
            },
        )),
        (Value::Single(a), Value::Single(b)) => Value::Single(match op {
            Op::Prod => a * b,
            Op::Min | Op::Max if a.is_nan() || b.is_nan() => f32::NAN,
            Op::Min => {
                if a.total_cmp(&b).is_le() {
                    a
                } else {
                    b
                }
            }
            Op::Max => {
                if a.total_cmp(&b).is_ge() {
                    a
                } else {
                    b
                }
            }
            _ => a + b,
        }),
        (Value::Double(a), Value::Double(b)) => Value::Double(match op {
            Op::Prod => a * b,
            Op::Min | Op::Max if a.is_nan() || b.is_nan() => f64::NAN,
            Op::Min => {
                if a.total_cmp(&b).is_le() {
                    a
                } else {
                    b
                }
            }
            Op::Max => {
                if a.total_cmp(&b).is_ge() {
                    a
                } else {
                    b
                }
            }
            _ => a + b,
        }),
        _ => panic!("two types in one reduction"),
    }
}

fn scaled(dtype: Dtype, value: Value, scale: u64) -> Value {
    match value {
        Value::Whole(value) => Value::Whole(wrap(dtype, value.wrapping_mul(wrap(dtype, scale.into())))),
        Value::Single(value) => Value::Single(value * f64::from_bits(scale) as f32),
        Value::Double(value) => Value::Double(value * f64::from_bits(scale)),
    }
}

fn averaged(value: Value, ranks: usize) -> Value {
    match value {
        Value::Whole(value) => Value::Whole(value / ranks as i128),
        Value::Single(value) => Value::Single(value / ranks as f32),
        Value::Double(value) => Value::Double(value / ranks as f64),
    }
}

fn same(dtype: Dtype, expected: Value, bytes: &[u8]) -> bool {
    match expected {
        Value::Whole(expected) => expected as u64 as i128 == whole(decode(dtype, bytes)) as u64 as i128,
        Value::Double(expected) => {
            let got = f64::from_ne_bytes(bytes.try_into().unwrap());
            got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan())
        }
        Value::Single(expected) => {
            let Value::Single(got) = decode(dtype, bytes) else { return false };
            let expected = match dtype {
                Dtype::F16 => f16::from_f32(expected).to_f32(),
                Dtype::Bf16 => bf16::from_f32(expected).to_f32(),
                _ => expected,
            };
            got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan())
        }
    }
}

fn whole(value: Value) -> i128 {
    match value {
        Value::Whole(value) => value,
        other => panic!("{other:?} is not whole"),
    }
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        Just(Op::Sum),
        Just(Op::Prod),
        Just(Op::Min),
        Just(Op::Max),
        Just(Op::Avg),
        Just(Op::ScaledSum(Scalar::Int(3))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_reduction_equals_the_scalar_reference(
        op in ops(),
        dtype in proptest::sample::select(Dtype::ALL.to_vec()),
        ranks in 1usize..9,
        elements in 0usize..70,
        seed in proptest::collection::vec(any::<u8>(), 8 * 70 * 8),
        scales in proptest::collection::vec(0i128..100, 8),
    ) {
        let size = dtype.size();
        let input = |rank: usize| &seed[rank * 560..][..elements * size];
        let scale = |rank: usize| match op {
            Op::ScaledSum(_) => Op::ScaledSum(Scalar::Int(scales[rank])).scale(dtype).unwrap(),
            _ => 0,
        };
        let mut accumulator = Accumulator::new(op, dtype);
        accumulator.start(elements);
        for rank in 0..ranks {
            accumulator.take(scale(rank), |bytes| { bytes.copy_from_slice(input(rank)); Ok(()) }).unwrap();
        }
        let got = accumulator.finish(ranks).to_vec();
        prop_assert_eq!(got.len(), elements * size);
        for index in 0..elements {
            let at = index * size..(index + 1) * size;
            let expected = (0..ranks)
                .map(|rank| {
                    let value = decode(dtype, &input(rank)[at.clone()]);
                    if matches!(op, Op::ScaledSum(_)) { scaled(dtype, value, scale(rank)) } else { value }
                })
                .reduce(|a, b| combined(op, dtype, a, b))
                .unwrap();
            let expected = if op == Op::Avg { averaged(expected, ranks) } else { expected };
            prop_assert!(same(dtype, expected, &got[at.clone()]), "{op} {dtype} {index}: {expected:?} {:?}", &got[at]);
        }
    }

    #[test]
    fn partial_results_in_the_wide_type_lose_nothing(
        values in proptest::collection::vec(any::<[u8; 2]>(), 24),
        dtype in proptest::sample::select(vec![Dtype::F16, Dtype::Bf16]),
    ) {
        let rank = |rank: usize| values[rank * 8..][..8].concat();
        let copied = |from: Vec<u8>| move |into: &mut [u8]| { into.copy_from_slice(&from); Ok(()) };
        let mut whole = Accumulator::new(Op::Sum, dtype);
        whole.start(8);
        (0..3).for_each(|index| whole.take(0, copied(rank(index))).unwrap());
        let mut first = Accumulator::new(Op::Sum, dtype);
        first.start(8);
        (0..2).for_each(|index| first.take(0, copied(rank(index))).unwrap());
        let mut second = Accumulator::new(Op::Sum, dtype);
        second.start(8);
        second.take_partial(copied(first.partial().to_vec())).unwrap();
        second.take(0, copied(rank(2))).unwrap();
        prop_assert_eq!(whole.finish(3), second.finish(3));
    }

    #[test]
    fn rounding_to_bf16_is_that_of_the_half_crate(value in any::<f32>()) {
        let mut narrow = [0];
        narrow_bf16(&[value], &mut narrow);
        prop_assert_eq!(narrow[0], bf16::from_f32(value).to_bits());
    }
}

#[test]
fn an_average_of_integers_rounds_towards_zero() {
    let mut accumulator = Accumulator::new(Op::Avg, Dtype::I32);
    accumulator.start(2);
    for pair in [[3i32, -3], [4, -4]] {
        accumulator
            .take(0, |bytes| {
                bytes.copy_from_slice(bytemuck::cast_slice(&pair));
                Ok(())
            })
            .unwrap();
    }
    assert_eq!(bytemuck::cast_slice::<u8, i32>(accumulator.finish(2)), [3, -3]);
}

#[test]
fn half_precision_is_rounded_once() {
    // 2048 + 1 + 1: in f16 each step would round back to 2048.
    let mut accumulator = Accumulator::new(Op::Sum, Dtype::F16);
    accumulator.start(1);
    for value in [2048.0, 1.0, 1.0] {
        accumulator
            .take(0, |bytes| {
                bytes.copy_from_slice(&f16::from_f32(value).to_ne_bytes());
                Ok(())
            })
            .unwrap();
    }
    assert_eq!(f16::from_ne_bytes(accumulator.finish(3).try_into().unwrap()).to_f32(), 2050.0);
}

#[test]
fn a_scalar_that_the_type_cannot_hold_is_refused() {
    for (scalar, dtype) in [
        (Scalar::Float(0.5), Dtype::I32),
        (Scalar::Int(-1), Dtype::U8),
        (Scalar::Int(256), Dtype::U8),
        (Scalar::Int(1 << 63), Dtype::I64),
    ] {
        assert!(Op::ScaledSum(scalar).scale(dtype).is_err(), "{scalar} {dtype}");
    }
    assert!(Op::ScaledSum(Scalar::Int(1 << 63)).scale(Dtype::U64).is_ok());
    assert!(Op::ScaledSum(Scalar::Int(7)).scale(Dtype::F16).is_ok());
}

#[test]
fn one_nan_makes_the_smallest_and_the_largest_a_nan() {
    for op in [Op::Min, Op::Max] {
        for values in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
            let mut accumulator = Accumulator::new(op, Dtype::F32);
            accumulator.start(1);
            for value in values {
                accumulator
                    .take(0, |bytes| {
                        bytes.copy_from_slice(&value.to_ne_bytes());
                        Ok(())
                    })
                    .unwrap();
            }
            assert!(f32::from_ne_bytes(accumulator.finish(3).try_into().unwrap()).is_nan());
        }
    }
}
