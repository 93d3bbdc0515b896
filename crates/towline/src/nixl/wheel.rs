//! Lists of descriptors as NIXL's Python API writes them: a pickle of one object, whose state is NIXL's own serial form.
//!
//! Only this shape is read, opcode by opcode; nothing is unpickled. Pure, and hostile input is expected.

use super::list::XferDescriptor;
use crate::memory::MemType;
use crate::{Error, Kind, Result, room};

/// What NIXL's serial form begins with; an agent's metadata begins so too.
pub(super) const SERIAL: &[u8] = b"nixlSerDes|";

/// The packages whose class may be named.
const PACKAGES: [&str; 3] = ["nixl_cu12", "nixl_cu13", "nixl"];

/// Address, length and device.
const ENTRY: usize = 24;

/// What a field has beside its tag and its value, and about what there is beside the entries.
const FIELD: usize = 9;
const HEAD: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Xfer,
    Reg,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Class::Xfer => "nixlXferDList",
            Class::Reg => "nixlRegDList",
        }
    }

    /// The name of the list in the serial form: plain entries, or entries that carry bytes of their own.
    fn serial(self) -> &'static [u8] {
        match self {
            Class::Xfer => b"nixlBDList",
            Class::Reg => b"nixlSDList",
        }
    }
}

fn code(kind: MemType) -> u32 {
    kind as u32
}

fn kind(code: u32) -> MemType {
    match code {
        0 => MemType::Dram,
        1 => MemType::Vram,
        2 => MemType::Block,
        3 => MemType::Object,
        4 => MemType::File,
        _ => MemType::Unknown,
    }
}

pub(super) fn write(
    package: &str,
    class: Class,
    mem_type: MemType,
    list: &[XferDescriptor],
) -> Result<Vec<u8>> {
    if !PACKAGES.contains(&package) {
        let message =
            format!("{package:?} is not a package of NIXL: the packages are {}", PACKAGES.join(", "));
        return Err(Error::invalid("nixl", message));
    }
    // An entry is a field of its own in one of the two.
    let mut state = room::list("nixl", HEAD + list.len().saturating_mul(ENTRY + FIELD))?;
    state.extend(SERIAL);
    field(&mut state, b"nixlDList", class.serial());
    field(&mut state, b"t", &code(mem_type).to_le_bytes());
    field(&mut state, b"n", &(list.len() as u64).to_le_bytes());
    let entry = |one: &XferDescriptor| -> [u8; ENTRY] {
        bytemuck::cast([one.addr as u64, one.len as u64, one.dev_id].map(u64::to_le))
    };
    match class {
        Class::Xfer => {
            let mut entries = room::list("nixl", list.len().saturating_mul(ENTRY))?;
            list.iter().for_each(|one| entries.extend(entry(one)));
            field(&mut state, b"", &entries);
        }
        Class::Reg => list.iter().for_each(|one| field(&mut state, b"", &entry(one))),
    }
    let state_len = u32::try_from(state.len())
        .map_err(|_| Error::invalid("nixl", format!("a list of {} ranges is too long", list.len())))?;
    let module = format!("{package}._bindings");
    let mut out = room::list("nixl", HEAD + state.len())?;
    out.extend(b"\x80\x04");
    for text in [&module, class.name()] {
        out.extend([0x8c, text.len() as u8]);
        out.extend(text.as_bytes());
        out.push(0x94);
    }
    out.extend(b"\x93\x94)\x81\x94B");
    out.extend(state_len.to_le_bytes());
    out.extend(state);
    out.extend(b"\x94b.");
    Ok(out)
}

fn field(out: &mut Vec<u8>, tag: &[u8], value: &[u8]) {
    out.extend(tag);
    out.extend((value.len() as u64).to_le_bytes());
    out.extend(value);
    out.push(b'|');
}

