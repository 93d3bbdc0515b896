//! What a rank says to the others when it cannot sit down with them.
//!
//! It goes, and a rank that has not reached it yet would take it for the culprit. So it first leaves its reason with those
//! that it does reach, where they look before they blame any rank.

use std::time::{Duration, Instant};

use towline::{Access, Endpoint, Limits, Registered, Remote, SharedStorage, SystemStorage};

use super::layout::{ABORTED, BELL, Layout, RECORD};
use super::record;
use crate::{Error, Result};

/// How long a rank that gives up before it has a team takes to say so, in all.
const FAREWELL: Duration = Duration::from_secs(2);

/// Leaves word with every rank that can be reached that this one cannot sit down, and says why: with this error, or
/// because another rank has given up, which it has said here.
pub(super) fn part<'r>(
    endpoint: &Endpoint,
    region: &Registered<SharedStorage>,
    layout: &Layout,
    rank: usize,
    others: impl Iterator<Item = &'r Remote>,
    error: Error,
) -> Error {
    let until = Instant::now() + FAREWELL;
    let error = left_here(region, layout, error.op()).unwrap_or(error);
    let bytes = record::encode(&error, rank);
    for remote in others {
        if let Err(reason) = leave_with(endpoint, layout, rank, remote, &bytes, until) {
            tracing::debug!(%reason, "could not be notified");
        }
    }
    error
}

fn left_here(region: &Registered<SharedStorage>, layout: &Layout, op: &'static str) -> Option<Error> {
    let nranks = layout.nranks();
    let from = (region.load(ABORTED).ok()? as usize).checked_sub(1).filter(|from| *from < nranks)?;
    let mut bytes = [0; RECORD];
    region.read_at(layout.abort_record(from), &mut bytes).ok()?;
    Some(record::decode(&bytes, op, nranks))
}

fn leave_with(
    endpoint: &Endpoint,
    layout: &Layout,
    rank: usize,
    remote: &Remote,
    bytes: &[u8; RECORD],
    until: Instant,
) -> Result<()> {
    let (at, mark) = (layout.abort_record(rank), rank as u64 + 1);
    if remote.len() != layout.len() as u64 {
        return Err(Error::invalid("assemble", "the rank has another layout"));
    }
    if let Ok(pin) = remote.pin() {
        pin.write_at(at, bytes)?;
        pin.compare_swap(ABORTED, 0, mark)?;
        pin.wake(BELL)?;
        return Ok(());
    }
    let mut storage = SystemStorage::new(RECORD)?;
    storage.as_mut_slice().copy_from_slice(bytes);
    let source = endpoint.register(storage, Access::NONE)?;
    let left = until.saturating_duration_since(Instant::now());
    let request = endpoint.write(remote, &source).at(at as u64, 0, RECORD as u64);
    request.limits(Limits::within(left)).start()?.wait()?;
    let marked = endpoint.compare_swap(remote, ABORTED as u64, 0, mark)?;
    marked.wait_for(until.saturating_duration_since(Instant::now()));
    drop(endpoint.signal(remote, BELL as u64, 1));
    Ok(())
}
