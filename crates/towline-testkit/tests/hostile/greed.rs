//! Peers and unauthenticated connections that take all they can get: connections, descriptors, requests, grants.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use towline::wire::{Block, Data, FrameKind, Granted, Import, ImportItem, Message, Ping, Read};
use towline::{Access, Endpoint, Kind, SystemStorage};
use towline_testkit::bench::routing;
use towline_testkit::watchdog::eventually;

use crate::{LEN, PATIENCE, STAMP, Target};
use towline_testkit::attacker::{Attacker, Medium};

/// A new client is to be served within a tenth of this; ten times that is what a busy machine is given.
const SERVED: Duration = Duration::from_secs(1);

fn serves_soon(target: &Target, beside: &str) {
    for path in ["unix", "tcp"] {
        let soon = (0..5).any(|_| {
            let user = Endpoint::options("new").routing(routing(path)).open().unwrap();
            let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
            let Ok(remote) = user.import_within(&target.ticket, &routing(path), SERVED) else { return false };
            user.read(&remote, &local).start().unwrap().wait().unwrap();
            STAMP.verify_storage(local.storage(), 0, LEN).unwrap();
            true
        });
        assert!(soon, "no new client was served over {path} beside {beside}");
    }
}

#[test]
fn a_new_client_is_served_beside_hundreds_of_silent_ones() {
    let mut target = Target::open("a_new_client_is_served_beside_hundreds_of_silent_ones");
    let hello = Attacker::hello(&target.ticket).1;
    for medium in [Medium::Unix, Medium::Tcp] {
        let silent: Vec<Attacker> = (0..400).map(|_| Attacker::connect(&target.ticket, medium)).collect();
        serves_soon(&target, "silent connections");
        let half: Vec<Attacker> = (0..400)
            .map(|_| {
                let mut attacker = Attacker::connect(&target.ticket, medium);
                attacker.send(&hello);
                attacker
            })
            .collect();
        serves_soon(&target, "connections that stop in the middle");
        drop((silent, half));
    }
    target.is_unharmed();
}

#[test]
fn an_unauthenticated_connection_that_must_go_gets_the_reason() {
    let mut target =
        Target::open_with("an_unauthenticated_connection_that_must_go_gets_the_reason", "unauthenticated=4");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut first = Attacker::connect(&target.ticket, medium);
        let rest: Vec<Attacker> = (0..4).map(|_| Attacker::connect(&target.ticket, medium)).collect();
        let (header, body) = first.frame().expect("a refusal");
        assert_eq!(header.kind, FrameKind::Refuse);
        let error = towline::wire::Refuse::decode(&body).unwrap().error;
        assert_eq!(error.kind, Kind::Exhausted);
        assert!(error.message.contains("more than 4 connections"), "{}", error.message);
        drop(rest);
        target.serves();
    }
    target.is_unharmed();
}

/// A peer that asks for far more than it takes.
fn stall(target: &Target, medium: Medium) -> Attacker {
    let mut attacker = Attacker::connect(&target.ticket, medium);
    let handle = attacker.log_in(&target.ticket);
    let blocks = vec![Block { offset: 0, len: LEN as u32 }];
    for _ in 0..64 {
        let read = Read { transfer: 0, handle, blocks: blocks.clone() };
        attacker.send(&Message::from(read).frame(7, 0, 0));
    }
    attacker
}

#[test]
fn a_new_client_is_served_beside_ten_stalled_ones() {
    let mut target = Target::open("a_new_client_is_served_beside_ten_stalled_ones");
    for medium in [Medium::Unix, Medium::Tcp] {
        let stalled: Vec<Attacker> = (0..10).map(|_| stall(&target, medium)).collect();
        serves_soon(&target, "stalled clients");
        drop(stalled);
    }
    target.is_unharmed();
}

