//! An owner that hands over pages which this process must not use: it runs as another user, or this process wants every access checked.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Medium, Session};
use crate::fence::pins::PinPage;
use crate::notify::Mailbox;
use crate::runtime::socket::{Received, Sent, Socket};
use crate::skip::skip;
use crate::ticket::socket_name;
use crate::wire::handshake::{LinkBase, ServerHandshake};
use crate::wire::{HEADER_LEN, Header, Message, Ready};
use crate::{Access, Endpoint, Isolation, Routing, SystemStorage, Ticket};

const NOBODY: u32 = 65_534;
const WATCHDOG: Duration = Duration::from_secs(30);

fn read_body(socket: &Socket) -> Vec<u8> {
    let mut head = [0; HEADER_LEN];
    read_all(socket, &mut head);
    let header = Header::decode(&head).unwrap();
    let mut body = vec![0; header.rest()];
    read_all(socket, &mut body);
    body.truncate(header.body(&body).unwrap().len());
    body
}

fn read_all(socket: &Socket, mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        match socket.recv(&mut [IoSliceMut::new(bytes)], 0, &mut Vec::new()).unwrap() {
            Received::Bytes(came) => bytes = &mut bytes[came..],
            Received::WouldBlock => assert!(socket.wait_readable(WATCHDOG).unwrap()),
            Received::Eof => panic!("the user hung up"),
        }
    }
}

/// Answers one contact for a ticket's owner, as that user, and gives it a table, a page of pins, a doorbell and a mailbox.
/// Keeps the connection until the sender is dropped.
fn answer_as(user: Option<u32>, ticket: Ticket) -> rustix::io::Result<mpsc::Sender<()>> {
    let (listening, listens) = mpsc::channel();
    let (finish, finished) = mpsc::channel::<()>();
    thread::spawn(move || {
        let pages = Endpoint::open("pages").unwrap();
        // Of this thread alone: the kernel's own call, not the C library's.
        let changed = user.map_or(Ok(()), |user| {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user)
        });
        if changed.is_err() {
            listening.send(changed).unwrap();
            return;
        }
        let identity = &ticket.body().identity;
        let listener = Socket::listen_unix_abstract(&socket_name(&identity.incarnation), 1).unwrap();
        listening.send(Ok(())).unwrap();
        assert!(listener.wait_readable(WATCHDOG).unwrap());
        let (socket, _) = listener.accept().unwrap().unwrap();
        let hello = read_body(&socket);
        let key = |_: &_| Ok(LinkBase::Tag(ticket.tag()));
        let (handshake, welcome) = ServerHandshake::on_hello(&hello, identity, [1; 32], None, key).unwrap();
        assert!(matches!(socket.send(&[IoSlice::new(&welcome)], &[]).unwrap(), Sent::Bytes(_)));
        handshake.on_prove(&read_body(&socket)).unwrap();
        let core = &pages.core().registry;
        let pins = PinPage::create().unwrap().take_fd().unwrap();
        let (_, mailbox) = Mailbox::create().unwrap();
        let (table, doorbell) = (core.table.fd().unwrap(), core.bell.event().unwrap());
        let files = [table.as_fd(), pins.as_fd(), doorbell.as_fd(), mailbox.as_fd()];
        let ready = Ready { session: 1, name: "owner".into(), local: Some(core.table.rows()) };
        let ready = Message::from(ready).frame(0, 0, 4);
        assert!(matches!(socket.send(&[IoSlice::new(&ready)], &files).unwrap(), Sent::Bytes(_)));
        let _ = finished.recv();
    });
    listens.recv().unwrap().map(|()| finish)
}

/// Whether a user that contacts such an owner takes the pages that it is handed.
fn takes_pages(of: Option<u32>, routing: Routing) -> rustix::io::Result<bool> {
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    drop(region);
    drop(owner);
    let _owner = answer_as(of, ticket.clone())?;
    let user = Endpoint::options("user").routing(routing).open().unwrap();
    let until = Instant::now() + WATCHDOG;
    let session = Session::connect(&user.core().sessions, &ticket, Medium::Unix, (until, until)).unwrap();
    Ok(session.shared().is_some())
}

#[test]
fn pages_of_an_owner_of_the_same_user_are_used() {
    assert!(takes_pages(None, Routing::default()).unwrap());
}

#[test]
fn pages_of_an_owner_of_another_user_are_closed() {
    match takes_pages(Some(NOBODY), Routing::default()) {
        Ok(taken) => assert!(!taken),
        Err(error) => {
            skip("pages_of_an_owner_of_another_user_are_closed", "users", &error.to_string());
        }
    }
}

#[test]
fn pages_are_closed_where_the_user_enforces_isolation() {
    let enforced = Routing::default().isolation(Isolation::Enforced);
    assert!(!takes_pages(None, enforced).unwrap());
}
