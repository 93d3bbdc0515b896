//! Several regions of one owner, and memory here for each of them: what laws try requests of many parts with.

use std::sync::Arc;
use std::time::Duration;

use towline::{Access, Endpoint, Part, Registered, Remote, Request, Storage, Transfer};

use super::owner::{check_parts, fill_parts};
use super::{Bench, Owner, OwnerRegion};
use crate::oracle::Stamp;
use crate::worker::storage;

/// How many parts are tried.
pub const COUNTS: [usize; 3] = [1, 2, 64];

/// A range of one part: its offset there, its offset here, and its length.
pub type Range = (u64, u64, u64);

/// A region of the owner's for each part, and memory of the user's. Of what has a stamp in all, each part has one of its own
/// ([`Stamp::of_part`]).
pub struct Parts<'b> {
    user: &'b Endpoint,
    /// The owner's, filled with the stamps that were asked for.
    pub regions: Vec<OwnerRegion<'b>>,
    /// The same as the user sees them.
    pub remotes: Vec<Remote>,
    /// The user's memory, each as long as the region.
    pub locals: Vec<Registered<Arc<dyn Storage>>>,
    /// How long they are.
    pub lens: Vec<usize>,
}

/// That many different lengths, in all about so many bytes; of one, exactly so many.
fn lengths(count: usize, bytes: usize) -> Vec<usize> {
    let each = bytes / count;
    match count {
        1 => vec![bytes],
        _ => (0..count).map(|part| (each / 2 + each * part / count).max(8) + part % 5).collect(),
    }
}

impl Bench {
    /// How many parts the laws try. Where each region is an allocation of a driver, which takes long, only those of `laws/parts.rs` try 64.
    pub fn counts(&self) -> [usize; 3] {
        let (theirs, ours) = self.both_kinds();
        let is_host = |kind| matches!(kind, "system" | "shared" | "disk");
        if is_host(theirs) && is_host(ours) { COUNTS } else { [1, 2, 8] }
    }

    /// One region of so many bytes, then two and then 64 of an eighth of them in all: a law holds for each.
    pub fn several(&self, bytes: usize, theirs: Stamp) -> impl Iterator<Item = Parts<'_>> {
        self.several_between((&self.owner, &self.user), bytes, theirs)
    }

    /// [`several`](Self::several), of another owner or for another user.
    pub fn several_between<'b>(
        &'b self,
        ends: (&'b Owner, &'b Endpoint),
        bytes: usize,
        theirs: Stamp,
    ) -> impl Iterator<Item = Parts<'b>> {
        self.counts().into_iter().map(move |count| {
            let bytes = if count == 1 { bytes } else { bytes / 8 };
            Parts::new(self.both_kinds(), ends, lengths(count, bytes), theirs)
        })
    }

    /// That many regions of different lengths, in all about so many bytes.
    pub fn parts(&self, count: usize, bytes: usize, theirs: Stamp) -> Parts<'_> {
        self.parts_of(lengths(count, bytes), theirs)
    }

    /// Regions of those lengths.
    pub fn parts_of(&self, lens: Vec<usize>, theirs: Stamp) -> Parts<'_> {
        Parts::new(self.both_kinds(), (&self.owner, &self.user), lens, theirs)
    }
}

