//! What an owner keeps of its peers.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};

use super::granting::GRANT;
use super::local::LOCAL;
use super::*;
use crate::Quotas;
use crate::fence::tests::alone_with_the_watcher;
use crate::memory::{DiskStorage, MemoryAccess, Stalled};
use crate::region::SERVED;
use crate::runtime::socket::{Received, Socket};
use crate::session::channel::Channel;
use crate::session::{GrantHandle, Medium, Session};
use crate::transport::Transport as _;
use crate::transport::file::FilePath;
use crate::{Endpoint, Registered, Remote, Routing, SystemStorage};

const MANY: usize = 1000;

struct Pair {
    owner: Endpoint,
    user: Endpoint,
    region: Registered<SystemStorage>,
}

impl Pair {
    fn open() -> Pair {
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        Pair { owner, user, region }
    }

    fn import(&self) -> Remote {
        self.user.import_with(&self.region.ticket().unwrap(), &over_tcp()).unwrap()
    }

    fn serving(&self) -> Arc<Serving> {
        self.owner.core().sessions.serving().swap_remove(0)
    }

    /// The user's bytes come.
    fn reads(&self, remote: &Remote) {
        let local = self.user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
        self.user.read(remote, &local).start().unwrap().wait().unwrap();
    }
}

impl Serving {
    fn count_grants(&self) -> usize {
        self.rules().count_grants()
    }
}

