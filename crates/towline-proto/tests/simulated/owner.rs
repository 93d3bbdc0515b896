//! The owner: what the rules of its role say is done to an array.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use towline_proto::session::allowance::InFlight;
use towline_proto::session::owner::{
    Act, Action, Admitted, Grant, LaneEnd, Settled, Settling, Standing, stale,
};
use towline_proto::ticket::Claims;
use towline_proto::wire::{self, Data, Done, Import, Message, QueryReply, WireError};
use towline_proto::{Access, Error, Kind, Place, Result};

use crate::network::{Came, Memory};
use crate::world::{Event, World};

/// The owner's memory.
pub(crate) struct Array {
    pub(crate) bytes: Mutex<Vec<u8>>,
    /// It is taken back.
    pub(crate) closed: AtomicBool,
    pub(crate) holds: AtomicUsize,
    /// Places that were changed, for who looks on.
    pub(crate) changed: Mutex<Vec<usize>>,
}

pub(crate) struct RegionHold {
    pub(crate) array: Arc<Array>,
    _flight: Option<InFlight>,
}

impl Drop for RegionHold {
    fn drop(&mut self) {
        self.array.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(crate) struct Granted {
    pub(crate) claims: Claims,
    pub(crate) region: Weak<Array>,
}

impl Grant for Granted {
    type Region = Array;
    type Hold = RegionHold;

    fn claims(&self) -> &Claims {
        &self.claims
    }

    fn region(&self) -> &Weak<Array> {
        &self.region
    }

    fn served(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(())
    }

    fn is_closed(array: &Array) -> bool {
        array.closed.load(Ordering::Relaxed)
    }

    fn hold(
        op: &'static str,
        array: Arc<Array>,
        flight: Option<InFlight>,
    ) -> Result<RegionHold, (Error, Arc<Array>)> {
        if Granted::is_closed(&array) {
            return Err((stale(op), array));
        }
        array.holds.fetch_add(1, Ordering::Relaxed);
        Ok(RegionHold { array, _flight: flight })
    }
}

/// What a request may touch, in the order of its bytes.
pub(crate) struct Ranges {
    hold: RegionHold,
    places: Vec<usize>,
}

impl Memory for Ranges {
    fn get(&self, at: usize) -> u8 {
        self.hold.array.bytes.lock()[self.places[at]]
    }

    fn put(&self, at: usize, byte: u8) {
        let place = self.places[at];
        self.hold.array.bytes.lock()[place] = byte;
        self.hold.array.changed.lock().push(place);
    }
}

fn ranges(admitted: Admitted<Granted>, needed: Access) -> Ranges {
    let claims = admitted.grant().claims.clone();
    assert!(claims.access.contains(needed), "what was admitted is not what its ticket allows");
    let (hold, ranges) = admitted.into_parts();
    let inside = |(at, len): (u64, usize)| claims.range.start <= at && at + len as u64 <= claims.range.end;
    assert!(ranges.iter().all(inside), "what was admitted is not all in the range of its ticket");
    let places = ranges.iter().flat_map(|(at, len)| at as usize..at as usize + len).collect();
    Ranges { hold, places }
}

impl World {
    /// The owner reads and acts on all that its kernel has.
    pub(crate) fn serve(&mut self, wire: usize) {
        if self.stopped || self.wires[wire].ended_by_owner {
            return;
        }
        // Nothing is applied for an initiator that has hung up.
        if self.wires[wire].hung_up {
            return self
                .owner_leaves(wire, &Error::new(towline_proto::Kind::Disconnected, "receive", "hung up"));
        }
        let one = &mut self.wires[wire];
        let bytes: Vec<u8> = one.inbox.drain(..).collect();
        one.towards -= bytes.len();
        one.at_owner.feed(&bytes);
        loop {
            let came = match self.wires[wire].at_owner.next() {
                Ok(Some(came)) => came,
                Ok(None) => break,
                Err(error) => return self.owner_leaves(wire, &error),
            };
            self.look_on();
            if self.lies > 0 && self.random.once_in(3) {
                self.lie(wire);
            }
            if let Err(error) = self.owner_hears(wire, came) {
                return self.owner_leaves(wire, &error);
            }
            if self.wires[wire].ended_by_owner {
                return;
            }
        }
        self.look_on();
        self.flush(wire);
    }

    fn owner_hears(&mut self, wire: usize, came: Came<Ranges>) -> Result<()> {
        match came {
            Came::Frame(header, body) => {
                let message = Message::decode(header.kind, &body)?;
                let action = self.owner.frame(&wire, header.id, message, self.now)?;
                self.owner_acts(wire, header.id, action)
            }
            Came::Payload(header, body) => {
                let message = Message::decode(header.kind, &body)?;
                let arriving = self.owner.payload(&header, message, body.len(), self.now)?;
                let place = arriving.admitted.ok().map(|admitted| ranges(admitted, Access::WRITE));
                self.wires[wire].at_owner.place(place);
                Ok(())
            }
            Came::Whole(header, body, place) => {
                let transfer = match Message::decode(header.kind, &body)? {
                    Message::Write(write) => write.transfer,
                    Message::Reduce(reduce) => reduce.transfer,
                    other => panic!("{:?} has no payload", other.kind()),
                };
                let outcome = if place.is_some() { Ok(header.payload_len) } else { Err(stale("write")) };
                drop(place);
                let settling = self.owner.applied(transfer, outcome.is_ok())?;
                self.owner_settles(settling)?;
                self.owner_answers(wire, header.id, outcome);
                Ok(())
            }
        }
    }

    fn owner_acts(&mut self, wire: usize, request: u64, action: Action<Granted, usize>) -> Result<()> {
        match action {
            Action::Answer(message) => self.reply(wire, &message.frame(request, 0, 0)),
            Action::Read(reading) => match reading.admitted {
                Ok(admitted) => {
                    let bytes = ranges(admitted, Access::READ);
                    let len = bytes.places.len();
                    let mut frame = Message::from(Data { outcome: Ok(()) }).frame(request, len as u64, 0);
                    frame.extend((0..len).map(|at| bytes.get(at)));
                    self.reply(wire, &frame);
                }
                Err(refusal) => {
                    let data = Data { outcome: Err(WireError::from(&refusal.error)) };
                    self.reply(wire, &Message::from(data).frame(request, 0, 0));
                }
            },
            Action::Settle(settling) => {
                let forgives = settling.forgives();
                let settled = self.owner_settles(settling);
                return if forgives { Ok(()) } else { settled };
            }
            Action::EndLane(lane) => {
                self.wires[lane].ended_by_owner = true;
                if let LaneEnd::Over = self.owner.lane_ends(lane, request, false, self.now)? {
                    self.owner_answers(wire, request, Ok(0));
                }
            }
            Action::Atomic(_, word) => {
                let outcome = word.map(|_| 0).map_err(|refusal| refusal.error);
                self.owner_answers(wire, request, outcome);
            }
            Action::Goodbye(error) => return Err(error),
            // Answers leave at once here, so that none can be taken back.
            Action::Withdraw(_) => {}
            Action::Import(import) => {
                let granted = self.owner_grants(&import)?;
                self.reply(wire, &Message::from(granted).frame(request, 0, 0));
            }
            Action::Reply(..) if request != 0 => {
                let error = Error::new(Kind::Unsupported, "query", "no path has anything to say");
                let reply = QueryReply { outcome: Err(WireError::from(&error)) };
                self.reply(wire, &Message::from(reply).frame(request, 0, 0));
            }
            Action::Nothing | Action::LetGo(_) | Action::Reply(..) | Action::Finish(_) | Action::Watch => {}
        }
        Ok(())
    }

    /// Grants what there is a ticket for.
    fn owner_grants(&mut self, import: &Import) -> Result<wire::Granted> {
        let mut items = Vec::new();
        for item in &import.items {
            let claims = self.tickets.iter().find(|(ticket, _)| *ticket == &item.ticket[..]);
            let Some(claims) = claims.map(|(_, claims)| claims.clone()).filter(|_| !self.revoked) else {
                items.push(Err(WireError::from(&stale("import"))));
                continue;
            };
            let region = || Arc::downgrade(&self.array);
            let new = match self.owner.grant_again(&item.ticket, &claims) {
                Ok(again) => {
                    again.map_or_else(|| Ok(Granted { claims: claims.clone(), region: region() }), Err)
                }
                Err(error) => {
                    items.push(Err(WireError::from(&error)));
                    continue;
                }
            };
            let handle = self.owner.grant(&item.ticket, new, Standing::new(region(), None));
            items.push(Ok(wire::Grant {
                handle,
                row: claims.row,
                generation: claims.generation,
                offset: claims.range.start,
                length: claims.range.end - claims.range.start,
                access: claims.access,
                place: Place::Host,
                layout: None,
                segment: None,
                expires_in_ms: None,
                offers: 0,
            }));
        }
        Ok(wire::Granted { items })
    }

    fn owner_settles(&mut self, mut settling: Settling<usize>) -> Result<()> {
        while let Some(Settled { act, answer }) = self.owner.settle(&mut settling, self.now) {
            let outcome = act.map_err(|refusal| refusal.error).map(|act| match act {
                Act::Deliver(message) => self.deliver(&message),
                Act::Raise(..) => {}
            });
            match answer {
                Some((over, request)) => self.owner_answers(over, request, outcome.map(|()| 0)),
                None => outcome?,
            }
        }
        Ok(())
    }

    fn owner_answers(&mut self, wire: usize, request: u64, outcome: Result<u64>) {
        let done = Done { outcome: outcome.map_err(|error| WireError::from(&error)) };
        self.reply(wire, &Message::from(done).frame(request, 0, 0));
    }

    /// Sends bytes to the user, in portions of any size.
    pub(crate) fn reply(&mut self, wire: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let take = bytes.len().min(1 + self.random.below(200) as usize);
            self.carry(wire, false, bytes[..take].to_vec());
            bytes = &bytes[take..];
        }
    }

    /// The owner ends a connection, or learns of its end.
    fn owner_leaves(&mut self, wire: usize, error: &Error) {
        self.wires[wire].ended_by_owner = true;
        self.wires[wire].at_owner.discard(|_| true);
        let gone = self.owner.gone(&wire, error, |_| false);
        if gone.ends && self.owner.end() {
            for other in &mut self.wires {
                other.ended_by_owner = true;
                other.at_owner.discard(|_| true);
            }
            drop(self.owner.clear());
        }
        for other in 0..self.wires.len() {
            if (other == wire || gone.ends) && !self.wires[other].dead {
                let when = self.wires[other].last[0].max(self.now);
                self.at(when, Event::HangsUp { wire: other, by_word: !self.wires[other].hung_up });
            }
        }
    }

    /// The region is taken back: what comes in goes nowhere from here on.
    pub(crate) fn revoke(&mut self) {
        self.array.closed.store(true, Ordering::Relaxed);
        for wire in &mut self.wires {
            wire.at_owner.discard(|_| true);
        }
        self.look_on();
        assert_eq!(
            self.array.holds.load(Ordering::Relaxed),
            0,
            "a peer still holds a region that was taken back"
        );
        self.revoked = true;
    }
}
