//! Storages.

/// Where bytes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    Host,
    /// A CUDA device.
    Cuda(u32),
    /// A file.
    Disk,
}

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Dtype {
    U8,
    I8,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Dtype {
    /// Every type, in the order of the codes.
    pub const ALL: [Dtype; 10] = {
        use Dtype::*;
        [U8, I8, U32, I32, U64, I64, F16, Bf16, F32, F64]
    };

    /// Its number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The type with that number.
    pub fn from_code(code: u8) -> Option<Dtype> {
        Dtype::ALL.get(usize::from(code)).copied()
    }
}

/// How a reduction combines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ReduceOp {
    Sum,
    Prod,
    Min,
    Max,
}

impl ReduceOp {
    /// Every operation, in the order of the codes.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max];

    /// Its number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The operation with that number.
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(usize::from(code)).copied()
    }
}
