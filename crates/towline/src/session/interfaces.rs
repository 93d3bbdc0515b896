//! The addresses by which other hosts reach a listener.
#![allow(unsafe_code, reason = "getifaddrs has no safe form in the crates that we use")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The addresses to write into tickets for a listener that is bound there: the address itself, or for an unspecified
/// address those of the host's interfaces.
pub(super) fn reachable(bound: SocketAddr) -> Vec<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let mut addresses: Vec<IpAddr> = interface_addresses()
        .into_iter()
        .filter(|address| {
            address.is_ipv4() == bound.is_ipv4() && !address.is_loopback() && !link_local(address)
        })
        .collect();
    if addresses.is_empty() {
        addresses.push(match bound {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    addresses.into_iter().map(|address| SocketAddr::new(address, bound.port())).collect()
}

fn link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

fn interface_addresses() -> Vec<IpAddr> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result; a failure leaves it untouched.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut addresses = Vec::new();
    let mut next = list;
    // SAFETY: getifaddrs returned a well-formed list, which is walked once and freed once; an entry's address has
    // the size that its family says.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let Some(address) = entry.ifa_addr.as_ref() else { continue };
            match i32::from(address.sa_family) {
                libc::AF_INET => {
                    let v4 = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    addresses.push(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into());
                }
                libc::AF_INET6 => {
                    let v6 = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    addresses.push(Ipv6Addr::from(v6.sin6_addr.s6_addr).into());
                }
                _ => {}
            }
        }
        libc::freeifaddrs(list);
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_address_stays_and_the_unspecified_one_becomes_real_ones() {
        let named = SocketAddr::from(([127, 0, 0, 1], 7000));
        assert_eq!(reachable(named), [named]);
        let any = reachable(SocketAddr::from(([0, 0, 0, 0], 7000)));
        assert!(!any.is_empty() && any.iter().all(|one| !one.ip().is_unspecified() && one.port() == 7000));
    }
}
