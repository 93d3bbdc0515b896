//! Reductions, atomics, signals and writes to a file whose owner is stopped: what ended in an error is not applied later, and
//! nothing is applied twice.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::{Duration, Instant};

use towline::memory::{Dtype, ReduceOp};
use towline::{Endpoint, Registered, Remote, SystemStorage, Ticket, Transfer};

use crate::bench::routing;
use crate::paths::{is_served_here, known};
use crate::random::Random;
use crate::scene::{GONE, KIB, MIB, Observer, Owner, STALL, endpoint, local, served_again, unchanged};

/// The elements that are reduced into; behind them come the words of the atomics.
const ELEMENTS: usize = 2 * MIB;
const ADDED: usize = ELEMENTS;
const SWAPPED: usize = ELEMENTS + 8;
const RAISED: usize = ELEMENTS + 16;
const LEN: usize = ELEMENTS + 4 * KIB;

/// Transfers that are in flight at a time.
const MANY: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Reduce(usize),
    Add,
    Swap,
    Raise,
    File(usize),
}

/// An owner with memory and a file, and what is known of both.
pub struct Changes {
    lane: &'static str,
    user: Endpoint,
    owner: Owner,
    observer: Observer,
    on_disk: Ticket,
    file: File,
    ones: Registered<SystemStorage>,
    bytes: Registered<SystemStorage>,
    rounds: u8,
}

/// What one round has seen.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// A change ended in an error.
    pub failed: bool,
    /// A change said that its owner was in the middle of it.
    pub inside: bool,
}

impl Changes {
    /// Starts the owner, whose user reaches it by a stream.
    pub fn open(lane: &'static str) -> Changes {
        let user = endpoint("user");
        let mut owner = Owner::open(lane, LEN);
        owner.process.must(&format!("register {ELEMENTS} disk read+write"));
        let on_disk = owner.process.must("ticket 2").text(0).parse().unwrap();
        let observer = Observer::of(&owner, lane);
        let file = file_of(owner.process.pid());
        let (ones, bytes) = (local(&user, ELEMENTS), local(&user, ELEMENTS));
        ones.write_at(0, &1u64.to_le_bytes().repeat(ELEMENTS / 8)).unwrap();
        Changes { lane, user, owner, observer, on_disk, file, ones, bytes, rounds: 0 }
    }

    /// Changes of one kind are asked for, the owner is stopped, and goes on when all have ended. Panics where something is wrong.
    pub fn round(&mut self, random: &mut Random) -> Seen {
        self.rounds = self.rounds.wrapping_add(1);
        // Over the control connection, over lanes, and between the two.
        let len = random.pick(&[4 * KIB, 64 * KIB, 300 * KIB, ELEMENTS]);
        let kinds = [
            Change::Reduce(len),
            Change::Reduce(len),
            Change::Add,
            Change::Swap,
            Change::Raise,
            Change::File(len),
        ];
        let change = random.pick(&kinds);
        let remote = match change {
            Change::File(_) => self.user.import_with(&self.on_disk, &routing(self.lane)).unwrap(),
            _ => self.owner.import(&self.user, self.lane),
        };
        self.bytes.write_at(0, &vec![self.rounds; ELEMENTS]).unwrap();
        let before = self.now();
        let (mut started, mut done) = (0, Vec::new());
        let mut begin = || {
            started += 1;
            self.begin(change, &remote, &before)
        };
        let mut open: Vec<Transfer> = Vec::new();
        let until = Instant::now() + random.micros(3000);
        while open.len() < MANY || Instant::now() < until {
            if open.len() < MANY {
                open.push(begin());
            } else if let Some(index) = open.iter().position(Transfer::is_done) {
                done.push(std::mem::replace(&mut open[index], begin()));
            }
        }
        self.owner.process.stop();
        done.append(&mut open);
        let mut seen = Seen::default();
        for transfer in &done {
            let ended = transfer.wait_for(STALL * 10);
            if let Err(error) = ended.unwrap_or_else(|| panic!("{}: {change:?} does not end", self.lane)) {
                assert!(GONE.contains(&error.kind()), "{error}");
                seen.failed = true;
            }
        }
        seen.inside = !done.iter().all(Transfer::quiet);
        // Elsewhere the check and the change are two steps, and a peer that can see it is notified of an owner between them.
        let one_step = cfg!(all(target_arch = "x86_64", target_env = "gnu"));
        let exact = one_step && !matches!(change, Change::File(_));
        assert!(
            !seen.inside || (is_served_here(&known(self.lane)) && !exact),
            "{}: {change:?} keeps nobody inside",
            self.lane
        );
        let mut at_the_end = self.now();
        self.owner.process.resume();
        if seen.inside {
            assert!(done.iter().all(|one| one.wait_quiet(STALL * 10)), "a change never becomes quiet");
            at_the_end = self.now();
        }
        served_again(&self.user, &self.owner.ticket, self.lane, "after a change");
        thread::sleep(Duration::from_millis(5));
        let later = self.now();
        unchanged(&format!("{change:?} of an owner that was stopped, memory"), &at_the_end.0, &later.0);
        unchanged(&format!("{change:?} of an owner that was stopped, its file"), &at_the_end.1, &later.1);
        self.check(change, started, &done, &before, &later);
        seen
    }

