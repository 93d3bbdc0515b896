//! What a peer may do: tickets become grants, and every request is checked against its grant, and counted.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::grants::{GRANT, Granting, no_such_grant};
use super::{Serving, Standing};
use crate::bytes::checked;
use crate::memory::Holder;
use crate::region::{Deed, RegionCore, RegionUse, SERVED, Served, stale};
use crate::runtime::socket::{RawPart, RawPartMut};
use crate::session::connection::{Connection, Role};
use crate::session::files::{Asked, Source};
use crate::session::importing::proven;
use crate::session::parts::Keep;
use crate::session::reply::Lending;
use crate::session::{Sessions, checks};
use crate::ticket::Claims;
use crate::wire::{Block, Grant, ImportItem};
use crate::{Access, Error, Kind, Result, room};

/// What a request may act on.
pub(super) enum Admitted {
    /// Parts of memory, and what keeps them in place.
    Memory(Keep, Vec<RawPartMut>),
    /// A part of a file, or of a GPU's memory: the bytes stop over in a buffer.
    Bounced(Asked),
}

impl Admitted {
    fn memory(
        op: &'static str,
        using: RegionUse,
        base: usize,
        blocks: &[Block],
        request: u64,
    ) -> Result<Admitted> {
        let mut parts: Vec<RawPartMut> = room::list(op, blocks.len())?;
        // A part without bytes would never be filled, and so whoever fills them would never get past it.
        for block in blocks.iter().filter(|block| block.len > 0) {
            let (ptr, len) = ((base + block.offset as usize) as *mut u8, block.len as usize);
            match parts.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == ptr => last.len += len,
                _ => parts.push(RawPartMut { ptr, len }),
            }
        }
        Ok(Admitted::Memory(Keep::Region(Arc::new(using), request), parts))
    }
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
        let new = match self.grants.again(&item.ticket, &claims) {
            Some(handle) => Err(handle),
            None => {
                self.allowance.check_grants(self.grants.count())?;
                Ok(self.granting_of(sessions, &region, claims.clone())?)
            }
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
                self.grants.release(*handle);
            }
        })?;
        let mut grant = region.grant(&claims, attached, sessions.paths.offers(&region, &claims));
        if self.local.is_none() {
            grant.segment = None;
        }
        let standing = Standing::new(&region, &claims);
        grant.handle = match new {
            Ok(granting) => self.grants.add(&item.ticket, granting),
            Err(handle) => handle,
        };
        self.holds_another(standing);
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
            granting.count(Deed::GivenAway);
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

    /// Checks a request against what was granted; begins a use of the region where its bytes are in memory.
    pub(super) fn admit(
        &self,
        handle: u32,
        needed: Access,
        blocks: &[Block],
        request: u64,
    ) -> Result<Admitted> {
        let op = if needed == Access::READ { "read" } else { "write" };
        let admitted = self.check(op, handle, needed, blocks).and_then(|(region, start, served)| {
            let bytes = blocks.iter().map(|block| u64::from(block.len)).sum();
            let flight = self.allowance.take(op, bytes, blocks.len() * size_of::<RawPart>(), Some(served))?;
            if let Some(source) = Source::of(&region) {
                let blocks = room::copy(op, blocks)?;
                return Ok(Admitted::Bounced(Asked { region, source, start, blocks, flight }));
            }
            let base = region.addr + start as usize;
            let admitted = Admitted::memory(op, region.begin_use_with(op, flight)?, base, blocks, request)?;
            // Before the answer begins, in which an error could not be told any more. Where bytes come in, the receive tells.
            if let Admitted::Memory(_, parts) = &admitted
                && region.lent
                && needed == Access::READ
            {
                parts.iter().try_for_each(|part| checked::look(op, part.ptr, part.len))?;
            }
            Ok(admitted)
        });
        if admitted.is_err() {
            self.refused(handle);
        }
        admitted
    }

    /// Counts a request that was refused.
    pub(super) fn refused(&self, handle: u32) {
        let Some(sessions) = self.sessions.upgrade() else { return };
        match self.grants.find(handle) {
            Some(granting) => {
                sessions.registry.count_refused();
                granting.count(Deed::Refused);
            }
            None => sessions.registry.refuse(&self.peer),
        }
    }

    /// Counts a request that is served.
    pub(super) fn served(&self, handle: u32, deed: Deed) {
        if let Some(granting) = self.grants.find(handle) {
            granting.count(deed);
        }
    }

    /// [`admit`](Self::admit) for what acts on words in memory.
    pub(super) fn admit_words(
        &self,
        op: &'static str,
        handle: u32,
        blocks: &[Block],
        request: u64,
    ) -> Result<(Keep, Vec<RawPartMut>)> {
        match self.admit(handle, Access::WRITE, blocks, request)? {
            Admitted::Memory(keep, parts) => Ok((keep, parts)),
            Admitted::Bounced(asked) => {
                self.refused(handle);
                Err(asked.no_words(op))
            }
        }
    }

    pub(in crate::session) fn granting(&self, op: &'static str, handle: u32) -> Result<Arc<Granting>> {
        self.grants.find(handle).ok_or_else(|| no_such_grant(op))
    }

    pub(in crate::session) fn check(
        &self,
        op: &'static str,
        handle: u32,
        needed: Access,
        blocks: &[Block],
    ) -> Result<(Arc<RegionCore>, u64, Arc<Served>)> {
        let granting = self.granting(op, handle)?;
        let claims = &granting.claims;
        if !claims.access.contains(needed) {
            return Err(Error::new(
                Kind::PermissionDenied,
                op,
                format!("the ticket allows {}, and this needs {needed}", claims.access),
            ));
        }
        self.sessions()?.registry.check_lease(claims)?;
        let length = claims.range.end - claims.range.start;
        let outside =
            |block: &&Block| block.offset.checked_add(block.len.into()).is_none_or(|end| end > length);
        if let Some(block) = blocks.iter().find(outside) {
            return Err(Error::invalid(
                op,
                format!("{} bytes at offset {} do not lie within {length} bytes", block.len, block.offset),
            ));
        }
        let region = granting.served.region().upgrade().ok_or_else(|| stale(op))?;
        Ok((region, claims.range.start, Arc::clone(&granting.served)))
    }

    /// The checksums of blocks in memory, which somebody keeps in place meanwhile.
    #[allow(unsafe_code, reason = "reads registered memory")]
    pub(super) fn checks(
        &self,
        connection: &Connection,
        op: &'static str,
        handle: u32,
        needed: Access,
        blocks: &[Block],
    ) -> Result<Vec<u32>> {
        let bytes: u64 = blocks.iter().map(|block| u64::from(block.len)).sum();
        if connection.role() == Role::Control && bytes > checks::MOST_ON_CONTROL {
            return Err(Error::invalid(
                op,
                "a request with checksums is too long for the control connection",
            ));
        }
        let (region, start, _) = self.check(op, handle, needed, blocks)?;
        let _in_place = region.begin_use(op)?;
        let base = (region.addr + start as usize) as *const u8;
        let ranges =
            blocks.iter().map(|block| (base.wrapping_add(block.offset as usize), block.len as usize));
        if region.lent {
            return ranges.map(|(from, len)| checked::crc32c(op, from, len)).collect();
        }
        // SAFETY: `check` has seen that the blocks lie within the region, and the use keeps its memory in place.
        Ok(unsafe { checks::of_memory(ranges) })
    }
}
