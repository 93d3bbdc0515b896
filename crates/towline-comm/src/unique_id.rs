//! The 128 bytes by which the ranks of a group find and trust each other.
