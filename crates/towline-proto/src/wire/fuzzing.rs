//! What must hold for any bytes: the fuzz targets and the tests over the stored corpus call these functions.
//!
//! Each takes bytes from nowhere in particular and panics where a rule of the wire format is broken.

use super::handshake::{ClientHandshake, ClientKey, LinkBase, Secret, ServerHandshake, SessionKey};
use super::{FrameKind, HEADER_LEN, Header, KeyRef, MAX_BODY, MAX_PAYLOAD, Message};
use crate::identity::{Identity, Incarnation};
use crate::place::Place;
use crate::ticket::{RegionKey, Ticket, TicketBody, parse_public, seal};
use crate::{Access, Error, Kind, Result};

/// The key that genuine tickets are signed with here.
pub fn region_key() -> RegionKey {
    RegionKey::derive(&[0x4b; 32], 3, 9)
}

/// A ticket takes these bytes or refuses them with `Protocol`, and what it takes it gives back unchanged.
///
/// The bytes are tried as a ticket, as the public part of one (the seal is added, so that inputs need not
/// guess a checksum) and as text.
pub fn ticket(data: &[u8]) {
    match Ticket::decode(data) {
        Ok(ticket) => {
            assert_eq!(ticket.encode(), data);
            holds_less_than_its_body(&ticket);
        }
        Err(error) => assert_eq!(error.kind(), Kind::Protocol),
    }
    match parse_public(data) {
        Ok(public) => {
            let key = region_key();
            let tag = public.tag(&key);
            let ticket = Ticket::decode(&seal(data.to_vec(), &tag));
            let ticket = ticket.expect("public bytes that parse are a ticket once they are sealed");
            assert_eq!(ticket.public_bytes(), data);
            assert!(tag.verify_proof(b"now", &ticket.proof(b"now")));
            holds_less_than_its_body(&ticket);
            narrows_and_verifies(&ticket, &key);
        }
        Err(error) => assert_eq!(error.kind(), Kind::Protocol),
    }
    if let Ok(text) = std::str::from_utf8(data) {
        match text.parse::<Ticket>() {
            Ok(ticket) => assert_eq!(ticket.to_string(), text.trim()),
            Err(error) => assert_eq!(error.kind(), Kind::Protocol),
        }
    }
}

fn holds_less_than_its_body(ticket: &Ticket) {
    let (range, body) = (ticket.range(), ticket.body());
    assert!(range.start <= range.end && range.end <= body.length);
    assert!(body.access.contains(ticket.access()));
    assert!(ticket.layout().is_none_or(|layout| layout.extent() <= ticket.length()));
    let again: Ticket = ticket.to_string().parse().expect("the text form can be read back");
    assert_eq!(&again, ticket);
}

fn narrows_and_verifies(ticket: &Ticket, key: &RegionKey) {
    let half = ticket.length() / 2;
    let Ok(less) = ticket.narrow().range(ticket.length() - half, half).access(Access::NONE).finish() else {
        return;
    };
    assert_eq!(less.length(), half);
    assert!(less.range().end == ticket.range().end && less.access() == Access::NONE);
    let public = parse_public(less.public_bytes()).expect("a narrowed ticket can be parsed");
    assert!(public.tag(key).verify_proof(b"now", &less.proof(b"now")));
}

/// A frame takes these bytes or refuses them with `Protocol`, and what it takes it gives back unchanged.
///
/// The bytes are tried as a header with a body behind it, and as a kind with a body behind it.
pub fn frame(data: &[u8]) {
    if let Some((header, body)) = data.split_first_chunk::<HEADER_LEN>() {
        match Header::decode(header) {
            Ok(decoded) => {
                assert_eq!(decoded.encode(), *header);
                if decoded.check(true).is_ok() {
                    assert!(decoded.body_len <= MAX_BODY && decoded.payload_len <= MAX_PAYLOAD);
                    assert!(decoded.payload_len == 0 || decoded.kind.has_payload());
                }
                if decoded.check(false).is_ok() {
                    assert!(decoded.payload_len == 0 && decoded.files == 0);
                }
                body_of(decoded.kind, body);
            }
            Err(error) => assert_eq!(error.kind(), Kind::Protocol),
        }
    }
    if let Some((code, body)) = data.split_first()
        && let Some(kind) = FrameKind::from_code(*code)
    {
        body_of(kind, body);
    }
}