#[test]
fn requests_and_bytes_beyond_the_quota_are_refused_and_the_rest_is_served() {
    let name = "requests_and_bytes_beyond_the_quota_are_refused_and_the_rest_is_served";
    for (quota, word) in [("requests=8".to_owned(), "8 requests"), (format!("bytes={}", 8 * LEN), "bytes")] {
        let mut target = Target::open_with(name, &quota);
        for medium in [Medium::Unix, Medium::Tcp] {
            // More than the sockets hold, so that some are in flight while others come.
            let mut attacker = Attacker::connect(&target.ticket, medium);
            let handle = attacker.log_in(&target.ticket);
            let blocks = vec![Block { offset: 0, len: LEN as u32 }];
            const ASKED: usize = 1000;
            let before = target.refused();
            for _ in 0..ASKED {
                let read = Read { transfer: 0, handle, blocks: blocks.clone() };
                attacker.send(&Message::from(read).frame(7, 0, 0));
            }
            // A peer that reads the replies as they come may never have more than one in flight.
            assert!(eventually(PATIENCE * 4, || target.refused() > before), "nothing was refused");
            let (mut served, mut refused) = (0, 0);
            for _ in 0..ASKED {
                let (header, body) = attacker.frame().expect("a reply");
                assert_eq!(header.kind, FrameKind::Data);
                match Data::decode(&body).unwrap().outcome {
                    Ok(()) => served += 1,
                    Err(error) => {
                        assert_eq!(error.kind, Kind::Exhausted);
                        assert!(error.message.contains(word), "{}", error.message);
                        refused += 1;
                    }
                }
            }
            assert!(served >= 8 && refused > 0, "{served} served, {refused} refused over {medium:?}");
            // What was given back can be taken again.
            let read = Read { transfer: 0, handle, blocks };
            attacker.send(&Message::from(read).frame(7, 0, 0));
            let (_, body) = attacker.frame().expect("a reply");
            assert!(Data::decode(&body).unwrap().outcome.is_ok());
        }
        target.is_unharmed();
    }
}

#[test]
fn grants_beyond_the_quota_are_refused() {
    let mut target = Target::open_with("grants_beyond_the_quota_are_refused", "grants=10");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut attacker = Attacker::connect(&target.ticket, medium);
        let challenge = attacker.shake_hands(&target.ticket).unwrap();
        let item = |len: u64| {
            let ticket = target.ticket.narrow().range(0, len).finish().unwrap();
            let proof = ticket.proof(&challenge);
            ImportItem { ticket: ticket.public_bytes().to_vec(), proof, operation: None }
        };
        // The same one again and again is one grant.
        attacker.send(&Message::from(Import { items: vec![item(1); 16] }).frame(1, 0, 0));
        let (_, body) = attacker.frame().expect("the grants");
        let handles: Vec<u32> =
            Granted::decode(&body).unwrap().items.into_iter().map(|grant| grant.unwrap().handle).collect();
        assert_eq!(handles, [handles[0]; 16]);
        attacker.send(&Message::from(Import { items: (1..=16).map(item).collect() }).frame(1, 0, 0));
        let (_, body) = attacker.frame().expect("the grants");
        let items = Granted::decode(&body).unwrap().items;
        let (granted, refused): (Vec<_>, Vec<_>) = items.into_iter().partition(Result::is_ok);
        assert_eq!((granted.len(), refused.len()), (10, 6), "over {medium:?}");
        assert!(refused.iter().all(|one| one.as_ref().is_err_and(|error| error.kind == Kind::Exhausted)));
    }
    target.is_unharmed();
}

#[test]
fn peers_and_connections_beyond_the_quota_are_refused() {
    for (quota, word) in [("peers=3", "3 peers"), ("connections=3", "3 connections")] {
        let mut target = Target::open_with("peers_and_connections_beyond_the_quota_are_refused", quota);
        for medium in [Medium::Unix, Medium::Tcp] {
            let settled = eventually(PATIENCE * 10, || target.process.descriptors() <= target.descriptors);
            assert!(settled, "the peers of the last round are still there");
            let mut logged_in: Vec<Attacker> = (0..3)
                .map(|_| {
                    let mut attacker = Attacker::connect(&target.ticket, medium);
                    attacker.log_in(&target.ticket);
                    attacker
                })
                .collect();
            let error = Attacker::connect(&target.ticket, medium).try_log_in(&target.ticket).unwrap_err();
            assert_eq!(error.kind, Kind::Exhausted);
            assert!(error.message.contains(word), "{}", error.message);
            // Those that are there go on.
            for attacker in &mut logged_in {
                attacker.send(&Message::from(Ping {}).frame(9, 0, 0));
                assert_eq!(attacker.frame().expect("a reply").0.kind, FrameKind::Pong);
            }
        }
        target.is_unharmed();
    }
}