pub(super) fn read(class: Class, bytes: &[u8]) -> Result<(MemType, Vec<XferDescriptor>)> {
    let state = if bytes.starts_with(SERIAL) { bytes } else { unwrapped(class, bytes)? };
    let mut rest = Bytes(state);
    rest.expect(SERIAL)?;
    if rest.field(b"nixlDList")? != class.serial() {
        return Err(damaged("the list is of another kind than requested"));
    }
    let mem_type = kind(u32::from_le_bytes(exact(rest.field(b"t")?)?));
    let count = u64::from_le_bytes(exact(rest.field(b"n")?)?);
    // A list cannot have more entries than fit into its bytes, so nothing is reserved that was not sent.
    let count = usize::try_from(count).ok().filter(|count| *count <= bytes.len() / ENTRY);
    let Some(count) = count else { return Err(damaged("it counts more ranges than it has")) };
    let mut list = room::list("nixl", count)?;
    match class {
        Class::Xfer => {
            let entries = rest.field(b"")?;
            if entries.len() != count * ENTRY {
                return Err(damaged("its count of ranges is wrong"));
            }
            for one in entries.chunks_exact(ENTRY) {
                list.push(entry(one)?);
            }
        }
        Class::Reg => {
            for _ in 0..count {
                let one = rest.field(b"")?;
                list.push(entry(one.get(..ENTRY).ok_or_else(|| damaged("a range is too short"))?)?);
            }
        }
    }
    if rest.0.is_empty() { Ok((mem_type, list)) } else { Err(damaged("something follows the list")) }
}

fn entry(bytes: &[u8]) -> Result<XferDescriptor> {
    let mut words = bytes.chunks_exact(8).map(|word| exact(word).map(u64::from_le_bytes));
    let mut word = || words.next().unwrap_or_else(|| Err(damaged("a range is too short")));
    let (addr, len, dev_id) = (word()?, word()?, word()?);
    let size = |value: u64| usize::try_from(value).map_err(|_| damaged("a number is too large"));
    Ok(XferDescriptor { addr: size(addr)?, len: size(len)?, dev_id })
}

/// The state of the one object in the pickle.
fn unwrapped(class: Class, bytes: &[u8]) -> Result<&[u8]> {
    let mut rest = Bytes(bytes);
    rest.expect(b"\x80")?;
    if !matches!(rest.take(1)?, [2..=5]) {
        return Err(damaged("it is not a pickle of a known protocol"));
    }
    let module = rest.text()?;
    if !PACKAGES.iter().any(|package| module.strip_suffix(b"._bindings") == Some(package.as_bytes())) {
        return Err(damaged("it names no module of NIXL's"));
    }
    if rest.text()? != class.name().as_bytes() {
        return Err(damaged("it names another class than a list of this kind"));
    }
    // The class is taken, an object made of it without arguments, and given its state.
    for opcode in [b"\x93".as_slice(), b")", b"\x81"] {
        rest.skip_bookkeeping()?;
        rest.expect(opcode)?;
    }
    rest.skip_bookkeeping()?;
    let len = match rest.take(1)? {
        b"C" => u64::from(rest.take(1)?[0]),
        b"B" => u64::from(u32::from_le_bytes(exact(rest.take(4)?)?)),
        b"\x8e" => u64::from_le_bytes(exact(rest.take(8)?)?),
        _ => return Err(damaged("the list's state is not bytes")),
    };
    let state = rest.take(usize::try_from(len).map_err(|_| damaged("a number is too large"))?)?;
    rest.skip_bookkeeping()?;
    rest.expect(b"b")?;
    rest.skip_bookkeeping()?;
    rest.expect(b".")?;
    if rest.0.is_empty() { Ok(state) } else { Err(damaged("something follows the pickle")) }
}

fn damaged(why: &str) -> Error {
    Error::new(Kind::Protocol, "nixl", format!("not a list of descriptors as NIXL writes it: {why}"))
}

fn exact<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    bytes.try_into().map_err(|_| damaged("a number has another length"))
}

