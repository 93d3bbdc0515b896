//! Memory that is used for something else while its old tickets are about.

use std::thread;

use towline::{Access, Endpoint, Kind, Registered, Remote, SystemStorage, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::lending;
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_here, known};
use towline_testkit::process::Process;
use towline_testkit::scene::{KIB, STALL, endpoint, kind_for, local};
use towline_testkit::worker::storage;

use super::{Course, Drill, Round};

const LEN: usize = 256 * KIB;

/// The same bytes, registered again and again.
pub(super) struct Recycle {
    lane: &'static str,
    user: Endpoint,
    buffers: [Registered<SystemStorage>; 2],
    owner: Owner,
    /// What the last round left.
    old: Vec<Remote>,
}

enum Owner {
    Here(Endpoint, Option<Registered<std::sync::Arc<dyn towline::Storage>>>),
    There(Process, u64),
}

impl Owner {
    /// Takes the memory back, fills it, registers it again.
    fn recycle(&mut self, stamp: Stamp) -> Ticket {
        match self {
            Owner::Here(endpoint, region) => {
                let memory = region
                    .take()
                    .expect("there is a region between rounds")
                    .into_storage_within(STALL * 10)
                    .unwrap_or_else(|pinned| panic!("memory cannot be taken back: {}", pinned.error));
                stamp.fill_storage(&memory).unwrap();
                region.insert(endpoint.register(memory, Access::READ_WRITE).unwrap()).ticket().unwrap()
            }
            Owner::There(process, id) => {
                let order = format!(
                    "recycle {id} {} {} {}",
                    stamp.region,
                    stamp.generation,
                    (STALL * 10).as_millis()
                );
                let reply = process.must(&order);
                *id = reply.number(0);
                reply.text(1).parse().unwrap()
            }
        }
    }
}

impl Recycle {
    pub(super) fn new(course: &Course) -> Result<Recycle, String> {
        let lane = course.lane;
        let user = endpoint("user");
        let owner = if is_here(&known(lane)) {
            let owner = endpoint("owner");
            let region = owner.register(storage(LEN, "system").unwrap(), Access::READ_WRITE).unwrap();
            Owner::Here(owner, Some(region))
        } else {
            let mut process = Process::open("owner", &lending::words(lane));
            process.must(&format!("register {LEN} {} read+write", kind_for(lane)));
            Owner::There(process, 1)
        };
        let buffers = [local(&user, LEN), local(&user, LEN)];
        Ok(Recycle { lane, user, buffers, owner, old: Vec::new() })
    }
}

impl Drill for Recycle {
    fn round(&mut self, round: &mut Round) {
        let now = Stamp::new(1, round.generation());
        let ticket = self.owner.recycle(now);
        let mine = Stamp::new(99, round.generation());
        let scratch = &self.buffers[1];
        mine.fill_storage(scratch.storage()).unwrap();
        for remote in self.old.drain(..) {
            let reading = outcome(self.user.read(&remote, scratch).start());
            let writing = outcome(self.user.write(&remote, scratch).start());
            for outcome in [reading, writing] {
                let error = outcome.expect_err("an old ticket is served");
                assert_eq!(error.kind(), Kind::Stale, "{error}");
            }
        }
        mine.verify_storage(scratch.storage(), 0, LEN).unwrap();
        let remote = self.user.import_with(&ticket, &routing(self.lane)).unwrap();
        outcome(self.user.read(&remote, &self.buffers[0]).start()).unwrap();
        now.verify_storage(self.buffers[0].storage(), 0, LEN).unwrap();
        // Recycled once more while reads of it are in flight: they get these bytes, or none.
        let transfers = [0, 1].map(|index| self.user.read(&remote, &self.buffers[index]).start());
        let moment = round.random.micros(200);
        if moment.as_micros() > 60 {
            thread::sleep(moment);
        }
        self.owner.recycle(Stamp::new(2, round.generation()));
        for (transfer, buffer) in transfers.into_iter().zip(&self.buffers) {
            let ended =
                transfer.and_then(|transfer| transfer.wait_for(STALL * 10).expect("a read does not end"));
            match ended {
                Ok(()) => {
                    now.verify_storage(buffer.storage(), 0, LEN)
                        .unwrap_or_else(|wrong| panic!("a read that went well gave {wrong}"));
                    round.tally.count("reads before", 1);
                }
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Stale, "{error}");
                    round.tally.count("reads refused", 1);
                }
            }
        }
        let error = self.user.import_with(&ticket, &routing(self.lane)).unwrap_err();
        assert_eq!(error.kind(), Kind::Stale, "{error}");
        self.old.push(remote);
    }
}
