//! The same transfers as the Python package's, in Rust, over the same memory of the same owner.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use towline::connect::{Connector, Descriptor, RdmaMetadata};
use towline::memory::MemoryAccess;
use towline::{Access, Endpoint, Layout, Registered, Remote, SharedStorage, Ticket};

use crate::outcome::{Failure, Outcome};

/// What the package asks for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Query {
    /// Make ready to read a region: as a whole, or its blocks by index.
    Prepare { ticket: Box<Ticket>, bytes: u64, block: u64, remote: Option<Vec<u32>>, local: Option<Vec<u32>> },
    /// Read what was prepared that many times, one after the other.
    Transfers { prepared: usize, count: usize },
    /// Read what an operation of the package offers; the metadata is JSON.
    Operation { metadata: String, bytes: u64 },
}

/// What it replies.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// The number of what is ready.
    Prepared(usize),
    /// The time of each.
    Seconds(Vec<f64>),
    Error(String),
}

pub(super) struct Reference {
    endpoint: Endpoint,
    connector: Connector,
    prepared: Vec<Prepared>,
    memory: HashMap<u64, Descriptor>,
}

struct Prepared {
    remote: Remote,
    local: Registered<Arc<SharedStorage>>,
    blocks: Option<(Layout, Vec<u32>, Vec<u32>)>,
}

impl Reference {
    pub(super) fn open() -> Outcome<Reference> {
        let endpoint = Endpoint::open("bench-rust")?;
        let connector = Connector::with_endpoint(endpoint.clone());
        Ok(Reference { endpoint, connector, prepared: Vec::new(), memory: HashMap::new() })
    }

    pub(super) fn reply(&mut self, query: Query) -> Outcome<Reply> {
        match query {
            Query::Prepare { ticket, bytes, block, remote, local } => {
                let blocks = match remote.zip(local) {
                    Some((remote, local)) => Some((Layout::contiguous(bytes, block)?, remote, local)),
                    None => None,
                };
                let remote = self.endpoint.import(&ticket)?;
                let storage = Arc::new(touched(bytes)?);
                let local = self.endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?;
                self.prepared.push(Prepared { remote, local, blocks });
                Ok(Reply::Prepared(self.prepared.len() - 1))
            }
            Query::Transfers { prepared, count } => {
                let Some(prepared) = self.prepared.get(prepared) else {
                    return Err(Failure::failed(format!("nothing with the number {prepared} is prepared")));
                };
                let times = (0..count).map(|_| self.transfer(prepared)).collect::<Outcome<_>>()?;
                Ok(Reply::Seconds(times))
            }
            Query::Operation { metadata, bytes } => {
                let remote = RdmaMetadata::from_json(&metadata)?;
                if !self.memory.contains_key(&bytes) {
                    let descriptor = Descriptor::new(touched(bytes)?);
                    descriptor.register_memory(&self.connector)?;
                    self.memory.insert(bytes, descriptor);
                }
                let local = &self.memory[&bytes];
                let start = Instant::now();
                self.connector.begin_read(&remote, local)?.wait(None)?;
                Ok(Reply::Seconds(vec![start.elapsed().as_secs_f64()]))
            }
        }
    }

    fn transfer(&self, prepared: &Prepared) -> Outcome<f64> {
        let Prepared { remote, local, blocks } = prepared;
        let start = Instant::now();
        let request = self.endpoint.read(remote, local);
        let request = match blocks {
            Some((layout, there, here)) => request.blocks(layout, there, layout, here),
            None => request,
        };
        request.start()?.wait()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Shared memory whose pages are there: missing ones would be counted as copying.
fn touched(bytes: u64) -> Outcome<SharedStorage> {
    let storage = SharedStorage::new(bytes as usize)?;
    storage.memset(0, 0, bytes as usize)?;
    Ok(storage)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn regions_and_operations_of_another_endpoint_are_read_and_timed() {
        let owner = Endpoint::open("owner").unwrap();
        let region = owner.register(SharedStorage::new(8192).unwrap(), Access::READ).unwrap();
        let mut reference = Reference::open().unwrap();
        let whole = (None, None);
        let shuffled = (Some(vec![1, 0]), Some(vec![0, 1]));
        for (number, (remote, local)) in [whole, shuffled].into_iter().enumerate() {
            let ticket = Box::new(region.ticket().unwrap());
            let query = Query::Prepare { ticket, bytes: 8192, block: 4096, remote, local };
            let reply = reference.reply(query).unwrap();
            assert!(matches!(reply, Reply::Prepared(prepared) if prepared == number));
            let reply = reference.reply(Query::Transfers { prepared: number, count: 3 }).unwrap();
            assert!(matches!(reply, Reply::Seconds(times) if times.len() == 3));
        }
        assert!(reference.reply(Query::Transfers { prepared: 2, count: 1 }).is_err());
        let connector = Connector::with_endpoint(owner.clone());
        let memory = Descriptor::new(SharedStorage::new(4096).unwrap());
        let readable = connector.create_readable(memory).unwrap();
        let metadata = readable.metadata().unwrap().to_json().unwrap();
        let reply = reference.reply(Query::Operation { metadata, bytes: 4096 }).unwrap();
        assert!(matches!(reply, Reply::Seconds(times) if times.len() == 1));
        readable.wait(None).unwrap();
        owner.close().unwrap();
    }
}
