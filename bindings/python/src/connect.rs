//! The operations API: what `towline.connect` and `towline.nixl_connect` stand on.

pub(crate) mod connector;
pub(crate) mod descriptor;
pub(crate) mod metadata;
pub(crate) mod operation;
