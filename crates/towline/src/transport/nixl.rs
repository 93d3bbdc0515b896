//! NIXL moves the bytes: UCX with its RDMA, shared memory and sockets underneath, and whatever else its plug-ins reach.
//!
//! One agent per endpoint, made when a transfer by NIXL is first asked for ([`Domain`]). An owner that [`lends`] registers a region with
//! its agent when a peer first asks about it, and answers with what that peer needs to reach it ([`words`]); the peer keeps
//! that, and what it has prepared, in its [`attachment`]. A file is handed over instead and registered with the agent of the
//! user ([`files`]), since NIXL moves its bytes only where it is open. Everything else (rights, messages, signals, who lives) goes over our
//! own connection. Which of the promises NIXL cannot keep, and what is done about it, is in
//! `docs/reference/nixl-path.md`.

mod attachment;
mod devices;
mod driver;
mod engine;
mod files;
mod lists;
mod memory;
mod options;
mod peer;
mod run;
mod system;
mod words;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use towline_sys::nixl::Nixl;

use self::attachment::NixlAttachment;
pub(crate) use self::engine::Domain;
pub use self::engine::NixlStats;
use self::engine::{EngineLoan, Reach};
use self::memory::Known;
pub use self::options::{NixlOptions, NixlPrefer};
use self::words::{Answer, Word};
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport, TransportContext};
use crate::memory::Place;
use crate::route::Capabilities;
use crate::session::{Medium, Query, QueryReply, Ticketed};
use crate::{Access, Error, Kind, Result, runtime};

/// How long the owner drives its agent after a peer has asked about a region: the first transfer connects.
const FIRST_HELP: Duration = Duration::from_millis(50);

/// By which peers and owners speak of it.
const NUMBER: u8 = 2;

