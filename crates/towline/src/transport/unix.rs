//! The owner serves over a Unix socket, on one host where memory cannot be shared.

use std::sync::Arc;

use super::{Attachment, Contact, Offer, PathProperties, Probe, Serves, Transport, stream};
use crate::Result;
use crate::route::Capabilities;
use crate::runtime::socket::Socket;
use crate::session::Medium;

/// The transport over a Unix socket.
pub(crate) struct Unix;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &Unix;

impl Transport for Unix {
    fn properties(&self) -> PathProperties {
        PathProperties {
            mend: "run both workers in one network namespace: the socket's name is abstract",
            enforced: true,
            ..PathProperties::new(
                "unix",
                "the owner serves over a Unix socket on this host",
                Capabilities::ALL,
                Serves::Anything,
                Contact::Unix,
            )
        }
    }

    fn probe(&self) -> Probe {
        let mut name = *b"towline/probe/................";
        let random = getrandom::fill(&mut name[14..]);
        match random
            .map_err(|error| error.to_string())
            .and_then(|()| Socket::listen_unix_abstract(&name, 1).map_err(|error| error.to_string()))
        {
            Ok(_) => Probe::Works("abstract Unix sockets work".into()),
            Err(reason) => Probe::Missing { reason, mend: "allow Unix sockets in this container".into() },
        }
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        stream::attach(&Unix, offer, |medium| *medium == Medium::Unix)
    }
}
