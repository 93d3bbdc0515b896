#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::Access;
use crate::place::Place;
use crate::ticket::{RegionKey, TicketBody, parse_public};
use crate::wire::HEADER_LEN;

fn identity(name: &str, life: u8) -> Identity {
    Identity::new(name, Incarnation([life; 16])).unwrap()
}

fn key() -> RegionKey {
    RegionKey::derive(&[5; 32], 1, 2)
}

fn ticket_signed_with(key: &RegionKey) -> Ticket {
    let body = TicketBody {
        identity: identity("owner", 1),
        reach: Vec::new(),
        row: 1,
        generation: 2,
        length: 100,
        place: Place::Host,
        access: Access::READ_WRITE,
        issued_ms: 0,
        layout: None,
    };
    Ticket::mint(&body, key).unwrap()
}

type End = (SessionKey, [u8; 32]);

struct Run<'a> {
    key: ClientKey<'a>,
    target: Incarnation,
    client_secret: Option<&'a str>,
    server_secret: Option<&'a str>,
    session: Option<&'a SessionKey>,
    nonces: (u8, u8),
}

impl<'a> Run<'a> {
    fn with(key: ClientKey<'a>) -> Run<'a> {
        let target = Incarnation([1; 16]);
        Run { key, target, client_secret: None, server_secret: None, session: None, nonces: (1, 2) }
    }

    /// Both ends' session keys and challenges, and whether the secret was asked for.
    fn go(&self) -> Result<(End, End, bool)> {
        let (client_nonce, server_nonce) = ([self.nonces.0; 32], [self.nonces.1; 32]);
        let secret = self.client_secret.map(Secret::from);
        let me = identity("client", 9);
        let (client, hello) =
            ClientHandshake::start(&me, self.target, self.key, client_nonce, secret.as_ref());
        let secret = self.server_secret.map(Secret::from);
        let owner = identity("owner", 1);
        let (server, welcome) = ServerHandshake::on_hello(
            &hello[HEADER_LEN..],
            &owner,
            server_nonce,
            secret.as_ref(),
            |key_ref| match key_ref {
                KeyRef::Ticket(public) => Ok(LinkBase::Tag(parse_public(public)?.tag(&key()))),
                KeyRef::Session(7) => Ok(LinkBase::Session(self.session.unwrap().clone())),
                KeyRef::Session(_) => Err(Error::new(Kind::NotFound, "handshake", "no such session")),
            },
        )?;
        assert_eq!((server.client(), server.version()), (&me, VERSION));
        let asked = Welcome::decode(&welcome[HEADER_LEN..]).unwrap().secret_required;
        let (prove, session, challenge) = client.on_welcome(&welcome[HEADER_LEN..])?;
        let there = server.on_prove(&prove[HEADER_LEN..])?;
        Ok(((session, challenge), there, asked))
    }

    fn fails(&self) -> Error {
        self.go().map(|_| ()).unwrap_err()
    }
}

#[test]
fn both_ends_of_a_genuine_handshake_have_the_same_session_and_challenge() {
    let ticket = ticket_signed_with(&key());
    let ((here, here_challenge), (there, there_challenge), asked) =
        Run::with(ClientKey::Ticket(&ticket)).go().unwrap();
    assert!(here.is(&there));
    assert_eq!(here_challenge, there_challenge);
    assert!(!asked);
    let public = parse_public(ticket.public_bytes()).unwrap();
    assert!(public.tag(&key()).verify_proof(&there_challenge, &ticket.proof(&here_challenge)));
}

#[test]
fn a_narrowed_ticket_opens_a_link_too() {
    let ticket = ticket_signed_with(&key()).narrow().range(10, 5).finish().unwrap();
    assert!(Run::with(ClientKey::Ticket(&ticket)).go().is_ok());
}

#[test]
fn every_connection_has_its_own_challenge_and_session() {
    let ticket = ticket_signed_with(&key());
    let run = Run::with(ClientKey::Ticket(&ticket));
    let ((session, challenge), ..) = run.go().unwrap();
    for nonces in [(3, 2), (1, 3)] {
        let ((other, other_challenge), ..) = Run { nonces, ..Run::with(run.key) }.go().unwrap();
        assert!(!session.is(&other) && challenge != other_challenge);
    }
}

#[test]
fn a_forged_ticket_is_refused_by_the_client_who_sees_a_wrong_proof() {
    let forged = ticket_signed_with(&RegionKey::derive(&[6; 32], 1, 2));
    let error = Run::with(ClientKey::Ticket(&forged)).fails();
    assert_eq!(error.kind(), Kind::PermissionDenied);
}

#[test]
fn a_client_that_ignores_the_servers_proof_cannot_prove_itself() {
    let forged = ticket_signed_with(&RegionKey::derive(&[6; 32], 1, 2));
    let owner = identity("owner", 1);
    let (client, hello) = ClientHandshake::start(
        &identity("client", 9),
        owner.incarnation,
        ClientKey::Ticket(&forged),
        [1; 32],
        None,
    );
    let meet = || {
        ServerHandshake::on_hello(&hello[HEADER_LEN..], &owner, [2; 32], None, |_| {
            Ok(LinkBase::Tag(parse_public(forged.public_bytes())?.tag(&key())))
        })
    };
    let (server, welcome) = meet().unwrap();
    let welcome = Welcome::decode(&welcome[HEADER_LEN..]).unwrap();
    let transcript = transcript(&hello[HEADER_LEN..], &welcome, None);
    let mac = client.base.link_key(None).proof(CLIENT, &transcript);
    assert_eq!(server.on_prove(&mac).map(|_| ()).unwrap_err().kind(), Kind::PermissionDenied);
    // Nor by sending the server's own proof back.
    let (server, _) = meet().unwrap();
    assert_eq!(server.on_prove(&welcome.mac).map(|_| ()).unwrap_err().kind(), Kind::PermissionDenied);
    let (server, _) = meet().unwrap();
    assert_eq!(server.on_prove(&mac[1..]).map(|_| ()).unwrap_err().kind(), Kind::Protocol);
}

#[test]
fn a_secret_is_needed_on_both_sides_or_on_none() {
    let ticket = ticket_signed_with(&key());
    let run = |client_secret, server_secret| Run {
        client_secret,
        server_secret,
        ..Run::with(ClientKey::Ticket(&ticket))
    };
    assert!(run(Some("s3cret"), Some("s3cret")).go().unwrap().2);
    assert!(!run(None, None).go().unwrap().2);
    let untrusted = run(Some("s3cret"), None).fails();
    assert_eq!(untrusted.kind(), Kind::PermissionDenied);
    assert!(untrusted.message().contains("the owner has none"), "{untrusted}");
    let missing = run(None, Some("s3cret")).fails();
    assert_eq!(missing.kind(), Kind::PermissionDenied);
    assert!(missing.message().contains("requires the endpoint secret"), "{missing}");
    assert_eq!(run(Some("other"), Some("s3cret")).fails().kind(), Kind::PermissionDenied);
    assert_eq!(run(Some(""), Some("s3cret")).fails().kind(), Kind::PermissionDenied);
}

#[test]
fn a_session_opens_further_connections_without_ticket_or_secret() {
    let ticket = ticket_signed_with(&key());
    let secret = Some("s3cret");
    let first = Run { client_secret: secret, server_secret: secret, ..Run::with(ClientKey::Ticket(&ticket)) };
    let ((session, _), ..) = first.go().unwrap();
    let again = Run {
        server_secret: secret,
        session: Some(&session),
        ..Run::with(ClientKey::Session { id: 7, key: &session })
    };
    let ((second, _), (there, _), asked) = again.go().unwrap();
    assert!(second.is(&there) && !second.is(&session) && !asked);

    let wrong = Run { session: Some(&second), ..Run::with(ClientKey::Session { id: 7, key: &session }) };
    assert_eq!(wrong.fails().kind(), Kind::PermissionDenied);
    let unknown = Run::with(ClientKey::Session { id: 8, key: &session });
    assert_eq!(unknown.fails().kind(), Kind::NotFound);
}

#[test]
fn another_incarnation_is_stale_at_both_ends() {
    let ticket = ticket_signed_with(&key());
    let target = Incarnation([0xee; 16]);
    let at_the_server = Run { target, ..Run::with(ClientKey::Ticket(&ticket)) };
    assert_eq!(at_the_server.fails().kind(), Kind::Stale);

    let start = || {
        let me = identity("client", 9);
        ClientHandshake::start(&me, target, ClientKey::Ticket(&ticket), [1; 32], None).0
    };
    let welcome = Welcome {
        version: VERSION,
        incarnation: Incarnation([1; 16]),
        nonce: [2; 32],
        secret_required: false,
        mac: [0; 32],
    };
    let mut body = Vec::new();
    welcome.encode(&mut body);
    assert_eq!(start().on_welcome(&body).map(|_| ()).unwrap_err().kind(), Kind::Stale);
}

#[test]
fn versions_without_overlap_are_named() {
    let ticket = ticket_signed_with(&key());
    let owner = identity("owner", 1);
    let (_, hello) = ClientHandshake::start(
        &identity("client", 9),
        owner.incarnation,
        ClientKey::Ticket(&ticket),
        [1; 32],
        None,
    );
    let meet = |oldest: u16, newest: u16| {
        let mut body = hello[HEADER_LEN..].to_vec();
        body[..2].copy_from_slice(&oldest.to_le_bytes());
        body[2..4].copy_from_slice(&newest.to_le_bytes());
        ServerHandshake::on_hello(&body, &owner, [2; 32], None, |_| {
            Ok(LinkBase::Tag(parse_public(ticket.public_bytes())?.tag(&key())))
        })
    };
    // A newer client that still speaks ours, and one that does not.
    assert_eq!(meet(1, 2).unwrap().0.version(), 1);
    let error = meet(2, 3).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), Kind::Protocol);
    assert!(error.message().contains("2 to 3") && error.message().contains("1 to 1"), "{error}");
    assert_eq!(meet(3, 2).map(|_| ()).unwrap_err().kind(), Kind::Protocol);
    let hello = [2, 0, 3, 0, 0xff];
    let error = ServerHandshake::on_hello(&hello, &owner, [2; 32], None, |_| panic!("no key is looked up"));
    assert!(error.unwrap_err().message().contains("no common version"));
}

