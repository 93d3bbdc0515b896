//! Layouts, and the index arrays that go with them.
#![allow(unsafe_code, reason = "reads arrays of indices that Python keeps")]

use std::sync::Arc;

use pyo3::Borrowed;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyType};
use towline::layout::MAX_DIMS;
use towline::room::{self, Zeroable};
use towline::{Dim, IndexList, Indices};

use crate::asked::Asked;
use crate::dlpack::{self, Exported};
use crate::errors::{OrRaise, invalid};
use crate::number::{Number, number};
use crate::owners::OwnerToken;

/// What a layout is made from: base, block, dimensions.
type Arguments = (u64, u64, Vec<(u64, u64)>);

/// Counts and strides. What says that it has very many of them is asked for them one by one.
struct Dims(Vec<(Number, Number)>);

impl<'py> FromPyObject<'_, 'py> for Dims {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = Vec::<(Number, Number)>::INPUT_TYPE;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Dims> {
        if value.len()? > MAX_DIMS {
            let message = format!("dims: a layout has 1 to {MAX_DIMS} dimensions, not {}", value.len()?);
            return Err(invalid(value.py(), "layout", message));
        }
        value.extract().map(Dims)
    }
}

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
    fn new(py: Python<'_>, base: Number, block: Number, dims: Dims) -> PyResult<Layout> {
        let dims: Vec<Dim> =
            dims.0.into_iter().map(|(count, stride)| Dim { count: count.0, stride: stride.0 }).collect();
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

/// Which blocks: handed to the core as they are where nobody can change them, and otherwise copied out of Python once, in
/// one go. The core plans them on a thread of its own.
pub(crate) struct Blocks(IndexList<'static>);

/// Longer lists of signed numbers are taken as they are: a negative one is past every layout, which the transfer says then.
const CHECKED: usize = 4096;

/// A list that is shorter is copied in less time than it takes to keep it.
const LENT: usize = 1024;

impl Blocks {
    /// From `None`, any one-dimensional buffer of integers, or a sequence of them.
    pub(crate) fn from_object(
        object: &Bound<'_, PyAny>,
        op: &'static str,
        argument: &'static str,
    ) -> PyResult<Blocks> {
        let py = object.py();
        if object.is_none() {
            return Ok(Blocks(Indices::All.into()));
        }
        let negative = || invalid(py, op, format!("{argument}: a block's index is negative"));
        if let Ok(buffer) = PyBuffer::<u32>::get(object) {
            return Ok(Blocks(match lent::<u32, u32>(object, &buffer)? {
                Some(lent) => IndexList::U32(Arc::new(lent)),
                None => copied(py, op, &buffer)?.into(),
            }));
        }
        if let Ok(buffer) = PyBuffer::<u64>::get(object) {
            return Ok(Blocks(match lent::<u64, u64>(object, &buffer)? {
                Some(lent) => IndexList::U64(Arc::new(lent)),
                None => copied(py, op, &buffer)?.into(),
            }));
        }
        if let Ok(buffer) = PyBuffer::<i64>::get(object) {
            if let Some(lent) = lent::<i64, u64>(object, &buffer)? {
                return Ok(Blocks(IndexList::U64(Arc::new(lent))));
            }
            let signed = copied(py, op, &buffer)?;
            if signed.len() <= CHECKED && signed.iter().any(|index| *index < 0) {
                return Err(negative());
            }
            // In place: nothing is copied or looked at again.
            let unsigned: Vec<u64> = signed.into_iter().map(i64::cast_unsigned).collect();
            return Ok(Blocks(unsigned.into()));
        }
        if let Ok(buffer) = PyBuffer::<i32>::get(object) {
            let unsigned: Result<Vec<u32>, _> =
                copied(py, op, &buffer)?.into_iter().map(u32::try_from).collect();
            return unsigned.map(|list| Blocks(list.into())).map_err(|_| negative());
        }
        if let Some(list) = of_tensor(object, op, argument)? {
            return Ok(Blocks(list));
        }
        if PyBuffer::<u8>::get(object).is_err()
            && let Ok(len) = object.len()
        {
            // A range has a length that no list of its numbers has.
            let mut list = room::list(op, len).or_raise(py)?;
            for index in object.try_iter().map_err(|_| wrong(argument))? {
                let index: u64 = index?.extract().map_err(|_| wrong(argument))?;
                room::push(op, &mut list, index).or_raise(py)?;
            }
            return Ok(Blocks(list.into()));
        }
        Err(wrong(argument))
    }

    pub(crate) fn indices(&self) -> Indices<'_> {
        self.0.indices()
    }

    /// The same list, once more.
    pub(crate) fn list(&self) -> IndexList<'static> {
        self.0.clone()
    }
}

/// The elements of a buffer, which may say that it has more than there is memory for: an array can be its one element again and again.
pub(crate) fn copied<T: Element + Zeroable>(
    py: Python<'_>,
    op: &'static str,
    buffer: &PyBuffer<T>,
) -> PyResult<Vec<T>> {
    let mut list = room::zeros(op, buffer.item_count()).or_raise(py)?;
    buffer.copy_to_slice(py, &mut list)?;
    Ok(list)
}

