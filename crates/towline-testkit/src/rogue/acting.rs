//! A rogue owner that does as a program says: every frame at every moment, twice, never, elsewhere, with wrong lengths and descriptors.

use std::os::fd::AsFd;
use std::time::Duration;

use towline::Ticket;

use super::pages::{Pages, ROWS};
use super::{Grant, Heard, Link, Rogue, check, data, done, frame, granted, kind, ready, refused};
use crate::attacker::Medium;
use crate::input::Input;

/// The length of one step of a program.
pub const STEP: usize = 8;

/// What a user's memory holds once nothing of it may be sent any more.
pub const CANARY: u8 = 0xee;

/// So many of them in a row are no coincidence.
const CANARIES: usize = 48;

/// The bytes that an honest answer carries.
const FILLING: u8 = 0x77;

/// How long it waits for what a user does at once.
const MOMENT: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(10);

/// And for what takes some threads of its user.
const LONG: Duration = Duration::from_millis(10);

/// More than this it neither sends nor takes in one piece.
const MOST: u64 = 2 << 20;

/// One connection, and how much of a payload on it is still to come.
struct Side {
    link: Link,
    left: u64,
    /// The rest did not come when it was last waited for.
    slow: bool,
    /// It was hung up.
    over: bool,
}

impl Side {
    fn new(link: Link) -> Side {
        Side { link, left: 0, slow: false, over: false }
    }
}

/// An owner in action.
pub struct Actor {
    rogue: Option<Rogue>,
    ticket: Ticket,
    incarnation: [u8; 16],
    length: u64,
    sides: Vec<Side>,
    /// What was asked, over which connection, and not answered.
    asked: Vec<(usize, Heard)>,
    /// The last that was answered.
    answered: Option<(usize, Heard)>,
    pages: Option<Pages>,
    /// What it says over TCP of the ports at which it sees its user.
    ports: Ports,
    disk: bool,
    /// For so many steps it takes no payload, whatever it says to it.
    deaf: u8,
    /// Whether something is worth waiting for: the user has begun something, or has just spoken.
    expects: bool,
    /// The same for what takes the user longer, such as another connection.
    awaits: bool,
    canaries: u64,
    told: Told,
    /// The highest number of a request that has come.
    last: u64,
}

/// Whether the port of a user is said at all, and then the right one: of the control connection, and of lanes.
#[derive(Default, Clone, Copy)]
struct Ports {
    said: bool,
    control: bool,
    lanes: bool,
}

impl Ports {
    fn of(self, link: &Link) -> Option<u32> {
        let right = if link.lane { self.lanes } else { self.control };
        // No user is at port 0.
        link.seen_at().filter(|_| self.said).map(|port| if right { port } else { 0 })
    }
}

/// What only an owner is told that knows of it.
#[derive(Debug, Default, Clone, Copy)]
pub struct Told {
    /// Reads that nobody wants any more.
    pub withdrawn: usize,
    /// Lanes that are to end.
    pub ends: usize,
}

impl Actor {
    /// Waits for a user of a region of that length.
    pub fn open(medium: Medium, length: u64) -> Actor {
        let rogue = Rogue::open(medium, length);
        let ticket = rogue.ticket().clone();
        let incarnation = ticket.body().identity.incarnation.0;
        let (sides, asked) = (Vec::new(), Vec::new());
        Actor {
            rogue: Some(rogue),
            ticket,
            incarnation,
            length,
            sides,
            asked,
            answered: None,
            pages: None,
            ports: Ports::default(),
            disk: false,
            deaf: 0,
            expects: true,
            awaits: true,
            canaries: 0,
            told: Told::default(),
            last: 0,
        }
    }

    /// What leads the user here.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// The user has begun something: the next step waits a moment for what it sends.
    pub fn expect(&mut self) {
        (self.expects, self.awaits) = (true, true);
    }

    /// How many canaries it was sent.
    pub fn canaries(&self) -> u64 {
        self.canaries
    }

    /// What it was told until now.
    pub fn told(&self) -> Told {
        self.told
    }

    /// Waits for the first connection, and says that it is ready: with pages, where it has such to share, or over TCP with a port.
    pub fn meet(&mut self, setup: &[u8]) {
        let mut input = Input(setup);
        let Some(mut link) = self.rogue.as_ref().and_then(|rogue| rogue.meet(PATIENCE)) else { return };
        let how = input.byte();
        self.disk = how & 8 != 0;
        match how & 0xf6 {
            // Not a word, the end, or nonsense in place of the word that it is ready.
            0x10 => {}
            0x30 => link.hang_up(),
            0x50 => link.send(&input.take(STEP).repeat(8)),
            _ => self.be_ready(&mut link, how, &mut input),
        }
        self.sides.push(Side::new(link));
    }

