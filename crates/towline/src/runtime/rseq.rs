//! A check and the action that depends on it, as one step: the thread is not preempted between the two.
//!
//! A process can be stopped between any two instructions, for any time. A thread that checks whether something is still wanted and then
//! does it may therefore do it long after nobody wants it any more. Here the last steps are a *restartable sequence*
//! (`rseq(2)`): the kernel sends a thread that is preempted inside one back to its start instead of letting it go
//! on. The C library registers every thread for that; where it does not (before glibc 2.35, other C libraries), and on
//! other processors, the check comes first and the action soon after: [`is_possible`] says which.
//!
//! How a stop is noticed, from the check on: while the thread is in the kernel for its check, by the clock, which is read before
//! it and after; from before that second reading on, because the kernel clears the word that names the sequence
//! when it preempts the thread outside of it; and inside of it, because the kernel sends the thread to its abort. The sequence
//! ends with the action: a copy, the exchange of one word, or the entry into a system call. What the kernel does from there on it does
//! before the stop.
//!
//! A copy that is preempted in the middle is made again from its start. What must not be done twice, an atomic or the elements of a
//! reduction, is a series of exchanges: one instruction each, behind which the thread is outside of the sequence.
#![allow(
    unsafe_code,
    reason = "writes the word that names a restartable sequence, and has the sequences themselves"
)]

use std::time::{Duration, Instant};

use crate::runtime::socket::RawPartMut;

/// A check counts as fresh for this long. It is not repeated for ever: on a very busy machine it never is fresh.
const FRESH: Duration = Duration::from_millis(1);
const MAX_CHECKS: usize = 100;

/// One sequence copies at most about this many bytes: a few microseconds.
pub(crate) const MOST_COPIED: usize = 64 << 10;

/// Whether the check and the action are one step in this thread.
pub(crate) fn is_possible() -> bool {
    sequence::area().is_some()
}

/// Receives a message if the check says yes, in one step; `None` if it says no. Returns what the kernel returned.
///
/// # Safety
/// As for `recvmsg`: the header is valid, and what it names is writable.
pub(crate) unsafe fn recvmsg(
    check: &dyn Fn() -> bool,
    fd: i32,
    message: *mut libc::msghdr,
    flags: i32,
) -> Option<isize> {
    // SAFETY: the caller's promise.
    let plain = || unsafe { sequence::plain_recvmsg(fd, message, flags) };
    // SAFETY: the caller's promise; the area is this thread's own, and the word names the sequence.
    let action = |area| unsafe { sequence::recvmsg(fd, message, flags, area) };
    after(check, sequence::of_recvmsg(), plain, |area| {
        Some(action(area)).filter(|one| *one != sequence::NOT_DONE)
    })
}

/// Copies bytes to those parts, which have room for them, if the check says yes, in one step. Returns whether it did.
///
/// # Safety
/// The parts are writable and have room for the bytes, of which there are at most [`MOST_COPIED`], and nobody has a reference to
/// them.
pub(crate) unsafe fn copy(check: &dyn Fn() -> bool, parts: &[RawPartMut], bytes: &[u8]) -> bool {
    // SAFETY: the caller's promise.
    let plain = || unsafe { plain_copy(parts, bytes) };
    // SAFETY: the caller's promise; the area is this thread's own, and the word names the sequence.
    let action =
        |area| unsafe { sequence::copy(parts.as_ptr(), parts.len(), bytes.as_ptr(), bytes.len(), area) };
    after(check, sequence::of_copy(), plain, |area| (action(area) == 1).then_some(())).is_some()
}

/// Writes to a file if the check says yes, in one step; `None` if it says no. Returns what the kernel returned.
///
/// # Safety
/// As for `pwrite`: the bytes are readable.
pub(crate) unsafe fn pwrite(
    check: &dyn Fn() -> bool,
    fd: i32,
    bytes: *const u8,
    len: usize,
    offset: i64,
) -> Option<isize> {
    // SAFETY: the caller's promise.
    let plain = || match unsafe { libc::pwrite(fd, bytes.cast(), len, offset) } {
        -1 => -(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) as isize),
        returned => returned,
    };
    // SAFETY: the caller's promise; the area is this thread's own, and the word names the sequence.
    let action = |area| unsafe { sequence::pwrite(fd, bytes, len, offset, area) };
    after(check, sequence::of_pwrite(), plain, |area| {
        Some(action(area)).filter(|one| *one != sequence::NOT_DONE)
    })
}

