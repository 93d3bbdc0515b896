//! What the passive side hands to the active one, by a channel of the application's choice.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::envelope::{Envelope, MAX_DESCRIPTORS, MAX_TEXT};
use super::{Device, OperationKind};
use crate::{Error, Result};

/// The longest JSON text that is read: the longest `nixl_metadata`, and as much again as its descriptors can take.
const MAX_JSON: usize = MAX_TEXT + MAX_DESCRIPTORS * 256 + (4 << 10);

const OP: &str = "metadata";

/// One descriptor of the passive side, as the active side sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerializedDescriptor {
    /// Where the memory lives.
    pub device: Device,
    /// A number that names the memory. It is not an address and is never used as one; it is never 0.
    pub ptr: u64,
    /// How many bytes are offered.
    pub size: u64,
}

/// All that an active operation needs to know about its passive one.
///
/// In JSON it has exactly the four keys of its fields. It is a capability: a peer that has it can claim the operation,
/// so it belongs to the peer and in no log ([`Debug`](fmt::Debug) leaves the secret part out).
///
/// ```
/// use towline::connect::{Connector, Descriptor, RdmaMetadata};
/// use towline::SharedStorage;
/// let connector = Connector::new()?;
/// let readable = connector.create_readable(Descriptor::new(SharedStorage::new(4096)?))?;
/// let metadata = readable.metadata()?;
/// assert_eq!(RdmaMetadata::from_json(&metadata.to_json()?)?, metadata);
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RdmaMetadata {
    /// The memory that is offered: at most 1024 parts.
    #[serde(deserialize_with = "few_descriptors")]
    pub descriptors: Vec<SerializedDescriptor>,
    /// The operation and the tickets of its memory: opaque.
    pub nixl_metadata: String,
    /// The operation's number as a UUID. The operation is found by `nixl_metadata`; this is for logs.
    pub notification_key: String,
    /// What the active side has to do.
    pub operation_kind: OperationKind,
}

impl RdmaMetadata {
    /// Reads the JSON form; any text gives metadata or an error, and a long one an error at once.
    pub fn from_json(text: &str) -> Result<RdmaMetadata> {
        if text.len() > MAX_JSON {
            let message = format!("the metadata has {} bytes; at most {MAX_JSON} are read", text.len());
            return Err(Error::protocol(OP, message));
        }
        let metadata: RdmaMetadata = serde_json::from_str(text)
            .map_err(|error| Error::protocol(OP, format!("not the metadata of an operation: {error}")))?;
        metadata.check()?;
        Ok(metadata)
    }

