//! What goes for a request as a whole: what follows its bytes, its limits, and its paths.
#![allow(unsafe_code, reason = "passes on a stream that the caller vouches for")]

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use towline::{Request, Routing, cuda, room};

use crate::errors::OrRaise;
use crate::request::{routing, seconds};

/// The message; offset, how much to add, and the part of the signal; timeout, stall timeout, required and forbidden paths, and the stream.
pub(crate) type TermsArgument = (
    Option<PyBackedBytes>,
    Option<(u64, u64, usize)>,
    Option<f64>,
    Option<f64>,
    Vec<String>,
    Vec<String>,
    Option<usize>,
);

/// What goes for a request as a whole.
pub(crate) struct Terms {
    notify: Option<Vec<u8>>,
    signal: Option<(u64, u64, usize)>,
    timeout: Option<Duration>,
    stall: Option<Duration>,
    routing: Option<Routing>,
    stream: Option<usize>,
}

impl Terms {
    pub(crate) fn from_argument(
        py: Python<'_>,
        op: &'static str,
        (notify, signal, timeout, stall, require, forbid, stream): TermsArgument,
    ) -> PyResult<Terms> {
        Ok(Terms {
            notify: notify.map(|message| room::copy(op, &message)).transpose().or_raise(py)?,
            signal,
            timeout: seconds(py, op, "timeout", timeout)?,
            stall: seconds(py, op, "stall_timeout", stall)?,
            routing: routing(py, &require, &forbid, None)?,
            stream,
        })
    }

    pub(crate) fn apply(self, mut request: Request<'_>) -> Request<'_> {
        if let Some(message) = self.notify {
            request = request.notify(message);
        }
        if let Some((offset, add, part)) = self.signal {
            request = request.signal_in(part, offset, add);
        }
        if let Some(routing) = self.routing {
            request = request.routing(routing);
        }
        if let Some(timeout) = self.timeout {
            request = request.within(timeout);
        }
        if let Some(stall) = self.stall {
            request = request.stall_within(stall);
        }
        if let Some(stream) = self.stream {
            // SAFETY: the caller vouches for the stream, as for all that it hands to CUDA.
            request = unsafe { request.stream(cuda::StreamHandle(stream)) };
        }
        request
    }
}
