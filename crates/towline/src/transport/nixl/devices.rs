//! The network devices that UCX may use, and how that is set.
//!
//! Left to itself, UCX takes every device of the machine, and listens on every interface that has an address. A host that reaches it
//! there is asked for nothing: so it gets the devices that the user has named, or RDMA devices alone.

use std::collections::BTreeMap;
use std::fs;

use super::system::rdma_devices;
use crate::{Error, Kind, Result};

/// In place of a device: every interface that UCX's tcp can use.
const TCP: &str = "tcp";

/// UCX's own variable for the same.
const VARIABLE: &str = "UCX_NET_DEVICES";

/// NIXL's parameter for the list of devices, to each of which it adds the port 1.
const DEVICE_LIST: &str = "device_list";

/// NIXL's parameter for settings of UCX, which it takes apart at commas: no list fits into one.
const ENGINE_CONFIG: &str = "engine_config";

/// UCX's setting for the list of devices.
const NET_DEVICES: &str = "NET_DEVICES";

/// Devices that UCX may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Devices {
    names: Vec<String>,
    /// Whether these are all that there are.
    all: bool,
    /// Whether one of them moves bytes without its owner's processor.
    pub(super) rdma: bool,
    /// Whether all of them do.
    pub(super) only_rdma: bool,
}

impl Devices {
    /// Those of these names; without any, all RDMA devices. `Unavailable` where there is none, or one is not there.
    pub(super) fn of(named: &[String], op: &'static str) -> Result<Devices> {
        Devices::among(named, &rdma_ports(), &interfaces()).map_err(|error| error.during(op).on("nixl"))
    }

    fn among(named: &[String], ports: &[String], interfaces: &[String]) -> Result<Devices> {
        let lacking = |message: String| Error::new(Kind::Unavailable, "open", message);
        if named.is_empty() && ports.is_empty() {
            let message = "there is no RDMA device here, and UCX gets others, such as \"tcp\", only where they are named: by \
                           NixlOptions::reach_over (nixl_reach_over in Python), or by AgentConfig::ucx_devices of an agent (devices)";
            return Err(lacking(message.to_owned()));
        }
        let mut names: Vec<String> = if named.is_empty() { ports.to_vec() } else { Vec::new() };
        for name in named {
            let known = ports.contains(name) || interfaces.contains(name);
            match name.as_str() {
                TCP => names.extend_from_slice(interfaces),
                _ if known => names.push(name.clone()),
                _ => {
                    let there = [ports, interfaces].concat().join(", ");
                    let message = format!(
                        "UCX finds no device {name:?} here; there are {there}, and \"tcp\" for all interfaces"
                    );
                    return Err(lacking(message));
                }
            }
        }
        names.sort();
        names.dedup();
        let all = ports.iter().chain(interfaces).all(|one| names.contains(one));
        let rdma = names.iter().any(|name| ports.contains(name));
        let only_rdma = names.iter().all(|name| ports.contains(name));
        Ok(Devices { names, all, rdma, only_rdma })
    }

    /// Adds them to the parameters of UCX's backend.
    pub(super) fn limit(&self, parameters: BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
        self.limit_beside(parameters, std::env::var_os(VARIABLE).is_some())
    }

    /// `variable`: whether UCX's own is set, which comes before UCX's settings and not before NIXL's list.
    fn limit_beside(
        &self,
        mut parameters: BTreeMap<String, String>,
        variable: bool,
    ) -> Result<BTreeMap<String, String>> {
        let named = |config: &String| config.contains(NET_DEVICES);
        if parameters.contains_key(DEVICE_LIST) || parameters.get(ENGINE_CONFIG).is_some_and(named) {
            let message = "backend UCX: its devices are named by NixlOptions::reach_over and lend_over, not by its parameters";
            return Err(Error::invalid("import", message).on("nixl"));
        }
        if self.all {
            return Ok(parameters);
        }
        if let ([name], false) = (self.names.as_slice(), variable) {
            let config = parameters.entry(ENGINE_CONFIG.into()).or_default();
            let comma = if config.is_empty() { "" } else { "," };
            *config = format!("{config}{comma}{NET_DEVICES}={name}");
            return Ok(parameters);
        }
        // One entry to NIXL, and a list to UCX. What NIXL adds belongs to the last name: to a port 1, or to one that is there twice.
        let mut names = self.names.clone();
        let first_port = names.iter().find_map(|name| name.strip_suffix(":1")).map(str::to_owned);
        if let Some(device) = &first_port {
            names.retain(|name| name.strip_suffix(":1") != Some(device.as_str()));
        }
        names.extend(first_port.or_else(|| names.first().cloned()));
        parameters.insert(DEVICE_LIST.into(), names.join(","));
        Ok(parameters)
    }

