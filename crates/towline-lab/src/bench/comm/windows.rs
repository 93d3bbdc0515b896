//! The rows of windows themselves: what opening a large one costs, and what many leave behind.

use super::super::Session;
use super::super::report::{Row, Unit};
use super::group::{Group, surprise};
use crate::outcome::Outcome;
use crate::worker::order::{Order, RankReply};

pub(super) const LARGE: &str = "window-1g";
pub(super) const MANY: &str = "windows-1000";

/// What may be left in the allocator's hands.
const SLACK: f64 = 256.0 * 1024.0;

/// Measures those of the rows that are wanted.
pub(super) fn run(session: &mut Session, nranks: usize, names: &[&str]) {
    let mut group = match Group::start(nranks, false) {
        Ok(group) => group,
        Err(failure) => {
            names.iter().for_each(|name| session.fail((*name).to_owned(), None, &failure));
            return;
        }
    };
    for name in names {
        session.step(&format!("{nranks}-ranks/{name}"));
        let measured = if *name == LARGE { large(session, &mut group) } else { many(session, &mut group) };
        if let Err(failure) = measured {
            session.fail((*name).to_owned(), None, &failure);
        }
    }
}

fn large(session: &mut Session, group: &mut Group) -> Outcome<()> {
    const BYTES: u64 = 1 << 30;
    let rounds = session.pace.fewest.max(5);
    let time = group.seconds(&Order::Register { bytes: BYTES, rounds })?;
    let row = Row::new(LARGE, Unit::Milliseconds, time * 1e3).target(Some(1.0));
    let op = Some("register".into());
    session.rows.push(Row { op, bytes: BYTES, ranks: Some(group.nranks()), rounds, ..row });
    Ok(())
}

fn many(session: &mut Session, group: &mut Group) -> Outcome<()> {
    const COUNT: usize = 1000;
    let answers = group.each(|_| Order::Windows { count: COUNT, at_a_time: 100 })?;
    let (mut bytes, mut files, mut threads) = (0, 0, 0);
    for answer in &answers {
        let RankReply::Grown { bytes: more_bytes, files: more_files, threads: more_threads } = answer else {
            return Err(surprise(answer));
        };
        bytes = bytes.max(*more_bytes);
        files = files.max(*more_files);
        threads = threads.max(*more_threads);
    }
    for (name, unit, grown, target) in [
        ("windows-1000-memory", Unit::Bytes, bytes, SLACK),
        ("windows-1000-files", Unit::Count, files, 0.0),
        ("windows-1000-threads", Unit::Count, threads, 0.0),
    ] {
        let row = Row::new(name, unit, grown as f64).target(Some(target));
        let op = Some("growth".into());
        session.rows.push(Row { op, blocks: COUNT as u64, ranks: Some(group.nranks()), ..row });
    }
    Ok(())
}
