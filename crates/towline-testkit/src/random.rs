//! Numbers that look random and are the same in every run with the same seed.

/// The variable that names a seed, to see a failure again.
const VARIABLE: &str = "TOWLINE_TEST_SEED";

/// A small generator (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator for that lane of a test; `TOWLINE_TEST_SEED` changes all of them.
    pub fn new(lane: u64) -> Random {
        Random(mix(seed()) ^ mix(lane.wrapping_add(1)))
    }

    /// A generator that the run's seed does not change.
    pub fn from_seed(seed: u64) -> Random {
        Random(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// Returns a moment of at most that many microseconds.
    pub fn micros(&mut self, most: u64) -> std::time::Duration {
        std::time::Duration::from_micros(self.below(most + 1))
    }

    /// Returns one of the items, of which there is at least one.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// Puts the items in another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The seed of this run.
pub fn seed() -> u64 {
    std::env::var(VARIABLE).ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_260)
}

/// A permutation of the 64-bit numbers in which neighbours land far apart.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// What [`mix`] was given.
pub(crate) fn unmix(mut word: u64) -> u64 {
    word = unshift(word, 31).wrapping_mul(0x3196_42b2_d24d_8ec3);
    word = unshift(word, 27).wrapping_mul(0x96de_1b17_3f11_9089);
    unshift(word, 30)
}

/// Undoes `word ^ (word >> by)`.
fn unshift(word: u64, by: u32) -> u64 {
    // A third step would shift by more than 64 for every distance used here.
    word ^ (word >> by) ^ (word >> (2 * by))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmixing_undoes_mixing() {
        let mut random = Random::new(3);
        for _ in 0..10_000 {
            let word = random.number();
            assert_eq!(unmix(mix(word)), word);
        }
    }
}
