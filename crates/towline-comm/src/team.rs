//! The ranks of one communicator, how each is reached, and how they wait for each other.
