//! A line of the talk with a worker: words, and bytes where the last word says `+N`.

use std::io::{self, BufRead, Write};

use towline::Kind;

use super::{Failure, Reply};

/// One line.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) text: String,
    pub(crate) payload: Vec<u8>,
}

impl Line {
    pub(crate) fn order(text: &str, payload: &[u8]) -> Line {
        Line { text: text.to_owned(), payload: payload.to_owned() }
    }

    pub(crate) fn outcome(outcome: Result<(String, Vec<u8>), Failure>) -> Line {
        match outcome {
            Ok((text, payload)) => Line { text: format!("ok {text}"), payload },
            Err(Failure { kind, message }) => {
                let message = message.replace('\n', " ");
                Line { text: format!("err {} {message}", kind.name()), payload: Vec::new() }
            }
        }
    }

    /// Reads a line; `None` at the end.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Option<Line>> {
        let mut text = String::new();
        if from.read_line(&mut text)? == 0 {
            return Ok(None);
        }
        let text = text.trim_end();
        let (text, len) = match text.rsplit_once(" +") {
            Some((head, len)) if len.parse::<usize>().is_ok() => (head, len.parse().unwrap_or(0)),
            _ => (text, 0),
        };
        let mut payload = vec![0; len];
        let text = text.to_owned();
        from.read_exact(&mut payload)?;
        Ok(Some(Line { text, payload }))
    }

    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        writeln!(to, "{} +{}", self.text.trim_end(), self.payload.len())?;
        to.write_all(&self.payload)?;
        to.flush()
    }

    pub(super) fn into_reply(self) -> Result<Reply, Failure> {
        let (verdict, rest) = self.text.split_once(' ').unwrap_or((&self.text, ""));
        if verdict == "ok" {
            let words = rest.split_whitespace().map(str::to_owned).collect();
            return Ok(Reply { words, payload: self.payload });
        }
        let (kind, message) = rest.split_once(' ').unwrap_or((rest, ""));
        let kind = Kind::ALL.into_iter().find(|(_, name)| *name == kind);
        Err(Failure { kind: kind.map_or(Kind::Internal, |(kind, _)| kind), message: message.to_owned() })
    }
}
