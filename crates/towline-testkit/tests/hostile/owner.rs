//! An owner that lies about what it has received, in bytes written by hand. It lets an honest one shake hands, and then speaks by
//! itself: after the handshake nothing protects plain TCP.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use towline::{Access, Endpoint, Limits, MemoryAccess, SystemStorage};
use towline_testkit::bench::routing;
use towline_testkit::watchdog::watch;

const LEN: usize = 32 << 20;
const STALL: Duration = Duration::from_secs(1);
const CANARY: u8 = 0xee;

/// The kinds of frames that it knows.
const READ: u8 = 32;
const WRITE: u8 = 34;
const DONE: u8 = 36;

/// A reply that says that all went well: 24 bytes of header, 9 of body, zeros up to 64.
fn done(id: u64) -> [u8; 64] {
    let mut frame = [0; 64];
    (frame[0], frame[3], frame[4]) = (DONE, 31, 9);
    frame[16..24].copy_from_slice(&id.to_le_bytes());
    frame
}

/// What happens on the connections that it has.
#[derive(Default)]
struct Seen {
    go_on: AtomicBool,
    lied: AtomicU64,
    canaries: AtomicU64,
    ended: AtomicU64,
}

/// Passes everything on up to the first request for bytes. From there on it says that this one and those behind it are done, reads
/// nothing until a test asks for it, and then counts the canaries that come.
fn lie(mut user: TcpStream, mut owner: TcpStream, seen: &Seen) {
    let (mut answers, mut to_user) = (owner.try_clone().unwrap(), user.try_clone().unwrap());
    thread::spawn(move || std::io::copy(&mut answers, &mut to_user));
    loop {
        let mut header = [0; 24];
        if user.read_exact(&mut header).is_err() {
            return;
        }
        if [READ, WRITE].contains(&header[0]) {
            let first = u64::from_le_bytes(header[16..24].try_into().unwrap());
            // Some are asked for only when those before them are done.
            for _ in 0..20 {
                for id in first..first + 64 {
                    let _ = user.write_all(&done(id));
                }
                thread::sleep(Duration::from_millis(10));
            }
            seen.lied.fetch_add(1, Ordering::SeqCst);
            break;
        }
        let body = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize + header[3] as usize;
        let mut rest = vec![0; body];
        if user.read_exact(&mut rest).is_err() || owner.write_all(&header).is_err() {
            return;
        }
        let _ = owner.write_all(&rest);
    }
    while !seen.go_on.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(5));
    }
    user.set_read_timeout(Some(STALL)).unwrap();
    let mut bytes = vec![0; 1 << 20];
    while let Ok(read @ 1..) = user.read(&mut bytes) {
        let canaries = bytes[..read].iter().filter(|byte| **byte == CANARY).count();
        seen.canaries.fetch_add(canaries as u64, Ordering::SeqCst);
    }
    seen.ended.fetch_add(1, Ordering::SeqCst);
}

/// A user that has imported memory of an owner who lies.
fn between() -> (Endpoint, Endpoint, towline::Registered<SystemStorage>, Arc<Seen>) {
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let owner =
        Endpoint::options("owner").listen(listen).advertise(door.local_addr().unwrap()).open().unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let seen = Arc::new(Seen::default());
    let shared = Arc::clone(&seen);
    thread::spawn(move || {
        for user in door.incoming().flatten() {
            let (owner, seen) = (TcpStream::connect(listen).unwrap(), Arc::clone(&shared));
            thread::spawn(move || lie(user, owner, &seen));
        }
    });
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    let user = Endpoint::options("user").limits(limits).routing(routing("tcp")).lanes(1).open().unwrap();
    (user, owner, region, seen)
}

#[test]
fn nothing_is_sent_from_memory_that_was_given_back_after_an_early_done() {
    let _watchdog = watch("nothing_is_sent_from_memory_that_was_given_back", STALL * 60);
    let (user, _owner, region, seen) = between();
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let buffer = user.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let transfer = user.write(&remote, &buffer).start().unwrap();
    let _ = transfer.wait();
    assert!(transfer.wait_quiet(STALL * 10), "it never becomes quiet");
    let storage = buffer.into_storage_within(STALL * 10).map_err(|pinned| pinned.error).unwrap();
    storage.write_at(0, &vec![CANARY; LEN]).unwrap();
    seen.go_on.store(true, Ordering::SeqCst);
    while seen.ended.load(Ordering::SeqCst) == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(seen.lied.load(Ordering::SeqCst) > 0);
    assert_eq!(seen.canaries.load(Ordering::SeqCst), 0, "bytes of memory that was given back were sent");
}

#[test]
fn a_done_to_a_read_ends_the_session() {
    let _watchdog = watch("a_done_to_a_read_ends_the_session", STALL * 60);
    let (user, _owner, region, seen) = between();
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let buffer = user.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let transfer = user.read(&remote, &buffer).start().unwrap();
    let error = transfer.wait().expect_err("no byte was read");
    assert_eq!(error.kind(), towline::Kind::Protocol, "{error}");
    assert!(transfer.wait_quiet(STALL * 10));
    assert!(buffer.into_storage_within(STALL * 10).is_ok());
    seen.go_on.store(true, Ordering::SeqCst);
}
