//! Communicators: how they come to be, how they end, and what is registered with them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use crate::driver::driver;
use crate::element::How;
use crate::settings::*;
use crate::team::Team;

/// The id of a group, passed by value.
#[repr(C)]
struct Id([u8; 128]);

/// A place of the caller's into which a handle is written.
#[derive(Clone, Copy)]
struct Out(*mut *mut c_void);

// SAFETY: NCCL writes there from threads of its own; the caller keeps the place until then.
unsafe impl Send for Out {}

impl Out {
    fn write(self, handle: usize) {
        // SAFETY: the caller's promise.
        unsafe { *self.0 = ptr::with_exposed_provenance_mut(handle) };
    }
}

pub(crate) struct Comm {
    pub(crate) team: Arc<Team>,
    pub(crate) rank: usize,
    blocking: bool,
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Until when it is in progress; `None` within for ever.
    busy: Option<Option<Instant>>,
    /// What is written when it is not any more.
    filling: Vec<(Out, usize)>,
    finalized: bool,
    pub(crate) revoked: bool,
    buffers: HashMap<usize, (u64, usize)>,
    pub(crate) windows: HashMap<usize, (u64, usize, c_int, u64)>,
    next_window: u64,
    pub(crate) ops: HashMap<c_int, How>,
    pub(crate) round: u64,
    /// The group that is being made of this one, and the rank in it.
    adopting: Option<(Arc<Team>, usize)>,
    pub(crate) awaited: HashMap<(usize, i32, i32), u64>,
}

static NEXT: AtomicU64 = AtomicU64::new(1);

fn fresh() -> usize {
    (NEXT.fetch_add(1, Ordering::Relaxed) as usize) << 8
}

fn comms() -> MutexGuard<'static, HashMap<usize, Arc<Comm>>> {
    static COMMS: OnceLock<Mutex<HashMap<usize, Arc<Comm>>>> = OnceLock::new();
    COMMS.get_or_init(Mutex::default).lock()
}

/// Memory of `ncclMemAlloc`: address and length.
fn allocated() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    static MEMORY: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());
    MEMORY.lock()
}

impl Comm {
    /// The communicator of a handle; one that has ended is refused.
    pub(crate) fn of(raw: *mut c_void) -> Done<Arc<Comm>> {
        comms().get(&raw.addr()).cloned().ok_or(INVALID_ARGUMENT)
    }

