//! A campaign that must fail: it shows that wrong words are found, and that a failed round can be seen again.

use towline::{Access, Endpoint, MemoryAccess, Registered, SystemStorage};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::scene::{KIB, endpoint, local};

use super::{Course, Drill, Round};

const LEN: usize = 64 * KIB;

/// Reads into which a bit is flipped in some rounds.
pub(super) struct SelfCheck {
    user: Endpoint,
    region: Registered<SystemStorage>,
    _owner: Endpoint,
}

impl SelfCheck {
    pub(super) fn new(_: &Course) -> Result<SelfCheck, String> {
        let owner = endpoint("owner");
        let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ).unwrap();
        Ok(SelfCheck { user: endpoint("user"), region, _owner: owner })
    }
}

impl Drill for SelfCheck {
    fn round(&mut self, round: &mut Round) {
        let stamp = Stamp::new(1, round.generation());
        stamp.fill_storage(self.region.storage()).unwrap();
        let remote = self.user.import_with(&self.region.ticket().unwrap(), &routing("inproc")).unwrap();
        let buffer = local(&self.user, LEN);
        outcome(self.user.read(&remote, &buffer).start()).unwrap();
        if round.random.below(4) == 0 {
            let at = round.random.below(LEN as u64) as usize;
            let mut byte = [0];
            buffer.read_at(at, &mut byte).unwrap();
            buffer.storage().write_at(at, &[byte[0] ^ 1]).unwrap();
        }
        stamp.verify_storage(buffer.storage(), 0, LEN).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}
