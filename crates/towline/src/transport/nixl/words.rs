//! What the two sides say to each other about NIXL, inside the frames Query and QueryReply.

use crate::{Error, Result};

/// The first byte of every word.
const VERSION: u8 = 1;

const ATTACH: u8 = 1;
const HELP: u8 = 2;
/// Older peers say by it that they insist. It decides nothing.
const WISHED: u8 = 1;
const PINNED: u8 = 2;

/// What a peer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// It wants to reach the region. `pinned`: it pins the region in memory that both share while something is in flight.
    Attach { pinned: bool },
    /// Something of it is in flight and does not move: the owner's agent may have to do its part. `core`: where, on this host,
    /// the thread that waits for it runs.
    Help { core: Option<u16> },
}

impl Word {
    pub(super) fn encode(self) -> Vec<u8> {
        match self {
            Word::Attach { pinned } => vec![VERSION, ATTACH, if pinned { PINNED } else { 0 }],
            Word::Help { core: None } => vec![VERSION, HELP],
            Word::Help { core: Some(core) } => [&[VERSION, HELP][..], &core.to_le_bytes()].concat(),
        }
    }

    pub(super) fn decode(words: &[u8]) -> Result<Word> {
        match *words {
            [VERSION, ATTACH, flags] if flags & !(WISHED | PINNED) == 0 => {
                Ok(Word::Attach { pinned: flags & PINNED != 0 })
            }
            [VERSION, HELP] => Ok(Word::Help { core: None }),
            [VERSION, HELP, low, high] => Ok(Word::Help { core: Some(u16::from_le_bytes([low, high])) }),
            _ => Err(Error::protocol("import", "an unknown word about nixl")),
        }
    }
}

/// What the owner answers to [`Word::Attach`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    /// The number under which the region is registered with the owner's agent.
    pub(super) device: u64,
    /// Where the region starts at the owner.
    pub(super) base: u64,
    /// NIXL's metadata to connect to the owner's agent.
    pub(super) connection: Vec<u8>,
    /// NIXL's metadata to reach the region.
    pub(super) region: Vec<u8>,
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.device.to_le_bytes());
        out.extend_from_slice(&self.base.to_le_bytes());
        for metadata in [&self.connection, &self.region] {
            out.extend_from_slice(&(metadata.len() as u32).to_le_bytes());
            out.extend_from_slice(metadata);
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Answer> {
        fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8]> {
            let short = || Error::protocol("import", "the owner's reply about nixl is too short");
            let (now, later) = rest.split_at_checked(len).ok_or_else(short)?;
            *rest = later;
            Ok(now)
        }
        fn number(rest: &mut &[u8], len: usize) -> Result<u64> {
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(take(rest, len)?);
            Ok(u64::from_le_bytes(bytes))
        }
        let mut rest = bytes;
        if number(&mut rest, 1)? != u64::from(VERSION) {
            return Err(Error::protocol("import", "the owner speaks another version about nixl"));
        }
        let (device, base) = (number(&mut rest, 8)?, number(&mut rest, 8)?);
        let mut metadata = || -> Result<Vec<u8>> {
            let len = number(&mut rest, 4)? as usize;
            Ok(take(&mut rest, len)?.to_vec())
        };
        let (connection, region) = (metadata()?, metadata()?);
        if !rest.is_empty() {
            return Err(Error::protocol("import", "the owner's reply about nixl has extra bytes at its end"));
        }
        Ok(Answer { device, base, connection, region })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_survive_and_others_are_refused() {
        for pinned in [false, true] {
            let word = Word::Attach { pinned };
            assert_eq!(Word::decode(&word.encode()).unwrap(), word);
            let insisting = [VERSION, ATTACH, word.encode()[2] | WISHED];
            assert_eq!(Word::decode(&insisting).unwrap(), word);
        }
        for core in [None, Some(0), Some(300)] {
            let word = Word::Help { core };
            assert_eq!(Word::decode(&word.encode()).unwrap(), word);
        }
        for words in [&[][..], &[1], &[2, 2], &[1, 1], &[1, 1, 4], &[1, 2, 0], &[1, 2, 0, 0, 0], &[1, 3]] {
            assert!(Word::decode(words).is_err(), "{words:?}");
        }
    }

    proptest! {
        #[test]
        fn an_answer_survives_and_no_part_of_it_does(
            device: u64, base: u64, connection: Vec<u8>, region: Vec<u8>, cut: prop::sample::Index
        ) {
            let answer = Answer { device, base, connection, region };
            let bytes = answer.encode();
            prop_assert_eq!(Answer::decode(&bytes).unwrap(), answer);
            prop_assert!(Answer::decode(&bytes[..cut.index(bytes.len())]).is_err());
            prop_assert!(Answer::decode(&[&bytes[..], &[0]].concat()).is_err());
        }

        #[test]
        fn any_bytes_are_taken_or_refused_without_harm(bytes: Vec<u8>) {
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert_eq!(answer.encode(), bytes);
            }
        }
    }
}
