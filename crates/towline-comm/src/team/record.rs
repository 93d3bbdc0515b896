//! What a rank leaves with the others when it gives the team up (pure).

use towline::Kind;

use super::layout::RECORD;
use crate::Error;

/// Kind, number of ranks, length of the message, and the rank that gave up first.
const HEAD: usize = 6;
/// Ranks that a record has room for; an error about more of them names the first.
const MOST_RANKS: usize = 32;

/// The bytes by which other ranks learn of an error.
pub(super) fn encode(error: &Error, origin: usize) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    let kind = Kind::ALL.iter().position(|(kind, _)| *kind == error.kind()).unwrap_or_default();
    let ranks = &error.ranks()[..error.ranks().len().min(MOST_RANKS)];
    let text = format!("{}: {}", error.op(), error.message());
    let room = RECORD - HEAD - 4 * ranks.len();
    let mut len = text.len().min(room);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    bytes[0] = kind as u8;
    bytes[1] = ranks.len() as u8;
    bytes[2..4].copy_from_slice(&(len as u16).to_le_bytes());
    bytes[4..6].copy_from_slice(&(origin as u16).to_le_bytes());
    let mut at = HEAD;
    for rank in ranks {
        bytes[at..at + 4].copy_from_slice(&(*rank as u32).to_le_bytes());
        at += 4;
    }
    bytes[at..at + len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

/// The error in a record. Takes whatever is there: a peer may be mistaken.
pub(super) fn decode(bytes: &[u8; RECORD], op: &'static str, nranks: usize) -> Error {
    let kind = Kind::ALL.get(usize::from(bytes[0])).map_or(Kind::Internal, |(kind, _)| *kind);
    let count = usize::from(bytes[1]).min(MOST_RANKS);
    let len = usize::from(u16::from_le_bytes([bytes[2], bytes[3]]));
    let origin = u16::from_le_bytes([bytes[4], bytes[5]]);
    let (ranks, text) = bytes[HEAD..].split_at(4 * count);
    let ranks = ranks
        .chunks_exact(4)
        .map(|rank| u32::from_le_bytes([rank[0], rank[1], rank[2], rank[3]]) as usize)
        .filter(|rank| *rank < nranks);
    let text = String::from_utf8_lossy(&text[..len.min(text.len())]);
    Error::new(kind, op, format!("rank {origin} gave up: {text}")).about(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_error_survives_the_way_to_another_rank() {
        let error = Error::new(Kind::Timeout, "reduce", "nothing came").about([1, 7]);
        let read = decode(&encode(&error, 3), "reduce", 8);
        assert_eq!((read.kind(), read.ranks()), (Kind::Timeout, &[1, 7][..]));
        assert_eq!(read.message(), "rank 3 gave up: reduce: nothing came");
    }

    #[test]
    fn what_is_too_long_is_cut() {
        let error = Error::new(Kind::Invalid, "reduce", "ä".repeat(1000)).about(0..1000);
        let read = decode(&encode(&error, 3), "reduce", 10);
        assert_eq!(read.ranks(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(read.message().ends_with('ä'));
    }

    proptest! {
        #[test]
        fn any_bytes_make_an_error(bytes in proptest::collection::vec(any::<u8>(), RECORD)) {
            let bytes: [u8; RECORD] = bytes.try_into().unwrap_or([0; RECORD]);
            let read = decode(&bytes, "x", 4);
            prop_assert!(read.ranks().iter().all(|rank| *rank < 4));
        }
    }
}
