#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};

use super::tuning::{LOCAL_BULK_BUFFER, LOCAL_CONGESTION};
use super::*;
use crate::skip::skip;

const WATCHDOG: Duration = Duration::from_secs(30);

fn unique_name() -> Vec<u8> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("towline-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)).into_bytes()
}

fn tcp_pair() -> (Socket, Socket) {
    let listener = Socket::listen_tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let client = Socket::connect_tcp(listener.local_addr().unwrap()).unwrap();
    assert!(listener.wait_readable(WATCHDOG).unwrap());
    let (server, peer) = listener.accept().unwrap().unwrap();
    assert!(client.wait_writable(WATCHDOG).unwrap());
    assert!(client.finish_connect().unwrap());
    assert_eq!(peer, PeerAddr::Tcp(client.local_addr().unwrap()));
    (client, server)
}

fn send(socket: &Socket, bytes: &[u8]) -> Result<Sent> {
    socket.send(&[IoSlice::new(bytes)], &[])
}

fn recv(socket: &Socket, bytes: &mut [u8]) -> Result<Received> {
    socket.recv(&mut [IoSliceMut::new(bytes)], 0, &mut Vec::new())
}

#[test]
fn bytes_come_through_in_pieces_and_the_end_is_seen_on_both_families() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        let mut buffer = [0; 8];
        assert_eq!(recv(&b, &mut buffer).unwrap(), Received::WouldBlock);
        assert!(!b.wait_readable(Duration::from_millis(1)).unwrap());
        let sent =
            a.send(&[IoSlice::new(b"seven "), IoSlice::new(b""), IoSlice::new(b"bytes")], &[]).unwrap();
        assert_eq!(sent, Sent::Bytes(11));
        assert!(b.wait_readable(WATCHDOG).unwrap());
        let (mut first, mut second) = ([0; 3], [0; 4]);
        let mut slices = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        assert_eq!(b.recv(&mut slices, 0, &mut Vec::new()).unwrap(), Received::Bytes(7));
        assert_eq!((&first, &second), (b"sev", b"en b"));
        assert_eq!(recv(&b, &mut buffer).unwrap(), Received::Bytes(4));
        assert_eq!(&buffer[..4], b"ytes");
        drop(a);
        assert!(b.wait_readable(WATCHDOG).unwrap());
        assert_eq!(recv(&b, &mut buffer).unwrap(), Received::Eof);
    }
}

#[test]
fn a_full_socket_says_so_and_takes_bytes_again_once_they_are_read() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        let block = vec![7; 1 << 16];
        let mut total = 0;
        loop {
            match send(&a, &block).unwrap() {
                Sent::Bytes(count) => total += count,
                // Loopback TCP may still be moving bytes from one side's buffer to the other's.
                Sent::WouldBlock if a.wait_writable(Duration::from_millis(20)).unwrap() => {}
                Sent::WouldBlock => break,
            }
        }
        assert!(total > 0);
        let mut buffer = vec![0; 1 << 20];
        let mut left = total;
        while left > 0 {
            assert!(b.wait_readable(WATCHDOG).unwrap());
            match recv(&b, &mut buffer).unwrap() {
                Received::Bytes(count) => left -= count,
                Received::WouldBlock => {}
                Received::Eof => panic!("the end came {left} bytes early"),
            }
        }
        assert!(a.wait_writable(WATCHDOG).unwrap());
        assert_eq!(send(&a, b"again").unwrap(), Sent::Bytes(5));
    }
}

#[test]
fn sending_to_a_closed_peer_is_an_error_and_not_a_signal() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        drop(b);
        let error = loop {
            match send(&a, b"x") {
                Ok(_) => std::thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), Kind::Disconnected);
    }
}

#[test]
fn shutdown_ends_both_directions() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        a.shutdown();
        a.shutdown();
        assert!(b.wait_readable(WATCHDOG).unwrap());
        assert_eq!(recv(&b, &mut [0; 1]).unwrap(), Received::Eof);
        assert_eq!(recv(&a, &mut [0; 1]).unwrap(), Received::Eof);
        assert_eq!(send(&a, b"x").unwrap_err().kind(), Kind::Disconnected);
    }
}

