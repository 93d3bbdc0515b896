//! The engine that is NIXL itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use towline_sys::nixl::{self as native, Nixl};

use super::config::AgentConfig;
use super::embedded;
use super::list::{Key, Range, RegDescList, XferDescList};
use super::transfer::{OptArgs, XferOp};
use crate::transport::nixl::{limited_to, of_nixl};
use crate::{Error, Kind, Result};

/// A registered storage, as transfers hold it.
pub(super) trait Held: Send + Sync {
    fn range(&self) -> &Range;
}

/// What holds the memory of a list.
pub(super) type Keepers = Arc<[Arc<dyn Held>]>;

/// An agent of NIXL, and what is registered with it.
pub(super) struct Native {
    nixl: Nixl,
    pub(super) agent: native::Agent,
    backends: Mutex<BTreeMap<String, native::Backend>>,
    /// Those that UCX may use, as the configuration has them.
    ucx_devices: Option<Vec<String>>,
    held: Mutex<BTreeMap<Key, Vec<Weak<dyn Held>>>>,
    /// The peers whose metadata is here.
    remotes: Mutex<BTreeSet<String>>,
}

/// One side of many transfers, looked up once.
pub(super) struct Prepared {
    prepared: native::Prepared,
    keep: Keepers,
}

impl Prepared {
    pub(super) fn len(&self) -> usize {
        self.prepared.len()
    }
}

impl Native {
    pub(super) fn create(nixl: Nixl, name: &str, config: &AgentConfig) -> Result<Native> {
        let agent = nixl.agent(name, &config.native()).map_err(of_nixl)?;
        Ok(Native {
            nixl,
            agent,
            backends: Mutex::default(),
            ucx_devices: config.ucx_devices.clone(),
            held: Mutex::default(),
            remotes: Mutex::default(),
        })
    }

    pub(super) fn name(&self) -> &str {
        self.agent.name()
    }

    /// Makes a backend, unless it is there.
    pub(super) fn add_backend(&self, name: &str, params: &BTreeMap<String, String>) -> Result<()> {
        let mut backends = self.backends.lock();
        if !backends.contains_key(name) {
            let limited = match (name, &self.ucx_devices) {
                ("UCX", Some(devices)) => Some(limited_to(devices, params.clone())?),
                _ => None,
            };
            let params = limited.as_ref().unwrap_or(params);
            let made = self.agent.create_backend(name, params).map_err(of_nixl)?;
            backends.insert(name.to_owned(), made);
        }
        Ok(())
    }

    pub(super) fn backends(&self) -> Vec<String> {
        self.backends.lock().keys().cloned().collect()
    }

    pub(super) fn partial_metadata(&self, list: &RegDescList, opt: Option<&OptArgs>) -> Result<Vec<u8>> {
        let list = list.native(&self.nixl)?;
        self.with_options(opt, |options| self.agent.partial_metadata(&list, options).map_err(of_nixl))
    }

    /// NIXL trusts the bytes; what another engine has written must not get there.
    pub(super) fn load(&self, bytes: &[u8]) -> Result<String> {
        if bytes.starts_with(embedded::MAGIC) {
            let message = format!(
                "this is the metadata of an agent on the embedded engine, and agent {} runs on NIXL; both sides need the same",
                self.name()
            );
            return Err(Error::new(Kind::Unsupported, "load_remote_md", message));
        }
        let name = self.agent.load_metadata(bytes).map_err(of_nixl)?;
        self.remotes.lock().insert(name.clone());
        Ok(name)
    }

    pub(super) fn invalidate(&self, peer: &str) -> Result<()> {
        self.remotes.lock().remove(peer);
        self.agent.forget(peer).map_err(of_nixl)
    }

    pub(super) fn invalidate_all(&self) -> Result<()> {
        let all = std::mem::take(&mut *self.remotes.lock());
        all.iter().try_for_each(|peer| self.agent.forget(peer).map_err(of_nixl))
    }

    pub(super) fn knows(&self, peer: &str, list: Option<&XferDescList>) -> bool {
        let known = || -> Result<bool> {
            let list = list.map(|list| list.native(&self.nixl)).transpose()?;
            self.agent.knows(peer, list.as_ref()).map_err(of_nixl)
        };
        known().unwrap_or(false)
    }

    /// Looks one side of transfers up; the local one where there is no peer.
    pub(super) fn prepare(
        &self,
        peer: Option<&str>,
        list: &XferDescList,
        opt: Option<&OptArgs>,
    ) -> Result<Prepared> {
        let own = peer.is_none_or(|peer| peer == self.name());
        let keep = if own { self.keepers(list)? } else { Vec::new() };
        let list = list.native(&self.nixl)?;
        let prepared = self.with_options(opt, |options| {
            Ok(match peer {
                None => self.agent.prepare_local(&list, options).map_err(of_nixl)?,
                Some(peer) => self.agent.prepare_remote(peer, &list, options).map_err(of_nixl)?,
            })
        })?;
        Ok(Prepared { prepared, keep: keep.into() })
    }

