//! Lives of endpoints that are known to be over: their tickets are worth nothing any more.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::identity::Incarnation;

/// The oldest is forgotten beyond so many: a query for it then finds nothing, and gets an error that says so.
const KEPT: usize = 1024;

static ENDED: Mutex<VecDeque<Incarnation>> = Mutex::new(VecDeque::new());

/// Remembers that this life is over. Only where that is certain: no request for it goes to its owner again.
pub(crate) fn remember(life: Incarnation) {
    let mut ended = ENDED.lock();
    if !ended.contains(&life) {
        ended.push_back(life);
        if ended.len() > KEPT {
            ended.pop_front();
        }
    }
}

/// Whether this life is known to be over.
pub(crate) fn contains(life: &Incarnation) -> bool {
    ENDED.lock().contains(life)
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
            remember(life(number));
            remember(life(number));
            assert!(contains(&life(number)));
        }
        // Other tests of this process end lives too.
        assert!(!contains(&life(0)));
        assert!(!contains(&life(KEPT + 1)));
        assert!(ENDED.lock().len() <= KEPT);
    }
}
