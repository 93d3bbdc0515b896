//! The rows of one-sided access: 8 bytes with a signal there and back, and 4 MiB.

use std::time::Instant;

use super::super::Session;
use super::super::report::{Row, Unit};
use super::group::{Group, surprise};
use super::peers::{Peer, Peers, SETTINGS};
use crate::measure::median;
use crate::outcome::{Failure, Outcome};
use crate::size;
use crate::worker::order::{Order, RankReply};
use crate::worker::protocol::Op;

const WINDOW: u64 = 4 << 20;
pub(super) const PING: &str = "put-signal-8b";
pub(super) const PUT: &str = "put-4m";
pub(super) const GET: &str = "get-4m";

/// Round trips of one turn: some milliseconds.
const COUNT: u64 = 5_000;

/// Two ranks with a window each, which they also reach by hand.
fn pair() -> Outcome<Group> {
    let mut group = Group::start(2, true)?;
    let opened = group.each(|_| Order::Open { bytes: WINDOW })?;
    let files: Vec<(i32, i32)> = opened
        .iter()
        .map(|answer| match answer {
            RankReply::Opened { pid, file } => Ok((*pid, *file)),
            answer => Err(surprise(answer)),
        })
        .collect::<Outcome<_>>()?;
    group.each(|rank| Order::Map { pid: files[1 - rank].0, file: files[1 - rank].1, bytes: WINDOW })?;
    Ok(group)
}

/// Measures those of the rows that are wanted.
pub(super) fn run(session: &mut Session, peers: &Peers, names: &[&str]) {
    let mut group = match pair() {
        Ok(group) => group,
        Err(failure) => {
            names.iter().for_each(|name| session.fail((*name).to_owned(), None, &failure));
            return;
        }
    };
    for name in names {
        session.step(&format!("2-ranks/{name}"));
        let measured = match *name {
            PING => ping(session, peers, &mut group),
            PUT => copy(session, &mut group, PUT, Op::Write),
            _ => copy(session, &mut group, GET, Op::Read),
        };
        if let Err(failure) = measured {
            session.fail((*name).to_owned(), None, &failure);
        }
    }
}

fn ping(session: &mut Session, peers: &Peers, group: &mut Group) -> Outcome<()> {
    let mut peer = fastest(peers);
    let (mut ours, mut bare, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let (pace, start) = (session.pace, Instant::now());
    for round in 0..pace.most {
        if round >= pace.fewest && start.elapsed() >= pace.budget {
            break;
        }
        for turn in 0..3 {
            match (turn + round) % 3 {
                0 => ours.push(group.seconds(&Order::Ping { bare: false, count: COUNT })?),
                1 => bare.push(group.seconds(&Order::Ping { bare: true, count: COUNT })?),
                _ => {
                    if let Ok((_, peer)) = &mut peer {
                        theirs.push(peer.put(COUNT)?);
                    }
                }
            }
        }
    }
    let (rounds, ours) = (ours.len(), median(&mut ours) * 1e6);
    let theirs = (!theirs.is_empty()).then(|| median(&mut theirs) * 1e6);
    let against = match &peer {
        Ok((settings, _)) => format!("Open MPI put + flush there and back ({settings})"),
        Err(failure) => format!("Open MPI: {failure}"),
    };
    let base = Row {
        path: Some("window".into()),
        op: Some("round trip".into()),
        bytes: 8,
        ranks: Some(2),
        rounds,
        ..Row::new(PING, Unit::Microseconds, ours)
    };
    let bare = Some(median(&mut bare) * 1e6);
    session.rows.push(base.clone().against("flag in shared memory there and back", bare, Some(0.5)));
    session.rows.push(base.against(against, theirs, Some(1.0)));
    Ok(())
}

/// Open MPI with the settings by which its puts are fastest.
fn fastest(peers: &Peers) -> Outcome<(&'static str, Peer)> {
    let mut best: Option<(f64, &'static str, Peer)> = None;
    for (label, settings) in SETTINGS.iter().take(3) {
        let mut peer = peers.open_mpi(2, settings)?;
        let turns = (0..3).map(|_| peer.put(COUNT)).collect::<Outcome<Vec<_>>>();
        let Ok(mut turns) = turns else { continue };
        let time = median(&mut turns);
        if best.as_ref().is_none_or(|(least, ..)| time < *least) {
            best = Some((time, label, peer));
        }
    }
    best.map(|(_, label, peer)| (label, peer)).ok_or_else(|| Failure::lacking("its windows do not work here"))
}

fn copy(session: &mut Session, group: &mut Group, name: &'static str, op: Op) -> Outcome<()> {
    let pace = session.pace;
    let (fewest, most) = (pace.fewest, pace.most);
    let order = Order::Copy { op, bytes: WINDOW, budget_ms: pace.budget.as_millis() as u64, fewest, most };
    let (ours, bare, rounds) = match group.one(0, order)? {
        RankReply::Copied { ours, bare, rounds } => (ours, bare, rounds),
        answer => return Err(surprise(&answer)),
    };
    let rate = |seconds| size::gib_per_second(WINDOW, seconds);
    let row = Row::new(name, Unit::Rate, rate(ours)).against("memcpy", Some(rate(bare)), Some(0.9));
    let (path, op) = (Some("window".into()), Some(op.name().into()));
    session.rows.push(Row { path, op, bytes: WINDOW, ranks: Some(2), rounds, ..row });
    Ok(())
}
