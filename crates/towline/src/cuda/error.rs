//! What the driver said, with the kind that says what the caller can do about it.

use towline_sys::cuda::code;

use crate::{Error, Kind};

/// The error of an operation in which the driver refused.
pub(crate) fn failed(op: &'static str, error: towline_sys::Error) -> Error {
    let kind = match &error {
        error if error.is_unavailable() => Kind::Unavailable,
        towline_sys::Error::Refused { call: "cuInit", .. }
        | towline_sys::Error::Argument { call: "cuDriverGetVersion", .. } => Kind::Unavailable,
        towline_sys::Error::Argument { .. } => Kind::Invalid,
        towline_sys::Error::Refused { code, .. } => kind_of(*code),
        _ => Kind::Native,
    };
    let lost = matches!(&error, towline_sys::Error::Refused { code, .. } if code::context_lost(*code));
    let message = if lost {
        format!("{error}: the CUDA context of this process is lost, and stays so until the process ends")
    } else {
        error.to_string()
    };
    Error::new(kind, op, message).caused_by(error)
}

/// Says that something was not given back, where that means something: with a driver that is shut down, at the end of the process,
/// it is gone already.
pub(crate) fn not_given_back(what: &'static str, error: &Error) {
    if error.kind() == Kind::Unavailable {
        tracing::debug!(%error, "{what} went with the driver");
    } else {
        tracing::error!(%error, "{what} could not be given back");
    }
}

fn kind_of(code: i32) -> Kind {
    match code {
        code::INVALID_VALUE | code::INVALID_DEVICE => Kind::Invalid,
        code::OUT_OF_MEMORY => Kind::Exhausted,
        code::NOT_INITIALIZED | code::DEINITIALIZED | code::STUB_LIBRARY | code::NO_DEVICE => {
            Kind::Unavailable
        }
        code::NOT_PERMITTED => Kind::PermissionDenied,
        code::NOT_SUPPORTED => Kind::Unsupported,
        _ => Kind::Native,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn kinds_tell_what_to_do_and_a_lost_context_is_said() {
        for (call, code, name, kind) in [
            ("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", Kind::Exhausted),
            ("cuInit", 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", Kind::Unavailable),
            ("cuIpcGetMemHandle", 801, "CUDA_ERROR_NOT_SUPPORTED", Kind::Unsupported),
            ("cuEventQuery", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", Kind::Native),
        ] {
            let error = failed("allocate", towline_sys::Error::Refused { call, code, name });
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.message().contains("context of this process is lost"), code == 700);
            assert!(error.message().starts_with(&format!("{call} returned {code} ({name})")));
        }
    }
}