    /// Writes the JSON form.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::invalid(OP, error.to_string()))
    }

    /// The name of the endpoint whose operation a [`nixl_metadata`](Self::nixl_metadata) names. What was not made by this
    /// library gives the error that beginning an operation with it would give.
    pub fn owner(nixl_metadata: &str) -> Result<String> {
        let envelope = Envelope::from_text(nixl_metadata)?;
        let first = envelope.tickets.first();
        Ok(first.map(|ticket| ticket.body().identity.name.clone()).unwrap_or_default())
    }

    /// Refuses what no passive operation says.
    pub(super) fn check(&self) -> Result<()> {
        if self.operation_kind == OperationKind::Unspecified {
            return Err(Error::protocol(OP, "operation_kind is neither 1 (read) nor 2 (write)"));
        }
        if self.descriptors.is_empty() {
            return Err(Error::invalid(OP, "the metadata names no descriptors"));
        }
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(Error::protocol(OP, too_many(self.descriptors.len())));
        }
        if self.notification_key.is_empty() || self.notification_key.len() > 256 {
            return Err(Error::protocol(OP, "notification_key has not 1 to 256 bytes"));
        }
        let mut total = 0u64;
        for (index, one) in self.descriptors.iter().enumerate() {
            if one.ptr == 0 {
                return Err(Error::protocol(OP, format!("descriptor {index}: ptr is 0")));
            }
            if one.size == 0 {
                return Err(Error::protocol(OP, format!("descriptor {index}: size is 0")));
            }
            total = total
                .checked_add(one.size)
                .filter(|total| *total <= i64::MAX as u64)
                .ok_or_else(|| Error::protocol(OP, "the sizes of the descriptors overflow"))?;
        }
        Ok(())
    }

    /// Opens what is opaque, and checks it against what is not.
    pub(super) fn open(&self) -> Result<Envelope> {
        self.check()?;
        let envelope = Envelope::from_text(&self.nixl_metadata)?;
        if envelope.tickets.len() != self.descriptors.len() {
            let message = format!(
                "{} descriptors come with the tickets of {}",
                self.descriptors.len(),
                envelope.tickets.len()
            );
            return Err(Error::protocol(OP, message));
        }
        for (index, (one, ticket)) in self.descriptors.iter().zip(&envelope.tickets).enumerate() {
            let (offered, right) = match ticket.layout() {
                Some(layout) => {
                    if self.operation_kind != OperationKind::Read {
                        let message =
                            format!("descriptor {index}: its ticket has a layout, and is not for a read");
                        return Err(Error::protocol(OP, message));
                    }
                    let packed = layout
                        .packed_len()
                        .map_err(|error| Error::protocol(OP, error.message().to_owned()))?;
                    (packed, one.size <= packed)
                }
                None => (ticket.length(), one.size == ticket.length()),
            };
            if !right {
                let message = format!("descriptor {index}: size is {}, and its ticket's {offered}", one.size);
                return Err(Error::protocol(OP, message));
            }
            let place = Device::from(ticket.body().place);
            if one.device != place {
                let message =
                    format!("descriptor {index}: device is {}, and its ticket's {place}", one.device);
                return Err(Error::protocol(OP, message));
            }
        }
        Ok(envelope)
    }
}

impl fmt::Debug for RdmaMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaMetadata")
            .field("descriptors", &self.descriptors)
            .field("nixl_metadata", &format_args!("({} bytes)", self.nixl_metadata.len()))
            .field("notification_key", &self.notification_key)
            .field("operation_kind", &self.operation_kind)
            .finish()
    }
}

fn too_many(count: usize) -> String {
    format!("{count} descriptors; an operation has at most {MAX_DESCRIPTORS}")
}

