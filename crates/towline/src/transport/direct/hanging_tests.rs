//! Files whose disk hangs: cancels and limits hold all the same, and memory that a thread is inside of stays.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;
use crate::fence::tests::alone_with_the_watcher;
use crate::memory::{DiskStorage, MemoryAccess, Stalled, Storage as _, SystemStorage};
use crate::region::{Registered, Span};
use crate::route::Routing;
use crate::runtime::EACH;
use crate::session::{Medium, Session};
use crate::transfer::Transfer;
use crate::transfer::submission::{self, SubmittedPart, Terms, What};
use crate::transport::file::FilePath;
use crate::transport::inproc::InProc;
use crate::transport::{Offer, Owner};
use crate::{Access, Endpoint, Limits};

/// Several units each.
const LEN: usize = 5 << 20;

const WATCHDOG: Duration = Duration::from_secs(20);

struct Scene {
    owner: Endpoint,
    user: Endpoint,
    region: Registered<DiskStorage>,
    stalled: Option<Stalled>,
    link: Arc<dyn Link>,
}

impl Scene {
    fn open(path: &str) -> Scene {
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let name = format!("/tmp/towline-hanging-{path}-{}", std::process::id());
        let storage = DiskStorage::new_at(name, LEN).unwrap();
        storage.write_at(0, &vec![1; LEN]).unwrap();
        let file = storage.file().unwrap();
        let region = owner.register(storage, Access::READ_WRITE).unwrap();
        let ticket = region.ticket().unwrap();
        let until = Instant::now() + WATCHDOG;
        let (routing, context) = (Routing::default(), &user.core().transports);
        // Within one process no file is handed over: the session is made by hand.
        let attachment = if path == "file" {
            let session =
                Session::connect(&user.core().sessions, &ticket, Medium::Unix, true, (until, until)).unwrap();
            let mut imported = session.import(&[&ticket], None, until).unwrap().wait().unwrap();
            let (grant, handle) = imported.outcomes.pop().unwrap().unwrap();
            let owner = Owner::There(&handle);
            FilePath.attach(&Offer { context, owner, grant: &grant, routing: &routing, until })
        } else {
            let challenge = b"one process";
            let proof = ticket.proof(challenge);
            let registry = &owner.core().registry;
            let (core, claims) = registry.verify(ticket.public_bytes(), &proof, challenge).unwrap();
            let (grant, owner) = (core.grant(&claims, false, 0), Owner::Here(&core));
            InProc.attach(&Offer { context, owner, grant: &grant, routing: &routing, until })
        };
        let link = attachment.unwrap() as Arc<dyn Link>;
        let stalled = Some(Stalled::new(&file));
        Scene { owner, user, region, stalled, link }
    }

    /// Waits until all threads of the disk are inside.
    fn hangs(&self) {
        assert!(self.stalled.as_ref().unwrap().holds(EACH, WATCHDOG), "the disk does not hang");
    }

    fn local(&self) -> Registered<SystemStorage> {
        self.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap()
    }

    fn start(&self, op: Op, local: &Registered<SystemStorage>, limits: Limits) -> Transfer {
        let near = Span::from(local);
        let (core, len) = (near.core(), LEN as u64);
        let used = core.begin_use(op.name()).unwrap();
        let part = SubmittedPart::new(&self.link, Some(used), core.addr, What::Whole, (len, len));
        let terms = Terms {
            after: After::default(),
            stream: None,
            limits,
            checked: false,
            peer: &"owner".into(),
            inline: true,
            portion: false,
            above: None,
        };
        let mut on_end = submission::nobody;
        let mut submission = Submission::new(op, Several::one(part), terms, &mut on_end);
        let Started::Running(core) = self.link.submit(&mut submission).unwrap() else {
            panic!("a file is never read in the call")
        };
        Transfer::live(core)
    }
}

/// Each transfer's end, and when it came. A caller that waits by itself is one of them.
fn ends(transfers: Vec<Transfer>) -> Vec<(Transfer, Result<()>, Instant)> {
    let (sender, ends) = mpsc::channel();
    let count = transfers.len();
    for transfer in transfers {
        let sender = sender.clone();
        std::thread::spawn(move || {
            let ended = transfer.wait();
            let _ = sender.send((transfer, ended, Instant::now()));
        });
    }
    (0..count).map(|_| ends.recv_timeout(WATCHDOG).expect("a transfer has not ended")).collect()
}

