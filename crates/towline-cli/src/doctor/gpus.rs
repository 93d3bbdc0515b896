//! GPUs: the driver, the devices, what they can share with other processes, and how much memory may be locked.

use rustix::process::{Resource, getrlimit};
use towline::cuda::{Availability, DeviceFacts, availability};
use towline::memory::PinnedStorage;
use towline_lab::machine::meminfo;
use towline_lab::size;

use super::{Check, Status};

const GROUP: &str = "GPUs";

/// How much memory is pinned as a trial.
const TRIAL: usize = 1 << 20;

pub(super) fn check() -> Vec<Check> {
    let availability = availability();
    let any = matches!(&availability, Availability::Found { devices, .. } if !devices.is_empty());
    let mut checks = found(availability);
    if any {
        checks.push(pinned(PinnedStorage::new(TRIAL).map(drop)));
    }
    let locked = match getrlimit(Resource::Memlock).current {
        None => "no limit".to_owned(),
        Some(limit) => {
            format!("{} (RLIMIT_MEMLOCK; the driver does not count what it pins)", size::bytes(limit))
        }
    };
    checks.push(Check::fact(GROUP, "locked memory", locked));
    checks
}

/// Whether memory could be pinned, and how much there is.
fn pinned(trial: towline::Result<()>) -> Check {
    const NAME: &str = "pinned memory";
    match trial {
        Ok(()) => {
            let most = meminfo("MemAvailable").map(size::bytes).unwrap_or_else(|| "unknown".to_owned());
            let found = format!("{} taken as a trial; at most what is available: {most}", size::bytes(TRIAL as u64));
            Check::new(GROUP, NAME, Status::Ok, found)
        }
        Err(error) => Check::new(GROUP, NAME, Status::Missing, error.to_string())
            .mend("host memory moves to and from GPUs through pinned memory: raise the memory limit of this process"),
    }
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
            let none = devices.is_empty().then(|| {
                Check::new(GROUP, "devices", Status::Note, "the driver shows none to this process")
                    .mend("CUDA_VISIBLE_DEVICES hides them, or the container was started without them")
            });
            let count = devices.len();
            std::iter::once(driver)
                .chain(none)
                .chain(devices.iter().flat_map(|gpu| device(gpu, count)))
                .collect()
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

fn device(gpu: &DeviceFacts, count: usize) -> Vec<Check> {
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
    let label = format!("{name} reaches");
    if !gpu.reaches.is_empty() {
        let peers: Vec<_> = gpu.reaches.iter().map(|peer| format!("GPU {peer}")).collect();
        checks.push(Check::new(GROUP, label, Status::Ok, peers.join(", ")));
    } else if count > 1 {
        let found = "no other GPU's memory directly";
        checks.push(Check::new(GROUP, label, Status::Note, found).mend("nvidia-smi topo -p2p r shows why"));
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
    fn memory_that_cannot_be_pinned_is_shown_with_the_reason() {
        let refused =
            towline::Error::new(towline::Kind::Exhausted, "pin memory", "cuMemHostAlloc returned 2");
        let check = pinned(Err(refused));
        assert_eq!(check.status, Status::Missing);
        assert!(check.found.contains("cuMemHostAlloc returned 2") && check.mend.is_some());
        assert_eq!(pinned(Ok(())).status, Status::Ok);
    }

    #[test]
    fn a_driver_without_devices_says_so() {
        let driver = Availability::Found {
            path: "/x/libcuda.so.1".into(),
            origin: "the loader's path".into(),
            version: "13.0".into(),
            fake: false,
            devices: Vec::new(),
        };
        let checks = found(driver);
        assert_eq!((checks[0].status, checks[1].status), (Status::Ok, Status::Note));
        assert!(checks[1].found.contains("none"), "{:?}", checks[1]);
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