    /// Their names, as they are shown.
    pub(super) fn shown(&self) -> String {
        self.names.join(", ")
    }
}

/// The ports of the RDMA devices that this process can open, as UCX calls them.
fn rdma_ports() -> Vec<String> {
    let ports = |device: String| {
        let all =
            fs::read_dir(format!("/sys/class/infiniband/{device}/ports")).into_iter().flatten().flatten();
        all.filter_map(move |port| Some(format!("{device}:{}", port.file_name().to_str()?)))
            .collect::<Vec<_>>()
    };
    rdma_devices().into_iter().flat_map(ports).collect()
}

/// The network interfaces of this process's namespace.
fn interfaces() -> Vec<String> {
    let table = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(list: &str) -> Vec<String> {
        list.split_whitespace().map(str::to_owned).collect()
    }

    fn among(named: &str, ports: &str) -> Result<Devices> {
        Devices::among(&names(named), &names(ports), &names("lo eth0"))
    }

    fn limited(named: &str, given: &[(&str, &str)], variable: bool) -> Vec<(String, String)> {
        let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let devices = among(named, "mlx5_0:1 mlx5_1:2").unwrap();
        devices.limit_beside(given, variable).unwrap().into_iter().collect()
    }

    fn one(key: &str, value: &str) -> Vec<(String, String)> {
        vec![(key.to_owned(), value.to_owned())]
    }

    #[test]
    fn without_a_name_rdma_devices_are_taken_and_never_tcp() {
        let found = among("", "mlx5_0:1 mlx5_1:2").unwrap();
        assert_eq!((found.shown().as_str(), found.rdma, found.all), ("mlx5_0:1, mlx5_1:2", true, false));
        let error = among("", "").unwrap_err();
        assert!(error.message().contains("reach_over"), "{error}");
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error_that_names_those_that_are() {
        for wrong in ["mlx5_0", "mlx5_9:1", "eth1", "all", "", "^tcp"] {
            let error = Devices::among(&[wrong.to_owned()], &names("mlx5_0:1"), &names("lo")).unwrap_err();
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.message().contains("mlx5_0:1, lo"), "{error}");
        }
        let tcp = among("tcp", "").unwrap();
        assert_eq!((tcp.shown().as_str(), tcp.rdma, tcp.all), ("eth0, lo", false, true));
        assert!(!among("tcp", "mlx5_0:1").unwrap().all);
    }

    #[test]
    fn ucx_is_told_of_these_devices_and_no_others_whatever_its_variable_says() {
        assert_eq!(limited("mlx5_0:1", &[], false), one("engine_config", "NET_DEVICES=mlx5_0:1"));
        assert_eq!(limited("mlx5_0:1", &[], true), one("device_list", "mlx5_0"));
        assert_eq!(limited("lo", &[], true), one("device_list", "lo,lo"));
        assert_eq!(limited("mlx5_0:1 mlx5_1:2 lo", &[], false), one("device_list", "lo,mlx5_1:2,mlx5_0"));
        assert_eq!(limited("lo eth0", &[], false), one("device_list", "eth0,lo,eth0"));
        assert_eq!(limited("tcp mlx5_0:1 mlx5_1:2", &[], false), []);
        let more = limited("lo", &[("engine_config", "RCACHE_ENABLE=y")], false);
        assert_eq!(more, one("engine_config", "RCACHE_ENABLE=y,NET_DEVICES=lo"));
    }

    #[test]
    fn parameters_that_name_devices_themselves_are_refused() {
        let devices = among("lo", "").unwrap();
        for (key, value) in [("device_list", "mlx5_0"), ("engine_config", "A=b,NET_DEVICES=eth0")] {
            let given = BTreeMap::from([(key.to_owned(), value.to_owned())]);
            assert_eq!(devices.limit_beside(given, false).unwrap_err().kind(), Kind::Invalid);
        }
    }
}