    fn be_ready(&mut self, link: &mut Link, how: u8, input: &mut Input<'_>) {
        let too_few = how & 0xf6 == 0x20;
        if link.seen_at().is_some() && !too_few {
            let bit = |bit: u8| how & bit != 0;
            self.ports = Ports { said: bit(1), control: bit(0x40), lanes: bit(0x80) };
            link.send(&ready(self.ports.of(link), 0));
        } else if how & 1 != 0 {
            let pages = Pages::new(self.length, self.incarnation, input);
            let rows = if how & 0xf0 == 0xf0 { input.number() as u32 } else { ROWS };
            let files = pages.files();
            let files = if too_few { &files[..3] } else { &files[..] };
            link.send_with_files(&ready(Some(rows), 4), files);
            self.pages = Some(pages);
        } else {
            link.send(&ready(None, 0));
        }
    }

    /// One step. Returns how many canaries have been seen until now.
    pub fn act(&mut self, step: &[u8]) -> u64 {
        let mut input = Input(step);
        let what = input.byte();
        self.join();
        self.hear();
        match what % 24 {
            0..=5 => self.answer(&mut input, false),
            6 => {
                self.answer(&mut input, false);
                self.answer_again(&mut input);
            }
            7 => self.answer_again(&mut input),
            8 => self.answer(&mut input, true),
            9 => self.answer_elsewhere(&mut input),
            10 => self.answer_by_another_kind(&mut input),
            11..=13 => self.say_something(&mut input),
            14 => self.say_nonsense(&mut input),
            15 => {
                let side = self.side(&mut input);
                let bytes = input.take(STEP);
                if let Some(side) = side {
                    self.sides[side].link.send(&bytes);
                }
            }
            16 if input.byte().is_multiple_of(4) => {
                if let Some(side) = self.side(&mut input) {
                    self.sides[side].link.hang_up();
                    (self.sides[side].over, self.awaits) = (true, true);
                }
            }
            17..=20 => {
                if let Some(pages) = &mut self.pages {
                    pages.scribble(&mut input);
                }
            }
            21 => self.pass_files(&mut input),
            22 if input.byte() == 255 => self.wait(),
            22 => std::thread::sleep(MOMENT / 8),
            23 => self.deaf = input.byte() % 16,
            _ => {}
        }
        self.deaf = self.deaf.saturating_sub(1);
        self.canaries
    }

    /// Takes what is on its way, hangs up, and says how many canaries have been seen.
    pub fn end(&mut self) -> u64 {
        drop(self.rogue.take());
        for side in &mut self.sides {
            // What is being sent comes by and by.
            let wait = if side.left > 0 { MOMENT } else { Duration::ZERO };
            let (bytes, _) = side.link.drain(wait);
            self.canaries += canaries(&bytes);
            side.link.hang_up();
        }
        self.canaries
    }

    /// Lets further connections of the session in.
    fn join(&mut self) {
        while let Some(link) = self.rogue.as_ref().and_then(|rogue| rogue.meet(Duration::ZERO)) {
            let mut link = link;
            // The first connection again, or a lane with its place in the page.
            link.send(&ready(self.pages.as_ref().map(|_| 1).or(self.ports.of(&link)), 0));
            self.sides.push(Side::new(link));
        }
    }

    /// Until another connection or frame comes, and not for long; in vain only once for what the user has begun.
    fn wait(&mut self) {
        let quiet = self.sides.iter().filter(|side| side.left == 0 && !side.over);
        if let Some(rogue) = self.rogue.as_ref().filter(|_| self.awaits) {
            self.awaits = rogue.await_any(quiet.map(|side| &side.link), LONG);
        }
    }

