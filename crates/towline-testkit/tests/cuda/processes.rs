//! GPU memory between processes that are killed, stopped and that take their memory back at random moments.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use towline::connect::{Connector, Descriptor, Descriptors, OperationStatus};
use towline::cuda::{Mark, StreamHandle};
use towline::memory::{DeviceStorage, Storage};
use towline::{Access, Endpoint, Kind, Layout, Limits, MemoryDescription, Registered, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, watch};
use towline_testkit::worker::storage;

use super::{driver, here};

const STALL: Duration = Duration::from_secs(3);
const MIB: usize = 1 << 20;
const LEN: usize = 8 * MIB;
const BLOCK: u64 = 4096;
const GONE: [Kind; 3] = [Kind::Disconnected, Kind::Stale, Kind::Timeout];

fn endpoint(name: &str) -> Endpoint {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    Endpoint::options(name).limits(limits).open().unwrap()
}

fn local(endpoint: &Endpoint, kind: &str) -> Registered<Arc<dyn Storage>> {
    endpoint.register(storage(LEN, kind).unwrap(), Access::NONE).unwrap()
}

/// All blocks of a region, shuffled.
fn shuffled(random: &mut Random) -> Vec<u32> {
    let mut indices: Vec<u32> = (0..(LEN as u64 / BLOCK) as u32).collect();
    random.shuffle(&mut indices);
    indices
}

pub(crate) fn a_killed_owner_ends_paged_copies_and_the_context_stays_usable() {
    if !driver("a_killed_owner_ends_paged_copies_and_the_context_stays_usable") {
        return;
    }
    let _watchdog = watch("gpu: a killed owner", Duration::from_secs(120));
    let mut random = Random::new(31);
    let user = endpoint("user");
    let pages = Layout::contiguous(LEN as u64, BLOCK).unwrap();
    for round in 0..8u16 {
        let stamp = Stamp::new(1, round);
        let mut owner = Process::open("victim", "");
        owner
            .must(&format!("register {LEN} {} read+write", ["device", "exportable"][usize::from(round % 2)]));
        owner.must(&format!("fill 1 {} {}", stamp.region, stamp.generation));
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing("cuda")).unwrap();
        let buffer = local(&user, ["device", "system"][usize::from(round / 2 % 2)]);
        let ids = shuffled(&mut random);
        let start =
            |_| user.read(&remote, &buffer).blocks(&pages, &ids[..], &pages, &ids[..]).start().unwrap();
        let transfers: Vec<_> = (0..4).map(start).collect();
        thread::sleep(random.micros(2000));
        owner.kill_without_waiting();
        for transfer in &transfers {
            match transfer.wait_for(STALL * 10).expect("it ends") {
                Ok(()) => {}
                Err(error) => assert!(GONE.contains(&error.kind()), "round {round}: {error}"),
            }
            assert!(transfer.wait_quiet(STALL * 10));
        }
        let dead =
            eventually(STALL * 10, || outcome(user.read(&remote, &buffer).at(0, 0, 8).start()).is_err());
        assert!(dead, "round {round}: a dead owner still gives bytes");
        let error = outcome(user.read(&remote, &buffer).start()).unwrap_err();
        assert!(GONE.contains(&error.kind()), "round {round}: {error}");
        // The context is as good as before.
        let mine = Stamp::new(99, round);
        mine.fill_storage(buffer.storage()).unwrap();
        mine.verify_storage(buffer.storage(), 0, LEN).unwrap();
        owner.kill();
    }
}

pub(crate) fn memory_in_many_parts_is_opened_side_by_side() {
    if !driver("memory_in_many_parts_is_opened_side_by_side") {
        return;
    }
    let _watchdog = watch("gpu: memory in parts", Duration::from_secs(120));
    // More parts than descriptors go along with one reply.
    const MANY: usize = 40 * MIB + 12_345;
    let user = endpoint("user");
    let mut owner = Process::open("owner", "");
    let local = user.register(storage(MANY, "device").unwrap(), Access::NONE).unwrap();
    for round in 0..3u16 {
        // The second time the parts are others, at addresses that may be the same.
        let stamp = Stamp::new(5, round);
        let id = owner.must(&format!("register {MANY} segments read+write")).number(0);
        owner.must(&format!("fill {id} {} {}", stamp.region, stamp.generation));
        let ticket: Ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing("cuda")).unwrap();
        user.read(&remote, &local).start().unwrap().wait().unwrap();
        stamp.verify_storage(local.storage(), 0, MANY).unwrap();
        let mine = Stamp::new(6, round);
        mine.fill_storage(local.storage()).unwrap();
        user.write(&remote, &local).start().unwrap().wait().unwrap();
        owner.must(&format!("check {id} {} {} 0 {MANY}", mine.region, mine.generation));
        drop(remote);
        owner.must(&format!("deregister {id} 30000"));
    }
}

