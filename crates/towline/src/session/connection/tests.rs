//! What the event loop does while another thread has the frames that a control connection is to send.

#![allow(clippy::unwrap_used)]

use std::io::IoSliceMut;
use std::sync::mpsc;

use super::*;
use crate::runtime::socket::Socket;
use crate::wire::{Atomic, AtomicOp, Bye, Message, Ping};

const WATCHDOG: Duration = Duration::from_secs(30);

/// Says which frames have come.
struct Notified(Mutex<mpsc::Sender<u64>>);

impl Handler for Notified {
    fn frame(&self, _: &Arc<Connection>, header: Header, _: &[u8], _: Vec<OwnedFd>) -> Result<()> {
        let _ = self.0.lock().send(header.id);
        Ok(())
    }

    fn payload(&self, _: &Arc<Connection>, _: Header, _: &[u8]) -> Result<Sink> {
        Err(Error::protocol("receive", "no payload was sent"))
    }

    fn received(&self, _: &Arc<Connection>, _: Header, _: Sink) -> Result<()> {
        Ok(())
    }

    fn next(&self, _: &Arc<Connection>) -> Next {
        Next::Nothing
    }

    fn closed(&self, _: &Arc<Connection>, _: Error) {}
}

/// A control connection that the event loop watches, its other end, and what comes over it.
fn connection() -> (Arc<Connection>, Socket, mpsc::Receiver<u64>) {
    let (ours, theirs) = Socket::pair().unwrap();
    let (say, received) = mpsc::channel();
    let handler = Arc::new(Notified(Mutex::new(say)));
    let connection = Connection::new(Channel::plain(ours), Role::Control, true, handler);
    connection.watch().unwrap();
    (connection, theirs, received)
}

fn ping(id: u64) -> Vec<u8> {
    Message::from(Ping {}).frame(id, 0, 0)
}

fn request(id: u64) -> Vec<u8> {
    Message::from(Atomic { handle: 1, offset: 0, op: AtomicOp::Add(1) }).frame(id, 0, 0)
}

fn say(socket: &Socket, id: u64) {
    let frame = ping(id);
    let sent = socket.send(&[IoSlice::new(&frame)], &[]).unwrap();
    assert!(matches!(sent, Sent::Bytes(bytes) if bytes == frame.len()));
}

#[test]
fn an_answer_is_taken_while_the_request_is_still_being_sent() {
    let (connection, theirs, came) = connection();
    let sending = connection.outgoing.lock();
    say(&theirs, 7);
    assert_eq!(came.recv_timeout(WATCHDOG).unwrap(), 7);
    drop(sending);
    say(&theirs, 8);
    assert_eq!(came.recv_timeout(WATCHDOG).unwrap(), 8);
}

#[test]
fn what_another_thread_kept_from_being_sent_is_sent_when_it_lets_go() {
    let (connection, theirs, _came) = connection();
    let mut sent = 0;
    while !connection.outgoing.lock().blocked() {
        connection.say(ping(sent)).unwrap();
        sent += 1;
    }
    let whole = sent as usize * ping(0).len();
    let mut taken = 0;
    let mut take = |until: usize| {
        let mut room = vec![0; 64 << 10];
        while taken < until && theirs.wait_readable(WATCHDOG).unwrap() {
            if let Received::Bytes(bytes) =
                theirs.recv(&mut [IoSliceMut::new(&mut room)], 0, &mut Vec::new()).unwrap()
            {
                taken += bytes;
            }
        }
        taken
    };
    // The socket has room again, of which the event loop is notified, and finds the frames in other hands.
    let held = connection.outgoing.lock();
    assert!(!held.is_empty());
    take(whole / 2);
    drop(held);
    assert_eq!(take(whole), whole);
}

#[test]
fn a_goodbye_that_nobody_has_read_is_found_when_a_send_has_failed() {
    let (ours, theirs) = Socket::pair().unwrap();
    let handler = Arc::new(Notified(Mutex::new(mpsc::channel().0)));
    // Nobody watches it: the goodbye lies there.
    let connection = Connection::new(Channel::plain(ours), Role::Control, true, handler);
    connection.expect_files();
    say(&theirs, 1);
    let bye = Message::from(Bye { error: None }).frame(0, 0, 0);
    assert!(matches!(theirs.send(&[IoSlice::new(&bye)], &[]).unwrap(), Sent::Bytes(_)));
    drop(theirs);
    let failed = connection.say(ping(2)).unwrap_err();
    assert_eq!(failed.kind(), Kind::Disconnected);
    assert!(connection.is_closed());
    assert_eq!(connection.farewell(), Some(Bye { error: None }));
}

#[test]
fn what_is_no_goodbye_is_not_taken_for_one() {
    let payload = Message::from(crate::wire::Data { outcome: Ok(()) }).frame(1, 100, 0);
    let bye = Message::from(Bye { error: None }).frame(0, 0, 0);
    for said in [Vec::new(), vec![0xff; 100], ping(1), bye[..bye.len() - 1].to_vec(), [payload, bye].concat()]
    {
        let (ours, theirs) = Socket::pair().unwrap();
        let handler = Arc::new(Notified(Mutex::new(mpsc::channel().0)));
        let connection = Connection::new(Channel::plain(ours), Role::Control, true, handler);
        if !said.is_empty() {
            assert!(matches!(theirs.send(&[IoSlice::new(&said)], &[]).unwrap(), Sent::Bytes(_)));
        }
        drop(theirs);
        assert_eq!(connection.farewell(), None, "{said:?}");
    }
}

#[test]
fn an_answer_that_comes_before_its_request_was_sent_is_refused_also_while_another_thread_is_sending() {
    let (connection, theirs, _came) = connection();
    let ask = |id| connection.say(request(id)).unwrap();
    ask(1);
    connection.answered(1).unwrap();
    let mut last = 1;
    while connection.outgoing.lock().weight() < 3 {
        last += 1;
        ask(last);
    }
    connection.answered(2).unwrap();
    let sending = connection.outgoing.lock();
    connection.answered(last).unwrap();
    drop(sending);
    // The next sender learns of it.
    let mut room = vec![0; 64 << 10];
    while !connection.is_closed() && theirs.wait_readable(WATCHDOG).unwrap() {
        let _ = theirs.recv(&mut [IoSliceMut::new(&mut room)], 0, &mut Vec::new()).unwrap();
    }
    assert!(connection.is_closed());
    let error = connection.answered(last).unwrap_err();
    assert_eq!(error.kind(), Kind::Protocol, "{error}");
}
