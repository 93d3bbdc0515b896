//! What goes into streams: collectives, messages, puts and signals.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::comm::{Comm, finish, next_round};
use crate::driver::driver;
use crate::element::{self, How};
use crate::settings::*;

/// Pinned memory, and whether no stream uses it.
struct Staging {
    address: usize,
    len: usize,
    done: Arc<AtomicBool>,
}

static STAGED: Mutex<Vec<Staging>> = Mutex::new(Vec::new());

/// Pinned memory for one call, which a later one uses again. It is never freed: that would wait for streams, and those for ranks.
fn stage(len: usize) -> Done<(usize, Arc<AtomicBool>)> {
    let mut staged = STAGED.lock();
    let fits = |one: &&Staging| one.len >= len && one.done.load(Ordering::Acquire);
    if let Some(one) = staged.iter().find(fits) {
        one.done.store(false, Ordering::Release);
        return Ok((one.address, Arc::clone(&one.done)));
    }
    let (address, done) = (driver()?.allocate_host(len)?, Arc::new(AtomicBool::new(false)));
    staged.push(Staging { address, len, done: Arc::clone(&done) });
    Ok((address, done))
}

fn bytes(address: usize, len: usize) -> Vec<u8> {
    // SAFETY: pinned memory of at least that length, which only this call uses.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) }.to_vec()
}

fn put_bytes(address: usize, from: &[u8]) {
    // SAFETY: as above.
    unsafe {
        std::ptr::copy_nonoverlapping(
            from.as_ptr(),
            std::ptr::with_exposed_provenance_mut(address),
            from.len(),
        )
    };
}

/// Takes `sent` bytes to the host, lets `work` make `received` of them there, and brings those back: all in the stream.
fn round_trip(
    stream: *mut c_void,
    (send, sent): (*const c_void, usize),
    (recv, received): (*mut c_void, usize),
    work: impl FnOnce(Vec<u8>) -> Option<Vec<u8>> + Send + 'static,
) -> Done {
    let (driver, stream) = (driver()?, stream.addr());
    let (staging, done) = stage(sent.max(received))?;
    driver.copy(staging as u64, send.addr() as u64, sent, stream)?;
    driver.call(stream, move || {
        if let Some(made) = work(bytes(staging, sent)) {
            put_bytes(staging, &made[..received.min(made.len())]);
        }
    })?;
    driver.copy(recv.addr() as u64, staging as u64, received, stream)?;
    driver.call(stream, move || done.store(true, Ordering::Release))
}

/// Makes a rank's bytes of every rank's: rank, bytes of a block, root.
type Make = fn(&[Vec<u8>], usize, usize, usize) -> Vec<u8>;

/// What a collective gives and takes on this rank, in blocks.
struct Shape {
    sent: usize,
    received: usize,
    op: Option<c_int>,
    make: Make,
    root: usize,
}

#[allow(clippy::too_many_arguments, reason = "a foreign function's")]
fn collective(
    shape: impl FnOnce(usize, usize) -> Shape,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    raw: *mut c_void,
    stream: *mut c_void,
    name: &'static str,
) -> Done {
    begin(name)?;
    let comm = Comm::ready(raw)?;
    let block = element::size(datatype).ok_or(INVALID_ARGUMENT)? * count;
    let (rank, size) = (comm.rank, comm.team.size);
    let Shape { sent, received, op, make, root, .. } = shape(rank, size);
    if root >= size {
        return Err(INVALID_ARGUMENT);
    }
    let how = match op {
        Some(op @ 0..=4) => How::Plain(op),
        Some(op) => comm.lock().ops.get(&op).cloned().ok_or(INVALID_ARGUMENT)?,
        None => How::Plain(0),
    };
    let round = next_round(&comm);
    if settings().is_stuck(name) {
        let team = Arc::clone(&comm.team);
        return driver()?.call(stream.addr(), move || {
            team.wait(rank, |_| None::<()>);
        });
    }
    round_trip(stream, (send, sent * block), (recv, received * block), move |mut mine| {
        how.scaled(datatype, &mut mine);
        let all = comm.team.exchange(round, rank, mine)?;
        let all = if op.is_some() { vec![element::combine(&how, datatype, &all)] } else { all };
        Some(make(&all, rank, block, root))
    })
}

fn whole(all: &[Vec<u8>], _: usize, _: usize, _: usize) -> Vec<u8> {
    all.concat()
}

fn own_block(all: &[Vec<u8>], rank: usize, block: usize, root: usize) -> Vec<u8> {
    let from = if all.len() == 1 { &all[0] } else { &all[root] };
    from[rank * block..(rank + 1) * block].to_vec()
}

fn from_root(all: &[Vec<u8>], _: usize, _: usize, root: usize) -> Vec<u8> {
    all[root].clone()
}

fn transposed(all: &[Vec<u8>], rank: usize, block: usize, _: usize) -> Vec<u8> {
    all.iter().flat_map(|one| one[rank * block..(rank + 1) * block].to_vec()).collect()
}

