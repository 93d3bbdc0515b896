//! The rows that move bytes.

use super::Session;
use super::bed::{Bed, Shape};
use super::limit::Limit;
use super::report::{Row, Unit};
use super::shapes::{Case, Manner, Path};
use crate::measure;
use crate::outcome::Outcome;
use crate::size;

/// Regions are not made larger than this for the sake of rows that can be measured one by one.
const SHARED_BED: u64 = 512 << 20;

/// The socket paths ask for about this many bytes at a time: a transfer takes no more streams than it has requests.
const REQUEST: u64 = 1 << 20;

/// Measures the rows of one path.
pub(super) fn run(session: &mut Session, path: Path, cases: &[&Case]) {
    let (small, large): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|case| case.bytes() <= SHARED_BED);
    on_one_bed(session, path, &small);
    for case in large {
        on_one_bed(session, path, &[case]);
    }
}

fn on_one_bed(session: &mut Session, path: Path, cases: &[&Case]) {
    let Some(bytes) = cases.iter().map(|case| case.bytes()).max() else { return };
    session.progress.says(&format!("{}: preparing {}", path.name(), size::bytes(bytes)));
    let mut bed = match Bed::prepare(path, bytes) {
        Ok(bed) => bed,
        Err(failure) => {
            for case in cases {
                session.step(&case.label());
                session.fail(case.name.clone(), Some(path.name()), &failure);
            }
            return;
        }
    };
    for case in cases {
        session.step(&case.label());
        match row(session, &mut bed, case) {
            Ok(row) => session.rows.push(row),
            Err(failure) => session.fail(case.name.clone(), Some(path.name()), &failure),
        }
    }
}

fn row(session: &Session, bed: &mut Bed, case: &Case) -> Outcome<Row> {
    let shape = Shape::of(case)?;
    bed.verify(case, &shape)?;
    let threads = measure::busy_threads(&mut || bed.transfer(case, &shape))?;
    let (limit, streams) = match case.path.medium() {
        None => (Limit::copy(case.op, &bed.near(), &bed.far()?, &shape.pieces, threads)?, None),
        Some(medium) => {
            let streams = (case.bytes() / REQUEST).clamp(1, bed.lanes as u64) as usize;
            let limit = Limit::sockets(&mut bed.worker, medium, case.op, case.bytes(), streams)?;
            (limit, Some(streams))
        }
    };
    let mut ours = || bed.transfer(case, &shape);
    let mut bare = || limit.run();
    let pace = match case.goal {
        Some(_) => session.pace.asked(case.path.medium().is_some()),
        None => session.pace,
    };
    let times = match case.manner {
        Manner::Latency => measure::latencies(pace, &mut ours, Some(&mut bare))?,
        _ => measure::rates(pace, &mut ours, Some(&mut bare))?,
    };
    let row = match case.manner {
        Manner::Latency => Row::new(&case.name, Unit::Microseconds, times.ours * 1e6)
            .target(case.target)
            .against(case.path.against(), times.limit.map(|time| time * 1e6), case.goal),
        _ => {
            let rate = |seconds| size::gib_per_second(case.bytes(), seconds);
            Row::new(&case.name, Unit::Rate, rate(times.ours)).against(
                case.path.against(),
                times.limit.map(rate),
                case.goal,
            )
        }
    };
    Ok(Row {
        path: Some(case.path.name().into()),
        op: Some(case.op.name().into()),
        bytes: case.bytes(),
        blocks: case.blocks,
        block_size: case.block_size,
        threads: Some(threads),
        streams,
        p99: times.p99.map(|time| time * 1e6),
        rounds: times.rounds,
        ..row
    })
}
