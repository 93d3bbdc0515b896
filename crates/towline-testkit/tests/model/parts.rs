//! Requests of several parts, with a cancel or a deregistration meanwhile.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use towline::{Access, Kind, MemoryAccess, Part, Storage};
use towline_testkit::bench::STALL;

use super::{Case, World, index};

/// The most parts that a request has here.
const MOST: usize = 8;

/// A request over several regions of one owner; here they lie one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Several {
    /// Over which remote the first goes: the others are of the same owner and user.
    first: u8,
    /// Towards them.
    write: bool,
    parts: Vec<Asked>,
    meanwhile: Meanwhile,
}

/// One part: over which remote, and what.
#[derive(Debug, Clone)]
struct Asked {
    remote: u8,
    /// Whether it is made to lie within the remote.
    fits: bool,
    far: u32,
    len: u32,
}

/// What happens while it is in flight.
#[derive(Debug, Clone, Copy)]
enum Meanwhile {
    Nothing,
    Cancel,
    /// The region of that part goes, by dropping it or by taking its storage back.
    Deregister(u8, bool),
}

/// A random one.
pub(super) fn several(
    far: impl Strategy<Value = u32>,
    len: impl Strategy<Value = u32>,
) -> impl Strategy<Value = Several> {
    let asked = (any::<u8>(), prop::bool::weighted(0.97), far, len)
        .prop_map(|(remote, fits, far, len)| Asked { remote, fits, far, len });
    let meanwhile = prop_oneof![
        4 => Just(Meanwhile::Nothing),
        1 => Just(Meanwhile::Cancel),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(part, dropped)| Meanwhile::Deregister(part, dropped)),
    ];
    (any::<u8>(), any::<bool>(), prop::collection::vec(asked, 1..=MOST), meanwhile)
        .prop_map(|(first, write, parts, meanwhile)| Several { first, write, parts, meanwhile })
}

/// A part as it was asked for: over which handle, and where its bytes lie on both sides.
struct Piece {
    handle: usize,
    far: usize,
    near: usize,
    len: usize,
}

/// A region whose storage came back while bytes were in flight: which, the storage, and what it held then.
type Taken = (usize, Arc<dyn Storage>, Vec<u8>);

impl World {
    pub(super) fn several(&mut self, several: &Several) -> Case {
        let Several { first, write, parts: asked, meanwhile } = several;
        let Some(first) = index(&self.handles, *first) else { return Ok(()) };
        let user = self.handles[first].user;
        let (pieces, reasons) = self.pieces(first, asked, *write);
        if pieces.is_empty() {
            return Ok(());
        }
        let worker = &self.workers[user];
        let parts = pieces.iter().map(|piece| {
            let part = Part::new(&self.handles[piece.handle].real, &worker.local);
            part.at(piece.far as u64, piece.near as u64, piece.len as u64)
        });
        let request =
            if *write { worker.endpoint.write_parts(parts) } else { worker.endpoint.read_parts(parts) };
        let mut expected: &[Kind] = &[];
        let (mut taken, mut failed) = (None, vec![true; pieces.len()]);
        let ended = match request.start() {
            Err(error) => Err(error),
            Ok(transfer) => {
                match meanwhile {
                    Meanwhile::Nothing => {}
                    Meanwhile::Cancel => {
                        transfer.cancel();
                        expected = &[Kind::Canceled];
                    }
                    Meanwhile::Deregister(part, dropped) => {
                        let piece = &pieces[usize::from(*part) % pieces.len()];
                        taken = self.deregister_meanwhile(self.handles[piece.handle].region, *dropped)?;
                        expected = &[Kind::Stale, Kind::Disconnected];
                    }
                }
                let ended = transfer.wait();
                prop_assert!(transfer.wait_quiet(STALL), "it does not become quiet");
                let failures = transfer.failures();
                prop_assert!(ended.is_err() || failures.is_empty(), "{:?}", failures);
                for (part, failed) in failed.iter_mut().enumerate() {
                    *failed = failures.iter().any(|failure| failure.part == part);
                }
                ended
            }
        };
        match &ended {
            Ok(()) => {
                prop_assert!(reasons.is_empty(), "it went well, and should have been {:?}", reasons);
            }
            Err(error) => {
                let kind = error.kind();
                let allowed = reasons.contains(&kind) || expected.contains(&kind);
                prop_assert!(allowed, "{}, and the reasons are {:?} and {:?}", error, reasons, expected);
                // What is refused beforehand moves nothing, whatever the other parts are.
                if matches!(kind, Kind::Invalid | Kind::PermissionDenied) {
                    return self.compare_sides(&pieces);
                }
            }
        }
        if let Some((_, storage, bytes)) = &taken {
            let mut now = vec![0; bytes.len()];
            storage.read_at(0, &mut now).unwrap();
            prop_assert!(now == *bytes, "something landed in storage that had come back");
        }
        if *write { self.written(&pieces, &failed, taken.as_ref()) } else { self.read(&pieces, &failed) }
    }

