//! Storages.
