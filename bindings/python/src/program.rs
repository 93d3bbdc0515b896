//! Programs: requests that are compiled once and started many times with new indices.

use pyo3::prelude::*;
use towline::{IndexList, ProgramPart, room};

use crate::errors::OrRaise;
use crate::layout::{Blocks, Layout};
use crate::process::{self, Inherited};
use crate::region;
use crate::remote::{Explanation, Remote};
use crate::terms::{Terms, TermsArgument};
use crate::transfer::Transfer;

/// One part as Python gives it: the remote and the local region, and their layouts.
type ProgramPartArgument<'py> = (Py<Remote>, Py<PyAny>, Py<Layout>, Py<Layout>);

/// A request that is compiled once.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Program {
    program: Inherited<towline::Program>,
    /// The local regions: kept registered, and looked at again at every start.
    locals: Vec<Py<PyAny>>,
}

impl Program {
    pub(crate) fn compile(
        py: Python<'_>,
        endpoint: &towline::Endpoint,
        parts: &Bound<'_, PyAny>,
    ) -> PyResult<Program> {
        const OP: &str = "program";
        let (mut compiled, mut locals) = (Vec::new(), Vec::new());
        for part in parts.try_iter()? {
            let (remote, local, theirs, ours): ProgramPartArgument<'_> = part?.extract()?;
            let span = region::local(OP, local.bind(py), false)?;
            let part = ProgramPart::new(&remote.get().0, span, &theirs.get().0, &ours.get().0);
            room::push(OP, &mut compiled, part).or_raise(py)?;
            room::push(OP, &mut locals, local).or_raise(py)?;
        }
        let program = py.detach(|| endpoint.program(compiled)).or_raise(py)?;
        Ok(Program { program: Inherited::new(program), locals })
    }

    /// Whether the local memory is still there: whoever lent it may have resized it since the last time.
    fn look(&self, py: Python<'_>, op: &'static str, writes: bool) -> PyResult<()> {
        process::guard(py, op)?;
        self.locals.iter().try_for_each(|local| region::local(op, local.bind(py), !writes).map(drop))
    }
}

#[pymethods]
impl Program {
    fn __len__(&self) -> usize {
        self.program.len()
    }

    /// Starts a read (or, with `writes`, a write) of the same blocks of each part.
    fn start(
        &self,
        py: Python<'_>,
        writes: bool,
        remote_blocks: &Bound<'_, PyAny>,
        local_blocks: &Bound<'_, PyAny>,
        terms: TermsArgument,
    ) -> PyResult<Transfer> {
        let op = if writes { "write" } else { "read" };
        self.look(py, op, writes)?;
        let theirs = Blocks::from_object(remote_blocks, op, "remote_blocks")?.list();
        let ours = Blocks::from_object(local_blocks, op, "local_blocks")?.list();
        let terms = Terms::from_argument(py, op, terms)?;
        let started = py.detach(|| {
            let program = &*self.program;
            let request = if writes { program.write(theirs, ours) } else { program.read(theirs, ours) };
            terms.apply(request).start()
        });
        started.map(Transfer::new).or_raise(py)
    }

    /// Starts a read (or, with `writes`, a write) of blocks that are named for each part.
    fn start_each(
        &self,
        py: Python<'_>,
        writes: bool,
        lists: &Bound<'_, PyAny>,
        terms: TermsArgument,
    ) -> PyResult<Transfer> {
        let op = if writes { "write" } else { "read" };
        self.look(py, op, writes)?;
        let mut all: Vec<(IndexList<'static>, IndexList<'static>)> = Vec::new();
        for pair in lists.try_iter()? {
            let (theirs, ours): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair?.extract()?;
            let theirs = Blocks::from_object(&theirs, op, "remote blocks")?;
            let ours = Blocks::from_object(&ours, op, "local blocks")?;
            room::push(op, &mut all, (theirs.list(), ours.list())).or_raise(py)?;
        }
        let terms = Terms::from_argument(py, op, terms)?;
        let started = py.detach(|| {
            let program = &*self.program;
            let request = if writes { program.write_each(all) } else { program.read_each(all) };
            terms.apply(request).start()
        });
        started.map(Transfer::new).or_raise(py)
    }

    /// Some of its parts, in that order.
    fn select(&self, py: Python<'_>, parts: Vec<usize>) -> PyResult<Program> {
        let program = self.program.select(parts.iter().copied()).or_raise(py)?;
        // The parts are there: otherwise there were no program.
        let locals = parts.iter().map(|part| self.locals[*part].clone_ref(py)).collect();
        Ok(Program { program: Inherited::new(program), locals })
    }

    /// The same program for other remote regions.
    fn rebind(&self, py: Python<'_>, remotes: Vec<Py<Remote>>) -> PyResult<Program> {
        let remotes = remotes.iter().map(|remote| &*remote.get().0);
        let program = self.program.rebind(remotes).or_raise(py)?;
        let locals = self.locals.iter().map(|local| local.clone_ref(py)).collect();
        Ok(Program { program: Inherited::new(program), locals })
    }

    /// Which path each part takes, and why not the others.
    fn explain(&self) -> Vec<Explanation> {
        self.program.explain().parts.into_iter().map(Explanation).collect()
    }
}
