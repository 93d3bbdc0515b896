//! Unauthenticated connections, liars and earlier lives at the door of a meeting: a rank with the right id is served or gets the reason why not.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use towline::Kind;
use towline::crypto::hmac_sha256;
use towline_comm::{Communicator, UniqueId, get_unique_id};
use towline_testkit::watchdog::eventually;

use super::meeting::{doors, join, refused};
use super::{LONG, config, impatient, watch};

const SECRET: std::ops::Range<usize> = 8..40;
const NONCE: std::ops::Range<usize> = 40..56;

fn hello(id: &UniqueId, challenge: &[u8; 32]) -> Vec<u8> {
    [b"TLm?", &id.as_bytes()[NONCE], &challenge[..]].concat()
}

/// What a rank of some version of the meeting sends once it was welcomed, made by hand from what is written down.
fn sealed_join(
    id: &UniqueId,
    ours: &[u8; 32],
    theirs: &[u8],
    version: u16,
    nranks: u32,
    rank: u32,
) -> Vec<u8> {
    let key = hmac_sha256(&id.as_bytes()[SECRET], &[b"towline meeting", &id.as_bytes()[NONCE], ours, theirs]);
    let mut plain = version.to_le_bytes().to_vec();
    plain.extend(nranks.to_le_bytes());
    plain.extend(rank.to_le_bytes());
    plain.extend([0xee; 77]);
    let stream = hmac_sha256(&key, &[b"stream", &[0]]);
    for (index, block) in plain.chunks_mut(32).enumerate() {
        let pad = hmac_sha256(&stream, &[&(index as u64).to_le_bytes()]);
        block.iter_mut().zip(pad).for_each(|(byte, pad)| *byte ^= pad);
    }
    let tag = hmac_sha256(&key, &[b"tag", &[0], &plain]);
    plain.extend(tag);
    let mut message = (plain.len() as u32).to_le_bytes().to_vec();
    message.extend(plain);
    message
}

/// Greets the root by hand: the connection, and the root's challenge.
fn greet(id: &UniqueId, challenge: &[u8; 32]) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(doors(id).1).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&hello(id, challenge)).unwrap();
    let mut welcome = [0; 68];
    stream.read_exact(&mut welcome).unwrap();
    (stream, welcome[4..36].to_vec())
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_rank_of_another_version_is_named_to_every_rank_that_came() {
    let _watchdog = watch("another version");
    let id = get_unique_id().unwrap();
    let waiting: Vec<_> = [0, 2]
        .into_iter()
        .map(|rank| {
            let id = id.clone();
            thread::spawn(move || Communicator::init(3, rank, &id, config()).map(drop))
        })
        .collect();
    let (mut stream, theirs) = greet(&id, &[9; 32]);
    stream.write_all(&sealed_join(&id, &[9; 32], &theirs, 7, 3, 1)).unwrap();
    for rank in waiting {
        let error = rank.join().unwrap().unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (Kind::Protocol, &[1][..]), "{error}");
        assert!(error.message().contains("version 7"), "{error}");
    }
    // It learns of it too, in a reply that every version can read.
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    assert!(u32::from_le_bytes(len) > 32);
}

#[test]
fn a_replayed_greeting_and_join_let_nobody_in() {
    let _watchdog = watch("a replay");
    let id = get_unique_id().unwrap();
    let challenge = [5; 32];
    let (mut first, theirs) = greet(&id, &challenge);
    let join_of_one = sealed_join(&id, &challenge, &theirs, 1, 2, 1);
    // An attacker on the network path has seen everything that this rank said, and says it again.
    let (mut again, new) = greet(&id, &challenge);
    assert_ne!(theirs, new, "the root's challenge is new for every connection");
    again.write_all(&join_of_one).unwrap();
    let mut rest = Vec::new();
    let _ = again.read_to_end(&mut rest);
    assert!(rest.is_empty(), "a replayed join was answered");
    // The root still waits for the ranks: the replay has taken nobody's seat.
    drop(first.write_all(b"junk"));
    drop(first);
    let joined = join(&id, &[(2, 0, config()), (2, 1, config())]);
    assert!(joined.iter().all(Result::is_ok), "{joined:?}");
}

