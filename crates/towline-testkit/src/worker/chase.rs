//! Following a region through its registrations: what four peers do while the owner deregisters.

use std::thread;
use std::time::Duration;

use towline::{Access, Kind, Ticket};

use super::{Answer, Words, Worker, bad, requiring, said, storage};
use crate::oracle::Stamp;
use crate::process::{Failure, Line};

/// What one chase has seen.
#[derive(Default)]
struct Tally {
    good: u64,
    stale: u64,
    broken: u64,
}

impl Worker {
    /// `chase PATHS read|write OFFSET LEN MARK`: reads (and verifies) or writes that part of whatever region the last
    /// `target TICKET REGION GENERATION` named, until `halt`. Answers at once, and with a tally at the end; a wrong
    /// word ends it with an error that names the word.
    pub(super) fn chase(&mut self, words: &mut Words<'_>) -> Answer {
        let routing = requiring(words.text()?)?;
        let (op, offset, len, mark): (&str, u64, usize, u16) =
            (words.text()?, words.take()?, words.take()?, words.take()?);
        let endpoint = self.endpoint()?;
        let local =
            endpoint.register(storage(len, "system")?, Access::NONE).map_err(|failed| failed.error)?;
        let _ = Line::outcome(said("started")).write(&mut std::io::stdout());

        let mut target: Option<(Ticket, Stamp)> = None;
        let mut remote = None;
        let mut tally = Tally::default();
        loop {
            // Waits while there is nothing to do, and otherwise only looks.
            let order = match target {
                None => self.orders.recv().ok(),
                Some(_) => self.orders.try_recv().ok(),
            };
            if let Some(order) = order {
                let mut words = Words { words: order.text.split_whitespace() };
                match words.text()? {
                    "target" => target = Some((words.take()?, words.stamp()?)),
                    "halt" => return said(format!("{} {} {}", tally.good, tally.stale, tally.broken)),
                    other => return Err(bad(format!("{other} in a chase"))),
                }
                remote = None;
            }
            let Some((ticket, stamp)) = &target else { continue };
            let outcome = (|| {
                if remote.is_none() {
                    remote = Some(endpoint.import_with(ticket, &routing)?);
                }
                let Some(remote) = &remote else { return Ok(()) };
                if op == "write" {
                    Stamp::new(mark, stamp.generation).fill_storage(local.storage())?;
                }
                let request =
                    if op == "read" { endpoint.read(remote, &local) } else { endpoint.write(remote, &local) };
                request.at(offset, 0, len as u64).start()?.wait()
            })();
            match outcome {
                Ok(()) if op == "read" => {
                    let mut bytes = vec![0; len];
                    local.read_at(0, &mut bytes)?;
                    if let Err(wrong) = stamp.verify(offset, &bytes) {
                        return Err(Failure {
                            kind: Kind::Internal,
                            message: format!("a read gave {wrong}"),
                        });
                    }
                    tally.good += 1;
                }
                Ok(()) => tally.good += 1,
                // The owner has moved on: the next ticket is on its way.
                Err(error) if error.kind() == Kind::Stale => {
                    tally.stale += 1;
                    target = None;
                }
                Err(error) if matches!(error.kind(), Kind::Disconnected | Kind::Timeout) => {
                    tally.broken += 1;
                    remote = None;
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
