//! An owner that hands over pages which this process must not use: it runs as another user, or this process wants every access checked.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
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
use crate::wire::{FrameKind, Granted, HEADER_LEN, Header, Message, Pong, Ready, WireError};
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
fn answer_as(user: Option<u32>, ticket: Ticket, passed: String) -> rustix::io::Result<mpsc::Sender<()>> {
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
        // To what the user asks next it replies with a file that nobody else has, and with one behind that.
        let file = rustix::fs::memfd_create(passed, rustix::fs::MemfdFlags::empty()).unwrap();
        if socket.wait_readable(Duration::from_secs(1)).unwrap() {
            let mut head = [0; HEADER_LEN];
            read_all(&socket, &mut head);
            let header = Header::decode(&head).unwrap();
            read_all(&socket, &mut vec![0; header.rest()]);
            if header.kind == FrameKind::Import {
                let refused = WireError::from(&crate::Error::invalid("import", "the reply has come"));
                let granted = Message::from(Granted { items: vec![Err(refused)] }).frame(header.id, 0, 1);
                let _ = socket.send(&[IoSlice::new(&granted)], &[file.as_fd()]).unwrap();
                let pong = Message::from(Pong {}).frame(0, 0, 0);
                let _ = socket.send(&[IoSlice::new(&pong)], &[file.as_fd()]).unwrap();
            }
        }
        let _ = finished.recv();
    });
    listens.recv().unwrap().map(|()| finish)
}

/// How many descriptors of this process lead to files of that name.
fn open_here(name: &str) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let leads_there = |one: &std::fs::DirEntry| {
        std::fs::read_link(one.path()).is_ok_and(|to| to.to_string_lossy().contains(name))
    };
    open.filter(leads_there).count()
}

/// Whether a user that contacts such an owner takes the pages that it is handed.
fn takes_pages(of: Option<u32>, routing: Routing, shares: bool) -> rustix::io::Result<bool> {
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    drop(region);
    drop(owner);
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let passed = format!("towline-passed-{}-", NEXT.fetch_add(1, Ordering::Relaxed));
    let _owner = answer_as(of, ticket.clone(), passed.clone())?;
    let user = Endpoint::options("user").routing(routing).open().unwrap();
    let until = Instant::now() + WATCHDOG;
    let session =
        Session::connect(&user.core().sessions, &ticket, Medium::Unix, shares, (until, until)).unwrap();
    let taken = session.shared().is_some();
    if !taken {
        // The stream serves, and what is passed along never gets into this process.
        let imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        let error = imported.outcomes.into_iter().next().unwrap().err().unwrap();
        assert!(error.message().contains("the reply has come"), "{error}");
        assert!(session.is_open(), "a file that came along has ended the session");
        // The one is the owner's own.
        assert_eq!(open_here(&passed), 1, "a file that an owner passed along was taken");
    }
    Ok(taken)
}

#[test]
fn pages_of_an_owner_of_the_same_user_are_used() {
    assert!(takes_pages(None, Routing::default(), true).unwrap());
}

#[test]
fn pages_of_an_owner_of_another_user_are_closed() {
    match takes_pages(Some(NOBODY), Routing::default(), true) {
        Ok(taken) => assert!(!taken),
        Err(error) => {
            skip("pages_of_an_owner_of_another_user_are_closed", "users", &error.to_string());
        }
    }
}

#[test]
fn pages_are_closed_where_the_user_enforces_isolation() {
    let enforced = Routing::default().isolation(Isolation::Enforced);
    assert!(!takes_pages(None, enforced, true).unwrap());
}

#[test]
fn pages_are_closed_where_one_import_enforces_isolation() {
    assert!(!takes_pages(None, Routing::default(), false).unwrap());
}