#[test]
fn a_sender_that_drips_and_one_that_floods_disturb_nobody() {
    let _watchdog = watch("drips and floods");
    let id = get_unique_id().unwrap();
    let (_, tcp) = doors(&id);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (over, id, tcp) = (&over, &id, &tcp);
        // A byte at a time, of a true greeting, for as long as it is let.
        scope.spawn(move || {
            let mut drip = TcpStream::connect(tcp).unwrap();
            for byte in hello(id, &[1; 32]).into_iter().chain([0; 4096]) {
                if over.load(Ordering::Relaxed) || drip.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        // Megabytes, from the first byte on and behind a true greeting.
        for greets in [false, true] {
            scope.spawn(move || {
                let mut flood = TcpStream::connect(tcp).unwrap();
                if greets {
                    let _ = flood.write_all(&hello(id, &[2; 32]));
                }
                let garbage = vec![0xa7; 1 << 20];
                (0..8).try_for_each(|_| flood.write_all(&garbage)).ok();
            });
        }
        thread::sleep(Duration::from_millis(30));
        let joined = join(id, &[(2, 0, config()), (2, 1, config())]);
        over.store(true, Ordering::Relaxed);
        assert!(joined.iter().all(Result::is_ok), "{joined:?}");
    });
}

#[test]
fn a_crowd_that_says_nothing_holds_a_bounded_number_of_descriptors_and_none_in_the_end() {
    let _watchdog = watch("a silent crowd");
    let before = descriptors();
    let id = get_unique_id().unwrap();
    let (unix, tcp) = doors(&id);
    let address = SocketAddr::from_abstract_name(&unix).unwrap();
    let mut most = 0;
    for _ in 0..2000 {
        // Both ends are in this process: theirs is closed at once, the root notices when it looks.
        drop(TcpStream::connect(&tcp).unwrap());
        drop(UnixStream::connect_addr(&address).unwrap());
        most = most.max(descriptors());
    }
    let crowd: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(&tcp).unwrap()).collect();
    let joined = join(&id, &[(2, 0, config()), (2, 1, config())]);
    assert!(joined.iter().all(Result::is_ok), "{joined:?}");
    drop((joined, crowd));
    // 512 unauthenticated connections at most, and what other tests of this process open meanwhile.
    assert!(most < before + 512 + 500, "{before} descriptors became {most}");
    // The meeting is over: its doors are closed, and every rank is gone.
    let closed =
        eventually(LONG, || TcpStream::connect(&tcp).is_err() && UnixStream::connect_addr(&address).is_err());
    assert!(closed, "a meeting that is over still accepts connections");
    // Fewer than the crowd was; tests beside this one open some too, and close them again.
    let calm = eventually(LONG, || descriptors() < before + 250);
    assert!(calm, "{before} descriptors became {} in the end", descriptors());
}

#[test]
fn used_and_failed_ids_are_refused_on_every_rank_and_again() {
    let _watchdog = watch("used ids");
    let id = get_unique_id().unwrap();
    let joined = join(&id, &[(2, 0, config()), (2, 1, config())]);
    assert!(joined.iter().all(Result::is_ok));
    for _ in 0..3 {
        refused(&id, &[(2, 0, config()), (2, 1, config())], Kind::Invalid, &[]);
    }
    let id = get_unique_id().unwrap();
    refused(&id, &[(3, 0, impatient()), (3, 2, impatient())], Kind::Timeout, &[1]);
    // The meeting has failed; a rank that comes now learns with which error, and after a while that it is over.
    let error = Communicator::init(3, 1, &id, config()).unwrap_err();
    assert!(matches!(error.kind(), Kind::Timeout | Kind::Invalid | Kind::Stale), "{error}");
}
