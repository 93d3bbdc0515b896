//! The output of a rank, passed on line by line.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// A longer line is broken, so that a rank that writes none does not fill the memory.
const LONGEST: u64 = 1 << 20;

/// Where lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Output,
    Error,
}

/// A thread that passes lines on until their source ends.
pub(super) struct Lines(Receiver<()>);

impl Lines {
    pub(super) fn pass_on(rank: usize, from: impl Read + Send + 'static, to: Stream) -> io::Result<Lines> {
        let (sender, ended) = channel();
        std::thread::Builder::new().name(format!("lines-{rank}")).spawn(move || {
            // The end of this thread is the only report.
            let _sender = sender;
            let prefix = format!("[{rank}] ");
            // When nobody reads any more, the rank learns of it by the closed pipe, as it would without a launcher.
            let _ = copy(&prefix, BufReader::new(from), |line| match to {
                Stream::Output => io::stdout().lock().write_all(line).and_then(|()| io::stdout().flush()),
                Stream::Error => io::stderr().lock().write_all(line),
            });
        })?;
        Ok(Lines(ended))
    }

    /// Waits for the last line, until then at most.
    pub(super) fn finish(self, until: Instant) {
        let _ = self.0.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Gives each line, with the prefix before it, to `write` in one piece.
fn copy(
    prefix: &str,
    mut from: impl BufRead,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        if from.by_ref().take(LONGEST).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        write(&line)?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn copied(text: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        copy("[3] ", text, |line| {
            lines.push(line.to_vec());
            Ok(())
        })
        .unwrap();
        lines
    }

    #[test]
    fn every_line_gets_the_prefix_and_the_last_one_its_end() {
        assert_eq!(copied(b"a\n\nb"), [&b"[3] a\n"[..], b"[3] \n", b"[3] b\n"]);
        assert_eq!(copied(b"\xff\n"), [b"[3] \xff\n"]);
        assert!(copied(b"").is_empty());
    }

    #[test]
    fn a_line_without_an_end_is_broken() {
        let lines = copied(&vec![b'x'; LONGEST as usize + 5]);
        assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [LONGEST as usize + 5, 10]);
    }
}