#[test]
fn descriptors_pass_over_a_unix_socket_and_show_the_same_bytes() {
    let (a, b) = Socket::pair().unwrap();
    let contents: Vec<Vec<u8>> = (0..MAX_FILES).map(|i| vec![i as u8; 100 + i]).collect();
    let files: Vec<OwnedFd> = contents
        .iter()
        .map(|content| {
            let file = memfd_create("towline-test", MemfdFlags::CLOEXEC).unwrap();
            assert_eq!(rustix::io::write(&file, content).unwrap(), content.len());
            file
        })
        .collect();
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    assert_eq!(a.send(&[IoSlice::new(b"files")], &borrowed).unwrap(), Sent::Bytes(5));
    assert_eq!(send(&a, b"more").unwrap(), Sent::Bytes(4));
    let mut bytes = [0; 64];
    let mut passed = Vec::new();
    assert_eq!(
        b.recv(&mut [IoSliceMut::new(&mut bytes)], MAX_FILES, &mut passed).unwrap(),
        Received::Bytes(5)
    );
    assert_eq!(passed.len(), MAX_FILES);
    for (file, content) in passed.iter().zip(&contents) {
        let mut seen = vec![0; content.len() + 1];
        assert_eq!(rustix::io::pread(file, &mut seen, 0).unwrap(), content.len());
        assert_eq!(&seen[..content.len()], content);
        assert!(rustix::io::fcntl_getfd(file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    assert_eq!(
        b.recv(&mut [IoSliceMut::new(&mut bytes)], MAX_FILES, &mut passed).unwrap(),
        Received::Bytes(4)
    );
    assert_eq!(passed.len(), MAX_FILES);
}

#[test]
fn descriptors_that_cannot_be_passed_are_refused_before_anything_is_sent() {
    let (a, b) = Socket::pair().unwrap();
    let many = vec![a.as_fd(); MAX_FILES + 1];
    assert_eq!(a.send(&[IoSlice::new(b"x")], &many).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(a.send(&[IoSlice::new(b"")], &many[..1]).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(recv(&b, &mut [0; 1]).unwrap(), Received::WouldBlock);
    let (c, _d) = tcp_pair();
    assert_eq!(c.send(&[IoSlice::new(b"x")], &many[..1]).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn descriptors_in_the_middle_of_payload_are_a_protocol_error() {
    let (a, b) = Socket::pair().unwrap();
    assert_eq!(a.send(&[IoSlice::new(b"x")], &[a.as_fd()]).unwrap(), Sent::Bytes(1));
    let mut byte = 0_u8;
    // SAFETY: `byte` is writable and no reference to it is used meanwhile.
    let error = unsafe { b.recv_raw(&[RawPartMut { ptr: &raw mut byte, len: 1 }]) }.unwrap_err();
    assert_eq!(error.kind(), Kind::Protocol);
}

#[test]
fn raw_parts_arrive_as_they_were_whatever_the_cuts() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        let source: Vec<u8> = (0..300_000_u32).map(|i| (i * 7 % 251) as u8).collect();
        let mut target = vec![0_u8; source.len()];
        let (from, into) = (source.as_ptr(), target.as_mut_ptr());
        let (mut sent, mut received) = (0, 0);
        while received < source.len() {
            // More parts than one call takes, some of them empty.
            let cuts = (sent..source.len()).step_by(97);
            let parts: Vec<RawPart> = cuts
                .flat_map(|at| {
                    let len = (source.len() - at).min(97);
                    let ptr = from.wrapping_add(at);
                    [RawPart { ptr, len }, RawPart { ptr, len: 0 }]
                })
                .collect();
            // SAFETY: the parts lie inside `source`, which outlives the call.
            if let Sent::Bytes(count) = unsafe { a.send_raw(&parts) }.unwrap() {
                sent += count;
            }
            let cuts = (received..source.len()).step_by(1013);
            let parts: Vec<RawPartMut> = cuts
                .map(|at| RawPartMut { ptr: into.wrapping_add(at), len: (source.len() - at).min(1013) })
                .collect();
            // SAFETY: the parts lie inside `target`, to which there is no reference here.
            match unsafe { b.recv_raw(&parts) }.unwrap() {
                Received::Bytes(count) => received += count,
                Received::WouldBlock => assert!(b.wait_readable(WATCHDOG).unwrap()),
                Received::Eof => panic!("an early end"),
            }
        }
        assert!(source == target);
        // SAFETY: no part, no memory.
        assert_eq!(unsafe { b.recv_raw(&[]) }.unwrap(), Received::Bytes(0));
        drop(a);
        assert!(b.wait_readable(WATCHDOG).unwrap());
        // SAFETY: as above.
        assert_eq!(unsafe { b.recv_raw(&[RawPartMut { ptr: into, len: 1 }]) }.unwrap(), Received::Eof);
    }
}

#[test]
fn a_patient_receive_takes_what_comes_while_it_waits_and_gives_up_soon() {
    for (a, b) in [Socket::pair().unwrap(), tcp_pair()] {
        b.tune(Lane::Bulk, None).unwrap();
        let mut target = [0_u8; 8];
        let part = [RawPartMut { ptr: target.as_mut_ptr(), len: target.len() }];
        // SAFETY: the part is `target`, to which there is no reference while a call lasts.
        let receive = || unsafe { b.recv_raw_patiently(&part) }.unwrap();
        assert_eq!(receive(), Received::WouldBlock);
        assert_eq!(a.send(&[IoSlice::new(b"some")], &[]).unwrap(), Sent::Bytes(4));
        assert!(b.wait_readable(WATCHDOG).unwrap());
        assert_eq!(receive(), Received::Bytes(4));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for half in [b"all ", b"here"] {
                    std::thread::sleep(Duration::from_millis(1));
                    assert_eq!(a.send(&[IoSlice::new(half)], &[]).unwrap(), Sent::Bytes(4));
                }
            });
            let mut came = 0;
            while came < 8 {
                let rest = [RawPartMut { ptr: target.as_mut_ptr().wrapping_add(came), len: 8 - came }];
                // SAFETY: as above; what has come is not overwritten.
                match unsafe { b.recv_raw_patiently(&rest) }.unwrap() {
                    Received::Bytes(count) => came += count,
                    Received::WouldBlock => {}
                    Received::Eof => panic!("an early end"),
                }
            }
        });
        assert_eq!(&target, b"all here");
        drop(a);
        assert!(b.wait_readable(WATCHDOG).unwrap());
        // SAFETY: as above.
        assert_eq!(unsafe { b.recv_raw_patiently(&part) }.unwrap(), Received::Eof);
    }
}

#[test]
fn a_unix_name_is_reached_and_tells_who_connected() {
    let name = unique_name();
    assert_eq!(Socket::connect_unix_abstract(&name).unwrap_err().kind(), Kind::Disconnected);
    let listener = Socket::listen_unix_abstract(&name, 8).unwrap();
    assert!(Socket::listen_unix_abstract(&name, 8).is_err(), "the name is taken");
    assert!(listener.accept().unwrap().is_none());
    let client = Socket::connect_unix_abstract(&name).unwrap();
    assert!(client.finish_connect().unwrap());
    let (server, peer) = listener.accept().unwrap().unwrap();
    assert_eq!(peer, PeerAddr::Unix);
    assert_eq!(server.family(), Family::Unix);
    for side in [&client, &server] {
        let ucred = side.peer_credentials().unwrap();
        assert_eq!(ucred.pid, std::process::id() as i32);
        assert_eq!(ucred.uid, rustix::process::geteuid().as_raw());
        assert_eq!(ucred.gid, rustix::process::getegid().as_raw());
    }
    drop(client);
    drop(listener);
    assert_eq!(Socket::connect_unix_abstract(&name).unwrap_err().kind(), Kind::Disconnected);
}

#[test]
fn a_full_unix_backlog_is_exhausted_and_can_be_retried() {
    let name = unique_name();
    let listener = Socket::listen_unix_abstract(&name, 1).unwrap();
    let mut clients = Vec::new();
    let error = loop {
        match Socket::connect_unix_abstract(&name) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() < 100, "the backlog has no end");
    };
    assert_eq!(error.kind(), Kind::Exhausted);
    assert!(error.is_retryable());
    listener.accept().unwrap().unwrap();
    Socket::connect_unix_abstract(&name).unwrap();
}