/// Parameters of UCX's backend that hold it to those devices, or to RDMA devices where none is named. `Unavailable` where one is not there.
pub(crate) fn limited_to(
    devices: &[String],
    parameters: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>> {
    devices::Devices::of(devices, "nixl")?.limit(parameters).map_err(|error| error.during("nixl"))
}

/// What a foreign library said, with the kind that says what the caller can do about it.
pub(crate) fn of_nixl(error: towline_sys::Error) -> Error {
    let kind = match &error {
        error if error.is_unavailable() => Kind::Unavailable,
        towline_sys::Error::Argument { .. } => Kind::Invalid,
        towline_sys::Error::Refused { name: "invalid parameter", .. } => Kind::Invalid,
        towline_sys::Error::Refused { name: "not found", .. } => Kind::NotFound,
        _ => Kind::Native,
    };
    Error::new(kind, "nixl", error.to_string()).caused_by(error)
}

/// The transport by NIXL.
pub(crate) struct NixlPath;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &NixlPath;

impl Transport for NixlPath {
    fn properties(&self) -> PathProperties {
        PathProperties {
            opt_in: true,
            may_be_missing: Some("NIXL is not there"),
            mend: "look at what UCX prints with UCX_LOG_LEVEL=info, and at UCX_TLS and UCX_NET_DEVICES",
            quiet_at_end: false,
            ..PathProperties::new(
                "nixl",
                "NIXL moves the bytes (UCX: RDMA, shared memory, tcp)",
                // Signals are raised by the owner, asked over the session; atomics and reductions need its cooperation.
                Capabilities::READ | Capabilities::WRITE | Capabilities::SIGNAL,
                Serves::Anything,
                Contact::Any,
            )
        }
    }

    /// Loads the library, which then stays loaded.
    fn probe(&self) -> Probe {
        match Nixl::load() {
            Ok(nixl) => Probe::Works(system::describe(&nixl)),
            Err(error) => Probe::Missing {
                reason: error.to_string(),
                mend: "install NIXL (pip install nixl-cu12), or name it in TOWLINE_NIXL".into(),
            },
        }
    }

    fn blocks(&self, offer: &Offer<'_>) -> bool {
        usable_owner(offer).is_ok()
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let handle = usable_owner(offer)?;
        runtime::may_block("import")?;
        let engine = Domain::engine_by(offer.context, offer.until)?;
        let attachment = match offer.grant.place {
            Place::Disk => NixlAttachment::open(offer, handle, engine)?,
            Place::Host | Place::Cuda(_) => NixlAttachment::ask(offer, handle, engine)?,
        };
        Ok(attachment)
    }

    fn number(&self) -> Option<u8> {
        Some(NUMBER)
    }

    fn offers(&self, context: &TransportContext, ticketed: &Ticketed<'_>) -> bool {
        lends(context, ticketed).is_ok()
    }

    fn take_hint(&self, context: &TransportContext, words: &[u8]) -> bool {
        let Ok(Word::Help { core }) = Word::decode(words) else { return false };
        if let Some(engine) = context.nixl.running() {
            engine.help(engine::HELP, core);
        }
        true
    }

    fn answer_query(&self, context: &TransportContext, query: &Query<'_>) -> Result<QueryReply> {
        let region = query.ticketed.region;
        match Word::decode(query.words)? {
            Word::Help { .. } => Ok(QueryReply::default()),
            Word::Attach { pinned } => {
                lends(context, &query.ticketed)?;
                // While it is being registered it does not go.
                let _used = region.begin_use("import")?;
                let engine = context.nixl.engine(&context.identity)?;
                if matches!(region.place, Place::Cuda(_)) && !engine.takes_gpus(Reach::Memory) {
                    return Err(unavailable("the bytes are on a GPU, and the owner's UCX has no CUDA"));
                }
                let memory = region.kept::<Known>().register(Reach::Memory, &engine, region)?;
                let answer = Answer {
                    device: memory.descriptor.device,
                    base: region.addr as u64,
                    connection: engine.connection()?,
                    region: memory.metadata(&engine)?,
                };
                engine.help(FIRST_HELP, None);
                // Pins speak for a peer that shares memory with its owner; another one is asked to let go.
                let pinned = pinned && query.pins.is_some();
                let loan = Some(EngineLoan::of(&engine, pinned));
                let (peer, range) = (&query.peer.name, &query.ticketed.claims.range);
                tracing::debug!(peer, ?range, pinned, "a peer reaches a region by NIXL");
                Ok(QueryReply { reply: answer.encode(), files: Vec::new(), loan })
            }
        }
    }
}

/// How an owner comes to lend.
const OPT_IN: &str = "NixlOptions::lend_over, nixl_lend_over in Python";

/// What both sides give away, in one sentence: UCX does what a message says, at whatever address it names.
const GIVES_AWAY: &str = "over NIXL each side can read and write all memory of the other's process, and nobody checks or counts it";

/// At the owner: whether it lends that region by NIXL to the holder of that ticket; the error says why not. Quick.
///
/// This alone decides, whatever the peer wishes. NIXL's keys cannot be narrowed, so a ticket that has been is not enough.
fn lends(context: &TransportContext, Ticketed { region, claims }: &Ticketed<'_>) -> Result<()> {
    if region.place == Place::Disk {
        return Err(unavailable("NIXL reads a file where it is open: it is asked for by the path file"));
    }
    if !context.nixl.options().lends() {
        return Err(unavailable(format!("the owner does not lend by NIXL: it has not opted in ({OPT_IN})")));
    }
    if context.routing.refusal(NixlPath.name(), NixlPath.properties().enforced).is_some() {
        return Err(unavailable(
            "the owner does not lend by NIXL: its own routing, or its isolation, keeps NIXL out",
        ));
    }
    if claims.range != (0..region.len as u64) || !claims.access.contains(Access::READ_WRITE) {
        return Err(unavailable(
            "the owner lends by NIXL only for tickets of the whole region with read and write: NIXL's keys cannot be narrowed",
        ));
    }
    if region.lent && !context.nixl.is_only_rdma() {
        return Err(unavailable(
            "the owner lends by NIXL over a network interface only memory that Towline allocated: what UCX does there itself ends the \
             process where a page of other memory has gone away; name RDMA devices alone",
        ));
    }
    Ok(())
}

/// Refuses an offer that NIXL is not taken for; the error says why. Quick.
fn usable_owner<'a>(offer: &Offer<'a>) -> Result<&'a Arc<crate::session::GrantHandle>> {
    let Owner::There(handle) = offer.owner else {
        return Err(unavailable("the owner is in this process"));
    };
    let prefers = offer.context.nixl.options().prefers();
    if offer.grant.place == Place::Disk {
        if prefers == NixlPrefer::Never {
            return Err(unavailable("switched off in the endpoint's options"));
        }
        if handle.local_fence().is_err() {
            let message = "NIXL's plug-ins for files move bytes only where the file is open, and a descriptor is handed over only \
                           between processes of one user on one host";
            return Err(Error::new(Kind::Unsupported, "import", message));
        }
        if offer.routing.requires("nixl") || prefers == NixlPrefer::Always {
            return Ok(handle);
        }
        return Err(unavailable(
            "the path file reads and writes it as well; require or prefer nixl to take it",
        ));
    }
    if offer.grant.offers & (1 << (NUMBER - 1)) == 0 {
        return Err(unavailable(format!(
            "the owner does not lend it by NIXL; it would if it opted in ({OPT_IN}), for a ticket of the whole region with read and write"
        )));
    }
    if prefers == NixlPrefer::Never {
        return Err(unavailable("switched off in the endpoint's options"));
    }
    let options = offer.context.nixl.options();
    let rdma = match options.devices() {
        Ok(devices) => devices.rdma,
        Err(none) if options.uses_ucx() => return Err(none),
        Err(_) => false,
    };
    if offer.routing.requires("nixl") || prefers == NixlPrefer::Always {
        return Ok(handle);
    }
    match handle.session().medium {
        Medium::Unix => Err(unavailable(
            "the owner is on this host, where the paths above and below are faster; require nixl to take it",
        )),
        Medium::Tcp(address) if address.ip().is_loopback() => {
            Err(unavailable("the owner is on this host; require nixl to take it"))
        }
        Medium::Tcp(_) if !options.names_devices() => Err(unavailable(
            "this endpoint has named no device for it (NixlOptions::reach_over, nixl_reach_over in Python); require nixl to take \
             the RDMA devices",
        )),
        Medium::Tcp(_) if !rdma => Err(unavailable(
            "no RDMA device may be used here, without which tcp is as good; require or prefer nixl to take it",
        )),
        Medium::Tcp(_) => Ok(handle),
    }
}

fn unavailable(reason: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::Unavailable, "import", reason)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_missing_library_is_unavailable_and_keeps_the_places_tried() {
        let error = of_nixl(Nixl::load_from("/nowhere/libnixl_capi.so").unwrap_err());
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(error.message().contains("/nowhere/libnixl_capi.so"), "{error}");
        let source = std::error::Error::source(&error).unwrap();
        assert!(source.downcast_ref::<towline_sys::Error>().unwrap().is_unavailable());
    }

    #[test]
    fn refusals_keep_their_call_and_get_a_useful_kind() {
        for (code, name, kind) in [
            (-1, "invalid parameter", Kind::Invalid),
            (-2, "backend error", Kind::Native),
            (-6, "not found", Kind::NotFound),
        ] {
            let refused = towline_sys::Error::Refused { call: "nixl_capi_register_mem", code, name };
            let error = of_nixl(refused);
            assert_eq!(error.kind(), kind);
            assert!(error.message().contains(&format!("nixl_capi_register_mem returned {code} ({name})")));
        }
    }
}