pub(crate) fn bytes_with_checksums_go_between_gpus_over_sockets() {
    if !driver("bytes_with_checksums_go_between_gpus_over_sockets") {
        return;
    }
    let _watchdog = watch("gpu: checksums", Duration::from_secs(120));
    let mut random = Random::new(35);
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    let user = Endpoint::options("user").limits(limits).checksums(true).open().unwrap();
    let mut owner = Process::open("owner", "");
    let (poison, theirs) = (Stamp::new(9, 9), Stamp::new(5, 1));
    // Memory of a GPU on either side, and on both.
    let pairs = [("tcp", "device", "device"), ("unix", "exportable", "system"), ("tcp", "system", "device")];
    for (path, far, near) in pairs {
        let id = owner.must(&format!("register {LEN} {far} read+write")).number(0);
        let ticket: Ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing(path)).unwrap();
        let local = local(&user, near);
        // From one byte to several slots, at any offset: what one request carries has one checksum, and what many do has many.
        for most in [1, 100, 5000, 300_000, 3 * MIB, LEN] {
            let len = random.below(most as u64) as usize + 1;
            let (from, to) = (random.below((LEN - len) as u64 + 1), random.below((LEN - len) as u64 + 1));
            owner.must(&format!("fill {id} {} {}", theirs.region, theirs.generation));
            poison.fill_storage(local.storage()).unwrap();
            outcome(user.read(&remote, &local).at(from, to, len as u64).start()).unwrap();
            let (mut bytes, mut wanted) = (vec![0; LEN], vec![0; LEN]);
            towline::memory::MemoryAccess::read_at(local.storage(), 0, &mut bytes).unwrap();
            poison.fill(0, &mut wanted);
            theirs.fill(from, &mut wanted[to as usize..to as usize + len]);
            assert!(bytes == wanted, "{path}: {len} bytes from {from} to {to}");

            outcome(user.write(&remote, &local).at(from, to, len as u64).start()).unwrap();
            let taken = owner.must(&format!("take {id} 0 {LEN}")).payload;
            theirs.fill(0, &mut wanted);
            assert!(taken == wanted, "{path}: what was read is written where it was");
            poison.fill_storage(local.storage()).unwrap();
            outcome(user.write(&remote, &local).at(from, to, len as u64).start()).unwrap();
            let taken = owner.must(&format!("take {id} 0 {LEN}")).payload;
            poison.fill(to, &mut wanted[from as usize..from as usize + len]);
            assert!(taken == wanted, "{path}: {len} bytes of {to} to {from}");
        }
        drop(remote);
        owner.must(&format!("deregister {id} 30000"));
    }
}

pub(crate) fn a_write_to_a_gpu_over_tcp_that_is_given_up_is_not_quiet() {
    if !driver("a_write_to_a_gpu_over_tcp_that_is_given_up_is_not_quiet") {
        return;
    }
    let _watchdog = watch("gpu: a write that is given up", Duration::from_secs(120));
    let limits = Limits { no_progress: Duration::from_millis(300), ..Limits::default() };
    let user = Endpoint::options("user").limits(limits).open().unwrap();
    let from = local(&user, "system");
    // One that does not give up before it learns of a death, however busy the machine is.
    let patient = endpoint("patient");
    let theirs = local(&patient, "system");
    // Of host memory the owner's look at its peer and the copy are one step: nothing lands behind the end.
    for (kind, quiet) in [("device", false), ("system", true)] {
        let mut owner = Process::open("owner", "");
        owner.must(&format!("register {LEN} {kind} read+write"));
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing("tcp")).unwrap();
        outcome(user.write(&remote, &from).start()).unwrap();
        owner.stop();
        let write = user.write(&remote, &from).start().unwrap();
        let error = write.wait().unwrap_err();
        assert!(GONE.contains(&error.kind()), "{error}");
        assert_eq!(write.wait_quiet(Duration::from_millis(100)), quiet, "{kind}: {error}");
        owner.resume();
        owner.must("ticket 1");
        // One that has exited is in the middle of nothing.
        let remote = patient.import_with(&ticket, &routing("tcp")).unwrap();
        owner.stop();
        let write = patient.write(&remote, &theirs).start().unwrap();
        owner.kill();
        write.wait().unwrap_err();
        assert!(write.quiet(), "{kind}: the owner is gone");
    }
}

