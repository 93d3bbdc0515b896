//! What can be set before an endpoint is opened.

use std::net::SocketAddr;

use super::{Endpoint, EndpointCore};
use crate::route::Routing;
use crate::session::Settings;
use crate::tls::Tls;
use crate::transfer::Limits;
use crate::transport::nixl::NixlOptions;
use crate::wire::handshake::Secret;
use crate::{Error, Quotas, Result, fork};

/// The environment variable that names listening addresses for programs that cannot pass one.
const LISTEN_VARIABLE: &str = "TOWLINE_LISTEN";

/// Settings of an endpoint.
///
/// ```
/// use towline::{Endpoint, Limits};
/// use std::time::Duration;
/// let endpoint = Endpoint::options("decode-3")
///     .listen("127.0.0.1:0".parse().unwrap())
///     .secret(b"one secret for the whole cluster")
///     .limits(Limits::within(Duration::from_secs(10)))
///     .open()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[must_use = "options do nothing until opened"]
pub struct EndpointOptions {
    pub(super) name: String,
    pub(super) listen: Vec<SocketAddr>,
    pub(super) advertise: Vec<SocketAddr>,
    pub(super) limits: Limits,
    pub(super) routing: Routing,
    pub(super) max_regions: u32,
    pub(super) settings: Settings,
    pub(super) nixl: NixlOptions,
    pub(super) checksums: bool,
}

impl EndpointOptions {
    pub(super) fn new(name: &str) -> EndpointOptions {
        EndpointOptions {
            name: name.to_owned(),
            listen: Vec::new(),
            advertise: Vec::new(),
            limits: Limits::default(),
            routing: Routing::default(),
            max_regions: 1 << 20,
            settings: Settings {
                secret: None,
                tls: None,
                quotas: Quotas::default(),
                lanes: std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 4),
                enforces_isolation: false,
                shares_between_containers: false,
            },
            nixl: NixlOptions::default(),
            checksums: false,
        }
    }

    /// Listens on that address. Without any, the endpoint listens on loopback only, unless `TOWLINE_LISTEN` names
    /// addresses (`host:port`, separated by commas).
    pub fn listen(mut self, address: SocketAddr) -> EndpointOptions {
        self.listen.push(address);
        self
    }

    /// Writes that address into tickets, where peers reach this endpoint by another address than it listens on.
    pub fn advertise(mut self, address: SocketAddr) -> EndpointOptions {
        self.advertise.push(address);
        self
    }

    /// Requires peers to know a secret in addition to holding a ticket: those that come to this endpoint, and the owners that it goes to.
    /// Endpoints of one process are not asked.
    pub fn secret(mut self, secret: &[u8]) -> EndpointOptions {
        self.settings.secret = Some(Secret::new(secret));
        self
    }

    /// Sets how long transfers may take where the request does not say.
    pub fn limits(mut self, limits: Limits) -> EndpointOptions {
        self.limits = limits;
        self
    }

    /// Sets which paths imports may use where the import does not say. With
    /// [`Isolation::Enforced`](crate::Isolation::Enforced) this endpoint gives no other process its memory either: peers are
    /// served by the Unix socket and TCP only, and every access is checked and counted here.
    pub fn routing(mut self, routing: Routing) -> EndpointOptions {
        self.settings.enforces_isolation = routing.is_enforced();
        self.routing = routing;
        self
    }

    /// Sets how many regions can be registered at a time. The default is a million.
    pub fn max_regions(mut self, regions: u32) -> EndpointOptions {
        self.max_regions = regions;
        self
    }

    /// Sets how many connections a large transfer is spread over, between hosts.
    pub fn lanes(mut self, lanes: usize) -> EndpointOptions {
        self.settings.lanes = lanes.clamp(1, 16);
        self
    }

    /// Sets how much of this endpoint unauthenticated connections and peers may take.
    ///
    /// ```
    /// use towline::{Endpoint, Quotas};
    /// let few = Quotas { peers: 8, requests: 256, ..Quotas::default() };
    /// let endpoint = Endpoint::options("cache").quotas(few).open()?;
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn quotas(mut self, quotas: Quotas) -> EndpointOptions {
        self.settings.quotas = quotas;
        self
    }

    /// Encrypts everything that goes over TCP, and refuses peers and owners that do not.
    pub fn tls(mut self, tls: Tls) -> EndpointOptions {
        self.settings.tls = Some(tls);
        self
    }

    /// Sets how NIXL is used, where it is used. Nothing is lent by it unless [`NixlOptions::lend_over`] says so.
    pub fn nixl(mut self, nixl: NixlOptions) -> EndpointOptions {
        self.nixl = nixl;
        self
    }

    /// Sends a CRC32C along with each block of this endpoint's transfers over sockets, and checks it at the other end. Off
    /// by default: it costs a pass over the bytes on both sides, and TCP and TLS have checks of their own.
    pub fn checksums(mut self, checksums: bool) -> EndpointOptions {
        self.checksums = checksums;
        self
    }

    /// Shares memory with processes of the same user in other containers, too: in another pid or user namespace, or hidden from this
    /// process by the kernel. Both sides must set it; each side decides for itself. Off by default: containers are kept apart on purpose,
    /// and a peer that was given memory can reach all of it, for as long as it likes. The user must still be the same, and Linux 6.5 or
    /// newer is needed.
    ///
    /// ```
    /// use towline::Endpoint;
    /// let endpoint = Endpoint::options("prefill").share_between_containers(true).open()?;
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn share_between_containers(mut self, share: bool) -> EndpointOptions {
        self.settings.shares_between_containers = share;
        self
    }

    /// Opens the endpoint.
    pub fn open(mut self) -> Result<Endpoint> {
        fork::guard("open")?;
        if self.listen.is_empty()
            && let Ok(addresses) = std::env::var(LISTEN_VARIABLE)
        {
            self.listen = parse_listen(&addresses)?;
        }
        EndpointCore::open(self).map(Endpoint::from_core)
    }
}

fn parse_listen(addresses: &str) -> Result<Vec<SocketAddr>> {
    addresses
        .split(',')
        .map(str::trim)
        .filter(|address| !address.is_empty())
        .map(|address| {
            address.parse().map_err(|error| {
                Error::invalid(
                    "open",
                    format!("{LISTEN_VARIABLE}: {address:?} is not an address and a port: {error}"),
                )
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn listening_addresses_come_from_a_list_and_nonsense_is_named() {
        let parsed = parse_listen("127.0.0.1:0, [::1]:7000,").unwrap();
        assert_eq!(parsed, ["127.0.0.1:0".parse().unwrap(), "[::1]:7000".parse().unwrap()]);
        assert!(parse_listen("localhost").unwrap_err().to_string().contains("localhost"));
    }
}
