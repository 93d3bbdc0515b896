//! Memory that is taken back while peers read and write it.

use std::sync::Arc;
use std::thread;

use towline::{Access, Endpoint, MemoryAccess, Storage};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::scene::{KIB, STALL, kind_for, old_or_new, owner_on, paths};
use towline_testkit::watchdog::eventually;
use towline_testkit::worker::storage;

use super::{Course, Drill, Round, Tally};

/// The owner's part, which is read; behind it the writer has its own.
const READ_LEN: usize = 512 * KIB;
const WRITE_LEN: usize = 260 * KIB;
const LEN: usize = READ_LEN + WRITE_LEN;
const MARK: u16 = 100;

/// One reader and one writer that follow a region from registration to registration.
pub(super) struct Deregister {
    owner: Endpoint,
    memory: Option<Arc<dyn Storage>>,
    reader: Process,
    writer: Process,
}

impl Deregister {
    pub(super) fn new(course: &Course) -> Result<Deregister, String> {
        let lane = course.lane;
        let peer = |op: &str, offset: usize, len: usize| {
            let mut peer = Process::open(op, &format!("stall={}", STALL.as_millis()));
            peer.must(&format!("chase {} {op} {offset} {len} {MARK}", paths(lane)));
            peer
        };
        Ok(Deregister {
            owner: owner_on(lane),
            memory: Some(storage(LEN, kind_for(lane)).unwrap()),
            reader: peer("read", 0, READ_LEN),
            writer: peer("write", READ_LEN, WRITE_LEN),
        })
    }
}

impl Drill for Deregister {
    fn round(&mut self, round: &mut Round) {
        let memory = self.memory.take().expect("the memory is back after each round");
        let stamp = Stamp::new(1, round.generation());
        stamp.fill_storage(&memory).unwrap();
        let region = self.owner.register(memory, Access::READ_WRITE).unwrap();
        let ticket = region.ticket().unwrap();
        for peer in [&mut self.reader, &mut self.writer] {
            // It says something only when it has seen a wrong word.
            if let Some(answer) = peer.early_answer() {
                panic!("a peer gave up: {answer:?}");
            }
            peer.tell(&format!("target {ticket} 1 {}", stamp.generation));
        }
        let most = round.random.pick(&[800, 800, 3000, 3000, 12_000]);
        thread::sleep(round.random.micros(most));
        let started = std::time::Instant::now();
        let memory = region
            .into_storage_within(STALL * 10)
            .unwrap_or_else(|pinned| panic!("memory cannot be taken back: {}", pinned.error));
        round.tally.time("taken back", started.elapsed());
        let mut bytes = vec![0; LEN];
        memory.read_at(0, &mut bytes).unwrap();
        stamp.verify(0, &bytes[..READ_LEN]).unwrap_or_else(|wrong| panic!("in what is only read: {wrong}"));
        let written = Stamp::new(MARK, stamp.generation);
        old_or_new("what a writer left", &bytes[READ_LEN..], READ_LEN, stamp, written, 0);
        // Used for something else, and looked at again after a while: nothing comes late.
        let next = Stamp::new(2, round.generation());
        next.fill_storage(&memory).unwrap();
        thread::sleep(round.random.micros(600));
        next.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
        self.memory = Some(memory);
    }

    fn finish(&mut self, tally: &mut Tally) {
        for peer in [&mut self.reader, &mut self.writer] {
            peer.tell("halt");
            let said = peer.answer(STALL * 20).unwrap_or_else(|failure| panic!("a peer gave up: {failure}"));
            tally.count("good transfers", said.number(0));
            tally.count("stale transfers", said.number(1));
        }
        assert!(eventually(STALL * 10, || self.owner.stats().parked == (0, 0)));
    }
}