pub(crate) fn a_killed_user_does_not_hold_the_owners_gpu_memory() {
    if !driver("a_killed_user_does_not_hold_the_owners_gpu_memory") {
        return;
    }
    let _watchdog = watch("gpu: a killed user", Duration::from_secs(120));
    let mut random = Random::new(32);
    let owner = endpoint("owner");
    for round in 0..8u16 {
        let stamp = Stamp::new(2, round);
        let memory = storage(LEN, "device").unwrap();
        stamp.fill_storage(&memory).unwrap();
        let watched = Arc::downgrade(&memory);
        let region = owner.register(memory, Access::READ_WRITE).unwrap();
        let mut user = Process::open("victim", "");
        user.must(&format!("register {LEN} {} none", ["device", "system"][usize::from(round % 2)]));
        user.must("fill 1 98 98");
        let imported = user.must(&format!("import {} cuda", region.ticket().unwrap()));
        assert_eq!(imported.text(1), "cuda");
        let op = if round % 2 == 0 { "write" } else { "read" };
        user.must(&format!("loop {op} {} 1 {LEN} {BLOCK}", imported.number(0)));
        thread::sleep(random.micros(8000));
        user.kill_without_waiting();
        if round % 4 == 3 {
            drop(region);
            let freed =
                eventually(STALL * 10, || watched.strong_count() == 0 && owner.stats().parked == (0, 0));
            assert!(freed, "round {round}: {:?}", owner.stats());
            continue;
        }
        let memory = region
            .into_storage_within(STALL * 10)
            .unwrap_or_else(|pinned| panic!("round {round}: {}", pinned.error));
        let mine = Stamp::new(97, round);
        mine.fill_storage(&memory).unwrap();
        user.kill();
        thread::sleep(random.micros(2000));
        mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
    }
}

pub(crate) fn a_stopped_user_keeps_the_memory_that_it_has_open_and_lets_go_when_it_goes_on() {
    if !driver("a_stopped_user_keeps_the_memory_that_it_has_open_and_lets_go_when_it_goes_on") {
        return;
    }
    let _watchdog = watch("gpu: a stopped user", Duration::from_secs(60));
    let owner = endpoint("owner");
    let memory = storage(LEN, "device").unwrap();
    let watched = Arc::downgrade(&memory);
    let region = owner.register(memory, Access::READ).unwrap();
    let mut user = Process::open("user", "");
    user.must(&format!("register {LEN} device none"));
    let remote = user.must(&format!("import {} cuda", region.ticket().unwrap())).number(0);
    user.must(&format!("read {remote} 1 0 0 {LEN}"));
    user.stop();
    // It has the memory open, though no copy is in flight.
    let pinned = region.into_storage_within(Duration::from_millis(200)).unwrap_err();
    assert_eq!(pinned.error.kind(), Kind::Timeout);
    drop(pinned.registration);
    assert_eq!(owner.stats().parked.0, 1);
    assert!(watched.upgrade().is_some(), "memory that is open elsewhere is not freed");
    user.resume();
    assert!(eventually(STALL * 10, || watched.strong_count() == 0 && owner.stats().parked == (0, 0)));
    assert_eq!(user.ask(&format!("read {remote} 1 0 0 8")).unwrap_err().kind, Kind::Stale);
}

