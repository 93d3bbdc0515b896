//! Streams, each a thread with a queue; events; calls back.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::device::{context_of, current, give};
use crate::state::*;

/// One thing that a stream does.
pub(crate) enum Work {
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
    /// Bytes of host memory that is not pinned, taken when the copy was asked for.
    CopyTaken {
        to: u64,
        bytes: Vec<u8>,
    },
    Fill {
        to: u64,
        value: u8,
        len: usize,
    },
    /// A kernel; `None` where it touched memory that the device does not reach.
    Kernel(Box<dyn FnOnce() -> Option<()> + Send>),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    Call(unsafe extern "C" fn(*mut c_void), usize),
}

pub(crate) struct Stream {
    device: c_int,
    inner: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    busy: bool,
    destroyed: bool,
}

/// How often it was recorded, and how many of these have happened.
#[derive(Default)]
pub(crate) struct Event {
    inner: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Event {
    fn record(&self) -> u64 {
        let mut inner = self.inner.lock();
        inner.0 += 1;
        inner.0
    }

    fn recorded(&self) -> u64 {
        self.inner.lock().0
    }

    fn happen(&self, which: u64) {
        let mut inner = self.inner.lock();
        inner.1 = inner.1.max(which);
        self.changed.notify_all();
    }

    fn has_happened(&self) -> bool {
        let inner = self.inner.lock();
        inner.1 >= inner.0
    }

    fn wait(&self, which: u64) {
        let mut inner = self.inner.lock();
        while inner.1 < which {
            self.changed.wait(&mut inner);
        }
    }
}

impl Stream {
    fn start(device: c_int) -> Done<Arc<Stream>> {
        let stream = Arc::new(Stream { device, inner: Mutex::default(), changed: Condvar::new() });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name("fake-cuda".into())
            .spawn(move || worker.run())
            .map_err(|_| OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn run(&self) {
        loop {
            let mut queue = self.inner.lock();
            let work = loop {
                queue.busy = false;
                if let Some(work) = queue.work.pop_front() {
                    queue.busy = true;
                    break work;
                }
                self.changed.notify_all();
                if queue.destroyed {
                    return;
                }
                self.changed.wait(&mut queue);
            };
            drop(queue);
            if let Some(delay) = settings().delay {
                std::thread::sleep(delay);
            }
            perform(work);
        }
    }

    pub(crate) fn add(&self, work: Work) -> Done {
        if current()? != self.device {
            return Err(INVALID_HANDLE);
        }
        self.inner.lock().work.push_back(work);
        self.changed.notify_all();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        let queue = self.inner.lock();
        queue.work.is_empty() && !queue.busy
    }

    fn drain(&self) {
        let mut queue = self.inner.lock();
        while queue.busy || !queue.work.is_empty() {
            self.changed.wait(&mut queue);
        }
    }
}

/// Does one thing; what touches unknown memory loses the context.
fn perform(work: Work) {
    if is_lost() {
        // The waiter goes on, and learns of it by its next call.
        if let Work::Record(event, which) = work {
            event.happen(which);
        }
        return;
    }
    let done = match work {
        Work::Copy { to, from, len } => move_bytes(to, from, len),
        Work::CopyTaken { to, bytes } => {
            let from = bytes.as_ptr().expose_provenance() as u64;
            in_stretches(to, from, bytes.len())
        }
        Work::Fill { to, value, len } => {
            let bytes = vec![value; len];
            let from = bytes.as_ptr().expose_provenance() as u64;
            in_stretches(to, from, len)
        }
        Work::Kernel(kernel) => kernel(),
        Work::Record(event, which) => {
            event.happen(which);
            Some(())
        }
        Work::Wait(event, which) => {
            event.wait(which);
            Some(())
        }
        Work::Call(function, data) => {
            // SAFETY: the caller of `cuLaunchHostFunc` vouches for both.
            unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
            Some(())
        }
    };
    if done.is_none() {
        lose();
    }
}

/// Copies between two ranges that the driver knows; a host range that it does not know is taken at its word.
pub(crate) fn move_bytes(to: u64, from: u64, len: usize) -> Option<()> {
    let known = |address| memory().find(address).is_some();
    let holds = |address| !known(address) || memory().holds(address, len as u64);
    (holds(to) && known(from) && holds(from)).then(|| in_stretches(to, from, len)).flatten()
}

/// The same, from one mapping to the next where a range goes on there.
fn in_stretches(mut to: u64, mut from: u64, len: usize) -> Option<()> {
    let mut left = len as u64;
    while left > 0 {
        let now = {
            let memory = memory();
            let stretch = |address| memory.find(address).map_or(left, |_| memory.stretch(address, left));
            stretch(to).min(stretch(from))
        };
        stretch_at(to, from, now as usize)?;
        (to, from, left) = (to + now, from + now, left - now);
    }
    Some(())
}

fn stretch_at(to: u64, from: u64, len: usize) -> Option<()> {
    let place = |address: u64| {
        let memory = memory();
        match memory.bytes(address, len as u64) {
            Some(bytes) => Some((bytes.pointer, Some(bytes))),
            None if memory.find(address).is_none() && !memory.was_reserved(address) => {
                Some((std::ptr::with_exposed_provenance_mut(address as usize), None))
            }
            None => None,
        }
    };
    let (into, out_of) = (place(to)?, place(from)?);
    // SAFETY: the ranges were found, and are kept; a host range that is not pinned is the caller's to vouch for.
    unsafe { std::ptr::copy(out_of.0, into.0, len) };
    Some(())
}

#[derive(Default)]
struct Objects {
    next: usize,
    streams: HashMap<usize, Arc<Stream>>,
    events: HashMap<usize, Arc<Event>>,
}

fn objects<T>(with: impl FnOnce(&mut Objects) -> T) -> T {
    static OBJECTS: Mutex<Option<Objects>> = Mutex::new(None);
    with(OBJECTS.lock().get_or_insert_default())
}

/// The number of a device's default stream, which is made when it is first named.
const DEFAULTS: usize = 0xDEF0_0000;

pub(crate) fn stream(handle: *mut c_void) -> Done<Arc<Stream>> {
    let number = handle.addr();
    if number > 2 {
        return objects(|all| all.streams.get(&number).cloned()).ok_or(INVALID_HANDLE);
    }
    let device = current()?;
    let number = DEFAULTS + device as usize;
    objects(|all| match all.streams.get(&number) {
        Some(stream) => Ok(Arc::clone(stream)),
        None => {
            let stream = Stream::start(device)?;
            all.streams.insert(number, Arc::clone(&stream));
            Ok(stream)
        }
    })
}

fn event(handle: *mut c_void) -> Done<Arc<Event>> {
    objects(|all| all.events.get(&handle.addr()).cloned()).ok_or(INVALID_HANDLE)
}

/// Waits until no stream has anything to do.
pub(crate) fn drain() {
    let streams: Vec<_> = objects(|all| all.streams.values().cloned().collect());
    streams.iter().for_each(|stream| stream.drain());
}

fn number(all: &mut Objects) -> usize {
    all.next += 16;
    0x5EA0_0000 + all.next
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    handle: *mut *mut c_void,
    _flags: c_uint,
    _priority: c_int,
) -> c_int {
    code(begin("cuStreamCreateWithPriority").and_then(|()| {
        let stream = Stream::start(current()?)?;
        let number = objects(|all| {
            let number = number(all);
            all.streams.insert(number, stream);
            number
        });
        // SAFETY: the caller's place.
        unsafe { give(handle, std::ptr::without_provenance_mut(number)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> c_int {
    let stream = objects(|all| all.streams.remove(&handle.addr()));
    let Some(stream) = stream else { return INVALID_HANDLE };
    stream.inner.lock().destroyed = true;
    stream.changed.notify_all();
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> c_int {
    code(begin("cuStreamSynchronize").and_then(|()| {
        stream(handle)?.drain();
        if is_lost() { Err(ILLEGAL_ADDRESS) } else { Ok(()) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(handle: *mut c_void) -> c_int {
    code(begin("cuStreamQuery").and_then(|()| {
        let idle = stream(handle)?.is_idle();
        match (is_lost(), idle) {
            (true, _) => Err(ILLEGAL_ADDRESS),
            (false, true) => Ok(()),
            (false, false) => Err(NOT_READY),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: *mut c_void, waited: *mut c_void, _flags: c_uint) -> c_int {
    code(begin("cuStreamWaitEvent").and_then(|()| {
        let (stream, event) = (stream(handle)?, event(waited)?);
        let which = event.recorded();
        stream.add(Work::Wait(event, which))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> c_int {
    code(begin("cuStreamGetCtx").and_then(|()| {
        let stream = stream(handle)?;
        // SAFETY: the caller's place.
        unsafe { give(context, context_of(stream.device)) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(handle: *mut *mut c_void, _flags: c_uint) -> c_int {
    code(begin("cuEventCreate").and_then(|()| {
        current()?;
        let number = objects(|all| {
            let number = number(all);
            all.events.insert(number, Arc::default());
            number
        });
        // SAFETY: the caller's place.
        unsafe { give(handle, std::ptr::without_provenance_mut(number)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(handle: *mut c_void) -> c_int {
    match objects(|all| all.events.remove(&handle.addr())) {
        Some(_) => 0,
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(handle: *mut c_void, into: *mut c_void) -> c_int {
    code(begin("cuEventRecord").and_then(|()| {
        let (stream, event) = (stream(into)?, event(handle)?);
        let which = event.record();
        stream.add(Work::Record(event, which))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(handle: *mut c_void) -> c_int {
    code(begin("cuEventQuery").and_then(|()| {
        let happened = event(handle)?.has_happened();
        match (is_lost(), happened) {
            (true, _) => Err(ILLEGAL_ADDRESS),
            (false, true) => Ok(()),
            (false, false) => Err(NOT_READY),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(handle: *mut c_void) -> c_int {
    code(begin("cuEventSynchronize").and_then(|()| {
        let event = event(handle)?;
        event.wait(event.recorded());
        if is_lost() { Err(ILLEGAL_ADDRESS) } else { Ok(()) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> c_int {
    code(
        begin("cuLaunchHostFunc")
            .and_then(|()| stream(handle)?.add(Work::Call(function, data.expose_provenance()))),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, handle: *mut c_void) -> c_int {
    code(begin("cuMemcpyAsync").and_then(|()| {
        let stream = stream(handle)?;
        let (to_known, from_known) = {
            let memory = memory();
            // What was freed, and a range that begins in one allocation and leaves it, is wrong at once.
            for address in [to, from] {
                let devices = memory.find(address).is_some() || memory.was_reserved(address);
                if devices && !memory.holds(address, len as u64) {
                    return Err(INVALID_VALUE);
                }
            }
            (memory.find(to).is_some(), memory.find(from).is_some())
        };
        match (to_known, from_known) {
            (_, true) => {
                stream.add(Work::Copy { to, from, len })?;
                if !to_known {
                    stream.drain();
                }
                Ok(())
            }
            (true, false) => {
                let mut bytes = vec![0u8; len];
                // SAFETY: host memory that is not pinned, for which the caller vouches.
                unsafe {
                    let pointer: *const u8 = std::ptr::with_exposed_provenance(from as usize);
                    std::ptr::copy_nonoverlapping(pointer, bytes.as_mut_ptr(), len);
                }
                stream.add(Work::CopyTaken { to, bytes })
            }
            (false, false) => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: u8, len: usize, handle: *mut c_void) -> c_int {
    code(begin("cuMemsetD8Async").and_then(|()| {
        if !memory().holds(to, len as u64) {
            return Err(INVALID_VALUE);
        }
        stream(handle)?.add(Work::Fill { to, value, len })
    }))
}
