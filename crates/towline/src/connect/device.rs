//! Where a descriptor's memory lives, in the words of the operations API.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::memory::Place;
use crate::{Error, Result};

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum DeviceKind {
    /// None that this interface names.
    #[default]
    Unspecified = 0,
    /// Memory of the host.
    Host = 1,
    /// A GPU that is reached by CUDA.
    Cuda = 2,
    /// An Intel GPU.
    Xpu = 3,
}

impl DeviceKind {
    /// Every kind, by number.
    pub const ALL: [DeviceKind; 4] =
        [DeviceKind::Unspecified, DeviceKind::Host, DeviceKind::Cuda, DeviceKind::Xpu];

    /// The kind's number.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind with that number.
    pub fn from_code(code: u8) -> Option<DeviceKind> {
        DeviceKind::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// NIXL's word for the memory of such a device.
    pub fn nixl_mem_type(self) -> &'static str {
        if self == DeviceKind::Host { "DRAM" } else { "VRAM" }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DeviceKind::Unspecified => "<invalid>",
            DeviceKind::Host => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Xpu => "xpu",
        })
    }
}

/// A device: its kind, and its number among those of its kind.
///
/// ```
/// use towline::connect::{Device, DeviceKind};
/// let device: Device = "cuda:3".parse()?;
/// assert_eq!((device.kind(), device.id()), (DeviceKind::Cuda, 3));
/// assert_eq!(device.to_string(), "cuda:3");
/// assert_eq!("gpu".parse::<Device>()?.to_string(), "cuda:0");
/// assert_eq!("host".parse::<Device>()?, Device::HOST);
/// assert!("cudafoo".parse::<Device>().is_err());
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    kind: DeviceKind,
    id: u32,
}

impl Device {
    /// The host.
    pub const HOST: Device = Device { kind: DeviceKind::Host, id: 0 };

    /// The device of that kind with that number; the host has only one.
    pub const fn new(kind: DeviceKind, id: u32) -> Device {
        match kind {
            DeviceKind::Host => Device::HOST,
            _ => Device { kind, id },
        }
    }

    /// What it is.
    pub const fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Which one of its kind.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Reads the form in which metadata names a device: `cpu`, `cuda:N`, `xpu:N`.
    pub(super) fn from_metadata(text: &str) -> Result<Device> {
        let device: Device = text.parse()?;
        let lower = text.trim().to_ascii_lowercase();
        let canonical = match device.kind {
            DeviceKind::Host => lower == "cpu",
            kind => lower.split(':').next() == Some(kind.to_string().as_str()),
        };
        if canonical { Ok(device) } else { Err(unknown(text)) }
    }
}

impl From<Place> for Device {
    fn from(place: Place) -> Device {
        match place {
            Place::Host => Device::HOST,
            Place::Cuda(id) => Device::new(DeviceKind::Cuda, id),
            Place::Disk => Device::new(DeviceKind::Unspecified, 0),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Cuda | DeviceKind::Xpu => write!(f, "{}:{}", self.kind, self.id),
            DeviceKind::Host | DeviceKind::Unspecified => self.kind.fmt(f),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Takes `cuda`, `gpu`, `xpu`, `cpu` and `host`, each with or without `:N`; case and space around it do not matter.
    fn from_str(text: &str) -> Result<Device> {
        if text.len() > 64 {
            return Err(Error::invalid("device", "the name of a device is longer than 64 bytes"));
        }
        let lower = text.trim().to_ascii_lowercase();
        let (name, id) = match lower.split_once(':') {
            None => (lower.as_str(), 0),
            Some((name, id)) if !id.is_empty() && id.bytes().all(|digit| digit.is_ascii_digit()) => {
                (name, id.parse().map_err(|_| unknown(text))?)
            }
            Some(_) => return Err(unknown(text)),
        };
        let kind = match name {
            "cuda" | "gpu" => DeviceKind::Cuda,
            "xpu" => DeviceKind::Xpu,
            "cpu" | "host" => DeviceKind::Host,
            _ => return Err(unknown(text)),
        };
        Ok(Device::new(kind, id))
    }
}

fn unknown(text: &str) -> Error {
    let shown: String = text.chars().take(64).collect();
    Error::invalid("device", format!("{shown:?} is not a device: use cpu, cuda:N or xpu:N"))
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Device {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Device, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Device::from_metadata(&text).map_err(|error| serde::de::Error::custom(error.message()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;

    #[test]
    fn kinds_keep_their_numbers_and_words() {
        let all: Vec<_> = DeviceKind::ALL
            .iter()
            .map(|kind| (kind.code(), kind.to_string(), kind.nixl_mem_type()))
            .collect();
        let expected =
            [(0, "<invalid>", "VRAM"), (1, "cpu", "DRAM"), (2, "cuda", "VRAM"), (3, "xpu", "VRAM")];
        assert_eq!(all, expected.map(|(code, name, memory)| (code, name.to_owned(), memory)));
        assert_eq!(DeviceKind::from_code(2), Some(DeviceKind::Cuda));
        assert_eq!(DeviceKind::from_code(4), None);
    }

    #[test]
    fn devices_are_named_in_the_ways_that_users_know() {
        for (text, kind, id, shown) in [
            ("cuda", DeviceKind::Cuda, 0, "cuda:0"),
            (" CUDA:1 ", DeviceKind::Cuda, 1, "cuda:1"),
            ("gpu:2", DeviceKind::Cuda, 2, "cuda:2"),
            ("xpu", DeviceKind::Xpu, 0, "xpu:0"),
            ("xpu:4294967295", DeviceKind::Xpu, u32::MAX, "xpu:4294967295"),
            ("cpu", DeviceKind::Host, 0, "cpu"),
            ("cpu:5", DeviceKind::Host, 0, "cpu"),
            ("Host", DeviceKind::Host, 0, "cpu"),
        ] {
            let device: Device = text.parse().unwrap();
            assert_eq!(
                (device.kind(), device.id(), device.to_string().as_str()),
                (kind, id, shown),
                "{text}"
            );
        }
    }

    #[test]
    fn what_names_no_device_is_invalid_and_shown() {
        let long = "x".repeat(65);
        for text in [
            "",
            "meta",
            "mps",
            "cudafoo",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:+1",
            "cuda: 1",
            "cuda:1:2",
            "cpu0",
            "xpu:4294967296",
            &long,
        ] {
            let error = text.parse::<Device>().unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{text}");
        }
        assert!("mps".parse::<Device>().unwrap_err().message().contains("\"mps\""));
    }

    #[test]
    fn metadata_takes_the_canonical_names_only() {
        for good in ["cpu", "cuda", "cuda:3", "xpu:0", " CPU "] {
            assert!(Device::from_metadata(good).is_ok(), "{good}");
        }
        for bad in ["gpu:0", "gpu", "host", "cpu:0", "cudax", "<invalid>", ""] {
            assert!(Device::from_metadata(bad).is_err(), "{bad}");
        }
    }
}
