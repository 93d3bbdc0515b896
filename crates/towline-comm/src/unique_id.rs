//! The id of a meeting: where it takes place and the secret that lets a rank in.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use towline::crypto::sha256;

use crate::{Error, Result};

/// How many bytes an id has.
pub const UNIQUE_ID_LEN: usize = 128;

const MAGIC: [u8; 4] = *b"TLid";
const VERSION: u8 = 1;
/// The most addresses that an id carries.
pub(crate) const MOST_ADDRESSES: usize = 3;
const ADDRESS_LEN: usize = 19;
const TLS: usize = 6;
const SECRET: std::ops::Range<usize> = 8..40;
const NONCE: std::ops::Range<usize> = 40..56;
const ADDRESSES: usize = 56;
const CHECKSUM: usize = UNIQUE_ID_LEN - 8;

/// The id of a meeting: 128 bytes that carry where it takes place and the secret that lets a rank in.
///
/// Everyone who has it can join: hand it to the ranks by a channel that you trust. It prints as text and reads back from
/// it. An id serves one meeting.
///
/// ```
/// use towline_comm::{UniqueId, get_unique_id};
/// let id = get_unique_id()?;
/// let text = id.to_string();
/// assert_eq!(text.parse::<UniqueId>()?.as_bytes(), id.as_bytes());
/// assert!("something else".parse::<UniqueId>().is_err());
/// # Ok::<(), towline_comm::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; UNIQUE_ID_LEN]);

/// Makes an id of NCCL's, for a group on GPUs; NCCL in any program takes it. This process must live until every rank has
/// joined.
///
/// # Errors
/// `Unavailable` where there is no NCCL, with the places tried.
pub fn get_nccl_unique_id() -> Result<UniqueId> {
    Ok(UniqueId(towline::nccl::unique_id()?))
}

impl UniqueId {
    /// The id of a meeting at those addresses, with the secret and the name that the random bytes are.
    pub(crate) fn compose(random: &[u8; 48], addresses: &[SocketAddr], tls: bool) -> Result<UniqueId> {
        if addresses.len() > MOST_ADDRESSES {
            let most = MOST_ADDRESSES;
            return Err(Error::invalid("get_unique_id", format!("an id carries at most {most} addresses")));
        }
        let mut bytes = [0; UNIQUE_ID_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = addresses.len() as u8;
        bytes[TLS] = u8::from(tls);
        bytes[SECRET].copy_from_slice(&random[..32]);
        bytes[NONCE].copy_from_slice(&random[32..]);
        for (slot, address) in bytes[ADDRESSES..].chunks_exact_mut(ADDRESS_LEN).zip(addresses) {
            let (family, ip) = match address.ip() {
                IpAddr::V4(ip) => (4, ip.to_ipv6_mapped()),
                IpAddr::V6(ip) => (6, ip),
            };
            slot[0] = family;
            slot[1..17].copy_from_slice(&ip.octets());
            slot[17..].copy_from_slice(&address.port().to_be_bytes());
        }
        let sum = checksum(&bytes);
        bytes[CHECKSUM..].copy_from_slice(&sum);
        Ok(UniqueId(bytes))
    }

    /// Takes the bytes of an id.
    ///
    /// # Errors
    /// `Invalid` where they are not those of an id, were damaged, or come from another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<UniqueId> {
        let refuse = |why: String| Err(Error::invalid("unique_id", why));
        let Ok(bytes) = <[u8; UNIQUE_ID_LEN]>::try_from(bytes) else {
            return refuse(format!("an id has {UNIQUE_ID_LEN} bytes, not {}", bytes.len()));
        };
        if bytes[..4] != MAGIC && names_a_socket(&bytes) {
            return Ok(UniqueId(bytes));
        }
        if bytes[..4] != MAGIC {
            return refuse("these bytes are not an id".into());
        }
        if bytes[4] != VERSION {
            return refuse(format!("the id is of version {}, this is version {VERSION}", bytes[4]));
        }
        if bytes[CHECKSUM..] != checksum(&bytes) {
            return refuse("the id is damaged: its checksum does not fit".into());
        }
        if usize::from(bytes[5]) > MOST_ADDRESSES {
            return refuse("the id names too many addresses".into());
        }
        if bytes[TLS] > 1 || bytes[TLS + 1] != 0 {
            return refuse("the id needs a feature that this version does not have".into());
        }
        Ok(UniqueId(bytes))
    }

