//! The meeting: how ranks that hold one unique id find each other.