#[test]
fn an_owner_without_descriptors_says_so_goes_on_and_recovers() {
    let mut target = Target::open("an_owner_without_descriptors_says_so_goes_on_and_recovers");
    // One that is served while all this happens.
    let mut running = Attacker::connect(&target.ticket, Medium::Tcp);
    let handle = running.log_in(&target.ticket);
    target.settle();
    let highest = std::fs::read_dir(format!("/proc/{}/fd", target.process.pid()))
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok())
        .max()
        .unwrap();
    let pid = Pid::from_raw(target.process.pid());
    let few = Rlimit { current: Some(highest + 8), maximum: getrlimit(Resource::Nofile).maximum };
    let before = prlimit(pid, Resource::Nofile, few).unwrap();
    for medium in [Medium::Tcp, Medium::Unix] {
        let mut logged_in = Vec::new();
        let mut silent = Vec::new();
        let refused = (0..200).find_map(|_| {
            silent.push(Attacker::connect(&target.ticket, medium));
            let mut attacker = Attacker::connect(&target.ticket, medium);
            match attacker.try_log_in(&target.ticket) {
                Ok(_) => {
                    logged_in.push(attacker);
                    None
                }
                Err(error) => Some(error),
            }
        });
        let refused = refused.expect("there is an end to descriptors");
        assert_eq!(refused.kind, Kind::Exhausted, "{}", refused.message);
        // A peer that comes now gets a reply too, and not silence.
        for _ in 0..20 {
            let _ = Attacker::connect(&target.ticket, medium).try_log_in(&target.ticket);
        }
        let user = Endpoint::options("late").routing(routing("tcp")).open().unwrap();
        if let Err(error) = user.import(&target.ticket) {
            assert!(error.is_retryable(), "{error}");
        }
        let read = Read { transfer: 0, handle, blocks: vec![Block { offset: 0, len: LEN as u32 }] };
        running.send(&Message::from(read).frame(7, 0, 0));
        let (_, body) = running.frame().expect("the running session goes on");
        assert!(Data::decode(&body).unwrap().outcome.is_ok());
        drop((logged_in, silent));
        let served = eventually(PATIENCE * 10, || {
            let user = Endpoint::options("next").routing(routing("tcp")).open().unwrap();
            user.import(&target.ticket).is_ok()
        });
        assert!(served, "the owner does not recover after {medium:?}");
    }
    prlimit(pid, Resource::Nofile, before).unwrap();
    drop(running);
    target.is_unharmed();
}

/// A frame of that kind: 24 bytes of header, a body, zeros up to a multiple of 64.
fn frame(kind: u8, id: u64, body: &[u8]) -> Vec<u8> {
    let len = 24 + body.len();
    let mut frame = vec![0; len.next_multiple_of(64)];
    (frame[0], frame[3], frame[4]) = (kind, (frame.len() - len) as u8, body.len() as u8);
    frame[16..24].copy_from_slice(&id.to_le_bytes());
    frame[24..len].copy_from_slice(body);
    frame
}

#[test]
fn requests_and_lanes_that_are_not_there_are_given_up_without_a_trace() {
    const WITHDRAW: u8 = 43;
    const END_LANE: u8 = 44;
    let mut target = Target::open("requests_and_lanes_that_are_not_there_are_given_up_without_a_trace");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut attacker = Attacker::connect(&target.ticket, medium);
        let handle = attacker.log_in(&target.ticket);
        let before = target.process.resident();
        for round in 0..200u64 {
            let nothing: Vec<u8> = (0..500).flat_map(|id| frame(WITHDRAW, round << 32 | id, &[])).collect();
            attacker.send(&nothing);
            attacker.send(&frame(END_LANE, round, &[round as u8; 32]));
            let (header, body) = attacker.frame().expect("a lane that is not there is over");
            assert_eq!((header.kind, header.id), (FrameKind::Done, round));
            assert!(towline::wire::Done::decode(&body).unwrap().outcome.is_ok());
        }
        assert!(target.process.resident() < before + (4 << 20), "it keeps what is not there in mind");
        // Of a request that is there exactly one reply comes, whole or not.
        let blocks = vec![Block { offset: 0, len: LEN as u32 }];
        for id in 1..=40 {
            attacker
                .send(&Message::from(Read { transfer: 0, handle, blocks: blocks.clone() }).frame(id, 0, 0));
            attacker.send(&frame(WITHDRAW, id, &[]));
            attacker.send(&frame(WITHDRAW, id, &[]));
        }
        attacker.send(&Message::from(Ping {}).frame(99, 0, 0));
        let mut answered = Vec::new();
        while let Some((header, body)) = attacker.frame().filter(|(header, _)| header.kind == FrameKind::Data)
        {
            let outcome = Data::decode(&body).unwrap().outcome;
            assert!(outcome.is_ok() || outcome.unwrap_err().kind == Kind::Canceled);
            answered.push(header.id);
        }
        answered.sort_unstable();
        assert_eq!(answered, (1..=40).collect::<Vec<u64>>());
        // What cannot be a transcript ends the session.
        attacker.send(&frame(END_LANE, 1, &[0; 31]));
        assert!(attacker.is_cut_off(PATIENCE));
        target.serves();
    }
    target.is_unharmed();
}
