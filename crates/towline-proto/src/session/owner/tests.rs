//! An owner whose memory is an array, and users that keep to no rule.
#![allow(clippy::unwrap_used, clippy::panic)]

mod following;
mod frames;
mod grants;
mod lanes;
mod touching;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::*;
use crate::identity::Incarnation;
use crate::session::Quotas;
use crate::session::budget::Budget;
use crate::wire::{
    Atomic, Block, Bye, Cancel, Check, Data, EndLane, FrameKind, Held, Notify, Ping, Read, Reduce, Release,
    Signal, Withdraw, Write,
};
use crate::{Dtype, ReduceOp};

/// The array is so long, and the ticket allows this much of it.
const LEN: usize = 256;
const START: u64 = 64;
const LENGTH: u64 = 100;

const CONTROL: u8 = 0;
const LANE: u8 = 1;
const OTHER: u8 = 2;

#[derive(Debug, Default)]
struct Array {
    bytes: Mutex<Vec<u8>>,
    closed: AtomicBool,
    /// Holds that were begun, and those that have ended.
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl Array {
    fn held(&self) -> usize {
        self.begun.load(Ordering::SeqCst) - self.ended.load(Ordering::SeqCst)
    }
}

struct HoldOfArray(Arc<Array>, Option<InFlight>);

impl Drop for HoldOfArray {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct Ticketed {
    claims: Claims,
    region: Weak<Array>,
}

impl Grant for Ticketed {
    type Region = Array;
    type Hold = HoldOfArray;

    fn claims(&self) -> &Claims {
        &self.claims
    }

    fn region(&self) -> &Weak<Array> {
        &self.region
    }

    fn served(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(())
    }

    fn is_closed(region: &Array) -> bool {
        region.closed.load(Ordering::SeqCst)
    }

    fn hold(
        op: &'static str,
        region: Arc<Array>,
        flight: Option<InFlight>,
    ) -> Result<HoldOfArray, (Error, Arc<Array>)> {
        if Ticketed::is_closed(&region) {
            return Err((stale(op), region));
        }
        region.begun.fetch_add(1, Ordering::SeqCst);
        Ok(HoldOfArray(region, flight))
    }
}

/// An owner in a session, and the little that it takes to do what the rules say.
struct Scene {
    rules: Owner<Ticketed, u8>,
    array: Arc<Array>,
    allowance: Arc<Allowance>,
    now: Instant,
    delivered: Vec<Vec<u8>>,
    /// The outcomes of requests that were answered.
    answers: Vec<(u8, u64, Result<u64, Kind>)>,
}

fn claims(access: Access, expires_ms: Option<u64>) -> Claims {
    let range = START..START + LENGTH;
    Claims {
        incarnation: Incarnation([3; 16]),
        row: 1,
        generation: 1,
        range,
        access,
        expires_ms,
        layout: None,
    }
}

impl Scene {
    fn open() -> Scene {
        Scene::with(Quotas::default(), None)
    }

