//! What an owner tells a peer about a path to one of its grants, before the peer takes it.

use std::sync::Arc;

use super::connection::Connection;
use super::parts::{Keep, Payload};
use super::serving::Serving;
use crate::transport::{self, Question, Told};
use crate::wire::{self, Message, WireError};
use crate::{Access, Error, Kind, Result, progress};

impl Serving {
    /// Answers a question. Not on the event loop: a path may open a device, or load a library.
    pub(super) fn tell(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        ask: wire::Ask,
    ) -> Result<()> {
        let (serving, answered) = (Arc::clone(self), Arc::clone(connection));
        let work = move || {
            let (outcome, files) = match serving.told(&ask).and_then(|told| serving.fits(told)) {
                Ok(told) => (Ok(told.answer), told.files),
                Err(error) => (Err(WireError::from(&error)), Vec::new()),
            };
            let frame = Message::from(wire::Told { outcome }).frame(request, 0, files.len() as u8);
            // Where it fails, the connection has ended, and the peer knows.
            let _ = answered.send(frame, files, Payload::None, Keep::Nothing);
        };
        progress::pool().spawn(Box::new(work)).map_err(|refused| refused.error)
    }

    fn told(&self, ask: &wire::Ask) -> Result<Told> {
        let (region, _) = self.check("import", ask.handle, Access::NONE, &[])?;
        let claims = self.granting("import", ask.handle)?.claims;
        let pins = self.local.as_ref().map(|local| &local.pins);
        let question =
            Question { region: &region, claims: &claims, peer: &self.peer, pins, words: &ask.question };
        transport::numbered(ask.path)?.tell(&question)
    }

    fn fits(&self, told: Told) -> Result<Told> {
        let files = if self.local.is_some() { wire::MAX_TOLD_FILES } else { 0 };
        if told.answer.len() <= wire::MAX_TOLD && told.files.len() <= usize::from(files) {
            return Ok(told);
        }
        let message = format!("{} bytes and {} descriptors do not fit", told.answer.len(), told.files.len());
        Err(Error::new(Kind::Internal, "import", message))
    }
}
