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
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 64-bit unsigned.
    U64,
}

impl Dtype {
    /// Its number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The type with that number.
    pub fn from_code(code: u8) -> Option<Dtype> {
        [Dtype::F32, Dtype::U64].get(usize::from(code)).copied()
    }
}

/// How a reduction combines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
}

impl ReduceOp {
    /// Its number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The operation with that number.
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        [ReduceOp::Sum, ReduceOp::Max].get(usize::from(code)).copied()
    }
}
