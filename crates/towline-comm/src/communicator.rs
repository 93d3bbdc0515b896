//! A rank's place in a group: its life, its registrations, its children.
