//! What tests of Towline share: laws, oracle, processes.

pub mod raw;
