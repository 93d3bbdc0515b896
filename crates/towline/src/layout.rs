//! Blocks by index.
