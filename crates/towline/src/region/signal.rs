//! Counters and flags in registered memory that peers change and the owner waits for.
#![allow(unsafe_code, reason = "the words live in registered memory, which is reached by address")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::RegionCore;
use crate::fence::protocol::{self, Machine};
use crate::memory::lent;
use crate::runtime;
use crate::{Error, Kind, Result, fork};

/// How a wait begins before the thread goes to sleep.
///
/// Spinning answers within a fraction of a microsecond and takes a whole core; giving way lets others run in
/// between; sleeping costs the waker a system call and the sleeper a few microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// How long to look again and again.
    pub spin: Duration,
    /// How long to look in between giving way to other threads, after that.
    pub yielding: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { spin: Duration::from_micros(5), yielding: Duration::from_micros(50) }
    }
}

/// All threads of this process that sleep until some region changes: what a change made by this process itself asks,
/// whichever registration of the memory it goes through.
static SLEEPERS_HERE: AtomicU32 = AtomicU32::new(0);

/// How often a wait whose bell cannot be rung looks again.
const WITHOUT_A_BELL: Duration = Duration::from_millis(1);

/// How often a wait in memory that was lent looks whether that is still there.
const LENT: Duration = Duration::from_millis(100);

/// The 32 bits of a counter on which its waiters sleep: those that change with every signal.
fn low_half(counter: *mut u64) -> *const AtomicU32 {
    if cfg!(target_endian = "little") { counter.cast() } else { counter.cast::<AtomicU32>().wrapping_add(1) }
}

/// Raises the counter at that address and wakes its waiters; returns what it was. `sleepers`: as the owner counts
/// them in the region's row.
///
/// # Safety
/// `counter` points to eight aligned bytes of registered memory that stay mapped during the call.
pub(crate) unsafe fn raise(counter: *mut u64, add: u64, sleepers: &AtomicU32) {
    // SAFETY: the caller's obligation; other users of the word go through atomics too.
    unsafe { AtomicU64::from_ptr(counter) }.fetch_add(add, Ordering::SeqCst);
    // SAFETY: the caller's obligation.
    unsafe { wake_raised(counter, Some(sleepers)) };
}

/// Raises a counter in memory of this process and wakes its waiters; returns what it was. Memory that was lent may be gone.
///
/// # Safety
/// As for [`raise`]; what was lent is the kernel's to check.
pub(crate) unsafe fn raise_own(counter: *mut u64, add: u64, lent: bool) -> Result<u64> {
    // SAFETY: the caller's obligation; other users of the word go through atomics too.
    let before = unsafe {
        if lent {
            let raised = |seen: u64| Some(seen.wrapping_add(add));
            lent::change("signal", &|| true, counter.cast(), raised)?.unwrap_or_default()
        } else {
            AtomicU64::from_ptr(counter).fetch_add(add, Ordering::SeqCst)
        }
    };
    // SAFETY: the caller's obligation; the kernel only looks at the address.
    unsafe { wake_raised(counter, None) };
    Ok(before)
}

/// Wakes the waiters for the counter at that address, which has been raised. `sleepers`: as for [`raise`]; `None` where this process
/// is the owner.
///
/// # Safety
/// As for [`raise`].
pub(crate) unsafe fn wake_raised(counter: *mut u64, sleepers: Option<&AtomicU32>) {
    if protocol::wake_wanted::<Machine>(sleepers.unwrap_or(&SLEEPERS_HERE)) {
        // SAFETY: the caller's obligation.
        unsafe { wake_all(counter) };
    }
}

/// Wakes the waiters on the bell at that address, if there are any. What was stored before is visible to it.
///
/// # Safety
/// As for [`raise`].
#[inline]
pub(crate) unsafe fn ring(bell: *mut u64, sleepers: &AtomicU32) {
    if protocol::wake_wanted::<Machine>(sleepers) {
        // SAFETY: the caller's obligation.
        unsafe { ring_loudly(bell) };
    }
}

/// [`ring`] on a bell in memory of this process, which may be gone where it was lent.
///
/// # Safety
/// As for [`raise_own`].
#[inline]
pub(super) unsafe fn ring_own(bell: *mut u64, sleepers: &AtomicU32, lent: bool) -> Result<()> {
    // SAFETY: the caller's obligation.
    unsafe {
        match lent {
            false => ring(bell, sleepers),
            true if protocol::wake_wanted::<Machine>(sleepers) => {
                lent::change("wake", &|| true, bell.cast(), |seen| Some(seen.wrapping_add(1)))?;
                wake_all(bell);
            }
            true => {}
        }
    }
    Ok(())
}

#[cold]
#[inline(never)]
unsafe fn ring_loudly(bell: *mut u64) {
    // SAFETY: the caller's obligation.
    unsafe {
        AtomicU64::from_ptr(bell).fetch_add(1, Ordering::SeqCst);
        wake_all(bell);
    }
}

