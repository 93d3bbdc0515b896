//! An error that travels to a peer.

use crate::codec::{Reader, put_counted};
use crate::{Error, Kind, Result};

/// The longest message of an error on the wire, in bytes.
pub const MAX_ERROR: usize = 512;

/// An error as a peer receives it: its kind and what happened, without causes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireError {
    /// What the peer can do about it.
    pub kind: Kind,
    /// What happened; longer than 512 bytes is cut.
    pub message: String,
}

impl WireError {
    /// Turns it into the error of the operation that failed here.
    pub fn into_error(self, op: &'static str) -> Error {
        Error::new(self.kind, op, self.message)
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.push(self.kind.code());
        put_counted(out, cut(&self.message).as_bytes());
    }

    pub(super) fn take(reader: &mut Reader<'_>) -> Result<WireError> {
        let code = reader.u8()?;
        let kind = Kind::from_code(code);
        if kind.code() != code {
            return Err(reader.bad(format!("unknown kind of error {code}")));
        }
        Ok(WireError { kind, message: reader.text(MAX_ERROR)?.to_owned() })
    }

    pub(super) fn put_outcome<T>(
        out: &mut Vec<u8>,
        outcome: &Result<T, WireError>,
        put: impl FnOnce(&mut Vec<u8>, &T),
    ) {
        out.push(u8::from(outcome.is_err()));
        match outcome {
            Ok(value) => put(out, value),
            Err(error) => error.put(out),
        }
    }

    pub(super) fn take_outcome<'a, T>(
        reader: &mut Reader<'a>,
        take: impl FnOnce(&mut Reader<'a>) -> Result<T>,
    ) -> Result<Result<T, WireError>> {
        if reader.bool()? { WireError::take(reader).map(Err) } else { take(reader).map(Ok) }
    }
}

impl From<&Error> for WireError {
    fn from(error: &Error) -> WireError {
        WireError { kind: error.kind(), message: cut(error.message()).to_owned() }
    }
}

fn cut(message: &str) -> &str {
    let mut end = message.len().min(MAX_ERROR);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}
