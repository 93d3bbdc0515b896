//! Orders that end badly on purpose: with work pending, or when a transfer breaks.
#![allow(unsafe_code, reason = "replaces the program while transfers are in flight")]

use std::io::Write as _;

use super::{Answer, Words, Worker, bad, said};
use crate::process::Line;

impl Worker {
    /// `leave read|write REMOTE LOCAL LEN exit|return|exec CODE`: ends with four transfers in flight. Does not answer.
    pub(super) fn leave(&mut self, words: &mut Words<'_>) -> Answer {
        let (op, remote, local) = (words.text()?, self.remote(words)?, self.region(words)?);
        let (len, how, code): (u64, &str, i32) = (words.take()?, words.text()?, words.take()?);
        let endpoint = self.endpoint()?;
        for _ in 0..4 {
            let request =
                if op == "read" { endpoint.read(remote, local) } else { endpoint.write(remote, local) };
            drop(request.at(0, 0, len).start()?);
        }
        let _ = std::io::stdout().flush();
        match how {
            "exit" => std::process::exit(code),
            "return" => {
                self.returning = Some(code);
                said("")
            }
            "exec" => {
                let arguments = [c"true".as_ptr(), std::ptr::null()];
                // SAFETY: both strings and the array are whole and outlive the call, which does not return.
                unsafe { libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr()) };
                Err(bad("exec failed"))
            }
            other => Err(bad(format!("nobody leaves by {other}"))),
        }
    }

    /// `until-broken read|write REMOTE LOCAL LEN`: answers at once, and with the error of the first transfer that fails.
    pub(super) fn until_broken(&mut self, words: &mut Words<'_>) -> Answer {
        let (op, remote, local) = (words.text()?, self.remote(words)?, self.region(words)?);
        let len: u64 = words.take()?;
        let endpoint = self.endpoint()?;
        let _ = Line::outcome(said("started")).write(&mut std::io::stdout());
        loop {
            let request =
                if op == "read" { endpoint.read(remote, local) } else { endpoint.write(remote, local) };
            request.at(0, 0, len).start()?.wait()?;
        }
    }
}