unsafe fn wake_all(counter: *mut u64) {
    // SAFETY: the caller's obligation; the kernel only looks at the address.
    let word = unsafe { &*low_half(counter) };
    // Shared, not private: waker and sleeper may be processes that map the same memory. A failure means that nobody
    // can be waiting there.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Wakes the threads of this process that sleep at those addresses, without changing anything there.
///
/// The addresses are those of sleepers that are counted now: each holds its registration until it has left the list.
pub(super) fn wake_here(bells: &[usize]) {
    for bell in bells {
        // SAFETY: the thread that put the address into the list checked it, and holds the registration for as long as it is there.
        unsafe { wake_all(std::ptr::with_exposed_provenance_mut(*bell)) };
    }
}

/// A thread that is counted as asleep; the count is taken back even if a check panics.
struct Sleeper<'a> {
    row: &'a AtomicU32,
    core: &'a RegionCore,
    bell: usize,
}

impl<'a> Sleeper<'a> {
    fn new(row: &'a AtomicU32, core: &'a RegionCore, bell: usize) -> Sleeper<'a> {
        core.waits(bell);
        // The last step has the fence that counts for both.
        SLEEPERS_HERE.fetch_add(1, Ordering::SeqCst);
        protocol::sleeper_came::<Machine>(row);
        Sleeper { row, core, bell }
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        protocol::sleeper_left::<Machine>(self.row);
        SLEEPERS_HERE.fetch_sub(1, Ordering::SeqCst);
        self.core.waits_no_more(self.bell);
    }
}

/// Waits until `check` gives something: spins, gives way, then sleeps on the bell. `None` at the limit, and when the endpoint
/// is closed.
///
/// The caller holds the registration, so that memory and row stay.
pub(super) fn wait_changed<T>(
    core: &RegionCore,
    bell: usize,
    patience: Patience,
    within: Duration,
    mut check: impl FnMut() -> Option<T>,
) -> Option<T> {
    if let Some(found) = check() {
        return Some(found);
    }
    if fork::in_child() {
        return None;
    }
    let started = Instant::now();
    let until = runtime::later(started, within);
    let spin_until = runtime::later(started, patience.spin).min(until);
    let yield_until = runtime::later(spin_until, patience.yielding).min(until);
    while Instant::now() < spin_until {
        // The clock costs more than a look.
        for _ in 0..8 {
            std::hint::spin_loop();
            if let Some(found) = check() {
                return Some(found);
            }
        }
    }
    while Instant::now() < yield_until {
        std::thread::yield_now();
        if let Some(found) = check() {
            return Some(found);
        }
    }
    let row = core.registry.table.row(core.row).map(|row| row.sleepers());
    let (Some(row), Ok(bell)) = (row, core.word("wait", bell)) else {
        return look_now_and_then(core, until, check);
    };
    let _asleep = Sleeper::new(row, core, bell.expose_provenance());
    loop {
        // Where the bell is gone, nobody can ring it.
        let Ok(rung) = core.load("wait", bell) else { return check() };
        // SAFETY: `word` checked that it lies within the region, whose registration the caller holds; only the kernel looks there.
        let word = unsafe { &*low_half(bell) };
        if let Some(found) = check() {
            return Some(found);
        }
        if core.registry.is_closed() {
            return None;
        }
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        // A process that takes pages away wakes no waiter.
        let left = if core.lent { left.min(LENT) } else { left };
        let timeout = rustix::time::Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // Every outcome (woken, value changed, interrupted, timed out) leads back to the check above.
        let _ = futex::wait(word, futex::Flags::empty(), rung as u32, Some(&timeout));
    }
}

fn look_now_and_then<T>(
    core: &RegionCore,
    until: Instant,
    mut check: impl FnMut() -> Option<T>,
) -> Option<T> {
    loop {
        if let Some(found) = check() {
            return Some(found);
        }
        if core.registry.is_closed() {
            return None;
        }
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        std::thread::sleep(left.min(WITHOUT_A_BELL));
    }
}

/// Waits until the counter is at least that high.
pub(super) fn wait(core: &RegionCore, offset: usize, at_least: u64, within: Duration) -> Result<u64> {
    let counter = core.word("wait_signal", offset)?;
    let mut value = 0;
    let started = Instant::now();
    let found = wait_changed(core, offset, Patience::default(), within, || {
        match core.load("wait_signal", counter) {
            Ok(seen) => value = seen,
            Err(gone) => return Some(Err(gone)),
        }
        (value >= at_least).then_some(Ok(value))
    });
    found.unwrap_or_else(|| {
        core.registry.check_open("wait_signal")?;
        let spent = started.elapsed().as_secs_f64();
        let message = format!("the counter is {value}, not {at_least}, after {spent:.3} s");
        Err(Error::new(Kind::Timeout, "wait_signal", message))
    })
}