#[test]
fn every_changed_byte_ends_the_handshake() {
    let lengths = [24 + 16 + 8 + 80, 2 + 16 + 32 + 1 + 32, 32];
    for (which, len) in (0u8..).zip(lengths) {
        for at in 0..len as u16 {
            let [low, high] = at.to_le_bytes();
            crate::wire::fuzzing::handshake(&[which, low, high, 0x01]);
        }
    }
    crate::wire::fuzzing::handshake(&[0, 0, 0, 0]);
}

#[test]
fn a_refusal_carries_kind_and_message() {
    let frame = refusal(&Error::new(Kind::Stale, "handshake", "gone"));
    let refuse = Refuse::decode(&frame[HEADER_LEN..]).unwrap();
    assert_eq!(refuse.error, WireError { kind: Kind::Stale, message: "gone".into() });
}

#[test]
fn no_key_is_ever_shown() {
    let shown = format!("{:?} {:?} {:?}", Secret::from("s3cret"), SessionKey([7; 32]), LinkKey([7; 32]));
    assert_eq!(shown, "Secret(..) SessionKey(..) LinkKey(..)");
    assert!(!format!("{:?}", LinkBase::Tag(Tag([7; 32]))).contains('7'));
}

#[test]
fn proofs_that_are_bound_to_a_connection_are_worth_nothing_on_another() {
    let ticket = ticket_signed_with(&key());
    let owner = identity("owner", 1);
    // What each end derives from its own encrypted connection: with an attacker in the middle these are two.
    let talk = |here: Option<[u8; 32]>, there: Option<[u8; 32]>| {
        let me = identity("client", 9);
        let (client, hello) =
            ClientHandshake::start(&me, owner.incarnation, ClientKey::Ticket(&ticket), [1; 32], None);
        let body = &hello[HEADER_LEN..];
        let (server, welcome) = ServerHandshake::on_hello_over(body, &owner, [2; 32], None, there, |_| {
            Ok(LinkBase::Tag(parse_public(ticket.public_bytes())?.tag(&key())))
        })
        .unwrap();
        let (prove, key, _) = client.bound_to(here).on_welcome(&welcome[HEADER_LEN..])?;
        let (other, _) = server.on_prove(&prove[HEADER_LEN..])?;
        assert!(key.is(&other));
        Ok(())
    };
    assert!(talk(Some([3; 32]), Some([3; 32])).is_ok());
    assert!(talk(None, None).is_ok());
    for (here, there) in [(Some([3; 32]), Some([4; 32])), (Some([3; 32]), None), (None, Some([4; 32]))] {
        let error: Error = talk(here, there).unwrap_err();
        assert_eq!(error.kind(), Kind::PermissionDenied);
    }
}