fn over_tcp() -> Routing {
    Routing::default().require("tcp").unwrap()
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_ticket_that_is_imported_again_has_the_same_handle_until_the_last_is_given_back() {
    let pair = Pair::open();
    let ticket = pair.region.ticket().unwrap();
    let import = || pair.user.import_with(&ticket, &over_tcp()).unwrap();
    let first = import();
    let serving = pair.serving();
    let (grants, memory) = (serving.count_grants(), pair.owner.stats().peer_memory);
    let more: Vec<Remote> = (0..MANY).map(|_| import()).collect();
    assert_eq!((serving.count_grants(), pair.owner.stats().peer_memory), (grants, memory));
    drop(first);
    more.iter().take(3).for_each(|remote| pair.reads(remote));
    // Another ticket of the region is another handle.
    let narrowed = ticket.narrow().range(0, 8).finish().unwrap();
    let other = pair.user.import_with(&narrowed, &over_tcp()).unwrap();
    assert_eq!(serving.count_grants(), grants + 1);
    drop((more, other));
    eventually("all are given back", || serving.count_grants() == 0);
    let again = import();
    pair.reads(&again);
}

#[test]
fn handles_that_are_in_use_are_not_given_again_after_the_last_number() {
    let pair = Pair::open();
    let kept = pair.import();
    let serving = pair.serving();
    serving.rules().number_grants_from(u32::MAX);
    let narrowed = |len| {
        let ticket = pair.region.ticket().unwrap().narrow().range(0, len).finish().unwrap();
        pair.user.import_with(&ticket, &over_tcp()).unwrap()
    };
    // The last number, and then the first that is free: 0 means nothing, and 1 is in use.
    let (last, next) = (narrowed(8), narrowed(16));
    let find = |handle| serving.rules().find("test", handle);
    for handle in [1, u32::MAX, 2] {
        assert!(find(handle).is_ok(), "handle {handle}");
    }
    assert!(find(0).is_err());
    assert_eq!(find(1).unwrap().claims.range, 0..4096);
    pair.reads(&kept);
    drop((last, next));
}

#[test]
fn the_defaults_have_room_for_ten_thousand_peers_and_for_a_hundred_thousand_tickets_of_one() {
    let pair = Pair::open();
    let _remote = pair.import();
    let connection = pair.serving().control().unwrap().cost();
    let (peers, quotas) = (10_000, Quotas::default());
    let ticket = GRANT + SERVED;
    for session in [SESSION + 5 * connection + 32 * ticket, SESSION + connection + LOCAL + 32 * ticket] {
        assert!((peers * session) as u64 <= quotas.memory, "{session} bytes for each of {peers}");
    }
    assert!(quotas.peers >= peers && quotas.grants >= 100_000);
    // Beside a thousand others, which leave less to a single one.
    let budget = crate::budget::Budget::new("tests", quotas.memory);
    let others = budget.account();
    let _others = (0..1000).map(|_| others.charge("test", (SESSION + connection + 32 * ticket) as u64));
    assert!(budget.account().charge("test", (100_000 * ticket) as u64).is_ok(), "{ticket} bytes each");
}

#[test]
fn what_a_session_is_counted_with_is_not_less_than_it_takes() {
    assert!(SESSION >= 2 * (size_of::<Serving>() + size_of::<Allowance>() + 256), "{}", size_of::<Serving>());
}

/// A file there that holds those bytes.
fn disk(folder: &str, bytes: &[u8]) -> DiskStorage {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = format!("{folder}/towline-hangs-{}-{number}", std::process::id());
    let storage = DiskStorage::new_at(path, bytes.len()).unwrap();
    storage.write_at(0, bytes).unwrap();
    storage
}

#[test]
fn a_disk_that_hangs_holds_up_neither_memory_nor_another_disk() {
    const LEN: usize = 1 << 20;
    let owner = Endpoint::open("owner").unwrap();
    let register = |storage| owner.register(storage, Access::READ_WRITE).unwrap();
    let (hung, well) = (disk("/tmp", &vec![1; LEN]), disk("/dev/shm", &vec![2; LEN]));
    let stalled = Stalled::new(&crate::Storage::file(&hung).unwrap());
    let (hung, well) = (register(hung), register(well));
    let memory = owner.register(SystemStorage::new(8 * LEN).unwrap(), Access::READ_WRITE).unwrap();
    memory.storage().write_at(0, &vec![3; LEN]).unwrap();
    let local = |user: &Endpoint| user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let path = |name| Routing::default().require(name).unwrap();
    // More of them than there are threads of any kind, by sockets and within the process, over lanes and without.
    let mut waiting = Vec::new();
    let limits = crate::Limits { no_progress: Duration::from_secs(120), ..crate::Limits::default() };
    let open = |name: String| Endpoint::options(&name).limits(limits).open().unwrap();
    let users: Vec<Endpoint> = (0..8).map(|number| open(format!("user-{number}"))).collect();
    for user in &users {
        for name in ["tcp", "unix", "inproc"] {
            let remote = user.import_with(&hung.ticket().unwrap(), &path(name)).unwrap();
            for len in [4096, LEN as u64] {
                for _ in 0..4 {
                    let into = local(user);
                    waiting
                        .push((user.read(&remote, &into).at(0, 0, len).start().unwrap(), Some((into, len))));
                }
                let from = local(user);
                from.storage().write_at(0, &vec![1; LEN]).unwrap();
                waiting.push((user.write(&remote, &from).at(0, 0, len).start().unwrap(), None));
            }
        }
    }
    // Users that were there already, and one that comes.
    let latest = open("latest".to_owned());
    for user in [&users[0], &latest] {
        for name in ["tcp", "unix", "inproc"] {
            for (ticket, byte) in [(memory.ticket().unwrap(), 3), (well.ticket().unwrap(), 2)] {
                let remote = user.import_with(&ticket, &path(name)).unwrap();
                let (into, mut bytes) = (local(user), vec![0; LEN]);
                let moved = user.read(&remote, &into).at(0, 0, LEN as u64).start().unwrap().wait();
                moved.unwrap_or_else(|error| panic!("{name} of {byte}: {error}"));
                into.storage().read_at(0, &mut bytes).unwrap();
                assert!(bytes.iter().all(|one| *one == byte), "{name} of {byte}");
                user.write(&remote, &into).at(0, 0, LEN as u64).start().unwrap().wait().unwrap();
            }
        }
    }
    let threads = std::fs::read_dir("/proc/self/task").unwrap().filter(|task| {
        let name = std::fs::read_to_string(task.as_ref().unwrap().path().join("comm"));
        name.is_ok_and(|name| name.starts_with("towline-device"))
    });
    assert!((1..=32).contains(&threads.count()));
    assert!(waiting.iter().all(|(transfer, _)| !transfer.is_done()), "the disk did not hang");
    drop(stalled);
    for (transfer, read) in waiting {
        transfer.wait().unwrap();
        if let Some((into, len)) = read {
            let mut bytes = vec![0; len as usize];
            into.storage().read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|one| *one == 1));
        }
    }
}

