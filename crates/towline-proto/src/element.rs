//! The types of elements, and how two of them become one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How two elements become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceOp {
    /// Their sum; integers wrap around.
    Sum,
    /// Their product; integers wrap around.
    Prod,
    /// The smaller one. A NaN on either side gives a NaN, and -0 is smaller than +0.
    Min,
    /// The larger one. A NaN on either side gives a NaN, and +0 is larger than -0.
    Max,
}

impl ReduceOp {
    /// Every operation, in the order of the codes.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max];

    /// The name, as `FromStr` takes it.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        }
    }

    /// The number on the wire.
    #[inline]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The operation with that number on the wire.
    #[inline]
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(name: &str) -> Result<ReduceOp> {
        ReduceOp::ALL
            .into_iter()
            .find(|op| op.name() == name)
            .ok_or_else(|| Error::invalid("parse", format!("no reduction is called {name:?}")))
    }
}

/// The type of an element.
///
/// ```
/// # use towline_proto as towline;
/// use towline::Dtype;
/// assert_eq!("bf16".parse::<Dtype>()?, Dtype::Bf16);
/// assert_eq!("float32".parse::<Dtype>()?.size(), 4);
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// IEEE half precision; reduced in single precision and rounded back each time.
    F16,
    /// The upper half of single precision; reduced in single precision and rounded back each time.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl Dtype {
    /// Every type, in the order of the codes.
    pub const ALL: [Dtype; 10] = [
        Dtype::U8,
        Dtype::I8,
        Dtype::U32,
        Dtype::I32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F32,
        Dtype::F64,
    ];

    /// The bytes of one element.
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 => 8,
        }
    }

    /// The name: a letter and the bits.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// The short name and the one that array libraries use; `FromStr` takes both.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Dtype::U8 => ("u8", "uint8"),
            Dtype::I8 => ("i8", "int8"),
            Dtype::U32 => ("u32", "uint32"),
            Dtype::I32 => ("i32", "int32"),
            Dtype::U64 => ("u64", "uint64"),
            Dtype::I64 => ("i64", "int64"),
            Dtype::F16 => ("f16", "float16"),
            Dtype::Bf16 => ("bf16", "bfloat16"),
            Dtype::F32 => ("f32", "float32"),
            Dtype::F64 => ("f64", "float64"),
        }
    }

    /// The number on the wire.
    #[inline]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The type with that number on the wire.
    #[inline]
    pub fn from_code(code: u8) -> Option<Dtype> {
        Dtype::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Dtype> {
        Dtype::ALL
            .into_iter()
            .find(|dtype| dtype.names().0 == name || dtype.names().1 == name)
            .ok_or_else(|| Error::invalid("parse", format!("no element type is called {name:?}")))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Kind;

    #[test]
    fn names_and_codes_lead_back() {
        for (index, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), index);
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
            assert_eq!(dtype.names().1.parse::<Dtype>().unwrap(), dtype);
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{dtype}\""));
        }
        assert_eq!(Dtype::from_code(10), None);
        assert_eq!("f8".parse::<Dtype>().unwrap_err().kind(), Kind::Invalid);
        for (index, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(op.code()), index);
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(op.to_string().parse::<ReduceOp>().unwrap(), op);
        }
        assert_eq!(ReduceOp::from_code(4), None);
        assert_eq!("mean".parse::<ReduceOp>().unwrap_err().kind(), Kind::Invalid);
    }
}
