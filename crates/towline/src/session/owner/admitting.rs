//! What a peer may do: tickets become grants, and what the rules admit becomes parts of memory, or of a file.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

use towline_proto::session::owner::{Admitted, Blame, Ranges, Refusal};

use super::granting::{GRANT, Granting, Hold, Standing};
use super::{Over, Serving};
use crate::bytes::checked;
use crate::memory::Holder;
use crate::region::{Counted, RegionCore, RegionUse, SERVED};
use crate::runtime::socket::RawPartMut;
use crate::runtime::{self, Device};
use crate::session::files::{Asked, Source};
use crate::session::importing::proven;
use crate::session::parts::Keep;
use crate::session::reply::Lending;
use crate::session::{Sessions, Ticketed, checks};
use crate::ticket::Claims;
use crate::wire::{Block, Grant, ImportItem};
use crate::{Access, Error, Kind, Result, room};

/// What a request acts on.
pub(super) enum Target {
    /// Memory, and the parts of it.
    Memory(Memory, Vec<RawPartMut>),
    /// A part of a file, or of a GPU's memory: the bytes stop over in a buffer.
    Bounced(Asked),
}

/// Memory that a request acts on, and that stays in place as long.
pub(super) struct Memory {
    using: RegionUse,
    ranges: Ranges,
}

impl Memory {
    pub(super) fn bytes(&self) -> u64 {
        self.ranges.bytes()
    }

    /// Whether it was lent to this process: pages of it may be gone.
    pub(super) fn is_lent(&self) -> bool {
        self.using.core().lent
    }

    /// Who has to bring pages of it, where this thread must not wait for them.
    pub(super) fn awaits(&self) -> Option<Device> {
        awaits(self.using.core(), &self.ranges)
    }

    pub(super) fn keep(self, request: u64) -> Keep {
        Keep::Region(Arc::new(self.using), request)
    }

    fn at(&self, offset: u64) -> *mut u8 {
        (self.using.core().addr + offset as usize) as *mut u8
    }

    /// Whether all of lent memory is there. Before the reply begins, in which an error could not be reported any more; where bytes come in,
    /// the receive reports it.
    pub(super) fn look(&self, parts: &[RawPartMut]) -> Result<()> {
        let lent = if self.is_lent() { parts } else { &[] };
        lent.iter().try_for_each(|part| checked::look("read", part.ptr, part.len))
    }

    pub(super) fn parts(&self, op: &'static str) -> Result<Vec<RawPartMut>> {
        let mut parts: Vec<RawPartMut> = room::list(op, self.ranges.blocks().len())?;
        // A part without bytes would never be filled, and so the code that fills them would never get past it.
        for (offset, len) in self.ranges.iter().filter(|(_, len)| *len > 0) {
            let ptr = self.at(offset);
            match parts.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == ptr => last.len += len,
                _ => parts.push(RawPartMut { ptr, len }),
            }
        }
        Ok(parts)
    }

    /// The checksums of its blocks.
    #[allow(unsafe_code, reason = "reads registered memory")]
    pub(super) fn checks(&self, op: &'static str) -> Result<Vec<u32>> {
        let ranges = self.ranges.iter().map(|(offset, len)| (self.at(offset).cast_const(), len));
        if self.is_lent() {
            return ranges.map(|(from, len)| checked::crc32c(op, from, len)).collect();
        }
        // SAFETY: the rules have seen that the ranges lie within the region, and the use keeps its memory in place.
        Ok(unsafe { checks::of_memory(ranges) })
    }
}

/// Who has to bring pages of lent memory before those ranges can be touched, where this thread must not wait for them: neither the
/// event loop, which looks at none, nor a lane's.
pub(super) fn awaits(region: &RegionCore, ranges: &Ranges) -> Option<Device> {
    if !region.lent {
        return None;
    }
    if runtime::may_block("serve").is_err() {
        return Some(region.brings_pages());
    }
    region.awaits(ranges.bytes(), ranges.iter())
}

impl Serving {
    /// Verifies one ticket and remembers what it allows.
    pub(super) fn grant(
        self: &Arc<Self>,
        sessions: &Sessions,
        item: &ImportItem,
        passed: &mut HashSet<u64>,
        files: &mut Vec<OwnedFd>,
    ) -> Result<Grant> {
        let proven = proven(&self.challenge, item.operation.as_ref());
        let (region, claims) = sessions.registry.verify(&item.ticket, &item.proof, &proven)?;
        // Before the ticket claims anything: what is granted then is not refused any more.
        let again = self.rules().grant_again(&item.ticket, &claims)?;
        let new = match again {
            Some(handle) => Err(handle),
            None => Ok(self.granting_of(sessions, &region, claims.clone())?),
        };
        // A claim that is refused gives no descriptor away.
        let admitted = self.claim_with(sessions, item, &region, &claims).and_then(|()| {
            self.pass(&region, passed, files).inspect_err(|error| {
                if let Some(operation) = &item.operation {
                    let _ = sessions.operations.finish(operation, self.claimer(), Err(error.clone()));
                }
            })
        });
        let attached = admitted.inspect_err(|_| {
            if let Err(handle) = &new {
                let released = self.rules().release(*handle);
                drop(released);
            }
        })?;
        let offers = sessions.paths.offers(&Ticketed { region: &region, claims: &claims });
        let mut grant = region.grant(&claims, attached, offers);
        if self.local.is_none() {
            grant.segment = None;
        }
        let standing = Standing::new(Arc::downgrade(&region), claims.expires_ms);
        grant.handle = self.rules().grant(&item.ticket, new, standing);
        Ok(grant)
    }