fn body_of(kind: FrameKind, body: &[u8]) {
    match Message::decode(kind, body) {
        Ok(message) => {
            let mut again = Vec::new();
            message.encode(&mut again);
            assert_eq!(again, body, "{kind:?} came back in another form");
        }
        Err(error) => assert_eq!(error.kind(), Kind::Protocol),
    }
}

/// No bytes open a link, and no genuine handshake survives a change in flight.
///
/// The bytes are tried as the body of each frame of the handshake, and then as a recipe: which of the three
/// frames of a genuine handshake to change, where and how.
pub fn handshake(data: &[u8]) {
    let scene = Scene::new();
    if let Ok((server, welcome)) = scene.welcome(data) {
        frame(&welcome);
        assert!(server.on_prove(data).is_err());
    }
    assert!(scene.start().0.on_welcome(data).is_err());
    let (server, _) = scene.welcome(&scene.start().1[HEADER_LEN..]).expect("a genuine hello is welcome");
    assert!(server.on_prove(data).is_err());

    if let [which, low, high, change, ..] = *data {
        let outcome = scene.exchange(|step, body| {
            let at = usize::from(u16::from_le_bytes([low, high])) % body.len();
            if step == which % 3 {
                body[at] ^= change;
            }
        });
        assert_eq!(
            outcome.is_ok(),
            change == 0,
            "a changed handshake came through, or a genuine one did not"
        );
    }
}

/// A client with a ticket and the owner of the region, both with the endpoint's secret.
struct Scene {
    owner: Identity,
    client: Identity,
    ticket: Ticket,
    secret: Secret,
}

impl Scene {
    fn new() -> Scene {
        let named =
            |name, life| Identity::new(name, Incarnation([life; 16])).expect("the name is a good one");
        let owner = named("owner", 1);
        let body = TicketBody {
            identity: owner.clone(),
            reach: Vec::new(),
            row: 3,
            generation: 9,
            length: 4096,
            place: Place::Host,
            access: Access::READ,
            issued_ms: 0,
            layout: None,
        };
        let ticket = Ticket::mint(&body, &region_key()).expect("the body is a good one");
        Scene { owner, client: named("client", 2), ticket, secret: Secret::from("open sesame") }
    }

    fn start(&self) -> (ClientHandshake, Vec<u8>) {
        let key = ClientKey::Ticket(&self.ticket);
        ClientHandshake::start(&self.client, self.owner.incarnation, key, [3; 32], Some(&self.secret))
    }

    fn welcome(&self, hello: &[u8]) -> Result<(ServerHandshake, Vec<u8>)> {
        ServerHandshake::on_hello(hello, &self.owner, [4; 32], Some(&self.secret), |key| match key {
            KeyRef::Ticket(public) => Ok(LinkBase::Tag(parse_public(public)?.tag(&region_key()))),
            KeyRef::Session(_) => Err(Error::new(Kind::NotFound, "handshake", "no such session")),
        })
    }

    /// Runs a handshake in which `meddle` may change the body of each frame.
    fn exchange(&self, mut meddle: impl FnMut(u8, &mut [u8])) -> Result<SessionKey> {
        let (client, mut hello) = self.start();
        meddle(0, &mut hello[HEADER_LEN..]);
        let (server, mut welcome) = self.welcome(&hello[HEADER_LEN..])?;
        meddle(1, &mut welcome[HEADER_LEN..]);
        let (mut prove, key, challenge) = client.on_welcome(&welcome[HEADER_LEN..])?;
        meddle(2, &mut prove[HEADER_LEN..]);
        let (same, same_challenge) = server.on_prove(&prove[HEADER_LEN..])?;
        assert_eq!(challenge, same_challenge);
        assert!(same.is(&key));
        Ok(key)
    }
}