/// The numbers of a tensor on the host that exports no buffer, as those of torch do: copied in one go. `None` where it is no such tensor.
fn of_tensor(
    object: &Bound<'_, PyAny>,
    op: &'static str,
    argument: &'static str,
) -> PyResult<Option<IndexList<'static>>> {
    let (py, asked) = (object.py(), Asked { op, argument, host_only: false, views: true, ordered: false });
    if !object.hasattr("__dlpack__")? || dlpack::device_of(object)?.is_some() {
        return Ok(None);
    }
    let tensor = dlpack::import(object, asked)?;
    if tensor.extent.layout.is_some() {
        return Ok(None);
    }
    let negative = || invalid(py, op, format!("{argument}: a block's index is negative"));
    let dlpack::Type { code, bits, lanes } = tensor.element;
    Ok(Some(match (code, bits, lanes) {
        (dlpack::UNSIGNED, 32, 1) => numbers::<u32>(py, op, &tensor)?.into(),
        (dlpack::UNSIGNED, 64, 1) => numbers::<u64>(py, op, &tensor)?.into(),
        (dlpack::SIGNED, 32, 1) => {
            let list: Result<Vec<u32>, _> =
                numbers::<i32>(py, op, &tensor)?.into_iter().map(u32::try_from).collect();
            list.map_err(|_| negative())?.into()
        }
        (dlpack::SIGNED, 64, 1) => {
            let list: Result<Vec<u64>, _> =
                numbers::<i64>(py, op, &tensor)?.into_iter().map(u64::try_from).collect();
            list.map_err(|_| negative())?.into()
        }
        _ => return Err(wrong(argument)),
    }))
}

/// Copies the numbers of a tensor on the host, which lie one after the other.
fn numbers<T: Zeroable>(py: Python<'_>, op: &'static str, tensor: &Exported<'_>) -> PyResult<Vec<T>> {
    let mut list: Vec<T> = room::zeros(op, tensor.extent.len / size_of::<T>()).or_raise(py)?;
    // SAFETY: the tensor has so many bytes there, which its capsule keeps in place; the list has as many, rounded down, and whatever they
    // are, they are numbers.
    unsafe {
        let from = std::ptr::with_exposed_provenance::<u8>(tensor.addr);
        std::ptr::copy_nonoverlapping(from, list.as_mut_ptr().cast::<u8>(), size_of_val(&list[..]));
    }
    Ok(list)
}

/// A list that Python keeps and nobody can write to.
struct Lent<T> {
    first: *const T,
    len: usize,
    _owner: OwnerToken,
}

// SAFETY: the numbers are only read, by whichever thread; the token may be dropped by any.
unsafe impl<T: Sync> Send for Lent<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lent<T> {}

impl<T> AsRef<[T]> for Lent<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: `lent` has seen so many aligned numbers there, one after the other. The token keeps them exported, so that they
        // are neither moved nor freed; and they are exported as read-only, which is the exporter's word that they do not change.
        unsafe { std::slice::from_raw_parts(self.first, self.len) }
    }
}

/// Takes a long list as it is, where its exporter says that it cannot be written to. `T` and `U` differ in their sign at most.
fn lent<T: Element, U>(object: &Bound<'_, PyAny>, buffer: &PyBuffer<T>) -> PyResult<Option<Lent<U>>> {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    let (first, len) = (buffer.buf_ptr().cast::<U>().cast_const(), buffer.item_count());
    if !buffer.readonly() || !buffer.is_c_contiguous() || !first.is_aligned() || len < LENT {
        return Ok(None);
    }
    if !is_read_only_throughout(object)? {
        return Ok(None);
    }
    // A view holds the export, where the object alone would only hold itself.
    let view = PyMemoryView::from(object)?;
    Ok(Some(Lent { first, len, _owner: OwnerToken::keep(view.into_any()) }))
}

/// Whether nothing that the memory was taken from can be written: neither an array of which this is a view, nor what lies beneath a
/// memoryview.
fn is_read_only_throughout(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let mut object = object.clone();
    // Longer chains nobody makes; NumPy itself keeps none.
    for _ in 0..16 {
        let beneath = match object.getattr_opt("base")? {
            None => object.getattr_opt("obj")?,
            base => base,
        };
        let Some(beneath) = beneath.filter(|beneath| !beneath.is_none()) else { return Ok(true) };
        if PyUntypedBuffer::get(&beneath).is_ok_and(|buffer| !buffer.readonly()) {
            return Ok(false);
        }
        object = beneath;
    }
    Ok(false)
}

fn wrong(argument: &str) -> PyErr {
    pyo3::exceptions::PyTypeError::new_err(format!(
        "{argument}: block indices are a buffer of 32- or 64-bit integers, a sequence of integers, or None for all"
    ))
}
