//! Descriptors that come over a connection: those that its frames name, and no others.

#![allow(clippy::unwrap_used)]

use std::os::fd::BorrowedFd;
use std::sync::mpsc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::runtime::socket::{MAX_FILES, Socket};
use crate::wire::{FrameKind, frame};

const WATCHDOG: Duration = Duration::from_secs(30);

/// What a connection passes to its handler.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Frame(FrameKind, usize),
    Closed(Kind),
}

struct Hears(Mutex<mpsc::Sender<Event>>);

impl Handler for Hears {
    fn frame(&self, _: &Arc<Connection>, header: Header, _: &[u8], files: Vec<OwnedFd>) -> Result<()> {
        let _ = self.0.lock().send(Event::Frame(header.kind, files.len()));
        Ok(())
    }

    fn payload(&self, _: &Arc<Connection>, _: Header, _: &[u8]) -> Result<Sink> {
        Ok(Sink::discard())
    }

    fn received(&self, _: &Arc<Connection>, header: Header, _: Sink) -> Result<()> {
        let _ = self.0.lock().send(Event::Frame(header.kind, 0));
        Ok(())
    }

    fn next(&self, _: &Arc<Connection>) -> Next {
        Next::Nothing
    }

    fn closed(&self, _: &Arc<Connection>, error: Error) {
        let _ = self.0.lock().send(Event::Closed(error.kind()));
    }
}

struct Rig {
    connection: Arc<Connection>,
    peer: Socket,
    events: mpsc::Receiver<Event>,
    /// What the peer sends again and again, and the end that shows whether a process has it.
    sent: OwnedFd,
    watched: OwnedFd,
}

impl Rig {
    fn new(authenticated: bool) -> Rig {
        let (ours, peer) = Socket::pair().unwrap();
        let (say, events) = mpsc::channel();
        let handler = Arc::new(Hears(Mutex::new(say)));
        let connection = Connection::new(Channel::plain(ours), Role::Control, authenticated, handler);
        connection.watch().unwrap();
        let (watched, sent) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        Rig { connection, peer, events, sent, watched }
    }

    fn send(&self, bytes: &[u8], files: usize) {
        let files: Vec<BorrowedFd<'_>> = vec![self.sent.as_fd(); files];
        // That the connection was ended meanwhile is what some of these tests are about.
        let _ = self.peer.send(&[IoSlice::new(bytes)], &files);
    }

    fn next(&self) -> Event {
        self.events.recv_timeout(WATCHDOG).unwrap()
    }

    /// Ends the sender's side and says whether no copy is left, though the connection is still there.
    fn nothing_is_kept(self) -> bool {
        let _there = Arc::clone(&self.connection);
        self.nothing_is_left()
    }

    /// The same without the connection: what was sent and never received is the kernel's until then.
    fn nothing_is_left(self) -> bool {
        drop((self.sent, self.peer, self.connection));
        let until = Instant::now() + WATCHDOG;
        loop {
            let mut fds = [PollFd::new(&self.watched, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 })).unwrap();
            if fds[0].revents().contains(PollFlags::HUP) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
        }
    }
}

fn granted(files: u8, body: usize) -> Vec<u8> {
    frame(FrameKind::Granted, 1, &vec![0; body], 0, files)
}

fn ping() -> Vec<u8> {
    frame(FrameKind::Ping, 1, &[], 0, 0)
}

#[test]
fn a_peer_that_sends_descriptors_with_every_byte_is_cut_off_before_and_after_the_proof() {
    for authenticated in [false, true] {
        let rig = Rig::new(authenticated);
        let bytes = if authenticated { ping() } else { frame(FrameKind::Hello, 0, &[0; 200], 0, 0) };
        for byte in &bytes {
            rig.send(std::slice::from_ref(byte), MAX_FILES);
        }
        assert_eq!(rig.next(), Event::Closed(Kind::Protocol));
        assert!(rig.nothing_is_left());
    }
}

#[test]
fn half_a_hello_with_descriptors_leaves_none_while_the_connection_waits() {
    let rig = Rig::new(false);
    let hello = frame(FrameKind::Hello, 0, &[0; 200], 0, 0);
    rig.send(&hello[..1], MAX_FILES);
    assert_eq!(rig.next(), Event::Closed(Kind::Protocol));
    assert!(rig.nothing_is_kept());
}

#[test]
fn an_expected_frame_brings_exactly_what_it_names_between_frames_that_bring_nothing() {
    let rig = Rig::new(true);
    rig.connection.expect_files();
    rig.connection.expect_files();
    let long = granted(MAX_FILES as u8, 3 * STAGING);
    let data = frame(FrameKind::Data, 1, &[0], 100, 0);
    // All of it is there at once: nothing may be read across a frame's end.
    rig.send(&ping(), 0);
    rig.send(&granted(3, 500), 3);
    rig.send(&[&data[..], &[0; 100]].concat(), 0);
    rig.send(&ping(), 0);
    rig.send(&long, MAX_FILES);
    rig.send(&ping(), 0);
    let events: Vec<Event> = (0..6).map(|_| rig.next()).collect();
    let expected = [
        Event::Frame(FrameKind::Ping, 0),
        Event::Frame(FrameKind::Granted, 3),
        Event::Frame(FrameKind::Data, 0),
        Event::Frame(FrameKind::Ping, 0),
        Event::Frame(FrameKind::Granted, MAX_FILES),
        Event::Frame(FrameKind::Ping, 0),
    ];
    assert_eq!(events, expected);
    assert!(rig.nothing_is_kept());
}

#[test]
fn an_expected_frame_with_more_fewer_or_misplaced_descriptors_ends_the_connection() {
    for case in 0..6 {
        let rig = Rig::new(true);
        rig.connection.expect_files();
        let frame = granted(2, 500);
        match case {
            // One more than is named; one less; none.
            0 => rig.send(&frame, 3),
            1 => rig.send(&frame, 1),
            2 => rig.send(&frame, 0),
            // On a frame before it, which names none.
            3 => {
                rig.send(&ping(), 2);
                rig.send(&frame, 2);
            }
            // Twice within one frame.
            4 => {
                rig.send(&frame[..100], 2);
                rig.send(&frame[100..], 2);
            }
            // With a header that comes in pieces.
            _ => {
                rig.send(&frame[..5], 2);
                rig.send(&frame[5..], 0);
            }
        }
        loop {
            match rig.next() {
                Event::Closed(kind) => {
                    assert_eq!(kind, Kind::Protocol, "case {case}");
                    break;
                }
                Event::Frame(kind, files) => assert_eq!((kind, files), (FrameKind::Ping, 0), "case {case}"),
            }
        }
        // Of the cases with one message, all of it was received.
        let gone = if case < 3 { rig.nothing_is_kept() } else { rig.nothing_is_left() };
        assert!(gone, "case {case}");
    }
}

#[test]
fn a_second_frame_with_descriptors_is_refused_where_one_was_expected() {
    let rig = Rig::new(true);
    rig.connection.expect_files();
    rig.send(&granted(1, 10), 1);
    assert_eq!(rig.next(), Event::Frame(FrameKind::Granted, 1));
    rig.send(&granted(1, 10), 1);
    assert_eq!(rig.next(), Event::Closed(Kind::Protocol));
    assert!(rig.nothing_is_kept());
}
