//! Whether there are GPUs here, and what they can do.

use std::path::{Path, PathBuf};

use towline_sys::cuda::{Attribute, Cuda, Device};
use towline_sys::loader::NotLoaded;

use super::failed;
use super::gpu::numa_node;
use crate::Result;

/// Whether the driver is there, and what it has; or all the places that were tried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// It is there.
    Found {
        /// The library that was loaded.
        path: PathBuf,
        /// Why it was looked for there.
        origin: String,
        /// The version of CUDA that it is made for, as `13.0`.
        version: String,
        /// Whether it is the test kit's fake, which has no GPU behind it.
        fake: bool,
        /// The devices that this process sees.
        devices: Vec<DeviceFacts>,
    },
    /// It is not there, or cannot be used.
    Missing {
        /// Every place that was tried, with the reason why it did not serve.
        tried: Vec<String>,
        /// What would mend it.
        mend: String,
    },
}

/// What a device says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// Its position among the devices that this process sees.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Where it sits, as `0000:1b:00.0`.
    pub bus: String,
    /// The number that names it in every process and container.
    pub uuid: Option<[u8; 16]>,
    /// The bytes of memory that it has.
    pub memory: u64,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Whether other processes can open its memory by handles.
    pub ipc: bool,
    /// Whether its memory can be handed over as file descriptors.
    pub descriptors: bool,
    /// Whether host memory can be registered with it.
    pub registers_host: bool,
    /// The devices whose memory it reaches directly.
    pub reaches: Vec<u32>,
    /// The NUMA node that it is near to, if the kernel says.
    pub numa_node: Option<u32>,
}

/// Looks for the driver and its devices. This makes no context on any of them.
///
/// [`SETTING`](super::SETTING) names one library, or says `off`; [`towline_sys::cuda`] lists the places.
pub fn availability() -> Availability {
    let found = Cuda::load().and_then(|cuda| {
        let version = cuda.init()?;
        let devices: Vec<Device> =
            (0..cuda.device_count()?).map(|ordinal| cuda.device(ordinal)).collect::<Result<_, _>>()?;
        Ok(Availability::Found {
            path: cuda.path().to_owned(),
            origin: cuda.origin().to_owned(),
            version: format!("{}.{}", version / 1000, version % 1000 / 10),
            fake: cuda.is_fake(),
            devices: devices.iter().map(|device| facts(device, &devices)).collect::<Result<_, _>>()?,
        })
    });
    found.unwrap_or_else(|error| match error {
        towline_sys::Error::NotLoaded(why) => {
            let NotLoaded { mend, attempts, .. } = *why;
            Availability::Missing { tried: attempts.iter().map(ToString::to_string).collect(), mend }
        }
        error => {
            let path = Cuda::load().map(|cuda| cuda.path().display().to_string()).unwrap_or_default();
            Availability::Missing { tried: vec![format!("{path}: {error}")], mend: String::new() }
        }
    })
}

/// Uses that library as the driver, for this whole process, as if [`SETTING`](super::SETTING) named it.
///
/// # Errors
/// `Unavailable` where it cannot be loaded; `Invalid` where another one is in use already.
pub fn load_driver(path: impl AsRef<Path>) -> Result<()> {
    Cuda::load_for_process(path).map(drop).map_err(|error| failed("load the CUDA driver", error))
}

fn facts(device: &Device, all: &[Device]) -> towline_sys::Result<DeviceFacts> {
    let number = |attribute| device.attribute(attribute).map(|value| u32::try_from(value).unwrap_or(0));
    let bus = device.bus()?;
    Ok(DeviceFacts {
        ordinal: device.ordinal(),
        name: device.name()?,
        uuid: device.uuid().ok(),
        memory: device.memory()?,
        capability: (number(Attribute::ComputeMajor)?, number(Attribute::ComputeMinor)?),
        ipc: device.can(Attribute::IpcEvents) && device.can(Attribute::UnifiedAddressing),
        descriptors: device.can(Attribute::VirtualMemory) && device.can(Attribute::PosixDescriptors),
        registers_host: device.can(Attribute::HostRegister),
        reaches: all
            .iter()
            .filter(|other| other.ordinal() != device.ordinal() && device.can_reach(other).unwrap_or(false))
            .map(Device::ordinal)
            .collect(),
        numa_node: numa_node(&bus),
        bus,
    })
}