    fn begin(&self, change: Change, remote: &Remote, before: &(Vec<u8>, Vec<u8>)) -> Transfer {
        let user = &self.user;
        let begun = match change {
            Change::Reduce(len) => {
                let reduced = user.reduce_into(remote, &self.ones, ReduceOp::Sum, Dtype::U64);
                reduced.at(0, 0, len as u64).start()
            }
            Change::Add => user.fetch_add(remote, ADDED as u64, 1),
            Change::Swap => {
                let old = word(&before.0, SWAPPED);
                user.compare_swap(remote, SWAPPED as u64, old, old + 1)
            }
            Change::Raise => user.signal(remote, RAISED as u64, 1),
            Change::File(len) => user.write(remote, &self.bytes).at(0, 0, len as u64).start(),
        };
        begun.unwrap()
    }

    /// Every change that succeeded is there, and none is there twice.
    fn check(
        &self,
        change: Change,
        started: u64,
        done: &[Transfer],
        before: &(Vec<u8>, Vec<u8>),
        after: &(Vec<u8>, Vec<u8>),
    ) {
        let good: Vec<_> = done.iter().filter(|one| matches!(one.result(), Some(Ok(())))).collect();
        let times = |at: usize| word(&after.0, at) - word(&before.0, at);
        let within = |at: usize| {
            let (times, least) = (times(at), good.len() as u64);
            assert!(
                (least..=started).contains(&times),
                "{change:?} was applied {times} times at {at}, of {started} of which {least} succeeded"
            );
        };
        match change {
            Change::Reduce(len) => (0..len).step_by(8).for_each(within),
            Change::Add => {
                within(ADDED);
                let mut values: Vec<_> = good.iter().filter_map(|one| one.value()).collect();
                values.sort_unstable();
                values.dedup();
                assert_eq!(values.len(), good.len(), "two additions have found the same");
            }
            Change::Swap => {
                let old = word(&before.0, SWAPPED);
                let won = good.iter().filter(|one| one.value() == Some(old)).count() as u64;
                assert!(won <= 1 && (won..=1).contains(&times(SWAPPED)), "{won} exchanges have won");
            }
            Change::Raise => within(RAISED),
            Change::File(len) => {
                let new = self.rounds;
                let wrong =
                    |at: &usize| after.1[*at] != new && (!good.is_empty() || after.1[*at] != before.1[*at]);
                assert_eq!((0..len).find(wrong), None, "a byte of the file is neither old nor new");
                unchanged("outside a write to a file", &before.1[len..], &after.1[len..]);
            }
        }
        let elsewhere = match change {
            Change::Reduce(len) => len..LEN,
            Change::File(_) => 0..LEN,
            _ => 0..ELEMENTS,
        };
        unchanged("outside a change", &before.0[elsewhere.clone()], &after.0[elsewhere]);
    }

    /// The owner's memory and file, without its help.
    fn now(&self) -> (Vec<u8>, Vec<u8>) {
        let mut bytes = vec![0; ELEMENTS];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        (self.observer.look(), bytes)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// The file that a worker has for its storage, which has no name any more.
fn file_of(pid: i32) -> File {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter(|entry| {
            let memory = |link: std::path::PathBuf| link.to_string_lossy().contains("memfd:");
            !std::fs::read_link(entry.path()).is_ok_and(memory)
        })
        .filter(|entry| std::fs::metadata(entry.path()).is_ok_and(|file| file.is_file()))
        .find(|entry| std::fs::metadata(entry.path()).is_ok_and(|file| file.size() == ELEMENTS as u64))
        .map(|entry| File::open(entry.path()).unwrap())
        .expect("the worker has a file")
}