    /// Takes what has come; of what is too long, a part.
    fn hear(&mut self) {
        if self.asked.is_empty() && self.expects {
            // Once in vain is enough: there are many steps, and most of them have nothing to wait for.
            self.expects = Link::await_any(self.sides.iter().map(|side| &side.link), MOMENT / 8);
        }
        for (number, side) in self.sides.iter_mut().enumerate() {
            loop {
                let wait = if side.slow { Duration::ZERO } else { MOMENT / 8 };
                if side.left > 0 && self.deaf == 0 {
                    side.slow = !side.link.has_bytes(wait);
                    if side.slow {
                        break;
                    }
                    let bytes = side.link.take_some(side.left);
                    self.canaries += canaries(&bytes);
                    side.left -= bytes.len() as u64;
                    if bytes.is_empty() {
                        break;
                    }
                    continue;
                }
                let heard = if side.left == 0 { side.link.hear_within(Duration::ZERO) } else { None };
                let Some(heard) = heard else { break };
                side.left = heard.payload;
                self.last = self.last.max(heard.id);
                if heard.kind == kind::WITHDRAW {
                    self.told.withdrawn += 1;
                    // It is answered all the same, behind everything else.
                    let read =
                        self.asked.iter().position(|(over, read)| (*over, read.id) == (number, heard.id));
                    let read = read.map(|at| self.asked.remove(at));
                    self.asked.extend(read);
                }
                self.told.ends += usize::from(heard.kind == kind::END_LANE);
                if matches!(
                    heard.kind,
                    kind::IMPORT
                        | kind::ASK
                        | kind::READ
                        | kind::WRITE
                        | kind::REDUCE
                        | kind::ATOMIC
                        | kind::SIGNAL
                        | kind::END_LANE
                ) && heard.id != 0
                    && self.asked.len() < 64
                {
                    // What became of a lane is said first.
                    let at = if heard.kind == kind::END_LANE { 0 } else { self.asked.len() };
                    self.asked.insert(at, (number, heard));
                }
            }
        }
    }

    fn side(&self, input: &mut Input<'_>) -> Option<usize> {
        (!self.sides.is_empty()).then(|| input.byte() as usize % self.sides.len())
    }

    fn answer(&mut self, input: &mut Input<'_>, wrong: bool) {
        if self.asked.is_empty() {
            return;
        }
        let which = if input.byte().is_multiple_of(8) { input.byte() as usize % self.asked.len() } else { 0 };
        let (side, heard) = self.asked.remove(which);
        self.send_answer(side, &heard, input, wrong);
        self.answered = Some((side, heard));
    }

    fn answer_again(&mut self, input: &mut Input<'_>) {
        if let Some((side, heard)) = self.answered.clone() {
            self.send_answer(side, &heard, input, false);
        }
    }

    fn answer_elsewhere(&mut self, input: &mut Input<'_>) {
        if self.asked.is_empty() {
            return;
        }
        let (side, heard) = self.asked.remove(0);
        let other = self.side(input).unwrap_or(side);
        self.send_answer(other, &heard, input, false);
        self.answered = Some((side, heard));
    }

    fn answer_by_another_kind(&mut self, input: &mut Input<'_>) {
        let Some((side, heard)) = self.asked.first().cloned() else { return };
        let other =
            [kind::READ, kind::WRITE, kind::IMPORT, kind::ASK, kind::ATOMIC][input.byte() as usize % 5];
        let heard = Heard { kind: other, ..heard };
        self.send_answer(side, &heard, input, false);
    }

    fn send_answer(&mut self, side: usize, heard: &Heard, input: &mut Input<'_>, wrong: bool) {
        let (id, how) = (heard.id, input.byte());
        let refuse = how >= 250;
        match heard.kind {
            kind::READ if refuse => self.sides[side].link.send(&refused(kind::DATA, id, how % 13)),
            kind::READ => {
                let (bytes, blocks) = heard.asked();
                let bytes = bytes.min(MOST);
                let bytes = match (wrong, how % 4) {
                    (false, _) => bytes,
                    (true, 0) => bytes.saturating_sub(u64::from(input.byte())),
                    (true, 1) => bytes + 1 + u64::from(input.byte()),
                    (true, 2) => 0,
                    (true, _) => u64::from(input.byte()),
                };
                let mut answer = data(id, &vec![FILLING; bytes as usize]);
                if how % 16 == 15 {
                    answer = [check(id, &vec![7; blocks.min(4096) as usize]), answer].concat();
                }
                // Never all of it.
                if wrong && how & 0x80 != 0 {
                    answer.truncate(answer.len() - answer.len() / 3);
                }
                self.sides[side].link.send(&answer);
            }
            kind::IMPORT if refuse => self.sides[side].link.send(&refused(kind::GRANTED, id, how % 13)),
            kind::IMPORT => self.grant(side, id, input, wrong),
            kind::ASK => self.tell(side, id, input, wrong),
            _ if refuse => self.sides[side].link.send(&refused(kind::DONE, id, how % 13)),
            _ if wrong => {
                let body = input.take(usize::from(how % 12));
                self.sides[side].link.send(&frame(kind::DONE, id, &body, 0, 0));
            }
            _ => self.sides[side].link.send(&done(id, heard.payload)),
        }
    }

