//! One thing, or several of its kind: most requests have one part, for which nothing is allocated.

use std::ops::{Index, IndexMut};

use crate::{Error, Result, room};

/// At least one of them.
#[derive(Debug, Clone)]
pub(crate) struct Several<T> {
    first: T,
    others: Vec<T>,
}

impl<T> Several<T> {
    /// Just one.
    #[inline]
    pub(crate) fn one(first: T) -> Several<T> {
        Several { first, others: Vec::new() }
    }

    /// That one, and the others.
    #[inline]
    pub(crate) fn with(first: T, others: Vec<T>) -> Several<T> {
        Several { first, others }
    }

    /// All of a list; `None` where it is empty.
    ///
    /// # Errors
    /// `Exhausted` where there is no room for it: so for all that make a list of what a user has chosen the number of.
    pub(crate) fn of(op: &'static str, list: impl IntoIterator<Item = T>) -> Result<Option<Several<T>>> {
        let mut list = list.into_iter();
        let Some(first) = list.next() else { return Ok(None) };
        Ok(Some(Several { first, others: room::collect(op, list)? }))
    }

    /// One more, of that many in all.
    pub(crate) fn push(&mut self, op: &'static str, one: T) -> Result<()> {
        room::push(op, &mut self.others, one)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        1 + self.others.len()
    }

    #[inline]
    pub(crate) fn first(&self) -> &T {
        &self.first
    }

    /// All but the first.
    #[inline]
    pub(crate) fn others(&self) -> &[T] {
        &self.others
    }

    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    #[inline]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// What `f` makes of each, by its number.
    #[inline]
    pub(crate) fn try_map<U, E: From<Error>>(
        self,
        op: &'static str,
        mut f: impl FnMut(usize, T) -> Result<U, E>,
    ) -> Result<Several<U>, E> {
        let first = f(0, self.first)?;
        let mut others = room::list(op, self.others.len())?;
        for (index, one) in self.others.into_iter().enumerate() {
            others.push(f(index + 1, one)?);
        }
        Ok(Several { first, others })
    }
}

impl<T> IntoIterator for Several<T> {
    type Item = T;
    type IntoIter = std::iter::Chain<std::iter::Once<T>, std::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.first).chain(self.others)
    }
}

impl<T> Index<usize> for Several<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        if index == 0 { &self.first } else { &self.others[index - 1] }
    }
}

impl<T> IndexMut<usize> for Several<T> {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut T {
        if index == 0 { &mut self.first } else { &mut self.others[index - 1] }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Kind;

    #[test]
    fn more_of_them_than_there_is_room_for_are_exhausted() {
        let endless = std::iter::repeat_n(0u64, isize::MAX as usize);
        assert_eq!(Several::of("read", endless).unwrap_err().kind(), Kind::Exhausted);
    }

    #[test]
    fn all_are_there_in_their_order() {
        let mut all = Several::of("read", [1, 2]).unwrap().unwrap();
        all.push("read", 3).unwrap();
        let doubled = all.try_map("read", |index, one| Ok::<_, Error>(index + one)).unwrap();
        assert_eq!(doubled.into_iter().collect::<Vec<_>>(), [1, 3, 5]);
        assert!(Several::<u8>::of("read", []).unwrap().is_none());
    }
}
