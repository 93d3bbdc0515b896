//! Memory that all ranks of a group have registered together.
