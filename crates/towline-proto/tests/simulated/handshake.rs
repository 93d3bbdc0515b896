//! A handshake over a network that may change one bit.

use towline_proto::identity::{Identity, Incarnation};
use towline_proto::ticket::{RegionKey, Ticket, TicketBody, parse_public};
use towline_proto::wire::handshake::{ClientHandshake, ClientKey, LinkBase, ServerHandshake};
use towline_proto::wire::{FrameKind, HEADER_LEN, Header, KeyRef};
use towline_proto::{Access, Error, Kind, Place, Result};

use crate::network::Random;

/// It comes about exactly when nothing was changed.
fn shake_hands(random: &mut Random) {
    let named = |name, life| Identity::new(name, Incarnation([life; 16])).unwrap();
    let (owner, user) = (named("owner", 1), named("user", 2));
    let key = RegionKey::derive(&[7; 32], 3, 9);
    let body = TicketBody {
        identity: owner.clone(),
        reach: Vec::new(),
        row: 3,
        generation: 9,
        length: 4096,
        place: Place::Host,
        access: Access::READ_WRITE,
        issued_ms: 0,
        layout: None,
    };
    let ticket = Ticket::mint(&body, &key).unwrap();
    let (changed, flip) = (random.below(6), random.below(1 << 20) as usize);
    let meddle = |step: u64, frame: &mut Vec<u8>| {
        if step == changed {
            let bit = flip % ((frame.len() - HEADER_LEN) * 8);
            frame[HEADER_LEN + bit / 8] ^= 1 << (bit % 8);
        }
    };
    let outcome: Result<()> = (|| {
        let nonce = [random.below(256) as u8; 32];
        let (client, mut hello) =
            ClientHandshake::start(&user, owner.incarnation, ClientKey::Ticket(&ticket), nonce, None);
        meddle(0, &mut hello);
        let (server, mut welcome) = ServerHandshake::on_hello(
            &hello[HEADER_LEN..],
            &owner,
            [9; 32],
            None,
            |key_ref| match key_ref {
                KeyRef::Ticket(public) => Ok(LinkBase::Tag(parse_public(public)?.tag(&key))),
                KeyRef::Session(_) => Err(Error::new(Kind::NotFound, "handshake", "no such session")),
            },
        )?;
        meddle(1, &mut welcome);
        let (mut prove, ours, _) = client.on_welcome(&welcome[HEADER_LEN..])?;
        assert_eq!(Header::decode(prove.first_chunk().unwrap()).unwrap().kind, FrameKind::Prove);
        meddle(2, &mut prove);
        let (theirs, _) = server.on_prove(&prove[HEADER_LEN..])?;
        assert!(theirs.is(&ours));
        Ok(())
    })();
    assert_eq!(outcome.is_ok(), changed > 2, "a changed handshake came about, or a whole one did not");
}

#[test]
fn a_handshake_comes_about_exactly_when_nothing_was_changed() {
    for seed in 0..4000 {
        shake_hands(&mut Random(seed));
    }
}