#[test]
fn names_that_no_socket_can_have_are_invalid() {
    for name in [&b""[..], &[b'x'; 108]] {
        assert_eq!(Socket::connect_unix_abstract(name).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(Socket::listen_unix_abstract(name, 1).unwrap_err().kind(), Kind::Invalid);
    }
    Socket::listen_unix_abstract(&[b'x'; 107], 1).unwrap();
}

#[test]
fn connecting_to_a_closed_port_ends_with_disconnected() {
    let port = Socket::listen_tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap().local_addr().unwrap();
    let outcome = Socket::connect_tcp(port).and_then(|socket| {
        assert!(socket.wait_writable(WATCHDOG).unwrap());
        socket.finish_connect()
    });
    assert_eq!(outcome.unwrap_err().kind(), Kind::Disconnected);
}

#[test]
fn an_ipv6_listener_takes_ipv6_only() {
    let listener = match Socket::listen_tcp((Ipv6Addr::LOCALHOST, 0).into()) {
        Ok(listener) => listener,
        Err(error) => return skip("an_ipv6_listener_takes_ipv6_only", "ipv6", &error.to_string()),
    };
    let address = listener.local_addr().unwrap();
    assert!(sockopt::ipv6_v6only(&listener).unwrap());
    let _client = Socket::connect_tcp(address).unwrap();
    assert!(listener.wait_readable(WATCHDOG).unwrap());
    assert!(matches!(listener.accept().unwrap(), Some((_, PeerAddr::Tcp(peer))) if peer.is_ipv6()));
}

#[test]
fn tuning_sets_what_it_says() {
    let (a, _b) = tcp_pair();
    a.tune(Lane::Bulk, Some(Duration::from_millis(2500))).unwrap();
    assert!(sockopt::tcp_nodelay(&a).unwrap());
    assert!(sockopt::socket_keepalive(&a).unwrap());
    assert_eq!(sockopt::tcp_user_timeout(&a).unwrap(), 2500);
    assert_eq!(sockopt::tcp_congestion(&a).unwrap(), LOCAL_CONGESTION);
    a.tune(Lane::Control, Some(Duration::MAX)).unwrap();
    assert_eq!(sockopt::tcp_user_timeout(&a).unwrap(), i32::MAX as u32);
    let (c, _d) = Socket::pair().unwrap();
    c.tune(Lane::Bulk, Some(Duration::from_secs(1))).unwrap();
    for socket in [&a, &c] {
        // The kernel doubles what is asked for, and cuts it to its limit.
        assert!(sockopt::socket_send_buffer_size(socket).unwrap() <= 2 * LOCAL_BULK_BUFFER);
    }
}

#[test]
fn shutdown_in_a_forked_child_leaves_the_parents_connection_alone() {
    fork::guard("test").unwrap();
    let (a, b) = Socket::pair().unwrap();
    assert!(fork::tests::in_a_child(|| {
        a.shutdown();
        true
    }));
    assert_eq!(send(&a, b"x").unwrap(), Sent::Bytes(1));
    assert_eq!(recv(&b, &mut [0; 1]).unwrap(), Received::Bytes(1));
}

/// Runs the test of that name once more in a process of its own, since a limit holds for a whole process;
/// true in that process.
fn in_own_process(test: &str) -> bool {
    const CHILD: &str = "TOWLINE_TEST_OWN_PROCESS";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("runtime::socket::tests::{test}"), "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

#[test]
fn without_free_descriptors_accepting_and_receiving_are_exhausted_and_nothing_leaks() {
    if !in_own_process("without_free_descriptors_accepting_and_receiving_are_exhausted_and_nothing_leaks") {
        return;
    }
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let name = unique_name();
    let listener = Socket::listen_unix_abstract(&name, 8).unwrap();
    let _client = Socket::connect_unix_abstract(&name).unwrap();
    let (a, b) = Socket::pair().unwrap();
    let borrowed = [a.as_fd(); 3];
    assert_eq!(a.send(&[IoSlice::new(b"abc")], &borrowed).unwrap(), Sent::Bytes(3));
    let before = open();
    // Room for two of the three descriptors.
    let highest = rustix::io::dup(&a).unwrap().as_raw_fd() as u64;
    let old = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = rustix::process::Rlimit { current: Some(highest + 2), maximum: old.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut files = Vec::new();
    let mut bytes = [0; 8];
    let error = b.recv(&mut [IoSliceMut::new(&mut bytes)], MAX_FILES, &mut files).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    assert!(files.is_empty());
    let fillers: Vec<_> = std::iter::from_fn(|| rustix::io::dup(&a).ok()).collect();
    for _ in 0..3 {
        assert_eq!(listener.accept().unwrap_err().kind(), Kind::Exhausted);
    }
    drop(fillers);
    assert!(listener.accept().unwrap().is_some(), "the connection waited");
    rustix::process::setrlimit(rustix::process::Resource::Nofile, old).unwrap();
    assert_eq!(open(), before);
}

/// The end of a pipe that can be sent many times, and the other end, which shows whether a process has one of these.
fn marked() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

fn nobody_has_it(watched: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(watched, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds[0].revents().contains(PollFlags::HUP)
}

#[test]
fn descriptors_beyond_those_that_are_named_never_become_ours() {
    // Also odd numbers: a control message is padded to an even one.
    for (sent, named) in [(1, 0), (2, 1), (4, 3), (253, 252), (253, 1)] {
        let (a, b) = Socket::pair().unwrap();
        let (watched, marked) = marked();
        let borrowed = vec![marked.as_fd(); sent];
        assert_eq!(a.send(&[IoSlice::new(b"x")], &borrowed).unwrap(), Sent::Bytes(1));
        drop(marked);
        let mut head = [0; 8];
        assert_eq!(b.peek(&mut head).unwrap(), Received::Bytes(1));
        let mut files = Vec::new();
        let error = b.recv(&mut [IoSliceMut::new(&mut head)], named, &mut files).unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol, "{sent} sent, {named} named: {error}");
        assert!(files.is_empty());
        assert!(nobody_has_it(&watched), "{sent} sent, {named} named");
    }
}

#[test]
fn a_look_at_the_bytes_leaves_bytes_and_descriptors_where_they_are() {
    let (a, b) = Socket::pair().unwrap();
    let mut head = [0; 8];
    assert_eq!(b.peek(&mut head).unwrap(), Received::WouldBlock);
    assert_eq!(a.send(&[IoSlice::new(b"before")], &[]).unwrap(), Sent::Bytes(6));
    assert_eq!(a.send(&[IoSlice::new(b"with")], &[a.as_fd(), b.as_fd()]).unwrap(), Sent::Bytes(4));
    assert_eq!((b.peek(&mut head).unwrap(), &head), (Received::Bytes(8), b"beforewi"));
    let mut files = Vec::new();
    assert_eq!(b.recv(&mut [IoSliceMut::new(&mut head[..6])], 0, &mut files).unwrap(), Received::Bytes(6));
    assert_eq!((b.peek(&mut head).unwrap(), &head[..4]), (Received::Bytes(4), &b"with"[..]));
    assert_eq!(b.recv(&mut [IoSliceMut::new(&mut head)], 2, &mut files).unwrap(), Received::Bytes(4));
    assert_eq!(files.len(), 2);
    drop((a, files));
    assert_eq!(b.peek(&mut head).unwrap(), Received::Eof);
}
