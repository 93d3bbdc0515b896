//! Room for what a user or a peer has chosen the size of: `Exhausted` where there is none, never an abort.

pub use towline_proto::room::{Zeroable, collect, copy, list, push, zeros};