pub(crate) fn a_user_that_is_stopped_during_paged_copies_holds_the_memory_and_no_longer() {
    if !driver("a_user_that_is_stopped_during_paged_copies_holds_the_memory_and_no_longer") {
        return;
    }
    let _watchdog = watch("gpu: stopped during paged copies", Duration::from_secs(120));
    let mut random = Random::new(34);
    let owner = endpoint("owner");
    for round in 0..6u16 {
        let memory = storage(LEN, ["device", "exportable"][usize::from(round % 2)]).unwrap();
        Stamp::new(6, round).fill_storage(&memory).unwrap();
        let region = owner.register(memory, Access::READ_WRITE).unwrap();
        let mut user = Process::open("user", "");
        user.must(&format!("register {LEN} {} none", ["device", "system"][usize::from(round / 2 % 2)]));
        user.must("fill 1 96 96");
        let remote = user.must(&format!("import {} cuda", region.ticket().unwrap())).number(0);
        let op = if round % 2 == 0 { "write" } else { "read" };
        user.must(&format!("loop {op} {remote} 1 {LEN} {BLOCK}"));
        thread::sleep(random.micros(5000));
        user.stop();
        let pinned = region.into_storage_within(Duration::from_millis(100)).unwrap_err();
        assert_eq!(pinned.error.kind(), Kind::Timeout, "round {round}");
        user.resume();
        let memory = pinned
            .registration
            .into_storage_within(STALL * 10)
            .unwrap_or_else(|pinned| panic!("round {round}: {}", pinned.error));
        // It goes on asking, and nothing of it lands any more.
        let mine = Stamp::new(95, round);
        mine.fill_storage(&memory).unwrap();
        thread::sleep(random.micros(3000));
        mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
        user.kill();
    }
}

pub(crate) fn regions_of_one_allocation_come_and_go_while_others_are_used() {
    if !driver("regions_of_one_allocation_come_and_go_while_others_are_used") {
        return;
    }
    let _watchdog = watch("gpu: regions of one allocation", Duration::from_secs(60));
    let owner = endpoint("owner");
    let memory = storage(LEN, "device").unwrap();
    let stamp = Stamp::new(3, 1);
    stamp.fill_storage(&memory).unwrap();
    let watched = Arc::downgrade(&memory);
    let buffer = towline::Buffer::from_arc(memory);
    let half = |at: usize| towline::OffsetBuffer::new(buffer.clone(), at * LEN / 4, LEN / 4).unwrap();
    let regions: Vec<_> = (0..4).map(|at| owner.register(half(at), Access::READ).unwrap()).collect();
    drop(buffer);
    let mut user = Process::open("user", "");
    user.must(&format!("register {LEN} device none"));
    let remotes: Vec<u64> = regions
        .iter()
        .map(|region| user.must(&format!("import {} cuda", region.ticket().unwrap())).number(0))
        .collect();
    for (gone, region) in regions.into_iter().enumerate() {
        // The others are served whichever of them is gone.
        for (at, remote) in remotes.iter().enumerate() {
            let read = user.ask(&format!("read {remote} 1 0 {} {}", at * LEN / 4, LEN / 4));
            match read {
                Ok(_) => assert!(at >= gone),
                Err(failure) => assert!(at < gone && failure.kind == Kind::Stale, "{}", failure.message),
            }
        }
        region.into_storage_within(STALL * 10).unwrap_or_else(|pinned| panic!("{gone}: {}", pinned.error));
    }
    assert_eq!(watched.strong_count(), 0, "with the last region the allocation is free");
    user.must(&format!("check 1 3 1 0 {LEN}"));
}

pub(crate) fn memory_is_taken_back_under_paged_copies_and_nothing_stale_is_read() {
    if !driver("memory_is_taken_back_under_paged_copies_and_nothing_stale_is_read") {
        return;
    }
    let _watchdog = watch("gpu: taken back", Duration::from_secs(120));
    let mut random = Random::new(33);
    let mut owner = Process::open("owner", "");
    let user = endpoint("user");
    let pages = Layout::contiguous(LEN as u64, BLOCK).unwrap();
    for round in 1..20u16 {
        let id = owner.must(&format!("register {LEN} device read")).number(0);
        owner.must(&format!("fill {id} 4 {round}"));
        let ticket: Ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing("cuda")).unwrap();
        let buffer = local(&user, ["device", "system"][usize::from(round % 2)]);
        let ids = shuffled(&mut random);
        let reading = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                loop {
                    let read = user.read(&remote, &buffer).blocks(&pages, &ids[..], &pages, &ids[..]);
                    match outcome(read.start()) {
                        Ok(()) => Stamp::new(4, round).verify_storage(buffer.storage(), 0, LEN).unwrap(),
                        Err(error) => return error,
                    }
                }
            });
            thread::sleep(random.micros(5000));
            owner.must(&format!("deregister {id} {}", (STALL * 10).as_millis()));
            reader.join().unwrap()
        });
        assert_eq!(reading.kind(), Kind::Stale, "round {round}: {reading}");
    }
}