/// Reads descriptors and stops at the first one too many.
fn few_descriptors<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SerializedDescriptor>, D::Error> {
    struct Few;

    impl<'de> Visitor<'de> for Few {
        type Value = Vec<SerializedDescriptor>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_DESCRIPTORS} descriptors")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut descriptors = Vec::new();
            while let Some(descriptor) = list.next_element()? {
                if descriptors.len() == MAX_DESCRIPTORS {
                    return Err(serde::de::Error::custom(too_many(MAX_DESCRIPTORS + 1)));
                }
                descriptors.push(descriptor);
            }
            Ok(descriptors)
        }
    }

    deserializer.deserialize_seq(Few)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;
    use crate::connect::DeviceKind;
    use proptest::prelude::*;

    fn metadata() -> RdmaMetadata {
        RdmaMetadata {
            descriptors: vec![
                SerializedDescriptor { device: Device::HOST, ptr: 17, size: 4096 },
                SerializedDescriptor { device: Device::new(DeviceKind::Cuda, 1), ptr: 18, size: 1 },
            ],
            nixl_metadata: "b64:AAAA".into(),
            notification_key: "9b0f8a52-6c1c-4f8e-9d5d-1f6f3a7f2f10".into(),
            operation_kind: OperationKind::Read,
        }
    }

    const JSON: &str = r#"{"descriptors":[{"device":"cpu","ptr":17,"size":4096},{"device":"cuda:1","ptr":18,"size":1}],"nixl_metadata":"b64:AAAA","notification_key":"9b0f8a52-6c1c-4f8e-9d5d-1f6f3a7f2f10","operation_kind":1}"#;

    #[test]
    fn json_has_exactly_the_four_keys() {
        assert_eq!(metadata().to_json().unwrap(), JSON);
        assert_eq!(RdmaMetadata::from_json(JSON).unwrap(), metadata());
        assert_eq!(serde_json::from_str::<RdmaMetadata>(JSON).unwrap(), metadata());
    }

    #[test]
    fn other_json_is_refused() {
        for (from, to) in [
            ("{\"descriptors\"", "{\"extra\":1,\"descriptors\""),
            ("\"device\":\"cpu\"", "\"device\":\"cpu\",\"more\":1"),
            ("\"operation_kind\":1", "\"operation_kind\":3"),
            ("\"operation_kind\":1", "\"operation_kind\":0"),
            ("\"operation_kind\":1", "\"operation_kind\":\"READ\""),
            (",\"operation_kind\":1", ""),
            (",\"operation_kind\":1", ",\"operation_kind\":1,\"operation_kind\":2"),
            ("\"ptr\":17", "\"ptr\":0"),
            ("\"ptr\":17", "\"ptr\":-1"),
            ("\"ptr\":17", "\"ptr\":18446744073709551616"),
            ("\"ptr\":17", "\"ptr\":1e3"),
            ("\"size\":4096", "\"size\":-4096"),
            ("\"size\":4096", "\"size\":0"),
            ("\"size\":4096", "\"size\":18446744073709551615"),
            ("\"size\":4096", "\"size\":9223372036854775807"),
            ("\"cpu\"", "\"host\""),
            ("\"cpu\"", "\"cudafoo\""),
            ("\"cpu\"", "7"),
            ("\"b64:AAAA\"", "null"),
            ("\"9b0f8a52-6c1c-4f8e-9d5d-1f6f3a7f2f10\"", "\"\""),
        ] {
            let text = JSON.replacen(from, to, 1);
            assert_ne!(text, JSON, "{from}");
            let error = RdmaMetadata::from_json(&text).unwrap_err();
            assert_eq!(error.kind(), Kind::Protocol, "{to}: {error}");
        }
        for text in ["", "null", "[]", "{}", "\"metadata\"", "{", "\u{0}"] {
            assert_eq!(RdmaMetadata::from_json(text).unwrap_err().kind(), Kind::Protocol, "{text:?}");
        }
        let empty = RdmaMetadata { descriptors: Vec::new(), ..metadata() };
        assert_eq!(RdmaMetadata::from_json(&empty.to_json().unwrap()).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn megabytes_and_thousands_of_descriptors_are_refused_early() {
        let long = format!("\"{}\"", "a".repeat(MAX_JSON));
        assert!(RdmaMetadata::from_json(&long).unwrap_err().message().contains("at most"));
        let mut many = metadata();
        many.descriptors = vec![many.descriptors[0]; MAX_DESCRIPTORS + 1];
        let error = RdmaMetadata::from_json(&many.to_json().unwrap()).unwrap_err();
        assert!(error.message().contains("at most 1024"), "{error}");
        assert_eq!(many.check().unwrap_err().kind(), Kind::Protocol);
        many.descriptors.pop();
        many.check().unwrap();
    }

    #[test]
    fn the_owner_is_named_and_what_is_not_ours_is_refused() {
        let connector = crate::connect::Connector::named("owner").unwrap();
        let storage = crate::SystemStorage::new(64).unwrap();
        let readable = connector.create_readable(crate::connect::Descriptor::new(storage)).unwrap();
        for metadata in [readable.metadata().unwrap(), readable.metadata_in_hex().unwrap()] {
            assert_eq!(RdmaMetadata::owner(&metadata.nixl_metadata).unwrap(), "owner");
        }
        assert_eq!(RdmaMetadata::owner("").unwrap_err().kind(), Kind::Invalid);
        assert_eq!(RdmaMetadata::owner("00").unwrap_err().kind(), Kind::Protocol);
        assert_eq!(RdmaMetadata::owner("b64:eJw=").unwrap_err().kind(), Kind::Unsupported);
    }

    #[test]
    fn the_secret_part_is_not_shown() {
        assert!(!format!("{:?}", metadata()).contains("AAAA"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_text_panics(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            noise in ".{0,60}",
        ) {
            let mut bytes = JSON.as_bytes().to_vec();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            for text in [String::from_utf8_lossy(&bytes).into_owned(), noise] {
                if let Ok(metadata) = RdmaMetadata::from_json(&text) {
                    prop_assert_eq!(RdmaMetadata::from_json(&metadata.to_json().unwrap()).unwrap(), metadata);
                }
            }
        }
    }
}