/// A word that is exchanged in one instruction.
pub(crate) trait Word: Copy + PartialEq {
    /// Exchanges the words at `at` from number `from` on, one after the other: stores `new` in place of `expected` where that is what is
    /// there, and stops where it is not.
    ///
    /// # Safety
    /// All three are `count` words, aligned; those at `at` are writable, and nobody has a reference to them.
    unsafe fn swap_all(
        turn: &Turn,
        at: *mut Self,
        expected: *const Self,
        new: *const Self,
        count: usize,
        from: usize,
    ) -> SequenceOutcome;

    /// What names the sequence.
    fn named() -> *const u8;
}

/// How far a series of exchanges went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SequenceOutcome {
    /// To its end.
    Complete,
    /// To a word that others have changed.
    Changed(usize),
    /// The thread was preempted before it came to that word.
    Preempted(usize),
}

/// The time in which a check holds: as long as the thread is not preempted.
pub(crate) struct Turn(Option<*mut sequence::Area>);

/// Does series of [exchanges](Word::swap_all) if the check says yes, each exchange in one step with it; `None` if it says no. The action
/// returns `None` when its thread was preempted, and is called again after another check: it goes on from where it was.
pub(crate) fn exchange<W: Word, T>(
    check: &dyn Fn() -> bool,
    action: impl FnMut(&Turn) -> Option<T>,
) -> Option<T> {
    let action = std::cell::RefCell::new(action);
    let act = |area| (*action.borrow_mut())(&Turn(area));
    for _ in 0..MAX_CHECKS {
        // Without a turn that can end every exchange is made.
        let done = after(check, W::named(), || act(None), |area| Some(act(Some(area))))?;
        if done.is_some() {
            return done;
        }
    }
    check().then(|| act(None)).flatten()
}

macro_rules! words {
    ($($word:ty, $atomic:ident, $swap:ident, $named:ident;)*) => {$(
        impl Word for $word {
            #[inline]
            unsafe fn swap_all(
                turn: &Turn,
                at: *mut $word,
                expected: *const $word,
                new: *const $word,
                count: usize,
                from: usize,
            ) -> SequenceOutcome {
                use std::sync::atomic::{$atomic, Ordering};
                if let Some(area) = turn.0 {
                    // SAFETY: the caller's promise; the area is this thread's own, and the word names the sequence unless the thread
                    // has been preempted since, which the sequence checks.
                    let reached = unsafe { sequence::$swap(at, expected, new, count, area, from) };
                    return match (reached & !sequence::PREEMPTED, reached & sequence::PREEMPTED) {
                        (reached, 0) if reached == count => SequenceOutcome::Complete,
                        (reached, 0) => SequenceOutcome::Changed(reached),
                        (reached, _) => SequenceOutcome::Preempted(reached),
                    };
                }
                for index in from..count {
                    // SAFETY: the caller's promise.
                    let (cell, old, new) = unsafe {
                        ($atomic::from_ptr(at.add(index)), expected.add(index).read(), new.add(index).read())
                    };
                    if cell.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                        return SequenceOutcome::Changed(index);
                    }
                }
                SequenceOutcome::Complete
            }

            fn named() -> *const u8 {
                sequence::$named()
            }
        }
    )*};
}

words! {
    u8, AtomicU8, swap_1, of_swap_1;
    u16, AtomicU16, swap_2, of_swap_2;
    u32, AtomicU32, swap_4, of_swap_4;
    u64, AtomicU64, swap_8, of_swap_8;
}

/// # Safety
/// As for [`copy`].
unsafe fn plain_copy(parts: &[RawPartMut], mut bytes: &[u8]) {
    for part in parts {
        let (now, rest) = bytes.split_at(part.len.min(bytes.len()));
        // SAFETY: the caller's promise; `now` is not longer than the part.
        unsafe { crate::bytes::copy(part.ptr, now.as_ptr(), now.len()) };
        bytes = rest;
    }
}

fn after<T>(
    check: &dyn Fn() -> bool,
    named: *const u8,
    plain: impl Fn() -> T,
    action: impl Fn(*mut sequence::Area) -> Option<T>,
) -> Option<T> {
    for _ in 0..MAX_CHECKS {
        let before = Instant::now();
        if !check() {
            return None;
        }
        let area = sequence::area();
        if let Some(area) = area {
            // SAFETY: the area is this thread's, which alone writes the word; the sequence lives as long as the program, and
            // the word is cleared before this returns.
            unsafe { sequence::name(area, named) };
        }
        #[cfg(test)]
        let before = tests::between(before);
        let done = match (before.elapsed() < FRESH, area) {
            (true, Some(area)) => action(area),
            (true, None) => return Some(plain()),
            (false, _) => None,
        };
        if let Some(area) = area {
            // SAFETY: as above.
            unsafe { sequence::name(area, std::ptr::null()) };
        }
        if done.is_some() {
            return done;
        }
    }
    check().then(plain)
}