    /// Takes an id of NCCL's, for a group on GPUs.
    pub fn from_nccl(bytes: [u8; UNIQUE_ID_LEN]) -> UniqueId {
        UniqueId(bytes)
    }

    /// Whether it is one of NCCL's, for a group on GPUs.
    pub fn is_nccl(&self) -> bool {
        self.0[..4] != MAGIC
    }

    /// The bytes of the id.
    pub fn as_bytes(&self) -> &[u8; UNIQUE_ID_LEN] {
        &self.0
    }

    /// Whether ranks of other hosts come through TLS.
    pub(crate) fn tls(&self) -> bool {
        self.0[TLS] != 0
    }

    pub(crate) fn secret(&self) -> &[u8] {
        &self.0[SECRET]
    }

    /// The name of the meeting.
    pub(crate) fn nonce(&self) -> &[u8; 16] {
        self.0[NONCE].first_chunk().unwrap_or(&[0; 16])
    }

    /// Where the meeting takes place.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let count = usize::from(self.0[5]);
        let slots = self.0[ADDRESSES..CHECKSUM].chunks_exact(ADDRESS_LEN).take(count);
        slots
            .filter_map(|slot| {
                let ip = Ipv6Addr::from(*slot[1..17].first_chunk::<16>()?);
                let port = u16::from_be_bytes([slot[17], slot[18]]);
                let ip = if slot[0] == 4 { IpAddr::V4(ip.to_ipv4_mapped()?) } else { IpAddr::V6(ip) };
                Some(SocketAddr::new(ip, port))
            })
            .collect()
    }

    /// The abstract Unix socket of the meeting, for ranks on the same host.
    pub(crate) fn socket_name(&self) -> String {
        format!("towline-meeting-{}", HEXLOWER.encode(self.nonce()))
    }
}

/// Whether bytes are like an id of NCCL's: a random number, then the address of a socket.
fn names_a_socket(bytes: &[u8; UNIQUE_ID_LEN]) -> bool {
    // The families of IPv4 and IPv6 on Linux.
    matches!(u16::from_ne_bytes([bytes[8], bytes[9]]), 2 | 10)
}

fn checksum(bytes: &[u8; UNIQUE_ID_LEN]) -> [u8; 8] {
    let digest = sha256(&[&bytes[..CHECKSUM]]);
    let mut sum = [0; 8];
    sum.copy_from_slice(&digest[..8]);
    sum
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&BASE64URL_NOPAD.encode(&self.0))
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_nccl() {
            return f.write_str("UniqueId(of NCCL's)");
        }
        // Without the secret: debug output ends up in logs.
        write!(f, "UniqueId({}, {:?})", HEXLOWER.encode(self.nonce()), self.addresses())
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<UniqueId> {
        let bytes = BASE64URL_NOPAD
            .decode(text.trim().as_bytes())
            .map_err(|error| Error::invalid("unique_id", format!("not the text of an id: {error}")))?;
        UniqueId::from_bytes(&bytes)
    }
}

impl Serialize for UniqueId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for UniqueId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<UniqueId, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error: Error| serde::de::Error::custom(error.message()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use towline::Kind;

    use super::*;

    fn sample() -> UniqueId {
        let addresses = ["10.1.2.3:4567".parse().unwrap(), "[fe80::1]:80".parse().unwrap()];
        UniqueId::compose(&std::array::from_fn(|index| index as u8), &addresses, false).unwrap()
    }

    #[test]
    fn an_id_survives_bytes_and_text_and_names_its_addresses() {
        let id = sample();
        assert_eq!(UniqueId::from_bytes(id.as_bytes()).unwrap(), id);
        assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
        assert_eq!(id.addresses(), ["10.1.2.3:4567".parse().unwrap(), "[fe80::1]:80".parse().unwrap()]);
    }

    #[test]
    fn a_changed_byte_anywhere_is_noticed() {
        let id = sample();
        for at in 0..UNIQUE_ID_LEN {
            let mut bytes = *id.as_bytes();
            bytes[at] ^= 0x40;
            assert_eq!(UniqueId::from_bytes(&bytes).unwrap_err().kind(), Kind::Invalid, "byte {at}");
        }
        assert!(UniqueId::from_bytes(&id.as_bytes()[..127]).is_err());
        assert!(UniqueId::from_bytes(&[0; UNIQUE_ID_LEN]).is_err());
    }

    #[test]
    fn debug_output_does_not_show_the_secret() {
        let id = sample();
        let secret = HEXLOWER.encode(id.secret());
        assert!(!format!("{id:?}").contains(&secret[..16]));
    }
}
