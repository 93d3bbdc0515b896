//! What the two sides say to each other about GPU memory, inside the frames Query and QueryReply. Pure.

use crate::cuda::IpcHandle;
use crate::{Error, Result};

/// The first byte of every word.
const VERSION: u8 = 2;

const HANDLE: u8 = 1;
const DESCRIPTORS: u8 = 2;

/// Parts per answer: as many as descriptors can ride with one.
pub(super) const MAX_PARTS: usize = crate::wire::MAX_QUERY_FILES as usize;

/// The most parts of one region: more than 40 GiB in PyTorch's smallest.
const MOST_PARTS: u32 = 1 << 16;

/// What a peer asks: how to open the region; of memory in several parts, those after the first few.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) skip: u32,
}

impl Ask {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.skip.to_le_bytes());
        out
    }

    pub(super) fn decode(words: &[u8]) -> Result<Ask> {
        match *words {
            [VERSION, a, b, c, d] => Ok(Ask { skip: u32::from_le_bytes([a, b, c, d]) }),
            _ => Err(Error::protocol("import", "an unknown query about cuda")),
        }
    }
}

/// What the owner answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    /// The number that the GPU has in every process.
    pub(super) uuid: [u8; 16],
    /// Where in the allocation the region starts.
    pub(super) start: u64,
    /// How long the allocation is, or all its parts together.
    pub(super) len: u64,
    pub(super) form: Form,
}

/// How the memory is opened.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Form {
    /// By a handle. CUDA's number of the allocation is one that no other one of the owner's process ever has.
    Handle { handle: Box<IpcHandle>, buffer: u64 },
    /// By descriptors, which come along: the parts that they stand for, of `all`.
    Descriptors { parts: Vec<Part>, all: u32 },
}

/// One part of memory in several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub(super) len: u64,
    /// CUDA's number of the addresses that it is mapped at, and of the memory behind them; the second is 0 where the driver
    /// does not tell, and then the same addresses may have other memory by the next time.
    pub(super) buffer: u64,
    pub(super) block: u64,
}

impl std::fmt::Debug for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Form::Handle { .. } => f.write_str("handle"),
            Form::Descriptors { all, .. } => write!(f, "{all} descriptors"),
        }
    }
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.uuid);
        for number in [self.start, self.len] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        match &self.form {
            Form::Handle { handle, buffer } => {
                out.push(HANDLE);
                out.extend_from_slice(&buffer.to_le_bytes());
                out.extend_from_slice(&handle[..]);
            }
            Form::Descriptors { parts, all } => {
                out.push(DESCRIPTORS);
                out.extend_from_slice(&all.to_le_bytes());
                for number in parts.iter().flat_map(|part| [part.len, part.buffer, part.block]) {
                    out.extend_from_slice(&number.to_le_bytes());
                }
            }
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Answer> {
        fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
            let short = || Error::protocol("import", "the owner's reply about cuda is too short");
            let (now, later) = rest.split_first_chunk().ok_or_else(short)?;
            *rest = later;
            Ok(*now)
        }
        let mut rest = bytes;
        if take(&mut rest)? != [VERSION] {
            return Err(Error::protocol("import", "the owner speaks another version about cuda"));
        }
        let uuid = take(&mut rest)?;
        let [start, len] = [take(&mut rest)?, take(&mut rest)?].map(u64::from_le_bytes);
        let form = match take(&mut rest)? {
            [HANDLE] => {
                let buffer = u64::from_le_bytes(take(&mut rest)?);
                Form::Handle { handle: Box::new(take(&mut rest)?), buffer }
            }
            [DESCRIPTORS] => {
                let all = u32::from_le_bytes(take(&mut rest)?);
                let mut parts = Vec::new();
                while !rest.is_empty() {
                    let [len, buffer, block] =
                        [take(&mut rest)?, take(&mut rest)?, take(&mut rest)?].map(u64::from_le_bytes);
                    parts.push(Part { len, buffer, block });
                }
                if all > MOST_PARTS || parts.len() > MAX_PARTS {
                    return Err(Error::protocol("import", format!("{all} parts are more than there can be")));
                }
                Form::Descriptors { parts, all }
            }
            [form] => return Err(Error::protocol("import", format!("form {form} of GPU memory is unknown"))),
        };
        if !rest.is_empty() {
            return Err(Error::protocol("import", "the owner's reply about cuda has extra bytes at its end"));
        }
        Ok(Answer { uuid, start, len, form })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn handle() -> Form {
        Form::Handle { handle: Box::new([5; 64]), buffer: 9 }
    }

    fn answer(form: Form) -> Answer {
        Answer { uuid: [7; 16], start: 512, len: 2 << 20, form }
    }

    #[test]
    fn words_survive_the_wire() {
        for skip in [0, 16, u32::MAX] {
            assert_eq!(Ask::decode(&Ask { skip }.encode()).unwrap(), Ask { skip });
        }
        let parts =
            (0..MAX_PARTS as u64).map(|at| Part { len: 2 << 20, buffer: 9, block: 10 + at }).collect();
        for form in [handle(), Form::Descriptors { parts, all: 40 }] {
            let said = answer(form);
            assert_eq!(Answer::decode(&said.encode()).unwrap(), said);
        }
    }

    #[test]
    fn damaged_words_are_refused() {
        for bytes in [&[][..], &[1, 0, 0, 0, 0], &[2, 0, 0, 0], &[2, 0, 0, 0, 0, 0]] {
            assert_eq!(Ask::decode(bytes).unwrap_err().kind(), crate::Kind::Protocol);
        }
        let whole = answer(handle()).encode();
        for len in 0..whole.len() {
            assert_eq!(Answer::decode(&whole[..len]).unwrap_err().kind(), crate::Kind::Protocol);
        }
        let mut tail = whole.clone();
        tail.push(0);
        assert_eq!(Answer::decode(&tail).unwrap_err().kind(), crate::Kind::Protocol);
        let parts = vec![Part { len: 1, buffer: 2, block: 3 }; MAX_PARTS + 1];
        let many = answer(Form::Descriptors { parts, all: 17 }).encode();
        assert_eq!(Answer::decode(&many).unwrap_err().kind(), crate::Kind::Protocol);
    }
}