/// The sequences, where there are some.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(miri)))]
mod sequence {
    use std::arch::{asm, naked_asm};
    use std::sync::OnceLock;

    use super::RawPartMut;

    /// What the C library shares with the kernel for each thread. The layout is the kernel's.
    #[repr(C)]
    pub(super) struct Area {
        cpu_id_start: u32,
        cpu_id: i32,
        named: *const u8,
    }

    /// What a sequence returns that was preempted before its last step: no error number is that low.
    pub(super) const NOT_DONE: isize = isize::MIN;

    /// The mark of a series of exchanges that was preempted.
    pub(super) const PREEMPTED: usize = 1 << (usize::BITS - 1);

    /// This thread's area; `None` where the kernel or the C library does not have it.
    #[inline]
    pub(super) fn area() -> Option<*mut Area> {
        static OFFSET: OnceLock<Option<isize>> = OnceLock::new();
        let offset = (*OFFSET.get_or_init(offset))?;
        let thread: *mut u8;
        // SAFETY: the first word of a thread's own block is the block's address, by the platform's ABI.
        unsafe { asm!("mov {}, fs:[0]", out(reg) thread, options(nostack, preserves_flags, readonly)) };
        let area = thread.wrapping_offset(offset).cast::<Area>();
        // SAFETY: the C library keeps the area at that offset in every thread; the kernel writes the number of the processor, so
        // it is read as what others change.
        let cpu = unsafe { std::ptr::read_volatile(&raw const (*area).cpu_id) };
        // Less than nothing: this thread is not registered.
        (cpu >= 0).then_some(area)
    }

    fn offset() -> Option<isize> {
        // SAFETY: looks up symbols of the C library, which are a word and a number where there are any.
        unsafe {
            let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>();
            let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
            (!size.is_null() && !offset.is_null() && *size >= 16).then(|| *offset)
        }
    }

