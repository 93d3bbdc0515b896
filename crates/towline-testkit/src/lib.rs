//! What tests of Towline share: laws, oracle, processes.
