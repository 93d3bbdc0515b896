//! The bytes of a program that a fuzzer, or chance, has made.

/// Taken one after the other; zeros at the end.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        match self.0 {
            [first, rest @ ..] => {
                let first = *first;
                self.0 = rest;
                first
            }
            [] => 0,
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        (0..8).fold(0, |all, _| all << 8 | u64::from(self.byte()))
    }

    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let len = len.min(self.0.len());
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken.to_vec()
    }
}
