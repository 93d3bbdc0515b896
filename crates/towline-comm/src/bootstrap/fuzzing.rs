//! What must hold for any bytes at the door of a meeting: the fuzz target and the test over the stored corpus call
//! [`meeting`].

use std::time::Instant;

use towline::Kind;

use super::meeting::Meeting;
use super::root;
use super::wire::{self, HELLO_LEN, Join, MOST_JOIN, Reply, Session, Side, VERSION, WELCOME_LEN};
use crate::{Error, UniqueId};

const NONCE: [u8; 16] = [6; 16];

fn session() -> Session {
    Session::new(&[1; 32], &NONCE, &[2; 32], &[3; 32])
}

/// Whatever comes to a meeting is taken or refused, and what is taken it gives back unchanged. Nothing that was not
/// sealed with the secret is taken for sealed.
///
/// The bytes are tried as each message, sealed and not, as an id, and then as a recipe: where to change a sealed join.
pub fn meeting(data: &[u8]) {
    if let Some(hello) = data.first_chunk::<HELLO_LEN>()
        && let Some(challenge) = wire::parse_hello(hello, &NONCE)
    {
        assert_eq!(wire::hello(&NONCE, &challenge), *hello);
    }
    if let Some(welcome) = data.first_chunk::<WELCOME_LEN>()
        && let Some((challenge, proof)) = wire::parse_welcome(welcome)
    {
        assert_eq!(wire::welcome(&challenge, &proof), *welcome);
        assert!(!session().proves(&proof), "a proof was guessed");
    }
    if let Ok(Some(sealed)) = root::sealed(data) {
        assert!(sealed.len() <= MOST_JOIN && sealed.len() + 4 <= data.len());
    }
    assert!(session().unseal(Side::Rank, data).is_none(), "a seal was guessed");
    join(data);
    reply(data);
    id(data);
    if let [low, high, change, plain @ ..] = data {
        let mut sealed = session().seal(Side::Rank, plain);
        assert_eq!(session().unseal(Side::Rank, &sealed).as_deref(), Some(plain));
        assert!(
            session().unseal(Side::Root, &sealed).is_none(),
            "a message was played back to who sealed it"
        );
        let at = usize::from(u16::from_le_bytes([*low, *high])) % sealed.len();
        sealed[at] ^= change;
        assert_eq!(session().unseal(Side::Rank, &sealed).is_some(), *change == 0);
    }
}

fn join(data: &[u8]) {
    match Join::decode(data) {
        Ok(join) => {
            // A name that is not text is shown as well as it can be, and only shown.
            if join.version == VERSION && !join.name.contains('\u{fffd}') {
                assert_eq!(join.encode(), data);
            }
            let (mut meeting, now) = (Meeting::default(), Instant::now());
            let (version, nranks, rank) = (join.version, join.nranks, join.rank);
            match meeting.arrive(join.clone(), now) {
                None => assert!(version == VERSION && rank < nranks),
                Some(Reply::List(list)) => assert_eq!((list.len(), nranks, rank), (1, 1, 0)),
                Some(Reply::Failed(error)) => assert_eq!(error.ranks(), [rank]),
            }
            if let Some(Reply::List(_)) = meeting.arrive(join, now) {
                assert_eq!(nranks, 1, "a rank filled two seats");
            }
        }
        Err(error) => refused(&error),
    }
}

fn reply(data: &[u8]) {
    match Reply::decode(data) {
        Ok(Reply::List(list)) => {
            assert_eq!(Reply::List(list.clone()).encode(), data);
            if let Err(error) = wire::tickets(&list) {
                refused(&error);
            }
        }
        Ok(Reply::Failed(error)) => {
            let again = Reply::Failed(error.clone()).encode();
            // Ranks are put in order, and text that is not text is shown as well as it can be.
            if let Ok(Reply::Failed(same)) = Reply::decode(&again) {
                assert_eq!((same.kind(), same.ranks()), (error.kind(), error.ranks()));
            }
        }
        Err(error) => refused(&error),
    }
}

fn id(data: &[u8]) {
    match UniqueId::from_bytes(data) {
        Ok(id) => {
            assert_eq!(id.as_bytes(), data);
            assert!(id.addresses().len() <= 3);
            assert_eq!(id.to_string().parse::<UniqueId>().ok().as_ref(), Some(&id));
        }
        Err(error) => assert_eq!(error.kind(), Kind::Invalid),
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Err(error) = text.parse::<UniqueId>()
    {
        assert_eq!(error.kind(), Kind::Invalid);
    }
}

fn refused(error: &Error) {
    assert_eq!(error.kind(), Kind::Protocol);
}

/// Genuine messages, from which to start: name and bytes.
pub fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let join = Join {
        version: VERSION,
        nranks: 4,
        rank: 2,
        digest: 4 << 32 | 32,
        timeout_ms: 30_000,
        name: "comm".into(),
        ticket: vec![0x5a; 90],
    };
    let failed = Error::new(Kind::Timeout, "init", "2 of 4 ranks did not come in 1.000 s").about([1, 3]);
    let sealed = session().seal(Side::Rank, &join.encode());
    let framed = [&(sealed.len() as u32).to_le_bytes()[..], &sealed].concat();
    let other = Join { version: VERSION + 6, ..join.clone() };
    vec![
        ("hello", wire::hello(&NONCE, &[2; 32]).to_vec()),
        ("welcome", wire::welcome(&[3; 32], &[4; 32]).to_vec()),
        ("join", join.encode()),
        ("join-of-another-version", other.encode()),
        ("join-outside-the-group", Join { rank: 9, ..join.clone() }.encode()),
        ("join-cut", join.encode()[..40].to_vec()),
        ("join-with-more-behind", [join.encode(), vec![0]].concat()),
        ("join-sealed", framed),
        ("join-sealed-too-long", (MOST_JOIN as u32 + 1).to_le_bytes().to_vec()),
        ("reply-list", Reply::List(vec![vec![1; 80], vec![2; 90]]).encode()),
        ("reply-list-too-long", [&VERSION.to_le_bytes()[..], &[0], &u32::MAX.to_le_bytes()].concat()),
        ("reply-failed", Reply::Failed(failed).encode()),
        ("reply-unknown", [&VERSION.to_le_bytes()[..], &[7]].concat()),
        ("nothing", Vec::new()),
    ]
}
