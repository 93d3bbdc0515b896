//! Interfaces and addresses: where others would find a listener.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use towline_lab::machine::read;

use super::{Check, Status};

const GROUP: &str = "Network";

pub(super) fn check() -> Vec<Check> {
    let mut checks = Vec::new();
    let v4 = read("/proc/net/fib_trie").map(|table| local_v4(&table)).unwrap_or_default();
    let routes = read("/proc/net/route").unwrap_or_default();
    let mut addresses: Vec<(String, IpAddr)> =
        v4.into_iter().map(|address| (device_of(&routes, address), address.into())).collect();
    let v6 = read("/proc/net/if_inet6").map(|table| local_v6(&table)).unwrap_or_default();
    addresses.extend(v6.into_iter().map(|(device, address)| (device, address.into())));
    for (device, address) in &addresses {
        let remark = if *address == IpAddr::from(Ipv4Addr::LOCALHOST) {
            "this host only; listened on by default"
        } else if address.is_loopback() {
            "this host only"
        } else if link_local(address) {
            "link-local: never put into tickets"
        } else {
            "put into tickets when an endpoint listens on it, or on the unspecified address"
        };
        checks.push(Check::fact(GROUP, device.clone(), format!("{address}: {remark}")));
    }
    if !addresses.iter().any(|(_, address)| address.is_loopback()) {
        checks.push(
            Check::new(GROUP, "loopback", Status::Missing, "no loopback address is up")
                .mend("ip link set lo up"),
        );
    }
    checks.push(match std::env::var("TOWLINE_LISTEN") {
        Ok(addresses) => {
            let wrong = addresses
                .split(',')
                .map(str::trim)
                .filter(|one| !one.is_empty())
                .find(|one| one.parse::<std::net::SocketAddr>().is_err());
            match wrong {
                None => Check::new(GROUP, "TOWLINE_LISTEN", Status::Ok, addresses),
                Some(wrong) => Check::new(
                    GROUP,
                    "TOWLINE_LISTEN",
                    Status::Missing,
                    format!("{wrong:?} is not an address and a port"),
                )
                .mend("TOWLINE_LISTEN=10.0.0.5:7000,[fd00::5]:7000"),
            }
        }
        Err(_) => Check::fact(GROUP, "TOWLINE_LISTEN", "not set: endpoints listen on this host only"),
    });
    checks
}

fn link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// The local addresses in a routing trie: those whose next line says `/32 host LOCAL`.
fn local_v4(table: &str) -> Vec<Ipv4Addr> {
    let mut found: Vec<Ipv4Addr> = Vec::new();
    let mut last = None;
    for line in table.lines() {
        if let Some((_, address)) = line.split_once("|-- ") {
            last = address.trim().parse().ok();
        } else if line.contains("/32 host LOCAL") {
            found.extend(last.filter(|address| !found.contains(address)));
        }
    }
    found
}

/// The device whose network holds the address; numbers in the table are in memory order.
fn device_of(routes: &str, address: Ipv4Addr) -> String {
    if address.is_loopback() {
        return "lo".to_owned();
    }
    let number = u32::from_ne_bytes(address.octets());
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    routes
        .lines()
        .skip(1)
        .find_map(|line| {
            let columns: Vec<_> = line.split_whitespace().collect();
            let (network, mask) = (hex(columns.get(1)?)?, hex(columns.get(7)?)?);
            (mask != 0 && number & mask == network).then(|| columns[0].to_owned())
        })
        .unwrap_or_else(|| "address".to_owned())
}

fn local_v6(table: &str) -> Vec<(String, Ipv6Addr)> {
    table
        .lines()
        .filter_map(|line| {
            let columns: Vec<_> = line.split_whitespace().collect();
            let bits = u128::from_str_radix(columns.first()?, 16).ok()?;
            Some((columns.get(5)?.to_string(), Ipv6Addr::from_bits(bits)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_out_of_the_kernel_tables() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 10.1.2.3\n        \
                    /32 host LOCAL\n     |-- 127.0.0.0\n        /8 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        assert_eq!(local_v4(trie), [Ipv4Addr::new(10, 1, 2, 3), Ipv4Addr::LOCALHOST]);
        let inet6 = "00000000000000000000000000000001 01 80 10 80       lo\n";
        assert_eq!(local_v6(inet6), [("lo".to_owned(), Ipv6Addr::LOCALHOST)]);
        assert_eq!(local_v6("garbage\n\n"), []);
        assert_eq!(local_v4("garbage"), Vec::<Ipv4Addr>::new());
    }
}
