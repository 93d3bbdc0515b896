//! GPUs: the driver, the devices, what they can share with other processes, and how much memory may be locked.

use rustix::process::{Resource, getrlimit};
use towline::cuda::{Availability, DeviceFacts, availability};

use super::{Check, Status};
use crate::size;

const GROUP: &str = "GPUs";

pub(super) fn check() -> Vec<Check> {
    let mut checks = found(availability());
    let locked = match getrlimit(Resource::Memlock).current {
        None => "no limit".to_owned(),
        Some(limit) => format!("{} (RLIMIT_MEMLOCK)", size::bytes(limit)),
    };
    checks.push(Check::fact(GROUP, "locked memory", locked));
    checks
}

fn found(availability: Availability) -> Vec<Check> {
    match availability {
        Availability::Found { path, origin, version, fake, devices } => {
            let what = format!("for CUDA {version}, {} ({origin})", path.display());
            let driver = if fake {
                Check::new(GROUP, "driver", Status::Note, format!("{what}: a fake for tests, without a GPU"))
                    .mend(format!("unset {}", towline::cuda::SETTING))
            } else {
                Check::new(GROUP, "driver", Status::Ok, what)
            };
            std::iter::once(driver).chain(devices.iter().flat_map(device)).collect()
        }
        Availability::Missing { tried, mend } => {
            let missing =
                Check::new(GROUP, "driver", Status::Note, "not found; nothing here needs it").mend(mend);
            std::iter::once(missing)
                .chain(tried.into_iter().map(|place| Check::fact(GROUP, "driver tried", place)))
                .collect()
        }
        _ => Vec::new(),
    }
}

fn device(gpu: &DeviceFacts) -> Vec<Check> {
    let name = format!("GPU {}", gpu.ordinal);
    let node = gpu.numa_node.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
    let is = format!(
        "{}, {}, compute {}.{}, at {}{node}",
        gpu.name,
        size::bytes(gpu.memory),
        gpu.capability.0,
        gpu.capability.1,
        gpu.bus
    );
    let can = |able: bool, what: &str| format!("{what} {}", if able { "yes" } else { "no" });
    let shares = [
        can(gpu.ipc, "IPC handles"),
        can(gpu.descriptors, "exportable memory"),
        can(gpu.registers_host, "registered host memory"),
    ];
    let status = if gpu.ipc || gpu.descriptors { Status::Ok } else { Status::Note };
    let mut checks = vec![
        Check::fact(GROUP, name.clone(), is),
        Check::new(GROUP, format!("{name} shares by"), status, shares.join(", ")),
    ];
    if !gpu.reaches.is_empty() {
        let peers: Vec<_> = gpu.reaches.iter().map(|peer| format!("GPU {peer}")).collect();
        checks.push(Check::new(GROUP, format!("{name} reaches"), Status::Ok, peers.join(", ")));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_shown_with_every_place_that_was_tried() {
        let tried = vec!["a: not there".to_owned(), "b: no ELF".to_owned()];
        let checks = found(Availability::Missing { tried, mend: "install it".into() });
        let texts: Vec<_> = checks.iter().map(|check| check.found.as_str()).collect();
        assert_eq!(texts, ["not found; nothing here needs it", "a: not there", "b: no ELF"]);
        assert_eq!(checks[0].mend.as_deref(), Some("install it"));
    }

    #[test]
    fn a_fake_is_called_one() {
        let driver = Availability::Found {
            path: "/x/libtowline_fake_cuda.so".into(),
            origin: "TOWLINE_CUDA".into(),
            version: "13.0".into(),
            fake: true,
            devices: Vec::new(),
        };
        let checks = found(driver);
        assert_eq!(
            checks[0].found,
            "for CUDA 13.0, /x/libtowline_fake_cuda.so (TOWLINE_CUDA): a fake for tests, without a GPU"
        );
        assert_eq!(checks[0].status, Status::Note);
    }
}
