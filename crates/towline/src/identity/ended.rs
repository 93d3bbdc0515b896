//! Lives of endpoints that are known to be over: their tickets are worth nothing any more.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::Incarnation;
use crate::sync::lock;

/// The oldest is forgotten beyond so many: whoever asks for it then finds nobody, and is told that.
const KEPT: usize = 1024;

static ENDED: Mutex<VecDeque<Incarnation>> = Mutex::new(VecDeque::new());

impl Incarnation {
    /// Remembers that it is over. Only where that is certain: nobody who asks for it here is sent to its owner again.
    pub(crate) fn end(self) {
        let mut ended = lock(&ENDED);
        if !ended.contains(&self) {
            ended.push_back(self);
            if ended.len() > KEPT {
                ended.pop_front();
            }
        }
    }

    /// Whether it is known to be over.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&ENDED).contains(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_lives_that_are_over_the_last_ones_are_known() {
        let life = |number: usize| {
            let mut bytes = *b"of many lives...";
            bytes[8..].copy_from_slice(&number.to_le_bytes());
            Incarnation(bytes)
        };
        for number in 0..=KEPT {
            life(number).end();
            life(number).end();
            assert!(life(number).has_ended());
        }
        // Other tests of this process end lives too.
        assert!(!life(0).has_ended());
        assert!(!life(KEPT + 1).has_ended());
        assert!(lock(&ENDED).len() <= KEPT);
    }
}
