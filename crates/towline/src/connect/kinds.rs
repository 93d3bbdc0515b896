//! What an operation does, and how far it is.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Kind, Result};

/// What the active side of an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum OperationKind {
    /// Nothing: no operation has this kind.
    #[default]
    Unspecified = 0,
    /// It reads the memory of the passive side.
    Read = 1,
    /// It writes the memory of the passive side.
    Write = 2,
}

impl OperationKind {
    /// Every kind, by number.
    pub const ALL: [OperationKind; 3] =
        [OperationKind::Unspecified, OperationKind::Read, OperationKind::Write];

    /// The kind's number.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind with that number.
    pub fn from_code(code: u8) -> Option<OperationKind> {
        OperationKind::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            OperationKind::Unspecified => "<invalid>",
            OperationKind::Read => "READ",
            OperationKind::Write => "WRITE",
        })
    }
}

impl Serialize for OperationKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.code())
    }
}

impl<'de> Deserialize<'de> for OperationKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<OperationKind, D::Error> {
        let code = u8::deserialize(deserializer)?;
        OperationKind::from_code(code).filter(|kind| *kind != OperationKind::Unspecified).ok_or_else(|| {
            serde::de::Error::custom(format!("{code} is not a kind of operation: 1 reads, 2 writes"))
        })
    }
}

/// How far an operation is. The last three are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum OperationStatus {
    /// There is no operation yet.
    #[default]
    Uninitialized = 0,
    /// It waits for a peer to claim it.
    Initialized = 1,
    /// Bytes are moving, or are about to.
    InProgress = 2,
    /// All bytes were moved.
    Complete = 3,
    /// One of the two sides has cancelled it.
    Cancelled = 4,
    /// It failed; its error says why.
    Errored = 5,
}

impl OperationStatus {
    /// Every status, by number.
    pub const ALL: [OperationStatus; 6] = [
        OperationStatus::Uninitialized,
        OperationStatus::Initialized,
        OperationStatus::InProgress,
        OperationStatus::Complete,
        OperationStatus::Cancelled,
        OperationStatus::Errored,
    ];

    /// The status's number.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The status with that number.
    pub fn from_code(code: u8) -> Option<OperationStatus> {
        OperationStatus::ALL.into_iter().find(|status| status.code() == code)
    }

    /// Whether it stays like this.
    pub fn is_final(self) -> bool {
        matches!(self, OperationStatus::Complete | OperationStatus::Cancelled | OperationStatus::Errored)
    }

    /// The status of what has ended like that.
    pub(super) fn of(result: &Result<(), Error>) -> OperationStatus {
        match result {
            Ok(()) => OperationStatus::Complete,
            Err(error) if error.kind() == Kind::Canceled => OperationStatus::Cancelled,
            Err(_) => OperationStatus::Errored,
        }
    }
}

impl fmt::Display for OperationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            OperationStatus::Uninitialized => "<invalid>",
            OperationStatus::Initialized => "INIT",
            OperationStatus::InProgress => "PROC",
            OperationStatus::Complete => "DONE",
            OperationStatus::Cancelled => "STOP",
            OperationStatus::Errored => "ERR",
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn kinds_and_states_keep_their_numbers_and_words() {
        let kinds = OperationKind::ALL.map(|kind| (kind.code(), kind.to_string()));
        assert_eq!(kinds, [(0, "<invalid>"), (1, "READ"), (2, "WRITE")].map(|(a, b)| (a, b.to_owned())));
        let states = OperationStatus::ALL.map(|status| (status.code(), status.to_string()));
        let expected = [(0, "<invalid>"), (1, "INIT"), (2, "PROC"), (3, "DONE"), (4, "STOP"), (5, "ERR")];
        assert_eq!(states, expected.map(|(a, b)| (a, b.to_owned())));
        assert_eq!(OperationKind::from_code(3), None);
        assert_eq!(OperationStatus::from_code(5), Some(OperationStatus::Errored));
        let last: Vec<_> = OperationStatus::ALL.into_iter().filter(|status| status.is_final()).collect();
        assert_eq!(last.len(), 3);
    }

    #[test]
    fn a_kind_is_a_number_in_json() {
        assert_eq!(serde_json::to_string(&OperationKind::Write).unwrap(), "2");
        for bad in ["0", "3", "-1", "256", "\"READ\"", "1.5", "null", "true"] {
            assert!(serde_json::from_str::<OperationKind>(bad).is_err(), "{bad}");
        }
    }
}
