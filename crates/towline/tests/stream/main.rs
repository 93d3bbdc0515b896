//! What goes over TCP, and an attacker on the network path: TLS, and the checksums of blocks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod checksums;
mod lent;
mod middle;
mod tls;

use std::time::Duration;

use towline::{Access, Endpoint, Error, Limits, Registered, Remote, Routing, SystemStorage, Tls};

pub(crate) const LEN: usize = 8 << 20;

pub(crate) fn tcp() -> Routing {
    Routing::default().require("tcp").unwrap()
}

pub(crate) fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

pub(crate) fn open(name: &str, tls: Option<Tls>) -> Endpoint {
    let limits = Limits { no_progress: Duration::from_secs(20), ..Limits::default() };
    let options = Endpoint::options(name).routing(tcp()).limits(limits).lanes(2);
    tls.into_iter().fold(options, towline::EndpointOptions::tls).open().unwrap()
}

pub(crate) fn region(owner: &Endpoint, seed: u8) -> Registered<SystemStorage> {
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    region.write_at(0, &bytes(seed, LEN)).unwrap();
    region
}

pub(crate) fn read(user: &Endpoint, remote: &Remote) -> Result<Vec<u8>, Error> {
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    user.read(remote, &local).start()?.wait()?;
    let mut into = vec![0; LEN];
    local.read_at(0, &mut into)?;
    Ok(into)
}