fn end_in_time(path: &str, cancelled: bool) {
    let _alone = alone_with_the_watcher();
    let mut scene = Scene::open(path);
    let locals: Vec<_> = (0..3 * EACH).map(|_| scene.local()).collect();
    let limits = match cancelled {
        true => Limits { no_progress: 10 * WATCHDOG, total: 10 * WATCHDOG, bytes_per_second: 1 },
        false => Limits::within(Duration::from_secs(1)),
    };
    let began = Instant::now();
    let op = |number| if number % 2 == 0 { Op::Read } else { Op::Write };
    let transfers: Vec<_> =
        locals.iter().enumerate().map(|(number, local)| scene.start(op(number), local, limits)).collect();
    if cancelled {
        // Threads are inside of some, and none comes for the rest.
        scene.hangs();
        assert!(transfers.iter().all(|transfer| !transfer.is_done()), "the disk did not hang");
        transfers.iter().for_each(Transfer::cancel);
    }
    let kind = if cancelled { Kind::Canceled } else { Kind::Timeout };
    let mut unquiet = Vec::new();
    for (transfer, ended, when) in ends(transfers) {
        assert_eq!(ended.unwrap_err().kind(), kind);
        let took = when - began;
        assert!(took < Duration::from_millis(2300), "{took:?}");
        if !transfer.quiet() {
            unquiet.push(transfer);
        }
    }
    assert!(!unquiet.is_empty() && unquiet.len() <= EACH, "{} are not quiet", unquiet.len());
    // What a thread is inside of is not given back, and the rest is.
    let (mut free, mut kept) = (0, Vec::new());
    for local in locals {
        match local.into_storage_within(Duration::from_millis(10)) {
            Ok(_) => free += 1,
            Err(pinned) => kept.push(pinned),
        }
    }
    assert_eq!((free, kept.len()), (3 * EACH - unquiet.len(), unquiet.len()));
    // Nor is the owner's.
    let Scene { region, .. } = scene;
    let pinned = region.into_storage_within(Duration::from_millis(10)).unwrap_err();
    drop(scene.stalled.take());
    assert!(unquiet.iter().all(|transfer| transfer.wait_quiet(WATCHDOG)), "the disk has gone on");
    for pinned in kept {
        pinned.registration.into_storage_within(WATCHDOG).unwrap();
    }
    pinned.registration.into_storage_within(WATCHDOG).unwrap();
    drop(scene.owner);
}

#[test]
fn a_cancel_of_transfers_within_the_process_ends_them_though_the_disk_hangs() {
    end_in_time("inproc", true);
}

#[test]
fn the_limit_of_transfers_within_the_process_holds_though_the_disk_hangs() {
    end_in_time("inproc", false);
}

#[test]
fn a_cancel_of_transfers_of_a_passed_file_ends_them_though_the_disk_hangs() {
    end_in_time("file", true);
}

#[test]
fn the_limit_of_transfers_of_a_passed_file_holds_though_the_disk_hangs() {
    end_in_time("file", false);
}

#[test]
fn what_was_cancelled_leaves_no_work_behind_for_the_disk() {
    let _alone = alone_with_the_watcher();
    let mut scene = Scene::open("inproc");
    let limits = Limits { no_progress: WATCHDOG, total: WATCHDOG, bytes_per_second: 1 };
    let begun = scene.local();
    let first: Vec<_> = (0..EACH).map(|_| scene.start(Op::Read, &begun, limits)).collect();
    let rest = scene.local();
    let device = scene.region.storage().file().unwrap().device();
    let waiting = || runtime::devices().waiting(device);
    scene.hangs();
    let before = waiting();
    for _ in 0..100 {
        let transfer = scene.start(Op::Read, &rest, limits);
        transfer.cancel();
        assert!(transfer.wait_for(Duration::from_secs(2)).unwrap().is_err());
        assert!(transfer.quiet(), "nobody had begun it");
    }
    assert_eq!(waiting(), before);
    drop(scene.stalled.take());
    first.iter().for_each(|transfer| transfer.wait().unwrap());
}
