//! What NCCL said, with the kind that says what the caller can do about it.

use towline_sys::nccl::{Nccl, code};

use crate::{Error, Kind};

/// The error of an operation in which NCCL refused; with what it said about it.
pub(crate) fn failed(op: &'static str, nccl: Option<&Nccl>, error: towline_sys::Error) -> Error {
    let kind = match &error {
        towline_sys::Error::NotLoaded(_) => Kind::Unavailable,
        towline_sys::Error::TooOld { .. } | towline_sys::Error::Lacks { .. } => Kind::Unsupported,
        towline_sys::Error::Argument { .. } => Kind::Invalid,
        towline_sys::Error::Refused { code, .. } => kind_of(*code),
        _ => Kind::Native,
    };
    let said = match (&error, nccl) {
        (towline_sys::Error::Refused { .. }, Some(nccl)) => nccl.last_words(),
        _ => String::new(),
    };
    let message = if said.is_empty() { error.to_string() } else { format!("{error}: {said}") };
    Error::new(kind, op, message).caused_by(error)
}

fn kind_of(code: i32) -> Kind {
    match code {
        code::INVALID_ARGUMENT | code::INVALID_USAGE => Kind::Invalid,
        code::REMOTE => Kind::Disconnected,
        code::TIMEOUT => Kind::Timeout,
        code::INTERNAL => Kind::Internal,
        _ => Kind::Native,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn kinds_tell_what_to_do() {
        for (code, name, kind) in [
            (4, "ncclInvalidArgument", Kind::Invalid),
            (5, "ncclInvalidUsage", Kind::Invalid),
            (6, "ncclRemoteError", Kind::Disconnected),
            (1, "ncclUnhandledCudaError", Kind::Native),
        ] {
            let error = failed("x", None, towline_sys::Error::Refused { call: "ncclSend", code, name });
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.message(), format!("ncclSend returned {code} ({name})"));
        }
        let since = "NCCL 2.29.2".to_owned();
        let old = towline_sys::Error::TooOld { library: "NCCL 2.28.9".into(), symbol: "ncclSignal", since };
        let error = failed("signal", None, old);
        assert_eq!(error.kind(), Kind::Unsupported);
        assert_eq!(error.message(), "NCCL 2.28.9 has no function ncclSignal: it came with NCCL 2.29.2");
    }
}
