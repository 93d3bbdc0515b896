//! The cursor and the small pieces that tickets and frames are made of: little endian, no padding.

use crate::identity::{EndpointId, Identity, Incarnation};
use crate::layout::{Dim, Layout};
use crate::place::Place;
use crate::{Access, Error, Result};

/// The newest version of the wire format that this library speaks.
pub const VERSION: u16 = 1;
/// The oldest version of the wire format that this library speaks.
pub const OLDEST: u16 = 1;

/// A cursor over bytes from outside: every step either fits or is a `Protocol` error.
pub struct Reader<'a> {
    rest: &'a [u8],
    op: &'static str,
}

impl<'a> Reader<'a> {
    #[inline]
    pub fn new(op: &'static str, bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes, op }
    }

    #[inline]
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    #[inline]
    pub fn bad(&self, why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
        Error::protocol(self.op, why)
    }

    #[inline]
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(len) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(self.bad(format!("{} bytes are missing", len - self.rest.len()))),
        }
    }

    #[inline]
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.rest.split_first_chunk() {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(*head)
            }
            None => Err(self.bad(format!("{} bytes are missing", N - self.rest.len()))),
        }
    }

    #[inline]
    pub fn u8(&mut self) -> Result<u8> {
        self.array().map(u8::from_le_bytes)
    }

    #[inline]
    pub fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    #[inline]
    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    #[inline]
    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    #[inline]
    pub fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(format!("{other} is not a boolean (0 or 1)"))),
        }
    }

    /// Bytes with their length in front, at most `max` of them.
    #[inline]
    pub fn counted(&mut self, max: usize) -> Result<&'a [u8]> {
        let len = usize::from(self.u16()?);
        if len > max {
            return Err(self.bad(format!("a field of {len} bytes is longer than {max}")));
        }
        self.bytes(len)
    }

    #[inline]
    pub fn text(&mut self, max: usize) -> Result<&'a str> {
        let bytes = self.counted(max)?;
        std::str::from_utf8(bytes).map_err(|_| self.bad("a text is not UTF-8"))
    }

    #[inline]
    pub fn access(&mut self) -> Result<Access> {
        let bits = self.u8()?;
        Access::from_bits(bits).ok_or_else(|| self.bad(format!("unknown access bits {bits:#04x}")))
    }

    #[inline]
    pub fn place(&mut self) -> Result<Place> {
        let (code, index) = (self.u8()?, self.u32()?);
        match (code, index) {
            (0, 0) => Ok(Place::Host),
            (1, index) => Ok(Place::Cuda(index)),
            (2, 0) => Ok(Place::Disk),
            _ => Err(self.bad(format!("unknown place {code}:{index}"))),
        }
    }

    #[inline]
    pub fn layout(&mut self) -> Result<Layout> {
        let (base, block_len, count) = (self.u64()?, self.u64()?, usize::from(self.u8()?));
        let mut dims = [Dim { count: 0, stride: 0 }; 4];
        let Some(dims) = dims.get_mut(..count) else {
            return Err(self.bad(format!("a layout of {count} dimensions")));
        };
        for dim in dims.iter_mut() {
            *dim = Dim { count: self.u64()?, stride: self.u64()? };
        }
        let layout =
            Layout::new(base, block_len, dims).map_err(|error| self.bad(error.message().to_owned()))?;
        // A layout that comes out in another form than it went in would change the bytes under a tag.
        let same_dims = layout.dims().len() == dims.len()
            && layout.dims().iter().zip(dims.iter()).all(|(a, b)| a.count == b.count && a.stride == b.stride);
        if layout.base() != base || layout.block_len() != block_len || !same_dims {
            return Err(self.bad("a layout is not in its simplest form"));
        }
        Ok(layout)
    }

    #[inline]
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    #[inline]
    pub fn identity(&mut self) -> Result<Identity> {
        let (id, incarnation) = (EndpointId(self.array()?), Incarnation(self.array()?));
        let name = self.text(crate::identity::MAX_NAME)?.to_owned();
        let identity = Identity { id, incarnation, name };
        identity.check().map_err(|why| self.bad(why))?;
        Ok(identity)
    }

    /// Refuses bytes that nothing has asked for.
    #[inline]
    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(self.bad(format!("{more} bytes too many"))),
        }
    }
}

pub fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Bytes with their length in front; what does not fit the length is left out.
pub fn put_counted(out: &mut Vec<u8>, bytes: &[u8]) {
    let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    put_u16(out, len);
    out.extend_from_slice(&bytes[..usize::from(len)]);
}

pub fn put_place(out: &mut Vec<u8>, place: Place) {
    let (code, index) = match place {
        Place::Host => (0, 0),
        Place::Cuda(index) => (1, index),
        Place::Disk => (2, 0),
    };
    out.push(code);
    put_u32(out, index);
}

pub fn put_layout(out: &mut Vec<u8>, layout: &Layout) {
    put_u64(out, layout.base());
    put_u64(out, layout.block_len());
    out.push(layout.dims().len() as u8);
    for dim in layout.dims() {
        put_u64(out, dim.count);
        put_u64(out, dim.stride);
    }
}

pub fn put_option<T>(out: &mut Vec<u8>, value: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    out.push(u8::from(value.is_some()));
    if let Some(value) = value {
        put(out, value);
    }
}

pub fn put_identity(out: &mut Vec<u8>, identity: &Identity) {
    out.extend_from_slice(&identity.id.0);
    out.extend_from_slice(&identity.incarnation.0);
    put_counted(out, identity.name.as_bytes());
}
