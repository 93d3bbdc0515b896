//! A peer with one narrow ticket that asks for everything else.

use towline::ticket::Ticket;
use towline::wire::{
    Atomic, AtomicOp, Block, Data, Done, FrameKind, Granted, Import, ImportItem, Message, Read, Reduce,
    Signal, Write,
};
use towline::{Access, Dtype, Endpoint, Kind, ReduceOp};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_served_here, known};
use towline_testkit::random::Random;
use towline_testkit::scene::{KIB, Owner, endpoint};

use super::{Course, Drill, Round};

const LEN: usize = 64 * KIB;
const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// What the attacker may: read this much, from here on.
const START: u64 = 16 << 10;
const LENGTH: u64 = 8 << 10;

/// Accesses of one round, in flights of so many.
const ACCESSES: u64 = 400;
const FLIGHT: u64 = 100;

/// A valid session, used for what it was not given for.
pub(super) struct Forge {
    medium: Medium,
    owner: Owner,
    narrow: Ticket,
    attacker: Option<(Attacker, u32)>,
    user: Endpoint,
    refused: u64,
}

impl Forge {
    pub(super) fn new(course: &Course) -> Result<Forge, String> {
        let mut owner = Owner::open(course.lane, LEN);
        owner.fill(STAMP);
        let narrow = owner.ticket.narrow().range(START, LENGTH).access(Access::READ).finish().unwrap();
        let medium = if is_served_here(&known(course.lane)) { Medium::Unix } else { Medium::Tcp };
        Ok(Forge { medium, owner, narrow, attacker: None, user: endpoint("user"), refused: 0 })
    }
}

/// An access that the ticket does not allow, and how many bytes of payload come with it.
fn mischief(random: &mut Random, handle: u32, request: u64) -> Vec<u8> {
    let far = || vec![Block { offset: u64::MAX - 16, len: 8 }];
    let inside = || vec![Block { offset: 0, len: 8 }];
    let outside = |random: &mut Random| {
        let offset = LENGTH - 7 + random.below(1 << 40);
        vec![Block { offset, len: 8 + random.below(4096) as u32 }]
    };
    let with = |message: Message, payload: usize| {
        let mut frame = message.frame(request, payload as u64, 0);
        frame.extend(vec![0xee; payload]);
        frame
    };
    match random.below(9) {
        0 => with(Read { transfer: 0, handle, blocks: outside(random) }.into(), 0),
        1 => with(Read { transfer: 0, handle, blocks: far() }.into(), 0),
        2 => with(
            Read {
                transfer: 0,
                handle: handle.wrapping_add(1 + random.number() as u32 % 1000),
                blocks: inside(),
            }
            .into(),
            0,
        ),
        3 => with(Write { transfer: 0, handle, blocks: inside() }.into(), 8),
        4 => with(Write { transfer: 0, handle, blocks: far() }.into(), 8),
        5 => with(Atomic { handle, offset: 0, op: AtomicOp::Add(1) }.into(), 0),
        6 => with(
            Atomic { handle, offset: LENGTH, op: AtomicOp::CompareSwap { expected: 0, new: 1 } }.into(),
            0,
        ),
        7 => with(Signal { transfer: 0, pieces: 0, handle, offset: 0, add: 1 }.into(), 0),
        _ => with(
            Reduce { transfer: 0, handle, op: ReduceOp::Sum, dtype: Dtype::U64, blocks: inside() }.into(),
            8,
        ),
    }
}

fn is_refused(kind: FrameKind, body: &[u8]) -> bool {
    match kind {
        FrameKind::Data => Data::decode(body).is_ok_and(|data| data.outcome.is_err()),
        FrameKind::Done => Done::decode(body).is_ok_and(|done| done.outcome.is_err()),
        FrameKind::Granted => {
            Granted::decode(body).is_ok_and(|granted| granted.items.iter().all(Result::is_err))
        }
        _ => false,
    }
}

impl Drill for Forge {
    fn round(&mut self, round: &mut Round) {
        let random = &mut round.random;
        let (attacker, handle) = self.attacker.get_or_insert_with(|| {
            let mut attacker = Attacker::connect(&self.narrow, self.medium);
            let handle = attacker.log_in(&self.narrow);
            (attacker, handle)
        });
        for flight in 0..ACCESSES / FLIGHT {
            let mut frames = Vec::new();
            for request in 1..=FLIGHT {
                frames.extend(mischief(random, *handle, 10 + flight * FLIGHT + request));
            }
            attacker.send(&frames);
            for _ in 0..FLIGHT {
                let (header, body) = attacker.frame().expect("a refusal, and not the end");
                assert!(
                    is_refused(header.kind, &body),
                    "an access without a right was answered with {header:?}"
                );
            }
        }
        self.refused += ACCESSES;
        // Tickets that nobody has minted: wider than what they were made from, or simply changed.
        let mut bytes = self.narrow.encode();
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
        if let Ok(forged) = Ticket::decode(&bytes) {
            let error = self.user.import(&forged).expect_err("a changed ticket is taken");
            assert!(error.kind() != Kind::Internal, "{error}");
        }
        let item = ImportItem {
            ticket: self.owner.ticket.public_bytes().to_vec(),
            proof: self.narrow.proof(&[random.number() as u8; 32]),
            operation: None,
        };
        attacker.send(&Message::from(Import { items: vec![item] }).frame(5, 0, 0));
        let (header, body) = attacker.frame().expect("a reply");
        assert!(is_refused(header.kind, &body), "a wrong proof is taken");
        self.owner.process.must(&format!("check 1 1 1 0 {LEN}"));
        round.tally.count("refused accesses", ACCESSES);
        if round.random.below(8) == 0 {
            self.attacker = None;
        }
    }

    fn finish(&mut self, _: &mut super::Tally) {
        let counted = self.owner.process.must("stats").number(3);
        assert!(counted >= self.refused / 2, "{} refusals, of which {counted} were counted", self.refused);
        self.owner.process.must(&format!("check 1 1 1 0 {LEN}"));
    }
}