macro_rules! collectives {
    ($($name:ident($($op:ident)?; $($root:ident)?) = |$rank:ident, $size:ident| ($sent:expr, $received:expr), $make:ident;)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            datatype: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> c_int {
            let name = stringify!($name);
            #[allow(unused_mut, unused_assignments, reason = "some have neither")]
            let (mut reduces, mut rooted) = (None, 0usize);
            $(reduces = Some($op);)?
            $(rooted = $root as usize;)?
            let shape = |$rank: usize, $size: usize| {
                let is_root = $rank == rooted;
                let _ = (is_root, $size);
                Shape {
                    sent: collectives!(@side is_root, $size, $sent),
                    received: collectives!(@side is_root, $size, $received),
                    op: reduces,
                    make: $make,
                    root: rooted,
                }
            };
            finish(collective(shape, send, recv, count, datatype, comm, stream, name))
        })*
    };
    (@side $is_root:ident, $size:ident, $side:expr) => {{
        let side: fn(bool, usize) -> usize = $side;
        side($is_root, $size)
    }};
}

fn one(_: bool, _: usize) -> usize {
    1
}

fn all(_: bool, size: usize) -> usize {
    size
}

fn root_one(is_root: bool, _: usize) -> usize {
    usize::from(is_root)
}

fn root_all(is_root: bool, size: usize) -> usize {
    if is_root { size } else { 0 }
}

collectives! {
    ncclAllReduce(op;) = |rank, size| (one, one), whole;
    ncclReduce(op; root) = |rank, size| (one, root_one), whole;
    ncclBroadcast(; root) = |rank, size| (root_one, one), from_root;
    ncclAllGather(;) = |rank, size| (one, all), whole;
    ncclReduceScatter(op;) = |rank, size| (all, one), own_block;
    ncclAlltoAll(;) = |rank, size| (all, all), transposed;
    ncclGather(; root) = |rank, size| (one, root_all), whole;
    ncclScatter(; root) = |rank, size| (root_all, one), own_block;
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    finish(begin("ncclSend").and_then(|()| {
        let comm = Comm::ready(comm)?;
        let len = element::size(datatype).ok_or(INVALID_ARGUMENT)? * count;
        round_trip(stream, (send, len), (std::ptr::null_mut(), 0), move |mine| {
            let way = (comm.rank, peer as usize);
            comm.team.change(|state| state.mail.entry(way).or_default().push_back(mine));
            None
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    finish(begin("ncclRecv").and_then(|()| {
        let comm = Comm::ready(comm)?;
        let len = element::size(datatype).ok_or(INVALID_ARGUMENT)? * count;
        round_trip(stream, (std::ptr::null(), 0), (recv, len), move |_| {
            let way = (peer as usize, comm.rank);
            comm.team.wait(comm.rank, |state| state.mail.get_mut(&way)?.pop_front())
        })
    }))
}

fn raise(comm: Arc<Comm>, peer: usize, context: c_int, index: c_int, stream: *mut c_void) -> Done {
    driver()?.call(stream.addr(), move || {
        let counter = (comm.rank, peer, context, index);
        comm.team.change(|state| *state.signals.entry(counter).or_default() += 1);
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclPutSignal(
    from: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    window: *mut c_void,
    offset: usize,
    index: c_int,
    context: c_int,
    _flags: c_uint,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    finish(begin("ncclPutSignal").and_then(|()| {
        let comm = Comm::ready(comm)?;
        let len = element::size(datatype).ok_or(INVALID_ARGUMENT)? * count;
        let known = comm.lock().windows.get(&window.addr()).copied();
        let (_, _, _, number) = known.ok_or(INVALID_ARGUMENT)?;
        let at = from.addr() as u64;
        let symmetric = comm
            .lock()
            .windows
            .values()
            .any(|(start, len, flags, _)| flags & 1 != 0 && at >= *start && at < start + *len as u64);
        if count > 0 && !symmetric {
            return Err(INVALID_ARGUMENT);
        }
        let target =
            comm.team.lock().windows.get(&number).and_then(|ranks| ranks.get(&(peer as usize)).copied());
        let (start, whole) = target.ok_or(INVALID_ARGUMENT)?;
        if offset + len > whole {
            return Err(CUDA);
        }
        driver()?.copy(start + offset as u64, at, len, stream.addr())?;
        raise(comm, peer as usize, context, index, stream)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn ncclSignal(
    peer: c_int,
    index: c_int,
    context: c_int,
    _flags: c_uint,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    finish(
        begin("ncclSignal").and_then(|()| raise(Comm::ready(comm)?, peer as usize, context, index, stream)),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclWaitSignal(
    count: c_int,
    wanted: *const [c_int; 4],
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    finish(begin("ncclWaitSignal").and_then(|()| {
        if count < 1 {
            return Err(INVALID_ARGUMENT);
        }
        let comm = Comm::ready(comm)?;
        // SAFETY: the caller passes that many descriptions.
        let wanted = unsafe { std::slice::from_raw_parts(wanted, count as usize) };
        let mut levels = Vec::new();
        for [count, peer, index, context] in wanted.iter().copied() {
            let mut state = comm.lock();
            let level = state.awaited.entry((peer as usize, context, index)).or_default();
            *level += count as u64;
            levels.push(((peer as usize, comm.rank, context, index), *level));
        }
        driver()?.call(stream.addr(), move || {
            comm.team.wait(comm.rank, |state| {
                let come =
                    |(counter, level): &(_, u64)| state.signals.get(counter).is_some_and(|now| now >= level);
                levels.iter().all(come).then_some(())
            });
        })
    }))
}
