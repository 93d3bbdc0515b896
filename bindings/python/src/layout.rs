//! Layouts, and the index arrays that go with them.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyType;
use towline::{Dim, Indices};

use crate::errors::{OrRaise, invalid};
use crate::request::{Number, number};

/// What a layout is made from: base, block, dimensions.
type Arguments = (u64, u64, Vec<(u64, u64)>);

/// Names many blocks of one length by index: base, block length, counts and strides.
///
/// ``Layout(base, block, [(count, stride), ...])`` has one to four dimensions, the outermost first.
#[pyclass(frozen, eq, hash, module = "towline")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Layout(pub(crate) towline::Layout);

#[pymethods]
impl Layout {
    #[new]
    #[pyo3(signature = (base, block, dims))]
    fn new(py: Python<'_>, base: Number, block: Number, dims: Vec<(Number, Number)>) -> PyResult<Layout> {
        let dims: Vec<Dim> =
            dims.into_iter().map(|(count, stride)| Dim { count: count.0, stride: stride.0 }).collect();
        towline::Layout::new(base.0, block.0, &dims).map(Layout).or_raise(py)
    }

    /// Blocks that lie back to back and fill ``nbytes`` bytes.
    #[staticmethod]
    fn contiguous(py: Python<'_>, nbytes: Number, block: Number) -> PyResult<Layout> {
        towline::Layout::contiguous(nbytes.0, block.0).map(Layout).or_raise(py)
    }

    /// ``count`` blocks, the first at ``base``, each ``stride`` bytes after the one before.
    #[staticmethod]
    #[pyo3(signature = (block, count, *, stride=None, base: "int" = 0))]
    fn blocks(
        py: Python<'_>,
        block: Number,
        count: Number,
        stride: Option<Number>,
        #[pyo3(from_py_with = number)] base: u64,
    ) -> PyResult<Layout> {
        towline::Layout::blocks(base, block.0, count.0, stride.unwrap_or(block).0).map(Layout).or_raise(py)
    }

    /// The offset of block 0.
    #[getter]
    fn base(&self) -> u64 {
        self.0.base()
    }

    /// The bytes of one block.
    #[getter]
    fn block(&self) -> u64 {
        self.0.block_len()
    }

    /// The count and the stride of each dimension, the outermost first.
    #[getter]
    fn dims(&self) -> Vec<(u64, u64)> {
        self.0.dims().iter().map(|dim| (dim.count, dim.stride)).collect()
    }

    /// One past the last byte that any block reaches.
    #[getter]
    fn extent(&self) -> u64 {
        self.0.extent()
    }

    /// The offset of a block's first byte.
    fn offset(&self, py: Python<'_>, index: Number) -> PyResult<u64> {
        self.0.offset(index.0).or_raise(py)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.0.block_count())?)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, Arguments) {
        (py.get_type::<Layout>(), (self.base(), self.block(), self.dims()))
    }

    fn __repr__(&self) -> String {
        format!("Layout({}, {}, {:?})", self.base(), self.block(), self.dims())
    }
}

/// Which blocks: copied out of Python once, so that the plan is made without the GIL.
pub(crate) enum Blocks {
    U32(Vec<u32>),
    U64(Vec<u64>),
    All,
}

impl Blocks {
    /// From `None`, any one-dimensional buffer of integers, or a sequence of them.
    pub(crate) fn from_object(
        object: &Bound<'_, PyAny>,
        op: &'static str,
        argument: &str,
    ) -> PyResult<Blocks> {
        let py = object.py();
        if object.is_none() {
            return Ok(Blocks::All);
        }
        if let Ok(buffer) = PyBuffer::<u32>::get(object) {
            return buffer.to_vec(py).map(Blocks::U32);
        }
        if let Ok(buffer) = PyBuffer::<u64>::get(object) {
            return buffer.to_vec(py).map(Blocks::U64);
        }
        let signed = if let Ok(buffer) = PyBuffer::<i64>::get(object) {
            Some(buffer.to_vec(py)?)
        } else if let Ok(buffer) = PyBuffer::<i32>::get(object) {
            Some(buffer.to_vec(py)?.into_iter().map(i64::from).collect())
        } else {
            None
        };
        match signed {
            Some(signed) => {
                let unsigned: Result<Vec<u64>, _> = signed.into_iter().map(u64::try_from).collect();
                unsigned
                    .map(Blocks::U64)
                    .map_err(|_| invalid(py, op, format!("{argument}: a block's index is negative")))
            }
            None if PyBuffer::<u8>::get(object).is_err() && object.len().is_ok() => {
                object.extract().map(Blocks::U64).map_err(|_| wrong(argument))
            }
            None => Err(wrong(argument)),
        }
    }

    pub(crate) fn indices(&self) -> Indices<'_> {
        match self {
            Blocks::U32(list) => list.into(),
            Blocks::U64(list) => list.into(),
            Blocks::All => Indices::All,
        }
    }
}

fn wrong(argument: &str) -> PyErr {
    pyo3::exceptions::PyTypeError::new_err(format!(
        "{argument}: block indices are a buffer of 32- or 64-bit integers, a sequence of integers, or None for all"
    ))
}