    fn grant(&mut self, side: usize, id: u64, input: &mut Input<'_>, wrong: bool) {
        let mut grant = Grant { disk: self.disk, offers: 7, ..Grant::whole(self.length) };
        if self.pages.is_some() {
            grant.segment = Some((1, self.length, 0, true));
        }
        let mut count = 1;
        if wrong {
            let value = match input.byte() % 4 {
                0 => u64::from(input.byte()) << 12,
                1 => u64::MAX - u64::from(input.byte()),
                2 => 1 << 46,
                _ => input.number(),
            };
            match input.byte() % 8 {
                0 => grant.length = value,
                1 => grant.offset = value,
                2 => grant.row = value as u32,
                3 => grant.generation = value,
                4 => grant.segment = Some((1, value, value.wrapping_sub(grant.length), true)),
                5 => grant.segment = Some((1, self.length, value, false)),
                6 => count = usize::from(value as u8 % 4),
                _ => grant.access = value as u8,
            }
        }
        let attached = u8::from(grant.segment.is_some_and(|segment| segment.3));
        let answer = granted(id, &vec![grant; count], attached);
        match &self.pages {
            Some(pages) if attached == 1 => {
                self.sides[side].link.send_with_files(&answer, &[pages.segment()]);
            }
            _ => self.sides[side].link.send(&answer),
        }
    }

    /// Where its file is, and something in place of it.
    fn tell(&mut self, side: usize, id: u64, input: &mut Input<'_>, wrong: bool) {
        let body = if wrong { input.take(STEP) } else { vec![0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0] };
        let files = input.byte() % 3;
        let answer = frame(kind::TOLD, id, &body, 0, files);
        let file = Pages::file(input);
        self.sides[side].link.send_with_files(&answer, &vec![file.as_fd(); usize::from(files)]);
    }

    /// A frame that can be read, whether or not it belongs there.
    fn say_something(&mut self, input: &mut Input<'_>) {
        let Some(side) = self.side(input) else { return };
        let (what, id) = (input.byte(), u64::from(input.byte() % 24));
        let word = u64::from(input.byte());
        let said = match what % 14 {
            0 => data(id, &vec![FILLING; (word as usize) << 4]),
            1 => done(id, word),
            2 => refused(kind::DATA, id, word as u8 % 13),
            3 => refused(kind::DONE, id, word as u8 % 13),
            4 => refused(kind::TOLD, id, word as u8 % 13),
            5 => granted(id, &[Grant::whole(self.length)], 0),
            6 => frame(kind::UNMAP, 0, &word.to_le_bytes(), 0, 0),
            7 => frame(kind::RECALL, 0, &(9 ^ u32::from(word as u8 & 1)).to_le_bytes(), 0, 0),
            8 => check(id, &vec![3; word as usize % 8]),
            9 => frame(kind::PING, id, &[], 0, 0),
            10 => frame(kind::PONG, id, &[], 0, 0),
            11 if word.is_multiple_of(8) => frame(kind::BYE, 0, &[0], 0, 0),
            12 if word.is_multiple_of(8) => frame(kind::REFUSE, 0, &[7, 2, 0, b'n', b'o'], 0, 0),
            // An answer to what will be asked next.
            13 if word >= 128 => done(self.last + 1 + id % 2, word),
            // What a user sends, and no owner.
            _ => frame(
                [kind::READ, kind::HELD, kind::RELEASE, kind::CANCEL][word as usize % 4],
                id,
                &[0; 8],
                0,
                0,
            ),
        };
        self.sides[side].link.send(&said);
    }

    /// A frame of any kind with any lengths.
    fn say_nonsense(&mut self, input: &mut Input<'_>) {
        let Some(side) = self.side(input) else { return };
        let (kind, id, payload, files) = (input.byte() % 52, input.byte(), input.byte(), input.byte());
        let body = input.take(usize::from(kind) % STEP);
        let mut said = frame(kind, u64::from(id % 24), &body, u64::from(payload) >> 4, files >> 6);
        said.extend(vec![FILLING; usize::from(payload) >> 4]);
        self.sides[side].link.send(&said);
    }

    /// Descriptors that no frame names, or in another number than it says.
    fn pass_files(&mut self, input: &mut Input<'_>) {
        let Some(side) = self.side(input) else { return };
        let count = usize::from(input.byte() % 5);
        let (id, said) = (u64::from(input.byte() % 24), input.byte());
        let answer = match said % 3 {
            0 => frame(kind::PING, id, &[], 0, 0),
            1 => frame(kind::TOLD, id, &[0, 0, 0], 0, said >> 5),
            _ => granted(id, &[Grant::whole(self.length)], said >> 5),
        };
        let file = Pages::file(input);
        self.sides[side].link.send_with_files(&answer, &vec![file.as_fd(); count]);
    }
}

/// How many runs of canaries there are.
fn canaries(bytes: &[u8]) -> u64 {
    bytes
        .chunks(CANARIES)
        .filter(|run| run.len() == CANARIES && run.iter().all(|byte| *byte == CANARY))
        .count() as u64
}