    /// The peer's first ticket ends then.
    fn with(quotas: Quotas, expires_ms: Option<u64>) -> Scene {
        let allowance = Allowance::new(quotas, Budget::new("tests", quotas.memory).account());
        let array =
            Arc::new(Array { bytes: Mutex::new((0..LEN).map(|at| at as u8).collect()), ..Array::default() });
        let (now, standing) = (Instant::now(), Standing::new(Arc::downgrade(&array), expires_ms));
        let mut rules = Owner::new(CONTROL, standing, &allowance, false, now);
        rules.joined(LANE, [LANE; 32]);
        rules.joined(OTHER, [OTHER; 32]);
        Scene { rules, array, allowance, now, delivered: Vec::new(), answers: Vec::new() }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn import(&mut self, access: Access, expires_ms: Option<u64>) -> u32 {
        let claims = claims(access, expires_ms);
        let ticket = format!("{access} {expires_ms:?}");
        self.import_as(ticket.as_bytes(), claims)
    }

    fn import_as(&mut self, ticket: &[u8], claims: Claims) -> u32 {
        let region = Arc::downgrade(&self.array);
        let standing = Standing::new(Weak::clone(&region), claims.expires_ms);
        let grant = match self.rules.grant_again(ticket, &claims).unwrap() {
            Some(handle) => Err(handle),
            None => Ok(Ticketed { claims, region }),
        };
        self.rules.grant(ticket, grant, standing)
    }

    /// A frame comes, cut out of bytes as they would be on a socket.
    fn frame(&mut self, over: u8, id: u64, message: impl Into<Message>) -> Result<Action<Ticketed, u8>> {
        let frame = message.into().frame(id, 0, 0);
        let header = Header::decode(frame.first_chunk().unwrap())?;
        header.check(true)?;
        let body = header.body(&frame[crate::wire::HEADER_LEN..])?;
        self.rules.frame(&over, header.id, Message::decode(header.kind, body)?, self.now)
    }

    fn read(&mut self, over: u8, handle: u32, blocks: Vec<Block>) -> Result<Vec<u8>, Refusal<Ticketed>> {
        let action = self.frame(over, 1, Read { transfer: 0, handle, blocks }).unwrap();
        let Action::Read(reading) = action else { panic!("not read") };
        assert!(reading.checks.is_none());
        let (hold, ranges) = reading.admitted?.into_parts();
        let bytes = hold.0.bytes.lock();
        Ok(ranges.iter().flat_map(|(at, len)| bytes[at as usize..at as usize + len].to_vec()).collect())
    }

    fn arrives(&mut self, message: Message, payload_len: u64) -> Result<Arriving<Ticketed>> {
        let frame = message.frame(1, payload_len, 0);
        let header = Header::decode(frame.first_chunk().unwrap())?;
        self.rules.payload(&header, message, 64, self.now)
    }

    fn write(&mut self, handle: u32, blocks: &[Block], bytes: &[u8]) -> Result<(), Refusal<Ticketed>> {
        let write = Write { transfer: 0, handle, blocks: blocks.to_vec() };
        let (hold, ranges) = self.arrives(write.into(), bytes.len() as u64)?.admitted?.into_parts();
        let (mut all, mut left) = (hold.0.bytes.lock(), bytes);
        for (at, len) in ranges.iter() {
            let (now, rest) = left.split_at(len);
            all[at as usize..][..len].copy_from_slice(now);
            left = rest;
        }
        Ok(())
    }

    /// Does what has followed, as an edge does.
    fn settle(&mut self, mut settling: Settling<u8>) -> Result<()> {
        while let Some(Settled { act, answer }) = self.rules.settle(&mut settling, self.now) {
            let outcome = act.map_err(|refusal| refusal.error).map(|act| match act {
                Act::Deliver(message) => {
                    self.delivered.push(message);
                    0
                }
                Act::Raise(word, add) => self.change(word, |seen| seen.wrapping_add(add)),
            });
            match answer {
                Some((over, id)) => self.answers.push((over, id, outcome.map_err(|error| error.kind()))),
                None => drop(outcome?),
            }
        }
        Ok(())
    }

    fn change(&self, word: Word<Ticketed>, change: impl Fn(u64) -> u64) -> u64 {
        let (hold, ranges) = word.admitted.into_parts();
        let (at, len) = ranges.iter().next().unwrap();
        let mut bytes = hold.0.bytes.lock();
        let word = &mut bytes[at as usize..][..len];
        let seen = u64::from_le_bytes(word.try_into().unwrap());
        word.copy_from_slice(&change(seen).to_le_bytes());
        seen
    }

    fn follow(&mut self, over: u8, id: u64, message: impl Into<Message>) -> Result<()> {
        match self.frame(over, id, message)? {
            Action::Settle(settling) => {
                let forgives = settling.forgives();
                let settled = self.settle(settling);
                if forgives { Ok(()) } else { settled }
            }
            _ => panic!("it follows"),
        }
    }

    fn applied(&mut self, transfer: u64, ok: bool) {
        let settling = self.rules.applied(transfer, ok).unwrap();
        self.settle(settling).unwrap();
    }
}

fn block(offset: u64, len: u32) -> Block {
    Block { offset, len }
}

fn refused<T>(outcome: Result<T, Refusal<Ticketed>>) -> (Kind, Blame<Ticketed>) {
    let Err(refusal) = outcome else { panic!("it was admitted") };
    (refusal.error.kind(), refusal.blame)
}

fn notify(transfer: u64, pieces: u32, message: &str) -> Notify {
    Notify { transfer, pieces, message: message.into() }
}