pub(crate) fn a_transfer_keeps_the_order_of_a_stream() {
    let Some(gpu) = here("a_transfer_keeps_the_order_of_a_stream") else { return };
    let _watchdog = watch("gpu: the order of a stream", Duration::from_secs(60));
    let mut owner = Process::open("owner", "");
    owner.must(&format!("register {LEN} device read+write"));
    owner.must("fill 1 5 1");
    let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let user = endpoint("user");
    let remote = user.import_with(&ticket, &routing("cuda")).unwrap();
    let near = user.register(DeviceStorage::new(LEN, 0).unwrap(), Access::NONE).unwrap();
    let after = DeviceStorage::new(LEN, 0).unwrap();
    let entered = gpu.enter("test").unwrap();
    let stream = entered.stream(0).unwrap();
    let handle = StreamHandle(stream.handle().0);
    let address = |storage: &DeviceStorage| towline::MemoryDescription::addr(storage) as u64;
    // What is queued in the stream before the write is what the owner gets.
    // SAFETY: both are as long as that, and stay until the stream is empty; so below.
    unsafe { stream.fill(&entered, address(near.storage()), 0x5A, LEN) }.unwrap();
    // SAFETY: the stream lives to the end of the test; so below.
    let write = unsafe { user.write(&remote, &near).stream(handle) }.start().unwrap();
    // SAFETY: as above.
    unsafe { stream.fill(&entered, address(near.storage()), 0x11, LEN) }.unwrap();
    write.wait().unwrap();
    stream.synchronize(&entered).unwrap();
    let taken = owner.must(&format!("take 1 0 {LEN}")).payload;
    assert!(taken.iter().all(|byte| *byte == 0x5A), "the write took the bytes of its moment");
    // What is queued after a read sees its bytes, and nobody waits on the host.
    // SAFETY: as above.
    let read = unsafe { user.read(&remote, &near).stream(handle) }.start().unwrap();
    // SAFETY: as above.
    unsafe { stream.copy(&entered, address(&after), address(near.storage()), LEN) }.unwrap();
    stream.synchronize(&entered).unwrap();
    let mut bytes = vec![0; LEN];
    towline::memory::MemoryAccess::read_at(&after, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x5A), "what follows a read sees what was read");
    read.wait().unwrap();
    // Host memory that nobody pinned has no place in a stream.
    let host = user.register(towline::SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    // SAFETY: as above.
    let refused = outcome(unsafe { user.read(&remote, &host).stream(handle) }.start()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Unsupported, "{refused}");
}