    /// The communicator, for a call that needs it to be ready.
    pub(crate) fn ready(raw: *mut c_void) -> Done<Arc<Comm>> {
        let comm = Comm::of(raw)?;
        if comm.settle() || comm.lock().finalized {
            return Err(INVALID_ARGUMENT);
        }
        if comm.lock().revoked { Err(INVALID_USAGE) } else { Ok(comm) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn add(team: Arc<Team>, rank: usize, blocking: bool) -> (usize, Arc<Comm>) {
        let comm = Arc::new(Comm { team, rank, blocking, state: Mutex::default() });
        let handle = fresh();
        comms().insert(handle, Arc::clone(&comm));
        (handle, comm)
    }

    /// Ends what this rank waits for, also in a group that is being made.
    fn stop(&self) {
        self.team.stop(self.rank);
        if let Some((team, rank)) = self.lock().adopting.take() {
            team.stop(rank);
        }
    }

    /// Ends a call: at once, or later on a communicator that does not block.
    fn end(&self, call: &'static str, out: Option<(Out, usize)>) -> Done {
        let stuck = settings().is_stuck(call);
        if self.blocking {
            if stuck && self.team.wait(self.rank, |_| None::<()>).is_none() {
                return Err(REMOTE);
            }
            if let Some((place, handle)) = out {
                place.write(handle);
            }
            return Ok(());
        }
        let mut state = self.lock();
        state.busy = Some((!stuck).then(|| Instant::now() + settings().delay));
        state.filling.extend(out);
        Err(IN_PROGRESS)
    }

    /// Whether it is still in progress; writes what was waited for where it is not.
    fn settle(&self) -> bool {
        let alone = self.team.lock().joined.len() < self.team.size;
        let mut state = self.lock();
        match state.busy {
            None => alone,
            Some(Some(until)) if !alone && Instant::now() >= until => {
                state.busy = None;
                for (place, handle) in std::mem::take(&mut state.filling) {
                    place.write(handle);
                }
                false
            }
            Some(_) => true,
        }
    }
}

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static DEFERRED: RefCell<Vec<Box<dyn FnOnce() -> Done>>> = const { RefCell::new(Vec::new()) };
    static FAILED: Cell<c_int> = const { Cell::new(0) };
}

/// Runs a call now or at the end of the group.
fn grouped(work: impl FnOnce() -> Done + 'static) -> Done {
    if DEPTH.get() == 0 {
        return work();
    }
    DEFERRED.with_borrow_mut(|deferred| deferred.push(Box::new(work)));
    Ok(())
}

/// A call's end; an error inside a group is also the group's.
pub(crate) fn finish(done: Done) -> c_int {
    let code = code(done);
    if code != 0 && code != IN_PROGRESS && DEPTH.get() > 0 && FAILED.get() == 0 {
        FAILED.set(code);
    }
    code
}

#[unsafe(no_mangle)]
extern "C" fn towline_fake_nccl() -> c_int {
    1
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for one number.
    unsafe { *version = settings().version };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut [u8; 128]) -> c_int {
    code(begin("ncclGetUniqueId").map(|()| {
        let mut bytes = [0; 128];
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        bytes[..8].copy_from_slice(&(time.as_nanos() as u64 ^ fresh() as u64).to_ne_bytes());
        // The family of the address of the one who waits.
        bytes[8..10].copy_from_slice(&2u16.to_ne_bytes());
        bytes[16..20].copy_from_slice(&std::process::id().to_ne_bytes());
        // SAFETY: the caller passes a place for one id.
        unsafe { *id = bytes };
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        0 => c"no error",
        CUDA => c"unhandled cuda error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"another error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: *mut c_void) -> *const c_char {
    c"the fake has nothing to add".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    nranks: c_int,
    id: Id,
    rank: c_int,
    config: *const [u32; 5],
) -> c_int {
    const CALL: &str = "ncclCommInitRankConfig";
    let init = || {
        begin(CALL)?;
        let (size, rank) = (nranks as usize, rank as usize);
        if nranks < 1 || rank >= size {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: size, magic, version and the first setting, which is whether it blocks.
        let blocking = unsafe { (*config)[4] } != 0;
        let team = Team::of_id(&id.0, size);
        let taken = !team.lock().joined.insert(rank);
        if taken || team.size != size {
            return Err(INVALID_USAGE);
        }
        team.change(|_| {});
        let (handle, comm) = Comm::add(Arc::clone(&team), rank, blocking);
        Out(out).write(handle);
        if blocking && team.wait(rank, |state| (state.joined.len() == size).then_some(())).is_none() {
            return Err(REMOTE);
        }
        comm.end(CALL, None)
    };
    finish(init())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut c_void, state: *mut c_int) -> c_int {
    code(begin("ncclCommGetAsyncError").and_then(|()| {
        let busy = Comm::of(comm)?.settle();
        // SAFETY: the caller passes a place for one number.
        unsafe { *state = if busy { IN_PROGRESS } else { 0 } };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: *mut c_void) -> c_int {
    const CALL: &str = "ncclCommFinalize";
    finish(begin(CALL).and_then(|()| {
        let comm = Comm::ready(comm)?;
        comm.lock().finalized = true;
        comm.end(CALL, None)
    }))
}

fn remove(raw: *mut c_void) -> Done {
    comms().remove(&raw.addr()).map(drop).ok_or(INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: *mut c_void) -> c_int {
    finish(begin("ncclCommDestroy").and_then(|()| {
        if Comm::of(comm)?.settle() {
            return Err(INVALID_ARGUMENT);
        }
        remove(comm)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: *mut c_void) -> c_int {
    code(begin("ncclCommAbort").and_then(|()| {
        Comm::of(comm)?.stop();
        remove(comm)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommRevoke(comm: *mut c_void, flags: c_int) -> c_int {
    code(begin("ncclCommRevoke").and_then(|()| {
        let comm = Comm::of(comm)?;
        if flags != 0 || std::mem::replace(&mut comm.lock().revoked, true) {
            return Err(INVALID_ARGUMENT);
        }
        comm.stop();
        comm.lock().busy = None;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommSplit(
    comm: *mut c_void,
    color: c_int,
    key: c_int,
    out: *mut *mut c_void,
    config: *const [u32; 5],
) -> c_int {
    const CALL: &str = "ncclCommSplit";
    let split = || {
        begin(CALL)?;
        let parent = Comm::ready(comm)?;
        let round = next_round(&parent);
        let mine = [color.to_ne_bytes(), key.to_ne_bytes()].concat();
        let all = parent.team.exchange(round, parent.rank, mine).ok_or(REMOTE)?;
        let word = |bytes: &[u8]| c_int::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let mut members: Vec<(c_int, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, said)| word(said) == color)
            .map(|(rank, said)| (word(&said[4..]), rank))
            .collect();
        members.sort_unstable();
        if color < 0 {
            return parent.end(CALL, None);
        }
        let rank = members.iter().position(|(_, rank)| *rank == parent.rank).ok_or(INVALID_USAGE)?;
        // SAFETY: as for init.
        let blocking = unsafe { (*config)[4] } != 0;
        let team = parent.team.child(round, color.into(), members.len());
        parent.end(CALL, Some((Out(out), adopt(&parent, team, rank, blocking)?)))
    };
    finish(split())
}

/// A rank of a group that was made of another; where it blocks, the others have come too.
fn adopt(parent: &Comm, team: Arc<Team>, rank: usize, blocking: bool) -> Done<usize> {
    parent.lock().adopting = Some((Arc::clone(&team), rank));
    team.change(|state| {
        state.joined.insert(rank);
    });
    let size = team.size;
    let come = !blocking || team.wait(rank, |state| (state.joined.len() == size).then_some(())).is_some();
    parent.lock().adopting = None;
    if !come {
        return Err(REMOTE);
    }
    Ok(Comm::add(team, rank, blocking).0)
}

pub(crate) fn next_round(comm: &Comm) -> u64 {
    let mut state = comm.lock();
    state.round += 1;
    state.round
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommShrink(
    comm: *mut c_void,
    exclude: *const c_int,
    count: c_int,
    out: *mut *mut c_void,
    config: *const [u32; 5],
    _flags: c_int,
) -> c_int {
    const CALL: &str = "ncclCommShrink";
    let shrink = || {
        begin(CALL)?;
        let parent = Comm::of(comm)?;
        // SAFETY: the caller passes that many ranks.
        let exclude = unsafe { std::slice::from_raw_parts(exclude, count as usize) };
        let survivors: Vec<usize> =
            (0..parent.team.size).filter(|rank| !exclude.contains(&(*rank as c_int))).collect();
        let rank = survivors.iter().position(|rank| *rank == parent.rank);
        let rank = rank.filter(|_| count > 0).ok_or(INVALID_ARGUMENT)?;
        // SAFETY: as for init.
        let blocking = unsafe { (*config)[4] } != 0;
        let team = parent.team.child(u64::MAX, i64::from(exclude[0]), survivors.len());
        parent.end(CALL, Some((Out(out), adopt(&parent, team, rank, blocking)?)))
    };
    finish(shrink())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCount(comm: *mut c_void, count: *mut c_int) -> c_int {
    code(Comm::of(comm).map(|comm| {
        // SAFETY: the caller passes a place for one number.
        unsafe { *count = comm.team.size as c_int };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommUserRank(comm: *mut c_void, rank: *mut c_int) -> c_int {
    code(Comm::of(comm).map(|comm| {
        // SAFETY: the caller passes a place for one number.
        unsafe { *rank = comm.rank as c_int };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommRegister(
    comm: *mut c_void,
    address: *mut c_void,
    len: usize,
    handle: *mut *mut c_void,
) -> c_int {
    finish(begin("ncclCommRegister").and_then(|()| {
        let comm = Comm::ready(comm)?;
        let made = fresh();
        comm.lock().buffers.insert(made, (address.addr() as u64, len));
        Out(handle).write(made);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDeregister(comm: *mut c_void, handle: *mut c_void) -> c_int {
    code(begin("ncclCommDeregister").and_then(|()| {
        let comm = Comm::of(comm)?;
        if handle.is_null() {
            return Ok(());
        }
        comm.lock().buffers.remove(&handle.addr()).map(drop).ok_or(INVALID_USAGE)
    }))
}

fn in_allocation(address: u64, len: usize) -> bool {
    let known = allocated();
    let found = known.range(..=address).next_back();
    found.is_some_and(|(start, whole)| address + len as u64 <= start + *whole as u64)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommWindowRegister(
    comm: *mut c_void,
    address: *mut c_void,
    len: usize,
    out: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    const CALL: &str = "ncclCommWindowRegister";
    let register = || {
        begin(CALL)?;
        let comm = Comm::ready(comm)?;
        let address = address.addr() as u64;
        let fits = in_allocation(address, len) || driver()?.is_created(address);
        if len == 0 || !address.is_multiple_of(4096) || !fits {
            return Err(INVALID_ARGUMENT);
        }
        let out = Out(out);
        grouped(move || {
            if !settings().windows {
                return comm.end(CALL, Some((out, 0)));
            }
            let handle = fresh();
            let number = {
                let mut state = comm.lock();
                state.next_window += 1;
                let number = state.next_window;
                state.windows.insert(handle, (address, len, flags, number));
                number
            };
            comm.team.change(|state| {
                state.windows.entry(number).or_default().insert(comm.rank, (address, len));
            });
            comm.end(CALL, Some((out, handle)))
        })
    };
    finish(register())
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommWindowDeregister(comm: *mut c_void, handle: *mut c_void) -> c_int {
    code(begin("ncclCommWindowDeregister").and_then(|()| {
        let comm = Comm::of(comm)?;
        if handle.is_null() {
            return Ok(());
        }
        comm.lock().windows.remove(&handle.addr()).map(drop).ok_or(INVALID_USAGE)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetPeerDevicePointer(
    window: *mut c_void,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> c_int {
    code(begin("ncclGetPeerDevicePointer").and_then(|()| {
        let find = |comm: &Arc<Comm>| {
            let (_, _, _, number) = comm.lock().windows.get(&window.addr()).copied()?;
            Some((Arc::clone(comm), number))
        };
        let (comm, number) = comms().values().find_map(find).ok_or(INVALID_ARGUMENT)?;
        let memory = comm.team.lock().windows.get(&number).and_then(|all| all.get(&(peer as usize)).copied());
        let (start, len) = memory.ok_or(INVALID_ARGUMENT)?;
        if offset >= len {
            return Err(INVALID_ARGUMENT);
        }
        // As where the other rank is on another host.
        let mapped = settings().mapped;
        Out(out).write(if mapped { start as usize + offset } else { 0 });
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclMemAlloc(address: *mut *mut c_void, len: usize) -> c_int {
    code(begin("ncclMemAlloc").and_then(|()| {
        let whole = len.next_multiple_of(2 << 20);
        let made = driver()?.allocate(whole)?;
        allocated().insert(made, whole);
        Out(address).write(made as usize);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemFree(address: *mut c_void) -> c_int {
    code(begin("ncclMemFree").and_then(|()| {
        let address = address.addr() as u64;
        allocated().remove(&address).ok_or(INVALID_ARGUMENT)?;
        driver()?.free(address)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *const c_void,
    datatype: c_int,
    _residence: c_int,
    comm: *mut c_void,
) -> c_int {
    finish(begin("ncclRedOpCreatePreMulSum").and_then(|()| {
        let size = crate::element::size(datatype).ok_or(INVALID_ARGUMENT)?;
        // SAFETY: the caller passes one element.
        let bytes = unsafe { std::slice::from_raw_parts(scalar.cast::<u8>(), size) }.to_vec();
        let comm = Comm::ready(comm)?;
        let made = 5 + (fresh() >> 8) as c_int;
        comm.lock().ops.insert(made, How::Scaled(bytes));
        // SAFETY: the caller passes a place for one number.
        unsafe { *op = made };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclRedOpDestroy(op: c_int, comm: *mut c_void) -> c_int {
    code(
        begin("ncclRedOpDestroy")
            .and_then(|()| Comm::of(comm)?.lock().ops.remove(&op).map(drop).ok_or(INVALID_ARGUMENT)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    code(begin("ncclGroupStart").map(|()| DEPTH.set(DEPTH.get() + 1)))
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    let end = || {
        let asked = begin("ncclGroupEnd");
        let depth = DEPTH.get().checked_sub(1).ok_or(INVALID_USAGE)?;
        DEPTH.set(depth);
        if depth > 0 {
            return Ok(());
        }
        let jobs = DEFERRED.with_borrow_mut(std::mem::take);
        let failed = FAILED.replace(0);
        asked?;
        if failed != 0 {
            return Err(failed);
        }
        let mut outcome = Ok(());
        for job in jobs {
            outcome = outcome.and(job());
        }
        outcome
    };
    code(end())
}
