//! The owner serves over TCP, between hosts.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{Attachment, Contact, Offer, PathProperties, Probe, Serves, Transport, stream};
use crate::Result;
use crate::route::Capabilities;
use crate::runtime::socket::Socket;
use crate::session::Medium;

/// The transport over TCP.
pub(crate) struct Tcp;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &Tcp;

impl Transport for Tcp {
    fn properties(&self) -> PathProperties {
        PathProperties {
            mend: "bring up the loopback interface, or name an address by --listen or TOWLINE_LISTEN",
            enforced: true,
            ..PathProperties::new(
                "tcp",
                "the owner serves over TCP",
                Capabilities::ALL,
                Serves::Anything,
                Contact::Tcp,
            )
        }
    }

    fn probe(&self) -> Probe {
        match Socket::listen_tcp(SocketAddr::from(([127, 0, 0, 1], 0))) {
            Ok(_) => Probe::Works("listening on loopback works".into()),
            Err(error) => Probe::Missing {
                reason: error.to_string(),
                mend: "bring the loopback interface up and allow TCP sockets".into(),
            },
        }
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        stream::attach(&Tcp, offer, |medium| matches!(medium, Medium::Tcp(_)))
    }
}
