//! Opens a meeting: its id, and the root that waits for its ranks.

use std::net::SocketAddr;
use std::time::Duration;

use towline::Kind;

use super::root::{self, Root};
use crate::unique_id::{MOST_ADDRESSES, UniqueId};
use crate::{Error, Result};

/// Where a meeting takes place, for [`get_unique_id_with`].
///
/// Without addresses: on this host only. A rank on another host needs an address that it can reach.
#[derive(Debug, Clone, Default)]
pub struct UniqueIdOptions {
    /// The addresses on which the meeting listens; port 0 picks one.
    pub listen: Vec<SocketAddr>,
    /// The addresses that are written into the id, where they differ from those listened on; at most three. Port 0
    /// stands for the port of the first one listened on.
    pub advertise: Vec<SocketAddr>,
    /// Whether ranks of other hosts come through TLS. What they say is encrypted under the id's secret in any case; with TLS
    /// it stays so when the id becomes known later.
    pub tls: bool,
    /// How long the id is good while nobody has joined: a day where nothing is said.
    pub unjoined: Option<Duration>,
}

/// Ranks may load a model before they join; a root that is forgotten keeps a thread and its listeners.
const UNJOINED: Duration = Duration::from_secs(24 * 60 * 60);

impl UniqueIdOptions {
    /// Returns what the variable `TOWLINE_LISTEN` says: addresses to listen on, with commas between them.
    pub fn from_env() -> Result<UniqueIdOptions> {
        let mut options = UniqueIdOptions::default();
        if let Ok(addresses) = std::env::var("TOWLINE_LISTEN") {
            for address in addresses.split(',').map(str::trim).filter(|address| !address.is_empty()) {
                let address: SocketAddr = address.parse().map_err(|error| {
                    Error::invalid(
                        "get_unique_id",
                        format!("TOWLINE_LISTEN: {address:?} is not an address: {error}"),
                    )
                })?;
                // The port belongs to the endpoint; an unspecified address is useless to other hosts.
                if !address.ip().is_unspecified() {
                    options.listen.push(SocketAddr::new(address.ip(), 0));
                }
            }
            options.listen.truncate(MOST_ADDRESSES);
        }
        Ok(options)
    }
}

/// Opens a meeting on this host and returns its id. This process must live until every rank has joined.
///
/// Where the variable `TOWLINE_LISTEN` names addresses, the meeting takes place on those hosts' addresses too.
pub fn get_unique_id() -> Result<UniqueId> {
    get_unique_id_with(&UniqueIdOptions::from_env()?)
}

/// Opens a meeting at those addresses and returns its id.
pub fn get_unique_id_with(options: &UniqueIdOptions) -> Result<UniqueId> {
    open_meeting(options).map(|(id, _)| id)
}

/// Opens a meeting: its id, and the handle by which it can be called off.
pub(crate) fn open_meeting(options: &UniqueIdOptions) -> Result<(UniqueId, Root)> {
    const OP: &str = "get_unique_id";
    towline::fork_guard(OP)?;
    let mut random = [0; 48];
    getrandom::fill(&mut random)
        .map_err(|error| Error::new(Kind::Native, OP, format!("no random bytes: {error}")))?;
    let listeners = root::listen(&options.listen)?;
    let own = root::addresses(&listeners)?;
    let mut addresses = options.advertise.clone();
    for address in addresses.iter_mut().filter(|address| address.port() == 0) {
        address.set_port(own.first().map_or(0, SocketAddr::port));
    }
    if addresses.is_empty() {
        addresses = own;
        if addresses.iter().any(|address| address.ip().is_unspecified()) {
            return Err(Error::invalid(
                OP,
                "other ranks cannot connect to an unspecified address: advertise one that they can reach",
            ));
        }
    }
    let id = UniqueId::compose(&random, &addresses, options.tls)?;
    let root = root::open(&id, listeners, options.unjoined.unwrap_or(UNJOINED))?;
    Ok((id, root))
}
