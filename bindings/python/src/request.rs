//! The arguments of a transfer, as Python gives them.

use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use towline::{Access, Isolation, Part, Request, Routing, room};

use crate::errors::{OrRaise, invalid};
use crate::layout::{Blocks, Layout, copied};
use crate::remote::Remote;

/// A length of time in seconds, where one was given.
pub(crate) fn seconds(
    py: Python<'_>,
    op: &'static str,
    argument: &str,
    value: Option<f64>,
) -> PyResult<Option<Duration>> {
    match value {
        None => Ok(None),
        // Longer than a century is for ever, and would overflow when added to now.
        Some(value) if value >= 0.0 => Ok(Some(Duration::from_secs_f64(value.min(3e9)))),
        Some(value) => Err(invalid(py, op, format!("{argument}: {value} is not a number of seconds"))),
    }
}

/// Rights by name.
pub(crate) fn access(py: Python<'_>, op: &'static str, name: &str) -> PyResult<Access> {
    name.parse().map_err(|_| {
        invalid(
            py,
            op,
            format!("access: {name:?} is not one of \"none\", \"read\", \"write\", \"read+write\""),
        )
    })
}

/// Which paths are allowed; `None` where the caller says nothing about it.
pub(crate) fn routing(
    py: Python<'_>,
    require: &[String],
    forbid: &[String],
    isolation: Option<&str>,
) -> PyResult<Option<Routing>> {
    if require.is_empty() && forbid.is_empty() && isolation.is_none() {
        return Ok(None);
    }
    let mut routing = Routing::default();
    for path in require {
        routing = routing.require(path).or_raise(py)?;
    }
    for path in forbid {
        routing = routing.forbid(path).or_raise(py)?;
    }
    match isolation {
        None | Some("cooperative") => {}
        Some("enforced") => routing = routing.isolation(Isolation::Enforced),
        Some(other) => {
            return Err(invalid(
                py,
                "path",
                format!("isolation: {other:?} is neither \"cooperative\" nor \"enforced\""),
            ));
        }
    }
    Ok(Some(routing))
}

/// The remote layout and its indices, the local layout and its indices.
pub(crate) type BlocksArgument<'py> = (Py<Layout>, Bound<'py, PyAny>, Py<Layout>, Bound<'py, PyAny>);

/// One part as Python gives it: the remote and the local region, and what moves between them where the whole request does not say so.
pub(crate) type PartArgument<'py> = (
    Py<Remote>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<BlocksArgument<'py>>,
);

/// What to move.
pub(crate) enum What {
    Whole,
    /// From or to that remote offset, the whole local span.
    From(u64),
    At(u64, u64, u64),
    Spans(Vec<(u64, u64, u64)>),
    Blocks(Box<(towline::Layout, Blocks, towline::Layout, Blocks)>),
}

impl What {
    pub(crate) fn from_objects(
        py: Python<'_>,
        op: &'static str,
        at: Option<&Bound<'_, PyAny>>,
        spans: Option<&Bound<'_, PyAny>>,
        blocks: Option<BlocksArgument<'_>>,
    ) -> PyResult<What> {
        match (at, spans, blocks) {
            (None, None, None) => Ok(What::Whole),
            (Some(at), None, None) => {
                match at.extract::<u64>() {
                    Ok(offset) => return Ok(What::From(offset)),
                    Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                        return Err(wrong(py, op, AT, &error));
                    }
                    Err(_) => {}
                }
                let given = at.extract::<(u64, u64, u64)>();
                let (remote, local, len) = given.map_err(|error| wrong(py, op, AT, &error))?;
                Ok(What::At(remote, local, len))
            }
            (None, Some(spans), None) => Ok(What::Spans(triples(py, op, spans)?)),
            (None, None, Some((remote, remote_indices, local, local_indices))) => {
                let remote_indices = Blocks::from_object(&remote_indices, op, "blocks[1]")?;
                let local_indices = Blocks::from_object(&local_indices, op, "blocks[3]")?;
                Ok(What::Blocks(Box::new((
                    remote.get().0.clone(),
                    remote_indices,
                    local.get().0.clone(),
                    local_indices,
                ))))
            }
            _ => Err(invalid(py, op, "only one of at, spans and blocks can be given".to_owned())),
        }
    }

    /// Tells a part, which takes the lists that are not copied.
    pub(crate) fn apply_to<'a>(&self, part: Part<'a>, local_len: usize) -> Part<'a> {
        match self {
            What::Whole => part,
            What::From(offset) => part.at(*offset, 0, local_len as u64),
            What::At(remote, local, len) => part.at(*remote, *local, *len),
            What::Spans(spans) => part.spans(spans.clone()),
            What::Blocks(blocks) => {
                let (remote, remote_indices, local, local_indices) = &**blocks;
                part.blocks(remote, remote_indices.list(), local, local_indices.list())
            }
        }
    }

    /// Tells the request, and hands the lists over.
    pub(crate) fn apply(self, request: Request<'_>, local_len: usize) -> Request<'_> {
        match self {
            What::Whole => request,
            What::From(offset) => request.at(offset, 0, local_len as u64),
            What::At(remote, local, len) => request.at(remote, local, len),
            What::Spans(spans) => request.spans(spans),
            What::Blocks(blocks) => {
                let (remote, remote_indices, local, local_indices) = &*blocks;
                request.blocks(remote, remote_indices.list(), local, local_indices.list())
            }
        }
    }
}

const AT: &str = "at: a remote offset is needed, or remote offset, local offset and length; none is negative";
const SPANS: &str = "spans: rows of remote offset, local offset and length are needed; none is negative";

/// Numbers of a wrong type, or numbers out of their range.
fn wrong(py: Python<'_>, op: &'static str, needed: &str, error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(py) {
        invalid(py, op, needed.to_owned())
    } else {
        PyTypeError::new_err(needed.to_owned())
    }
}

/// Spans from a buffer of rows of three integers, or from any iterable of triples.
fn triples(py: Python<'_>, op: &'static str, spans: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64, u64)>> {
    let flat = if let Ok(buffer) = PyBuffer::<u64>::get(spans) {
        copied(py, op, &buffer)?
    } else if let Ok(buffer) = PyBuffer::<i64>::get(spans) {
        let rows: Result<Vec<u64>, _> = copied(py, op, &buffer)?.into_iter().map(u64::try_from).collect();
        rows.map_err(|_| invalid(py, op, "spans: an offset or a length is negative".to_owned()))?
    } else {
        let mut rows = Vec::new();
        for row in spans.try_iter()? {
            let row = row?.extract().map_err(|error| wrong(py, op, SPANS, &error))?;
            room::push(op, &mut rows, row).or_raise(py)?;
        }
        return Ok(rows);
    };
    let (rows, rest) = flat.as_chunks::<3>();
    if !rest.is_empty() {
        return Err(PyTypeError::new_err(SPANS));
    }
    let mut spans = room::list(op, rows.len()).or_raise(py)?;
    spans.extend(rows.iter().map(|[remote, local, len]| (*remote, *local, *len)));
    Ok(spans)
}