#[test]
fn what_is_written_to_a_disk_that_hangs_waits_at_its_sender_and_arrives_when_the_disk_goes_on() {
    const LEN: usize = 128 << 20;
    let owner = Endpoint::open("owner").unwrap();
    let storage = DiskStorage::new_at(format!("/tmp/towline-waits-{}", std::process::id()), LEN).unwrap();
    let stalled = Stalled::new(&crate::Storage::file(&storage).unwrap());
    let region = owner.register(storage, Access::READ_WRITE).unwrap();
    let limits = crate::Limits { no_progress: Duration::from_secs(120), ..crate::Limits::default() };
    let user = Endpoint::options("user").limits(limits).lanes(4).open().unwrap();
    let remote = user.import_with(&region.ticket().unwrap(), &over_tcp()).unwrap();
    let from = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let pattern: Vec<u8> = (0..LEN / 8).flat_map(|word| (word as u64).to_le_bytes()).collect();
    from.storage().write_at(0, &pattern).unwrap();
    let write = user.write(&remote, &from).at(0, 0, LEN as u64).start().unwrap();
    // It comes until the lanes are held up, and stands still then.
    let (mut last, mut same) = (0, 0);
    eventually("the lanes are held up", || {
        let held = owner.stats().peer_memory;
        same = if held == last && held > 32 << 20 { same + 1 } else { 0 };
        last = held;
        same > 300
    });
    assert!(last < 96 << 20, "{last} bytes are kept for a disk that hangs");
    drop(stalled);
    write.wait().unwrap();
    let mut bytes = vec![0; LEN];
    region.storage().read_at(0, &mut bytes).unwrap();
    assert!(bytes == pattern, "other bytes are in the file");
    eventually("nothing is kept", || owner.stats().peer_memory < 1 << 20);
}