/// What is left to be read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(|| damaged("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn expect(&mut self, wanted: &[u8]) -> Result<()> {
        if self.take(wanted.len())? == wanted { Ok(()) } else { Err(damaged("it has another shape")) }
    }

    fn field(&mut self, tag: &[u8]) -> Result<&'a [u8]> {
        self.expect(tag)?;
        let len = u64::from_le_bytes(exact(self.take(8)?)?);
        let value = self.take(usize::try_from(len).map_err(|_| damaged("a number is too large"))?)?;
        self.expect(b"|")?;
        Ok(value)
    }

    /// Passes over frames and notes for later use, which change nothing.
    fn skip_bookkeeping(&mut self) -> Result<()> {
        loop {
            match self.0.first() {
                Some(0x94) => self.take(1)?,
                Some(0x95) => self.take(9)?,
                _ => return Ok(()),
            };
        }
    }

    fn text(&mut self) -> Result<&'a [u8]> {
        self.skip_bookkeeping()?;
        self.expect(b"\x8c")?;
        let len = self.take(1)?[0];
        self.take(len.into())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    /// Two ranges, written by the Python API of nixl-cu12 1.5.1.
    const WRITTEN: &[u8] = b"\x80\x04\x95\xb0\x00\x00\x00\x00\x00\x00\x00\x8c\x13nixl_cu12._bindings\x94\x8c\rnixlXferDList\
\x94\x93\x94)\x81\x94C\x80nixlSerDes|nixlDList\n\x00\x00\x00\x00\x00\x00\x00nixlBDList|t\x04\x00\x00\x00\x00\x00\x00\x00\
\x00\x00\x00\x00|n\x08\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00|0\x00\x00\x00\x00\x00\x00\x00\x00\x10\
\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x000\x00\x00\x00\x00\x00\x00\
\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00|\x94b.";

    const REGISTERED: &[u8] = b"\x80\x04\x95\x9a\x00\x00\x00\x00\x00\x00\x00\x8c\x13nixl_cu12._bindings\x94\x8c\x0cnixlRegDList\
\x94\x93\x94)\x81\x94CknixlSerDes|nixlDList\n\x00\x00\x00\x00\x00\x00\x00nixlSDList|t\x04\x00\x00\x00\x00\x00\x00\x00\
\x00\x00\x00\x00|n\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00|\x1b\x00\x00\x00\x00\x00\x00\x00\x00\
\x10\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00abc|\x94b.";

    fn one(addr: usize, len: usize, dev_id: u64) -> XferDescriptor {
        XferDescriptor { addr, len, dev_id }
    }

    #[test]
    fn what_the_wheel_writes_is_read() {
        let expected = vec![one(0x1000, 4096, 0), one(0x3000, 512, 0)];
        assert_eq!(read(Class::Xfer, WRITTEN).unwrap(), (MemType::Dram, expected));
        assert_eq!(read(Class::Reg, REGISTERED).unwrap(), (MemType::Dram, vec![one(0x1000, 4096, 0)]));
        assert_eq!(read(Class::Reg, WRITTEN).unwrap_err().kind(), Kind::Protocol);
    }

    #[test]
    fn every_damage_is_a_protocol_error_and_never_more() {
        for len in 0..WRITTEN.len() {
            assert_eq!(read(Class::Xfer, &WRITTEN[..len]).unwrap_err().kind(), Kind::Protocol);
        }
        for at in 0..WRITTEN.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = WRITTEN.to_vec();
                bytes[at] ^= change;
                if let Err(error) = read(Class::Xfer, &bytes) {
                    assert_eq!(error.kind(), Kind::Protocol);
                }
            }
        }
        let evil = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02ls\x94\x85\x94R\x94.";
        assert_eq!(read(Class::Xfer, evil).unwrap_err().kind(), Kind::Protocol);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            list in proptest::collection::vec((any::<usize>(), any::<usize>(), any::<u64>()), 0..40),
            package in 0usize..3,
        ) {
            let list: Vec<_> = list.into_iter().map(|(addr, len, dev)| one(addr, len, dev)).collect();
            for class in [Class::Xfer, Class::Reg] {
                let bytes = write(PACKAGES[package], class, MemType::File, &list).unwrap();
                prop_assert_eq!(read(class, &bytes).unwrap(), (MemType::File, list.clone()));
            }
        }

        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(Class::Xfer, &bytes);
            let _ = read(Class::Reg, &bytes);
        }
    }
}