    /// Names the sequence that this thread is about to enter; null for no sequence.
    ///
    /// # Safety
    /// The area is the calling thread's, and what is named stays.
    #[inline]
    pub(super) unsafe fn name(area: *mut Area, named: *const u8) {
        // SAFETY: the caller's promise. The kernel reads the word when it likes.
        unsafe { std::ptr::write_volatile(&raw mut (*area).named, named) };
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Whether a sequence is still named: not if the thread has been preempted since.
    #[cfg(test)]
    pub(super) fn is_named(area: *mut Area) -> bool {
        // SAFETY: the area is the calling thread's; the kernel writes the word when it likes.
        unsafe { !std::ptr::read_volatile(&raw const (*area).named).is_null() }
    }

    /// # Safety
    /// As for `recvmsg`.
    pub(super) unsafe fn plain_recvmsg(fd: i32, message: *mut libc::msghdr, flags: i32) -> isize {
        let returned: isize;
        // SAFETY: the caller's promise. The error comes back as a number below nothing, as from the sequence.
        unsafe {
            asm!("syscall", inlateout("rax") libc::SYS_recvmsg as isize => returned, in("rdi") fd as isize, in("rsi") message,
                in("rdx") flags as isize, out("rcx") _, out("r11") _, options(nostack));
        }
        returned
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn of_recvmsg() -> *const u8 {
        naked_asm!("lea rax, [rip + towline_sequence_of_recvmsg]", "ret")
    }

    /// `recvmsg`, if nothing has come between since the sequence was named.
    #[unsafe(naked)]
    pub(super) unsafe extern "C" fn recvmsg(
        fd: i32,
        message: *mut libc::msghdr,
        flags: i32,
        area: *mut Area,
    ) -> isize {
        naked_asm!(
            ".pushsection .data.rel.ro, \"aw\"",
            ".balign 32",
            ".hidden towline_sequence_of_recvmsg",
            ".globl towline_sequence_of_recvmsg",
            "towline_sequence_of_recvmsg:",
            ".long 0, 0",
            ".quad 2f, 3f - 2f, 5f",
            ".popsection",
            "mov r9, rcx",
            "lea r8, [rip + towline_sequence_of_recvmsg]",
            "movsxd rdi, edi",
            "movsxd rdx, edx",
            "mov eax, {call}",
            "2:",
            "cmp qword ptr [r9 + 8], r8",
            "jne 4f",
            "syscall",
            "3:",
            "ret",
            "4:",
            "movabs rax, {not_done}",
            "ret",
            // What the kernel wants to see before the place that it sends a thread to.
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "movabs rax, {not_done}",
            "ret",
            call = const libc::SYS_recvmsg,
            not_done = const NOT_DONE,
        )
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn of_copy() -> *const u8 {
        naked_asm!("lea rax, [rip + towline_sequence_of_copy]", "ret")
    }

    /// Copies the bytes to the parts, one after the other, if nothing has come between since the sequence was named; 1 where it
    /// has. Preempted in the middle it has copied some of them, and is done again from the start or not at all: who learns that
    /// nothing lands any more learns it after that.
    #[unsafe(naked)]
    pub(super) unsafe extern "C" fn copy(
        parts: *const RawPartMut,
        count: usize,
        bytes: *const u8,
        len: usize,
        area: *mut Area,
    ) -> usize {
        naked_asm!(
            ".pushsection .data.rel.ro, \"aw\"",
            ".balign 32",
            ".hidden towline_sequence_of_copy",
            ".globl towline_sequence_of_copy",
            "towline_sequence_of_copy:",
            ".long 0, 0",
            ".quad 2f, 3f - 2f, 5f",
            ".popsection",
            "lea rax, [rip + towline_sequence_of_copy]",
            "mov r9, rdi",
            "mov r10, rsi",
            "mov rsi, rdx",
            "mov rdx, rcx",
            "cld",
            "2:",
            "cmp qword ptr [r8 + 8], rax",
            "jne 4f",
            "6:",
            "test r10, r10",
            "jz 3f",
            "mov rdi, qword ptr [r9]",
            "mov rcx, qword ptr [r9 + 8]",
            "cmp rcx, rdx",
            "cmova rcx, rdx",
            "sub rdx, rcx",
            "rep movsb",
            "add r9, 16",
            "dec r10",
            "jmp 6b",
            "3:",
            "mov eax, 1",
            "ret",
            "4:",
            "xor eax, eax",
            "ret",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "xor eax, eax",
            "ret",
        )
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn of_pwrite() -> *const u8 {
        naked_asm!("lea rax, [rip + towline_sequence_of_pwrite]", "ret")
    }

    /// `pwrite`, if nothing has come between since the sequence was named.
    #[unsafe(naked)]
    pub(super) unsafe extern "C" fn pwrite(
        fd: i32,
        bytes: *const u8,
        len: usize,
        offset: i64,
        area: *mut Area,
    ) -> isize {
        naked_asm!(
            ".pushsection .data.rel.ro, \"aw\"",
            ".balign 32",
            ".hidden towline_sequence_of_pwrite",
            ".globl towline_sequence_of_pwrite",
            "towline_sequence_of_pwrite:",
            ".long 0, 0",
            ".quad 2f, 3f - 2f, 5f",
            ".popsection",
            "mov r10, rcx",
            "lea r9, [rip + towline_sequence_of_pwrite]",
            "movsxd rdi, edi",
            "mov eax, {call}",
            "2:",
            "cmp qword ptr [r8 + 8], r9",
            "jne 4f",
            "syscall",
            "3:",
            "ret",
            "4:",
            "movabs rax, {not_done}",
            "ret",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "movabs rax, {not_done}",
            "ret",
            call = const libc::SYS_pwrite64,
            not_done = const NOT_DONE,
        )
    }

    /// Exchanges of words: one sequence for each width, which has nothing but the check of its name and the exchange. What comes
    /// before and behind it, from word to word, is outside.
    macro_rules! exchanges {
        ($($word:ty, $swap:ident, $named:ident, $symbol:literal, $old:literal, $new:literal, $exchange:literal;)*) => {$(
            #[unsafe(naked)]
            pub(super) extern "C" fn $named() -> *const u8 {
                naked_asm!(concat!("lea rax, [rip + ", $symbol, "]"), "ret")
            }

            /// Exchanges words as long as nothing has come between since the sequence was named. Gives the number of the first one
            /// that was not exchanged, with a mark where that was because something has.
            #[unsafe(naked)]
            pub(super) unsafe extern "C" fn $swap(
                at: *mut $word,
                expected: *const $word,
                new: *const $word,
                count: usize,
                area: *mut Area,
                from: usize,
            ) -> usize {
                naked_asm!(
                    ".pushsection .data.rel.ro, \"aw\"",
                    ".balign 32",
                    concat!(".hidden ", $symbol),
                    concat!(".globl ", $symbol),
                    concat!($symbol, ":"),
                    ".long 0, 0",
                    ".quad 2f, 3f - 2f, 5f",
                    ".popsection",
                    concat!("lea r11, [rip + ", $symbol, "]"),
                    "6:",
                    "cmp r9, rcx",
                    "jae 7f",
                    $old,
                    $new,
                    "2:",
                    "cmp qword ptr [r8 + 8], r11",
                    "jne 4f",
                    $exchange,
                    "3:",
                    "jne 7f",
                    "inc r9",
                    "jmp 6b",
                    "7:",
                    "mov rax, r9",
                    "ret",
                    "4:",
                    "mov rax, r9",
                    "bts rax, 63",
                    "ret",
                    ".byte 0x0f, 0xb9, 0x3d",
                    ".long 0x53053053",
                    "5:",
                    "mov rax, r9",
                    "bts rax, 63",
                    "ret",
                )
            }
        )*};
    }

    exchanges! {
        u8, swap_1, of_swap_1, "towline_sequence_of_swap_1",
            "mov al, byte ptr [rsi + r9]", "mov r10b, byte ptr [rdx + r9]", "lock cmpxchg byte ptr [rdi + r9], r10b";
        u16, swap_2, of_swap_2, "towline_sequence_of_swap_2",
            "mov ax, word ptr [rsi + 2 * r9]", "mov r10w, word ptr [rdx + 2 * r9]", "lock cmpxchg word ptr [rdi + 2 * r9], r10w";
        u32, swap_4, of_swap_4, "towline_sequence_of_swap_4",
            "mov eax, dword ptr [rsi + 4 * r9]", "mov r10d, dword ptr [rdx + 4 * r9]", "lock cmpxchg dword ptr [rdi + 4 * r9], r10d";
        u64, swap_8, of_swap_8, "towline_sequence_of_swap_8",
            "mov rax, qword ptr [rsi + 8 * r9]", "mov r10, qword ptr [rdx + 8 * r9]", "lock cmpxchg qword ptr [rdi + 8 * r9], r10";
    }
}

/// Where there are none: the check comes first, and the action soon after.
#[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(miri))))]
mod sequence {
    use super::RawPartMut;

    pub(super) enum Area {}

    pub(super) const NOT_DONE: isize = isize::MIN;

    /// The mark of a series of exchanges that was preempted.
    pub(super) const PREEMPTED: usize = 1 << (usize::BITS - 1);

    pub(super) fn area() -> Option<*mut Area> {
        None
    }

    pub(super) unsafe fn name(_: *mut Area, _: *const u8) {}

    #[cfg(test)]
    pub(super) fn is_named(_: *mut Area) -> bool {
        false
    }

    pub(super) fn of_recvmsg() -> *const u8 {
        std::ptr::null()
    }

    pub(super) fn of_copy() -> *const u8 {
        std::ptr::null()
    }

    pub(super) unsafe fn recvmsg(_: i32, _: *mut libc::msghdr, _: i32, _: *mut Area) -> isize {
        NOT_DONE
    }

    pub(super) unsafe fn copy(_: *const RawPartMut, _: usize, _: *const u8, _: usize, _: *mut Area) -> usize {
        0
    }

    pub(super) fn of_pwrite() -> *const u8 {
        std::ptr::null()
    }

    pub(super) unsafe fn pwrite(_: i32, _: *const u8, _: usize, _: i64, _: *mut Area) -> isize {
        NOT_DONE
    }

    macro_rules! exchanges {
        ($($word:ty, $swap:ident, $named:ident;)*) => {$(
            pub(super) fn $named() -> *const u8 {
                std::ptr::null()
            }

            pub(super) unsafe fn $swap(
                _: *mut $word,
                _: *const $word,
                _: *const $word,
                _: usize,
                _: *mut Area,
                from: usize,
            ) -> usize {
                from | PREEMPTED
            }
        )*};
    }

    exchanges! { u8, swap_1, of_swap_1; u16, swap_2, of_swap_2; u32, swap_4, of_swap_4; u64, swap_8, of_swap_8; }

    /// # Safety
    /// As for `recvmsg`.
    pub(super) unsafe fn plain_recvmsg(fd: i32, message: *mut libc::msghdr, flags: i32) -> isize {
        // SAFETY: the caller's promise.
        match unsafe { libc::recvmsg(fd, message, flags) } {
            -1 => -(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) as isize),
            returned => returned,
        }
    }
}

#[cfg(test)]
mod tests;