#[test]
fn questions_that_hang_count_as_requests_and_hold_up_nobody_else() {
    const MOST: usize = 3;
    let _alone = alone_with_the_watcher();
    let quotas = Quotas { requests: MOST, ..Quotas::default() };
    let owner = Endpoint::options("owner").quotas(quotas).open().unwrap();
    let register = |storage| owner.register(storage, Access::READ).unwrap();
    let (hung, well) = (disk("/tmp", &[1; 64]), disk("/dev/shm", &[2; 64]));
    let stalled = Stalled::new(&crate::Storage::file(&hung).unwrap());
    let (hung, well) = (register(hung), register(well));
    let until = Instant::now() + Duration::from_secs(60);
    // Sessions of their own, over which the question is asked by hand: within one process no file is handed over.
    let asks = |name: &str, region: &Registered<DiskStorage>| {
        let user = Endpoint::open(name).unwrap();
        let ticket = region.ticket().unwrap();
        let session =
            Session::connect(&user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap();
        let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        (user, session, imported.outcomes.pop().unwrap().unwrap().1)
    };
    let refusals = AtomicUsize::new(0);
    let ask = |handle: &GrantHandle| {
        let reply = handle.query(FilePath.number().unwrap(), b"open".to_vec(), until);
        refusals.fetch_add(usize::from(reply.is_err()), Ordering::Relaxed);
        reply.map(|reply| reply.files.len())
    };
    let greedy: Vec<_> = (0..3).map(|number| asks(&format!("greedy-{number}"), &hung)).collect();
    let outcomes: Vec<Result<usize>> = std::thread::scope(|scope| {
        let asked: Vec<_> = greedy
            .iter()
            .flat_map(|(_, _, handle)| {
                (0..2 * MOST).map(|_| scope.spawn(move || ask(handle))).collect::<Vec<_>>()
            })
            .collect();
        // More wait now than threads do for that disk.
        eventually("they hang", || owner.stats().in_flight.0 == 3 * MOST);
        eventually("the others are refused", || refusals.load(Ordering::Relaxed) == 3 * MOST);
        let (_user, _session, handle) = asks("other", &well);
        assert!(ask(&handle).unwrap() > 0);
        drop(stalled);
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let (replied, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((replied.len(), refused.len()), (3 * MOST, 3 * MOST));
    assert!(refused.iter().all(|one| one.as_ref().is_err_and(|error| error.kind() == Kind::Exhausted)));
}

#[test]
fn a_panic_in_what_handles_a_frame_ends_that_session_and_no_other() {
    const LEN: usize = 8 << 20;
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ).unwrap();
    let open = |name: &str| {
        let user = Endpoint::open(name).unwrap();
        let remote = user.import_with(&region.ticket().unwrap(), &over_tcp()).unwrap();
        (user, remote)
    };
    let read = |(user, remote): &(Endpoint, Remote), len: usize| {
        let into = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        user.read(remote, &into).at(0, 0, len as u64).start()?.wait()
    };
    let well = open("well");
    // Over the control connection, which the event loop drives, and over lanes, which workers drive.
    for len in [64, LEN] {
        let unwell = open("unwell");
        read(&unwell, len).unwrap();
        let all = owner.core().sessions.serving();
        let serving = all.into_iter().find(|one| one.peer.name == "unwell").unwrap();
        serving.panics.store(true, Ordering::Relaxed);
        let error = read(&unwell, len).unwrap_err();
        assert_eq!(error.kind(), Kind::Disconnected, "{error}");
        eventually("the session is over", || serving.is_closed());
        read(&well, len).unwrap();
        // It can come again, and finds another session.
        read(&open("unwell"), len).unwrap();
    }
}

/// An import that reaches a region by itself, and has something in flight until it says otherwise.
#[derive(Default)]
struct Busy {
    recalled: AtomicBool,
    over: AtomicBool,
}

impl crate::session::Borrowing for Busy {
    fn recalled(self: Arc<Self>) {
        self.recalled.store(true, Ordering::SeqCst);
    }

    fn is_idle(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn has_let_go(&self) -> bool {
        self.recalled.load(Ordering::SeqCst) && self.is_idle()
    }
}

#[test]
fn the_last_of_those_who_imported_a_ticket_says_that_its_region_is_let_go() {
    let _alone = alone_with_the_watcher();
    let pair = Pair::open();
    let (ticket, until) = (pair.region.ticket().unwrap(), Instant::now() + Duration::from_secs(30));
    let session =
        Session::connect(&pair.user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap();
    let import = || {
        let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
        imported.outcomes.pop().unwrap().unwrap().1
    };
    let borrow = |grant: &Arc<GrantHandle>| {
        let busy = Arc::new(Busy::default());
        let weak: Weak<dyn crate::session::Borrowing> = Arc::downgrade(&(Arc::clone(&busy) as _));
        grant.borrow_by(weak);
        busy
    };
    let (first, second, third) = (import(), import(), import());
    assert_eq!(first.handle, second.handle);
    let (a, b) = (borrow(&first), borrow(&second));
    session.recall(first.handle);
    assert!(a.recalled.load(Ordering::SeqCst) && b.recalled.load(Ordering::SeqCst), "both are asked");
    a.over.store(true, Ordering::SeqCst);
    assert!(!session.others_have_let_go(&first), "the second is still inside");
    b.over.store(true, Ordering::SeqCst);
    assert!(session.others_have_let_go(&second));
    // Who comes after the owner has asked is asked at once.
    let late = borrow(&third);
    assert!(late.recalled.load(Ordering::SeqCst));
    assert!(!session.others_have_let_go(&second));
    drop(late);
    assert!(session.others_have_let_go(&second), "who is gone holds nothing");
}

#[test]
fn the_end_of_a_lane_is_said_when_nobody_applies_anything_of_it_any_more() {
    const NAME: [u8; 32] = [7; 32];
    let pair = Pair::open();
    let _kept = pair.import();
    let serving = pair.serving();
    let connection = |role| {
        let (ours, theirs) = Socket::pair().unwrap();
        (Connection::new(Channel::plain(ours), role, true, Arc::new(Arc::clone(&serving))), theirs)
    };
    // Connections of our own, so that the answers can be read here.
    let ((control, peer), (lane, _peer)) = (connection(Role::Control), connection(Role::Lane));
    lane.call(NAME);
    serving.rules().joined(Over::of(&lane), NAME);
    *serving.connections.lock() = vec![Arc::clone(&control), Arc::clone(&lane)];
    let answer = |within| {
        let mut head = [0; wire::HEADER_LEN];
        peer.wait_readable(within).unwrap().then(|| {
            let came = peer.recv(&mut [std::io::IoSliceMut::new(&mut head)], 0, &mut Vec::new()).unwrap();
            assert!(matches!(came, Received::Bytes(wire::HEADER_LEN)));
            let header = Header::decode(&head).unwrap();
            let mut body = vec![0; header.rest()];
            let _ = peer.recv(&mut [std::io::IoSliceMut::new(&mut body)], 0, &mut Vec::new()).unwrap();
            assert_eq!(header.kind, wire::FrameKind::Done);
            header.id
        })
    };
    let (soon, watchdog) = (Duration::from_millis(200), Duration::from_secs(30));
    let end_lane = |request, lane| {
        let frame = Message::from(wire::EndLane { lane }).frame(request, 0, 0);
        let header = Header::decode(frame.first_chunk().unwrap()).unwrap();
        let body = header.body(&frame[wire::HEADER_LEN..]).unwrap();
        serving.frame(&control, header, body, Vec::new()).unwrap();
    };
    let inside = lane.wanted().unwrap();
    for request in [1, 2] {
        end_lane(request, NAME);
    }
    // One that is not there is over.
    end_lane(3, [8; 32]);
    assert_eq!(answer(watchdog), Some(3));
    assert_eq!(answer(soon), None, "a thread is still inside");
    assert!(lane.wanted().is_none(), "nothing more of it is applied");
    drop(inside);
    assert_eq!([answer(watchdog), answer(watchdog)], [Some(1), Some(2)]);
    end_lane(4, NAME);
    assert_eq!(answer(watchdog), Some(4));
    serving.end(&Error::new(Kind::Canceled, "serve", "the test is over"));
}
