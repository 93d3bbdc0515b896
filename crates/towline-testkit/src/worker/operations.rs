//! Orders about operations: one that waits for a peer, or one that has claimed a peer's.

use std::time::Duration;

use towline::MemoryAccess;
use towline::connect::{
    Beginning, Connector, Descriptor, RdmaMetadata, ReadOperation, ReadableOperation, WritableOperation,
    WriteOperation,
};

use super::{Answer, Failure, Words, Worker, bad, said, storage};
use crate::process::Line;

/// The operation that a worker has.
pub(super) enum Operation {
    Readable(ReadableOperation),
    Writable(WritableOperation),
    Read(ReadOperation),
    Write(WriteOperation),
    /// Claimed, and nothing more.
    #[allow(dead_code, reason = "it is kept, so that the claim is")]
    Silent(Box<dyn std::any::Any>),
}

fn begun<T: 'static>(beginning: Beginning<T>) -> Operation {
    Operation::Silent(Box::new(beginning))
}

impl Worker {
    /// `offer read|write LEN KIND [BYTE]`, of memory that is full of that byte: answers with the metadata.
    pub(super) fn offer(&mut self, words: &mut Words<'_>) -> Answer {
        let (op, len, kind) = (words.text()?, words.take()?, words.text()?);
        let connector = Connector::with_endpoint(self.endpoint()?.clone());
        let memory = storage(len, kind)?;
        if let Ok(byte) = words.take() {
            memory.memset(byte, 0, len)?;
        }
        let local = Descriptor::new(memory);
        let (operation, metadata) = if op == "read" {
            let readable = connector.create_readable(local)?;
            let metadata = readable.metadata()?;
            (Operation::Readable(readable), metadata)
        } else {
            let writable = connector.create_writable(local)?;
            let metadata = writable.metadata()?;
            (Operation::Writable(writable), metadata)
        };
        self.operation = Some(operation);
        Ok((String::new(), metadata.to_json()?.into_bytes()))
    }

    /// `claim read|write LEN [silently|at-once [KIND [BYTE]]]`, with the metadata.
    pub(super) fn claim(&mut self, line: &Line, words: &mut Words<'_>) -> Answer {
        let (op, len): (_, usize) = (words.text()?, words.take()?);
        let silently = words.text().is_ok_and(|how| how == "silently");
        let memory = storage(len, words.text().unwrap_or("system"))?;
        if let Ok(byte) = words.take() {
            memory.memset(byte, 0, len)?;
        }
        let metadata = String::from_utf8_lossy(&line.payload);
        let metadata = RdmaMetadata::from_json(&metadata)?;
        let connector = Connector::with_endpoint(self.endpoint()?.clone());
        let local = Descriptor::new(memory);
        self.operation = Some(match (op, silently) {
            ("read", false) => Operation::Read(connector.begin_read(&metadata, local)?),
            ("read", true) => begun(connector.begin_read_async(&metadata, local)),
            (_, false) => Operation::Write(connector.begin_write(local, &metadata)?),
            (_, true) => begun(connector.begin_write_async(local, &metadata)),
        });
        said("")
    }

    /// `full BYTE`: whether the memory of the operation is full of that byte.
    pub(super) fn full(&mut self, words: &mut Words<'_>) -> Answer {
        let byte: u8 = words.take()?;
        let descriptors = match &self.operation {
            Some(Operation::Readable(one)) => one.descriptors(),
            Some(Operation::Writable(one)) => one.descriptors(),
            Some(Operation::Read(one)) => one.descriptors(),
            Some(Operation::Write(one)) => one.descriptors(),
            Some(Operation::Silent(_)) | None => return Err(bad("there is no operation")),
        };
        for one in descriptors {
            let mut bytes = vec![0; one.size()];
            one.storage().ok_or_else(|| bad("no storage"))?.read_at(0, &mut bytes)?;
            if let Some(at) = bytes.iter().position(|found| *found != byte) {
                return Err(bad(format!("byte {at} is {}, not {byte}", bytes[at])));
            }
        }
        said("")
    }

    /// `ended MS`: answers with the status, and the cause where there is one.
    pub(super) fn ended(&mut self, words: &mut Words<'_>) -> Answer {
        let within: Duration = words.millis()?;
        macro_rules! end {
            ($operation:expr) => {{
                let _ = $operation.wait(Some(within));
                ($operation.status(), $operation.error(), $operation.quiet())
            }};
        }
        let (status, error, quiet) = match &self.operation {
            Some(Operation::Readable(one)) => end!(one),
            Some(Operation::Writable(one)) => end!(one),
            Some(Operation::Read(one)) => end!(one),
            Some(Operation::Write(one)) => end!(one),
            Some(Operation::Silent(_)) | None => return Err(bad("there is no operation to wait for")),
        };
        match error {
            Some(error) => Err(Failure::from(error)),
            None => said(format!("{status:?} {quiet}")),
        }
    }
}
