//! What an owner on the same host hands over, made by hand: a table, a page for pins, a bell, a mailbox, a segment; and things that are
//! none of these.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::io::pwrite;
use towline::{MemoryDescription, SystemStorage};

use super::{GENERATION, ROW};
use crate::input::Input;

/// The table: rows of 32 bytes, generation, address and length first.
pub(super) const ROWS: u32 = 64;
const TABLE: u64 = ROWS as u64 * 32;

/// The page for pins: how it begins, where its slots and places lie, and its end. Between begin and slots lie two mutexes: what shares
/// memory with us may end us by these, and is a process that could end us anyway.
const MAGIC: &[u8; 8] = b"towl-pin";
const VERSION: u32 = 3;
const SLOTS: u64 = 192;
const PLACES: u64 = SLOTS + 2 * 1024 * 64;
const PINS: u64 = PLACES + 64 * 64;

const MAILBOX: u64 = (16 + 4096) * 8;

/// What is handed over.
pub struct Pages {
    files: [OwnedFd; 4],
    segment: OwnedFd,
    /// Rows that change all the time, while this is here.
    changing: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    memory: SystemStorage,
    _nonce: Box<[u8; 16]>,
}

/// A memory file of that length with those seals.
fn memory_file(len: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("rogue", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn sealed(len: u64) -> OwnedFd {
    memory_file(len, SealFlags::SHRINK | SealFlags::GROW)
}

/// Something else than a memory file of that length which cannot shrink.
fn odd(how: u8, len: u64) -> OwnedFd {
    match how % 10 {
        0 => memory_file(len, SealFlags::empty()),
        1 => sealed(len / 2),
        2 => sealed(0),
        3 => rustix::pipe::pipe().unwrap().1,
        4 => UnixStream::pair().unwrap().0.into(),
        5 => open("/", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap(),
        6 => open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap(),
        7 => eventfd(0, EventfdFlags::empty()).unwrap(),
        8 => memory_file(len, SealFlags::SHRINK | SealFlags::WRITE),
        _ => open("/dev/zero", OFlags::PATH, Mode::empty()).unwrap(),
    }
}

/// What a user hands over as the page that tells which of its threads live: such a page, or something else.
pub(crate) fn life(how: u8) -> OwnedFd {
    const LIFE: u64 = 1 << 20;
    if how.is_multiple_of(4) { sealed(LIFE) } else { odd(how / 4, 64 << 10) }
}

impl Pages {
    /// Mostly what an honest owner of a region of that many bytes would hand over.
    pub(super) fn new(length: u64, incarnation: [u8; 16], input: &mut Input<'_>) -> Pages {
        let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut files = [sealed(TABLE), sealed(PINS), bell, sealed(MAILBOX)];
        let mut segment = sealed(length);
        let (which, how) = (input.byte(), input.byte());
        match which {
            200..=239 => {
                files[usize::from(which % 4)] = odd(how, [TABLE, PINS, 8, MAILBOX][usize::from(which % 4)])
            }
            240.. => segment = odd(how, length),
            _ => {}
        }
        let nonce = Box::new(incarnation);
        let memory = SystemStorage::new(length as usize).unwrap();
        let pages = Pages { files, segment, changing: None, memory, _nonce: nonce };
        pages.put(1, 0, MAGIC);
        pages.put(1, 8, &VERSION.to_le_bytes());
        pages.row(0, 1, pages._nonce.as_ptr().expose_provenance() as u64, 16);
        pages.row(ROW, GENERATION, pages.memory.addr() as u64, length);
        pages
    }

    fn put(&self, file: usize, at: u64, bytes: &[u8]) {
        let _ = pwrite(&self.files[file], bytes, at);
    }

    fn row(&self, row: u32, generation: u64, addr: u64, len: u64) {
        let words = [generation, addr, len].map(u64::to_le_bytes).concat();
        self.put(0, u64::from(row) * 32, &words);
    }

    /// What goes along with the word that a session is ready.
    pub(super) fn files(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd).collect()
    }

    pub(super) fn segment(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// A descriptor to hand over where one for a file is asked for.
    pub(super) fn file(input: &mut Input<'_>) -> OwnedFd {
        match input.byte() % 4 {
            0 => memory_file(1 << 20, SealFlags::empty()),
            _ => odd(input.byte(), 1 << 20),
        }
    }

    /// Changes something of it while it is in use.
    pub(super) fn scribble(&mut self, input: &mut Input<'_>) {
        let (what, at) = (input.byte(), input.byte());
        let value = match input.byte() % 6 {
            0 => 0,
            1 => GENERATION,
            2 => u64::MAX,
            3 => u64::MAX - 7,
            4 => self.memory.addr() as u64,
            _ => input.number(),
        };
        let word = &value.to_le_bytes();
        match what % 8 {
            // A word of the region's row; an address only in another process, which copies there by itself.
            0 => self.put(0, u64::from(ROW) * 32 + u64::from(at % 4) * 8, word),
            1 => self.put(1, SLOTS + u64::from(at) * 512, word),
            // Who is said to be applying what, in the places.
            2 => self.put(1, PLACES + u64::from(at % 16) * 8, word),
            // How many slots were ever used, and whether the owner waits for them.
            3 => self.put(1, 12 + u64::from(at % 3) * 4, &word[..4]),
            4 => self.put(3, u64::from(at % 20) * 8, word),
            5 => self.cut(),
            _ => self.change_all_the_time(),
        }
    }

    /// Takes the pages away, where no seal forbids it, and what is in them.
    fn cut(&self) {
        use rustix::fs::{FallocateFlags, fallocate};
        for file in self.files.iter().chain([&self.segment]) {
            let _ = ftruncate(file, 0);
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.segment, hole, 0, 1 << 20);
    }

    fn change_all_the_time(&mut self) {
        if self.changing.is_some() {
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (over, table) = (Arc::clone(&stop), self.files[0].try_clone().unwrap());
        let (addr, len) = (self.memory.addr() as u64, self.memory.size() as u64);
        let rows = [
            [GENERATION, addr, len],
            [GENERATION, u64::MAX - 4096, len],
            [0, addr, len],
            [GENERATION, addr, 0],
            [GENERATION, 8, u64::MAX],
            [GENERATION + 1, addr, len],
        ];
        let change = move || {
            for row in rows.iter().cycle() {
                let _ = pwrite(&table, &row.map(u64::to_le_bytes).concat(), u64::from(ROW) * 32);
                if over.load(Ordering::Relaxed) {
                    return;
                }
                thread::yield_now();
            }
        };
        self.changing = Some((stop, thread::spawn(change)));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.changing.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
    }
}