    fn claim_with(
        self: &Arc<Self>,
        sessions: &Sessions,
        item: &ImportItem,
        region: &RegionCore,
        claims: &Claims,
    ) -> Result<()> {
        let Some(operation) = &item.operation else { return Ok(()) };
        let of = (region.row, region.generation);
        sessions.operations.claim(operation, self.claimer(), &self.peer.name, of, claims.access)?;
        self.beat();
        Ok(())
    }

    fn granting_of(
        self: &Arc<Self>,
        sessions: &Sessions,
        region: &Arc<RegionCore>,
        claims: Claims,
    ) -> Result<Granting> {
        let charge = self.allowance.charge("import", GRANT)?;
        let entries = || [&region.ledger, &sessions.registry.ledger].map(|ledger| ledger.of(&self.peer));
        let served = region.serve_over(self, entries, self.allowance.charge("import", SERVED)?);
        let granting = Granting { served, claims, lent: Lending::default(), _charge: charge };
        if self.local.is_some() {
            granting.count(Counted::GivenAway);
        }
        Ok(granting)
    }

    /// Lets a peer on this host touch the region directly; true where its segment's descriptor must go along.
    fn pass(
        self: &Arc<Self>,
        region: &Arc<RegionCore>,
        passed: &mut HashSet<u64>,
        files: &mut Vec<OwnedFd>,
    ) -> Result<bool> {
        let Some(local) = &self.local else { return Ok(false) };
        region.admit(&local.pins)?;
        let Some(slice) = &region.segment else { return Ok(false) };
        if passed.contains(&slice.segment.id()) {
            return Ok(false);
        }
        let file =
            slice.segment.file().try_clone_to_owned().map_err(|error| Error::os("import", "dup", error))?;
        files.push(file);
        passed.insert(slice.segment.id());
        let weak = Arc::downgrade(self);
        let holder: Weak<dyn Holder> = weak;
        slice.segment.lent_to(holder);
        Ok(true)
    }

    /// Checks a request against what was granted.
    pub(super) fn admit(
        &self,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
    ) -> Result<(Arc<Granting>, Target)> {
        let admitted = self.rules().admit(handle, needed, blocks, Instant::now());
        self.target(needed, admitted)
    }

    /// What a request acts on, once the rules have decided; a refusal is counted.
    pub(super) fn target(
        &self,
        needed: Access,
        admitted: Result<Admitted<Granting>, Refusal<Granting>>,
    ) -> Result<(Arc<Granting>, Target)> {
        let op = if needed == Access::READ { "read" } else { "write" };
        let admitted = admitted.map_err(|refusal| self.refuse(refusal))?;
        let granting = Arc::clone(admitted.grant());
        let (hold, ranges) = admitted.into_parts();
        let using = match hold {
            Hold::Memory(using) => using,
            Hold::Bounced(region, source, flight) => {
                return Ok((granting, Target::Bounced(Asked { region, source, ranges, flight })));
            }
        };
        let memory = Memory { using, ranges };
        let parts = memory.parts(op).inspect_err(|_| self.refused(&granting))?;
        Ok((granting, Target::Memory(memory, parts)))
    }

    /// Refuses what acts on words where they are not in memory.
    pub(super) fn in_memory(
        &self,
        op: &'static str,
        (granting, target): (Arc<Granting>, Target),
    ) -> Result<(Arc<Granting>, Memory, Vec<RawPartMut>)> {
        match target {
            Target::Memory(memory, parts) => Ok((granting, memory, parts)),
            Target::Bounced(Asked { region, source: Source::Mapped(_), ranges, flight }) => {
                let memory = Memory { using: region.begin_use_with(op, flight)?, ranges };
                let parts = memory.parts(op)?;
                Ok((granting, memory, parts))
            }
            Target::Bounced(asked) => {
                self.refused(&granting);
                Err(asked.no_words(op))
            }
        }
    }

    /// Counts what the rules have refused.
    pub(super) fn refuse(&self, refusal: Refusal<Granting>) -> Error {
        match &refusal.blame {
            Blame::Grant(granting) => self.refused(granting),
            Blame::Peer => {
                if let Some(sessions) = self.sessions.upgrade() {
                    sessions.registry.refuse(&self.peer);
                }
            }
            Blame::Nobody => {}
        }
        refusal.error
    }

    /// Counts a request that was refused.
    pub(super) fn refused(&self, granting: &Granting) {
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.registry.count_refused();
            granting.count(Counted::Refused);
        }
    }

    pub(in crate::session) fn granted(
        &self,
        op: &'static str,
        handle: u32,
        needed: Access,
    ) -> Result<(Arc<Granting>, Arc<RegionCore>)> {
        self.rules().granted(op, handle, needed, Instant::now())
    }

    /// Compares what has been written to memory, which the sink keeps in place meanwhile, with what was sent.
    pub(super) fn compare(&self, over: &Over, handle: u32, blocks: Vec<Block>, sent: &[u32]) -> Result<()> {
        let now = Instant::now();
        let admitted = self.rules().hold_to_check(over, "write", handle, Access::WRITE, blocks, now)?;
        let (hold, ranges) = admitted.into_parts();
        let Hold::Memory(using) = hold else {
            return Err(Error::new(Kind::Internal, "write", "memory has become a file"));
        };
        let memory = Memory { using, ranges };
        checks::compare("write", memory.ranges.blocks(), sent, &memory.checks("write")?)
    }
}