impl<'b> Parts<'b> {
    /// Regions of those lengths of that owner, for that user, in storages of these kinds.
    pub fn new(
        (theirs, ours): (&str, &str),
        (owner, user): (&'b Owner, &'b Endpoint),
        lens: Vec<usize>,
        stamp: Stamp,
    ) -> Parts<'b> {
        let (regions, tickets) = owner.register_parts(&lens, theirs, stamp).unwrap();
        let remotes = match &tickets[..] {
            [one] => vec![user.import(one).unwrap()],
            many => user.import_many(many).unwrap().into_iter().map(Result::unwrap).collect(),
        };
        let local = |len: &usize| user.register(storage(*len, ours).unwrap(), Access::NONE).unwrap();
        let locals = lens.iter().map(local).collect();
        Parts { user, regions, remotes, locals, lens }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.lens.len()
    }

    /// How many bytes they have.
    pub fn bytes(&self) -> u64 {
        self.lens.iter().map(|len| *len as u64).sum()
    }

    /// All of every part.
    pub fn whole(&self) -> impl Iterator<Item = Part<'_>> {
        self.remotes.iter().zip(&self.locals).map(|(remote, local)| Part::new(remote, local))
    }

    /// All of every part, but of the last what is made of it.
    pub fn last_as<'a>(&'a self, change: impl FnOnce(Part<'a>) -> Part<'a>) -> Vec<Part<'a>> {
        let mut parts: Vec<_> = self.whole().collect();
        let last = parts.pop().map(change);
        parts.extend(last);
        parts
    }

    /// A read of all bytes of all parts.
    pub fn read(&self) -> Request<'_> {
        match (&self.remotes[..], &self.locals[..]) {
            ([remote], [local]) => self.user.read(remote, local),
            _ => self.user.read_parts(self.whole()),
        }
    }

    /// A write of all bytes of all parts.
    pub fn write(&self) -> Request<'_> {
        match (&self.remotes[..], &self.locals[..]) {
            ([remote], [local]) => self.user.write(remote, local),
            _ => self.user.write_parts(self.whole()),
        }
    }

    /// A range of each part, as its length says.
    pub fn ranges(&self, range: impl FnMut(u64) -> Range) -> Vec<Range> {
        self.lens.iter().map(|len| *len as u64).map(range).collect()
    }

    /// A read of one range of each part.
    pub fn read_ranges(&self, ranges: &[Range]) -> Request<'_> {
        match (&self.remotes[..], &self.locals[..], ranges) {
            ([remote], [local], [(far, near, len)]) => self.user.read(remote, local).at(*far, *near, *len),
            _ => self.user.read_parts(self.at(ranges)),
        }
    }

    /// A write of one range of each part.
    pub fn write_ranges(&self, ranges: &[Range]) -> Request<'_> {
        match (&self.remotes[..], &self.locals[..], ranges) {
            ([remote], [local], [(far, near, len)]) => self.user.write(remote, local).at(*far, *near, *len),
            _ => self.user.write_parts(self.at(ranges)),
        }
    }

    fn at(&self, ranges: &[Range]) -> impl Iterator<Item = Part<'_>> {
        self.whole().zip(ranges).map(|(part, (far, near, len))| part.at(*far, *near, *len))
    }

    /// Fills the user's memory.
    pub fn fill_here(&self, stamp: Stamp) {
        for (part, local) in self.locals.iter().enumerate() {
            stamp.of_part(part).fill_storage(local.storage()).unwrap();
        }
    }

    /// Fills the owner's memory.
    pub fn fill_there(&self, stamp: Stamp) {
        fill_parts(&self.regions, stamp);
    }

    /// Says whether the user's memory is what it was filled with.
    pub fn check_here(&self, stamp: Stamp) -> Result<(), String> {
        (0..self.count()).try_for_each(|part| self.check_part(stamp, part, 0, self.lens[part]))
    }

    /// Says whether the owner's memory is what it was filled with.
    pub fn check_there(&self, stamp: Stamp) -> Result<(), String> {
        check_parts(&self.regions, stamp)
            .map_err(|wrong| format!("of {} at the owner, {wrong}", self.count()))
    }

    /// Says whether the user's memory has that stamp in one range of each part, and the other one around it.
    pub fn check_here_around(&self, ranges: &[Range], inside: Stamp, outside: Stamp) -> Result<(), String> {
        ranges.iter().enumerate().try_for_each(|(part, (_, at, len))| {
            let (at, end) = (*at as usize, (at + len) as usize);
            self.check_part(outside, part, 0, at)?;
            self.check_part(inside, part, at, end - at)?;
            self.check_part(outside, part, end, self.lens[part] - end)
        })
    }

    /// [`check_here_around`](Self::check_here_around) of the owner's memory.
    pub fn check_there_around(&self, ranges: &[Range], inside: Stamp, outside: Stamp) -> Result<(), String> {
        ranges.iter().enumerate().try_for_each(|(part, (at, _, len))| {
            let (at, end) = (*at as usize, (at + len) as usize);
            self.check_region(outside, part, 0, at)?;
            self.check_region(inside, part, at, end - at)?;
            self.check_region(outside, part, end, self.lens[part] - end)
        })
    }

    /// Says whether one range of each part has been read: that stamp's bytes of there, here.
    pub fn check_read(&self, ranges: &[Range], stamp: Stamp) -> Result<(), String> {
        ranges.iter().enumerate().try_for_each(|(part, (far, near, len))| {
            let mut bytes = vec![0; *len as usize];
            self.locals[part].read_at(*near as usize, &mut bytes).unwrap();
            let verified = stamp.of_part(part).verify(*far, &bytes);
            verified.map_err(|wrong| format!("part {part} of {}: {wrong}", self.count()))
        })
    }

    /// Says whether the parts of a read that have not failed were read.
    pub fn check_unfailed(&self, transfer: &Transfer, stamp: Stamp) -> Result<(), String> {
        let failures = transfer.failures();
        let unfailed = |part: &usize| failures.iter().all(|failure| failure.part != *part);
        let mut parts = (0..self.count()).filter(unfailed);
        parts.try_for_each(|part| self.check_part(stamp, part, 0, self.lens[part]))
    }

    /// Says whether nobody writes to the user's memory any more, for that long: all parts are looked at behind the wait for the first.
    pub fn stays_here(&self, stamp: Stamp, time: Duration) -> Result<(), String> {
        let first = stamp.of_part(0).stays_in(self.locals[0].storage(), self.lens[0], time);
        first.map_err(|wrong| format!("part 0 of {}: {wrong}", self.count()))?;
        self.check_here(stamp)
    }

    fn check_part(&self, stamp: Stamp, part: usize, at: usize, len: usize) -> Result<(), String> {
        let checked = stamp.of_part(part).verify_storage(self.locals[part].storage(), at, len);
        checked.map_err(|wrong| format!("part {part} of {}: {wrong}", self.count()))
    }

    fn check_region(&self, stamp: Stamp, part: usize, at: usize, len: usize) -> Result<(), String> {
        let checked = self.regions[part].check(stamp.of_part(part), at, len);
        checked.map_err(|wrong| format!("the owner's part {part} of {}: {wrong}", self.count()))
    }
}
