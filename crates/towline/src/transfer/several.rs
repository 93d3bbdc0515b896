//! One thing, or several of its kind: most requests have one part, for which nothing is allocated.

use std::ops::{Index, IndexMut};

/// At least one of them.
#[derive(Debug, Clone)]
pub(crate) struct Several<T> {
    first: T,
    others: Vec<T>,
}

impl<T> Several<T> {
    /// Just one.
    pub(crate) fn one(first: T) -> Several<T> {
        Several { first, others: Vec::new() }
    }

    /// All of a list; `None` where it is empty.
    pub(crate) fn of(list: impl IntoIterator<Item = T>) -> Option<Several<T>> {
        let mut list = list.into_iter();
        let first = list.next()?;
        Some(Several { first, others: list.collect() })
    }

    pub(crate) fn push(&mut self, one: T) {
        self.others.push(one);
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.others.len()
    }

    pub(crate) fn first(&self) -> &T {
        &self.first
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// What `f` makes of each, by its number.
    #[inline]
    pub(crate) fn try_map<U, E>(self, mut f: impl FnMut(usize, T) -> Result<U, E>) -> Result<Several<U>, E> {
        let first = f(0, self.first)?;
        let mut others = Vec::with_capacity(self.others.len());
        for (index, one) in self.others.into_iter().enumerate() {
            others.push(f(index + 1, one)?);
        }
        Ok(Several { first, others })
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
