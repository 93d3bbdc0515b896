//! How ranks find each other, and which errors they get when they do not.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use towline::Kind;
use towline_comm::{Communicator, Config, Result, UniqueId, get_unique_id};

use super::{config, impatient, watch};

/// Joins with one thread per entry: size and rank as that thread believes them.
pub(super) fn join(id: &UniqueId, beliefs: &[(usize, usize, Config)]) -> Vec<Result<Communicator>> {
    thread::scope(|scope| {
        let threads: Vec<_> = beliefs
            .iter()
            .map(|(nranks, rank, config)| {
                scope.spawn(move || Communicator::init(*nranks, *rank, id, config.clone()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(super) fn refused(id: &UniqueId, beliefs: &[(usize, usize, Config)], kind: Kind, ranks: &[usize]) {
    for outcome in join(id, beliefs) {
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (kind, ranks), "{error}");
    }
}

#[test]
fn threads_join_by_an_id_in_groups_of_one_to_eight() {
    let _watchdog = watch("joining");
    for nranks in 1..=8 {
        let id = get_unique_id().unwrap();
        let beliefs: Vec<_> = (0..nranks).map(|rank| (nranks, rank, config())).collect();
        for (rank, comm) in join(&id, &beliefs).into_iter().enumerate() {
            let comm = comm.unwrap();
            assert_eq!((comm.rank().unwrap(), comm.nranks().unwrap()), (rank, nranks));
        }
    }
}

#[test]
fn ranks_that_did_not_come_are_named_to_everybody() {
    let _watchdog = watch("missing ranks");
    let id = get_unique_id().unwrap();
    refused(&id, &[(4, 0, impatient()), (4, 2, impatient())], Kind::Timeout, &[1, 3]);
}

#[test]
fn a_rank_that_comes_twice_is_named_to_everybody() {
    let _watchdog = watch("duplicate rank");
    let id = get_unique_id().unwrap();
    refused(&id, &[(3, 1, config()), (3, 1, config())], Kind::Invalid, &[1]);
}

#[test]
fn a_rank_outside_the_group_is_named_to_everybody() {
    let _watchdog = watch("rank outside");
    let id = get_unique_id().unwrap();
    let waiting = {
        let id = id.clone();
        thread::spawn(move || Communicator::init(2, 0, &id, config()))
    };
    thread::sleep(Duration::from_millis(100));
    let error = Communicator::init(2, 5, &id, config()).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[5][..]));
    let error = waiting.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[5][..]));
    assert_eq!(
        Communicator::init(0, 0, &get_unique_id().unwrap(), config()).unwrap_err().kind(),
        Kind::Invalid
    );
}

#[test]
fn ranks_that_differ_about_size_or_settings_are_refused_on_every_rank() {
    let _watchdog = watch("differing ranks");
    for (nranks, contexts) in [(3, 4), (2, 9)] {
        let id = get_unique_id().unwrap();
        let other = Config { contexts, ..config() };
        for outcome in join(&id, &[(2, 0, config()), (nranks, 1, other)]) {
            let error = outcome.unwrap_err();
            assert_eq!((error.kind(), error.ranks().len()), (Kind::Invalid, 1), "{error}");
        }
    }
}

#[test]
fn a_rank_that_comes_after_the_meeting_has_failed_learns_why() {
    let _watchdog = watch("a late rank");
    let id = get_unique_id().unwrap();
    refused(&id, &[(3, 1, config()), (3, 1, config())], Kind::Invalid, &[1]);
    let error = Communicator::init(3, 0, &id, config()).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]), "{error}");
}

#[test]
fn an_id_serves_one_meeting() {
    let _watchdog = watch("used id");
    let id = get_unique_id().unwrap();
    let first = Communicator::init(1, 0, &id, config()).unwrap();
    let error = Communicator::init(1, 0, &id, config()).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().contains("used already"), "{error}");
    assert!(first.is_valid());
}

/// The address of the meeting, as an id that was written down carries it.
pub(super) fn doors(id: &UniqueId) -> (String, String) {
    let shown = format!("{id:?}");
    let nonce = shown[9..41].to_owned();
    let address = shown.split(['[', ']']).nth(1).unwrap().to_owned();
    (format!("towline-meeting-{nonce}"), address)
}

#[test]
fn garbage_silence_and_slow_senders_disturb_nobody() {
    let _watchdog = watch("unauthenticated connections");
    let id = get_unique_id().unwrap();
    let (unix, tcp) = doors(&id);
    let mut connections: Vec<Box<dyn Write>> = Vec::new();
    for round in 0..200 {
        let mut garbage = TcpStream::connect(&tcp).unwrap();
        let _ = garbage.write_all(&vec![round as u8; 10_000]);
        let mut long = TcpStream::connect(&tcp).unwrap();
        let _ = long.write_all(b"TLm?");
        let address = SocketAddr::from_abstract_name(&unix).unwrap();
        let silent = UnixStream::connect_addr(&address).unwrap();
        connections.push(Box::new(garbage));
        connections.push(Box::new(long));
        connections.push(Box::new(silent));
    }
    let joined = join(&id, &[(3, 0, config()), (3, 1, config()), (3, 2, config())]);
    for comm in joined {
        assert_eq!(comm.unwrap().nranks().unwrap(), 3);
    }
}

#[test]
fn one_who_knows_the_place_but_not_the_secret_learns_nothing() {
    let _watchdog = watch("a wrong secret");
    let id = get_unique_id().unwrap();
    let (_, tcp) = doors(&id);
    let mut attacker = TcpStream::connect(tcp).unwrap();
    let mut hello = b"TLm?".to_vec();
    hello.extend(&id.as_bytes()[40..56]);
    hello.extend([0; 32]);
    attacker.write_all(&hello).unwrap();
    let mut welcome = [0; 68];
    attacker.read_exact(&mut welcome).unwrap();
    let mut join = 200u32.to_le_bytes().to_vec();
    join.extend([7; 200]);
    attacker.write_all(&join).unwrap();
    let mut rest = Vec::new();
    let _ = attacker.read_to_end(&mut rest);
    assert!(rest.is_empty());
    assert!(Communicator::init(1, 0, &id, config()).is_ok());
}

#[test]
fn a_rank_that_leaves_before_the_others_have_come_is_named() {
    let _watchdog = watch("a rank that leaves");
    let id = get_unique_id().unwrap();
    let start = Instant::now();
    // It loses patience first and goes; the other one does not wait for its own.
    refused(&id, &[(3, 0, impatient()), (3, 1, config())], Kind::Timeout, &[2]);
    assert!(start.elapsed() < super::LONG);
}
