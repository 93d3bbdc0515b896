//! Orders over many regions at once, of which each has a stamp of its own.

use towline::{Access, Kind, MemoryDescription};

use super::{Answer, Words, Worker, bad, said, storage};
use crate::process::Failure;

impl Worker {
    /// `register-parts KIND STAMP LEN...`: registers one of each length, and fills it. Answers with the number of the first, those of the others
    /// follow, and with their tickets, one in a line.
    pub(super) fn register_parts(&mut self, words: &mut Words<'_>) -> Answer {
        let (kind, stamp) = (words.text()?, words.stamp()?);
        let (first, mut tickets) = (self.next + 1, String::new());
        for (part, len) in words.rest().into_iter().enumerate() {
            let memory = storage(len, kind)?;
            stamp.of_part(part).fill_storage(&memory)?;
            let region =
                self.endpoint()?.register(memory, Access::READ_WRITE).map_err(|failed| failed.error)?;
            tickets.push_str(&format!("{}\n", region.ticket()?));
            self.next += 1;
            self.regions.insert(self.next, region);
        }
        Ok((first.to_string(), tickets.into_bytes()))
    }

    /// `fill-parts STAMP REGION...`, and `check-parts STAMP REGION...`, which says of which part it does not hold.
    pub(super) fn each_part(&mut self, fill: bool, words: &mut Words<'_>) -> Answer {
        let stamp = words.stamp()?;
        for (part, id) in words.rest::<u64>().into_iter().enumerate() {
            let region = self.regions.get(&id).ok_or_else(|| bad(format!("no region is called {id}")))?;
            let (stamp, memory) = (stamp.of_part(part), region.storage());
            if fill {
                stamp.fill_storage(memory)?;
            } else if let Err(wrong) = stamp.verify_storage(memory, 0, memory.size()) {
                return Err(Failure { kind: Kind::Internal, message: format!("part {part}: {wrong}") });
            }
        }
        said("")
    }
}