    /// What is asked for, and why it must fail.
    fn pieces(&self, first: usize, asked: &[Asked], write: bool) -> (Vec<Piece>, Vec<Kind>) {
        let owner = |handle: usize| self.regions[self.handles[handle].region].owner;
        let beside = |other: &usize| {
            self.handles[*other].user == self.handles[first].user && owner(*other) == owner(first)
        };
        let beside: Vec<usize> = (0..self.handles.len()).filter(beside).collect();
        let needed = if write { Access::WRITE } else { Access::READ };
        let (mut pieces, mut reasons, mut near) = (Vec::new(), Vec::new(), 5);
        for one in asked {
            let number = beside[usize::from(one.remote) % beside.len()];
            let handle = &self.handles[number];
            let (mut far, mut len) = (one.far as usize, one.len as usize);
            if one.fits {
                far %= handle.len;
                len = (1 + len % (handle.len - far)).min(self.kinds.local - near);
                if len == 0 {
                    break;
                }
            }
            reasons.extend(self.reasons(handle, needed));
            if len == 0 || far + len > handle.len || near + len > self.kinds.local {
                reasons.push(Kind::Invalid);
            }
            pieces.push(Piece { handle: number, far, near, len });
            near = (near + len).min(self.kinds.local);
        }
        (pieces, reasons)
    }

    fn deregister_meanwhile(&mut self, number: usize, dropped: bool) -> Result<Option<Taken>, TestCaseError> {
        let region = &mut self.regions[number];
        let Some(real) = region.real.take() else { return Ok(None) };
        if dropped {
            drop(real);
            return Ok(None);
        }
        let storage = real.into_storage_within(STALL).map_err(|pinned| {
            TestCaseError::fail(format!(
                "a region that is read or written does not come back: {}",
                pinned.error
            ))
        })?;
        let mut bytes = vec![0; region.bytes.len()];
        storage.read_at(0, &mut bytes).unwrap();
        Ok(Some((number, storage, bytes)))
    }

    /// Believes what a read has left of the parts that failed, where it is old or new.
    fn read(&mut self, pieces: &[Piece], failed: &[bool]) -> Case {
        for (piece, failed) in pieces.iter().zip(failed) {
            let handle = &self.handles[piece.handle];
            let worker = &mut self.workers[handle.user];
            let far = handle.start + piece.far;
            let new = &self.regions[handle.region].bytes[far..far + piece.len];
            let old = &mut worker.bytes[piece.near..piece.near + piece.len];
            let mut found = vec![0; piece.len];
            worker.local.read_at(piece.near, &mut found).unwrap();
            let right = |at: usize| found[at] == new[at] || (*failed && found[at] == old[at]);
            if let Some(at) = (0..piece.len).find(|at| !right(*at)) {
                let message = format!("byte {at} of a part that was read (failed: {failed}) is wrong");
                return Err(TestCaseError::fail(message));
            }
            old.copy_from_slice(&found);
        }
        self.compare_sides(pieces)
    }

    /// Believes what a write has left, where it is old or of one of the parts that were to be written there.
    fn written(&mut self, pieces: &[Piece], failed: &[bool], taken: Option<&Taken>) -> Case {
        let mut regions: Vec<usize> = pieces.iter().map(|piece| self.handles[piece.handle].region).collect();
        regions.sort_unstable();
        regions.dedup();
        for number in regions {
            let len = self.regions[number].bytes.len();
            let found = match (taken, &self.regions[number].real) {
                (Some((of, _, bytes)), _) if *of == number => bytes.clone(),
                (_, Some(real)) => {
                    let mut bytes = vec![0; len];
                    real.read_at(0, &mut bytes).unwrap();
                    bytes
                }
                // Nobody sees what was dropped.
                _ => continue,
            };
            let (mut is_new, mut must_be_new) = (vec![false; len], vec![false; len]);
            for (piece, failed) in pieces.iter().zip(failed) {
                let handle = &self.handles[piece.handle];
                if handle.region != number {
                    continue;
                }
                for at in 0..piece.len {
                    let there = handle.start + piece.far + at;
                    is_new[there] |= found[there] == self.workers[handle.user].bytes[piece.near + at];
                    must_be_new[there] |= !failed;
                }
            }
            let old = &mut self.regions[number].bytes;
            let right = |at: usize| is_new[at] || (!must_be_new[at] && found[at] == old[at]);
            if let Some(at) = (0..len).find(|at| !right(*at)) {
                let message = format!("byte {at} of region {number} is neither old nor of one of the parts");
                return Err(TestCaseError::fail(message));
            }
            *old = found;
        }
        self.compare_sides(pieces)
    }

    /// Compares all that the pieces are of.
    fn compare_sides(&self, pieces: &[Piece]) -> Case {
        pieces.iter().try_for_each(|piece| self.compare_region(self.handles[piece.handle].region))?;
        pieces.first().map_or(Ok(()), |piece| self.compare_local(self.handles[piece.handle].user))
    }
}