    #[allow(unsafe_code, reason = "hands addresses to NIXL")]
    pub(super) fn request(
        &self,
        op: XferOp,
        local: &XferDescList,
        remote: &XferDescList,
        peer: &str,
        opt: Option<&OptArgs>,
    ) -> Result<(native::Request, Vec<Keepers>)> {
        let mut keep: Vec<Keepers> = vec![self.keepers(local)?.into()];
        if peer == self.name() {
            keep.push(self.keepers(remote)?.into());
        }
        let (near, far) = (local.native(&self.nixl)?, remote.native(&self.nixl)?);
        let request = self.with_options(opt, |options| {
            // SAFETY: every local range lies in a registered storage that `keep` holds, and the request holds `keep`
            // until NIXL has let go of it.
            unsafe { self.agent.request(op.native(), &near, &far, peer, options) }.map_err(of_nixl)
        })?;
        Ok((request, keep))
    }

    #[allow(unsafe_code, reason = "hands addresses to NIXL")]
    pub(super) fn request_prepared(
        &self,
        op: XferOp,
        local: (&Prepared, &[i32]),
        remote: (&Prepared, &[i32]),
        opt: Option<&OptArgs>,
    ) -> Result<(native::Request, Vec<Keepers>)> {
        let keep = vec![Arc::clone(&local.0.keep), Arc::clone(&remote.0.keep)];
        let sides = ((&local.0.prepared, local.1), (&remote.0.prepared, remote.1));
        let request = self.with_options(opt, |options| {
            // SAFETY: as for `request`: the lists were prepared with what holds their memory.
            unsafe { self.agent.request_prepared(op.native(), sides.0, sides.1, options) }.map_err(of_nixl)
        })?;
        Ok((request, keep))
    }

    /// Registers the range. See `native::Agent::register` for what is promised.
    ///
    /// # Safety
    /// The range stays valid until the registration has been given back, and transfers that touch it have ended.
    #[allow(unsafe_code, reason = "the signature passes an obligation on")]
    pub(super) unsafe fn register(
        &self,
        range: &Range,
        opt: Option<&OptArgs>,
    ) -> Result<native::Registration> {
        let list =
            native::RegistrationList::new(&self.nixl, range.kind(), [range.descriptor()]).map_err(of_nixl)?;
        // SAFETY: the caller's obligation is the same.
        self.with_options(opt, |options| unsafe { self.agent.register(list, options) }.map_err(of_nixl))
    }

    pub(super) fn note(&self, held: &Arc<dyn Held>) {
        let mut all = self.held.lock();
        let at = all.entry(held.range().key()).or_default();
        at.retain(|one| one.strong_count() > 0);
        at.push(Arc::downgrade(held));
    }

    pub(super) fn forget(&self, range: &Range) {
        let mut all = self.held.lock();
        if let Some(at) = all.get_mut(&range.key()) {
            at.retain(|one| one.strong_count() > 0);
            if at.is_empty() {
                all.remove(&range.key());
            }
        }
    }

    /// What holds the memory of every range of the list.
    fn keepers(&self, list: &XferDescList) -> Result<Vec<Arc<dyn Held>>> {
        // The last handle to a registration must not go while the lock is held, which its drop takes: these two go after it.
        let mut keep: Vec<Arc<dyn Held>> = Vec::new();
        let mut passed_over: Vec<Arc<dyn Held>> = Vec::new();
        let all = self.held.lock();
        for range in list.ranges() {
            if keep.last().is_some_and(|last| last.range().covers(&range)) {
                continue;
            }
            if let Some(at) = keep.iter().position(|held| held.range().covers(&range)) {
                // Ranges come in runs: the one that was found last is looked at first.
                let last = keep.len() - 1;
                keep.swap(at, last);
                continue;
            }
            // Registrations may overlap, so the nearest one below is likely, and not sure, to be the one.
            let below = all.range(range.first_key()..=range.key()).rev();
            let mut found = None;
            for held in below.flat_map(|(_, at)| at.iter().filter_map(Weak::upgrade)) {
                if held.range().covers(&range) {
                    found = Some(held);
                    break;
                }
                passed_over.push(held);
            }
            match found {
                Some(held) => keep.push(held),
                None => {
                    let message = format!("{range:?} is not registered with agent {}", self.name());
                    return Err(Error::invalid("nixl", message));
                }
            }
        }
        drop(all);
        Ok(keep)
    }

    pub(super) fn with_options<T>(
        &self,
        opt: Option<&OptArgs>,
        call: impl FnOnce(&native::Options<'_>) -> Result<T>,
    ) -> Result<T> {
        let Some(opt) = opt else { return call(&native::Options::default()) };
        let backends = {
            let known = self.backends.lock();
            opt.backends
                .iter()
                .map(|name| {
                    known.get(name).cloned().ok_or_else(|| {
                        Error::invalid("nixl", format!("the agent has no backend {name} to use"))
                    })
                })
                .collect::<Result<Vec<_>>>()?
        };
        call(&opt.native(&backends))
    }
}