pub(crate) fn operations_keep_the_order_of_a_stream() {
    const FILLS: usize = 300;
    let Some(gpu) = here("operations_keep_the_order_of_a_stream") else { return };
    let _watchdog = watch("gpu: operations in a stream", Duration::from_secs(120));
    let mut peer = Process::open("peer", "");
    let connector = Connector::with_endpoint(endpoint("user"));
    let (near, after) = (storage(LEN, "device").unwrap(), DeviceStorage::new(LEN, 0).unwrap());
    let entered = gpu.enter("test").unwrap();
    let stream = entered.stream(0).unwrap();
    let at = near.addr() as u64;
    let ours = || Descriptor::new(Arc::clone(&near));
    // SAFETY: the stream lives to the end of the test; so below.
    let ordered = |local: Descriptor| unsafe { Descriptors::from(local).stream(stream.handle()) };
    // Much work, of which only the last bit leaves what must be seen.
    let work = |last: u8| {
        for round in 0..FILLS {
            let byte = if round + 1 == FILLS { last } else { 0x11 };
            // SAFETY: the storage is as long as that, and stays until the stream is empty.
            unsafe { stream.fill(&entered, at, byte, LEN) }.unwrap();
        }
    };
    let reading = format!("claim read {LEN} at-once device");
    let limit = (STALL * 10).as_millis();
    // What is offered while the work goes on is read when it is done, by other processes and by this one.
    for byte in [0x51, 0x52] {
        work(byte);
        let readable = connector.create_readable(ordered(ours())).unwrap();
        peer.ask_with(&reading, readable.metadata().unwrap().to_json().unwrap().as_bytes()).unwrap();
        peer.must(&format!("ended {limit}"));
        peer.must(&format!("full {byte}"));
        readable.wait(Some(STALL * 10)).unwrap();
    }
    work(0x53);
    let other = Connector::with_endpoint(endpoint("other"));
    let readable = connector.create_readable(ordered(ours())).unwrap();
    let target = Descriptor::new(DeviceStorage::new(LEN, 0).unwrap());
    other.begin_read(&readable.metadata().unwrap(), &target).unwrap().wait(Some(STALL * 10)).unwrap();
    let full = |storage: &dyn towline::MemoryAccess, byte: u8| {
        let mut bytes = vec![0; LEN];
        towline::memory::MemoryAccess::read_at(storage, 0, &mut bytes).unwrap();
        bytes.iter().all(|found| *found == byte)
    };
    assert!(full(target.storage().unwrap(), 0x53));
    readable.wait(Some(STALL * 10)).unwrap();
    // So is memory of which its library says that work is queued for it.
    work(0x54);
    let marked = ours();
    // SAFETY: as above.
    marked.set_mark(unsafe { Mark::of(stream.handle(), 0) }.unwrap());
    let readable = connector.create_readable(&marked).unwrap();
    peer.ask_with(&reading, readable.metadata().unwrap().to_json().unwrap().as_bytes()).unwrap();
    peer.must(&format!("ended {limit}"));
    peer.must("full 84");
    // What is queued behind a read sees its bytes, and nobody waits on the host.
    let metadata = String::from_utf8(peer.must(&format!("offer read {LEN} device 119")).payload).unwrap();
    work(0x55);
    let read = connector.begin_read(&metadata.parse().unwrap(), ordered(ours())).unwrap();
    // SAFETY: both are as long as that, and stay until the stream is empty.
    unsafe { stream.copy(&entered, after.addr() as u64, at, LEN) }.unwrap();
    stream.synchronize(&entered).unwrap();
    assert!(full(&after, 119), "what follows a read sees what was read");
    read.wait(Some(STALL * 10)).unwrap();
    // A write takes the bytes of its moment.
    let metadata = String::from_utf8(peer.must(&format!("offer write {LEN} device 1")).payload).unwrap();
    work(0x56);
    let write = connector.begin_write(ordered(ours()), &metadata.parse().unwrap()).unwrap();
    work(0x57);
    peer.must(&format!("ended {limit}"));
    peer.must("full 86");
    write.wait(Some(STALL * 10)).unwrap();
    stream.synchronize(&entered).unwrap();
    // Where neither side is on a GPU there is nothing to order, and the peer's operation is left alone.
    let metadata = String::from_utf8(peer.must("offer read 64 system 7").payload).unwrap();
    let host = || Descriptor::new(towline::SystemStorage::new(64).unwrap());
    let refused = connector.begin_read(&metadata.parse().unwrap(), ordered(host())).unwrap_err();
    assert_eq!(refused.kind(), Kind::Invalid, "{refused}");
    connector.begin_read(&metadata.parse().unwrap(), host()).unwrap().wait(Some(STALL * 10)).unwrap();
    // One that ends before its time ends for a peer that waits to claim it.
    work(0x58);
    let readable = connector.create_readable(ordered(ours())).unwrap();
    peer.tell_with(&reading, readable.metadata().unwrap().to_json().unwrap().as_bytes());
    thread::sleep(Duration::from_micros(500));
    readable.cancel();
    // On a busy machine the work is done, and the peer too, before it is cancelled.
    let ends: &[_] = match peer.answer(STALL * 10) {
        Ok(_) => &[OperationStatus::Cancelled, OperationStatus::Complete],
        Err(failure) => {
            assert!([Kind::Stale, Kind::Canceled].contains(&failure.kind), "{}", failure.message);
            &[OperationStatus::Cancelled]
        }
    };
    assert!(eventually(STALL * 10, || ends.contains(&readable.status())), "{readable:?}");
    stream.synchronize(&entered).unwrap();
}
