//! Tickets: narrowed, forged, damaged, of the gone; and secrets.

use std::time::Duration;

use towline::ticket::{RegionKey, TicketBody};
use towline::{Access, Contact, Kind, Ticket};

use crate::bench::{Bench, Owner, STALL, options, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };

/// Offsets count from the start of what is left, and what is cut off cannot be reached.
pub fn a_narrowed_range_is_all_that_can_be_reached(bench: &Bench) {
    let region = bench.stamped(64 << 10, Access::READ_WRITE, THEIRS);
    let once = region.ticket().narrow().range(4096, 8192).finish().unwrap();
    let twice = once.narrow().range(1000, 500).finish().unwrap();
    assert_eq!((once.range(), twice.range()), (4096..12_288, 5096..5596));
    refused(once.narrow().range(0, 8193).finish(), &[Kind::Invalid]);
    refused(twice.narrow().range(500, 1).finish(), &[Kind::Invalid]);
    for ticket in [once, twice] {
        let remote = bench.remote(&ticket);
        let len = (ticket.range().end - ticket.range().start) as usize;
        assert_eq!(remote.len(), len as u64);
        let local = bench.local(len);
        outcome(bench.user.read(&remote, &local).start()).unwrap();
        let mut bytes = vec![0; len];
        local.read_at(0, &mut bytes).unwrap();
        THEIRS.verify(ticket.range().start, &bytes).unwrap();
        refused(bench.user.read(&remote, &local).at(1, 0, len as u64).start(), &[Kind::Invalid]);
        let stamp = Stamp::new(5, 5);
        stamp.fill_storage(local.storage()).unwrap();
        outcome(bench.user.write(&remote, &local).start()).unwrap();
        stamp.verify(0, &region.take(ticket.range().start as usize, len)).unwrap();
        region.check(THEIRS, 0, ticket.range().start as usize).unwrap();
        let end = ticket.range().end as usize;
        region.check(THEIRS, end, region.len() - end).unwrap();
        region.fill(THEIRS);
    }
}

/// A holder gives up rights and cannot take them back.
pub fn narrowed_rights_are_all_that_is_allowed(bench: &Bench) {
    let region = bench.stamped(64, Access::READ_WRITE, THEIRS);
    let reader = region.ticket().narrow().access(Access::READ).finish().unwrap();
    refused(reader.narrow().access(Access::READ_WRITE).finish(), &[Kind::Invalid]);
    let remote = bench.remote(&reader);
    let local = bench.local(64);
    outcome(bench.user.read(&remote, &local).start()).unwrap();
    refused(outcome(bench.user.write(&remote, &local).start()), &[Kind::PermissionDenied]);
    let writer = bench.remote(&region.ticket().narrow().access(Access::WRITE).finish().unwrap());
    outcome(bench.user.write(&writer, &local).start()).unwrap();
    refused(outcome(bench.user.read(&writer, &local).start()), &[Kind::PermissionDenied]);
}

/// A lease that has run out ends what was imported, and cannot be imported any more.
pub fn a_lease_ends(bench: &Bench) {
    let region = bench.stamped(64, Access::READ_WRITE, THEIRS);
    let local = bench.local(64);
    let expired = region.ticket().narrow().lease(Duration::ZERO).finish().unwrap();
    refused(bench.user.import(&expired), &[Kind::PermissionDenied]);
    let long = region.ticket().narrow().lease(Duration::from_secs(3600)).finish().unwrap();
    outcome(bench.user.read(&bench.remote(&long), &local).start()).unwrap();
    let longer = long.narrow().lease(Duration::from_secs(7200)).finish().unwrap();
    assert_eq!(longer.expires_ms(), long.expires_ms(), "a lease is never prolonged");

    let short = region.ticket().narrow().lease(Duration::from_millis(300)).finish().unwrap();
    if let Ok(remote) = bench.user.import(&short) {
        // The watchdog bounds this.
        let error = loop {
            if let Err(error) = outcome(bench.user.read(&remote, &local).start()) {
                break error;
            }
        };
        assert_eq!(error.kind(), Kind::PermissionDenied, "{error}");
        refused(outcome(bench.user.write(&remote, &local).start()), &[Kind::PermissionDenied]);
        if bench.has_words() {
            refused(outcome(bench.user.fetch_add(&remote, 0, 1)), &[Kind::PermissionDenied]);
        }
    }
    refused(bench.user.import(&short), &[Kind::PermissionDenied]);
}

/// A peer without the region's key cannot make a ticket, however good it looks.
pub fn forged_tickets_are_refused_and_counted(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ, THEIRS);
    let body = region.ticket().body().clone();
    let before = bench.owner.stats().refused;
    let forge = |change: &dyn Fn(&mut TicketBody)| {
        let mut body = body.clone();
        change(&mut body);
        let key = RegionKey::derive(&[0x55; 32], body.row, body.generation);
        Ticket::mint(&body, &key).unwrap()
    };
    let forgeries = [
        forge(&|_| {}),
        forge(&|body| body.access = Access::READ_WRITE),
        forge(&|body| body.length = 1 << 40),
        forge(&|body| body.row += 1),
        forge(&|body| body.generation += 1),
        forge(&|body| body.row = u32::MAX),
    ];
    for forgery in &forgeries {
        refused(bench.user.import(forgery), &[Kind::PermissionDenied]);
    }
    let refused_now = bench.owner.stats().refused;
    assert!(refused_now >= before + forgeries.len() as u64, "{before} before, {refused_now} now");
    // And the genuine one goes on working, also in a batch with forgeries.
    let batch = [region.ticket(), forgeries[0].clone(), region.ticket()];
    let answers = bench.user.import_many(&batch).unwrap();
    assert!(answers[0].is_ok() && answers[2].is_ok());
    assert_eq!(answers[1].as_ref().unwrap_err().kind(), Kind::PermissionDenied);
}

/// Damage is noticed before anybody is asked.
pub fn damaged_tickets_do_not_decode(bench: &Bench) {
    let region = bench.region(64, Access::READ);
    let ticket = region.ticket().narrow().range(8, 8).finish().unwrap();
    let bytes = ticket.encode();
    assert!(bytes.len() <= 512, "a ticket has {} bytes", bytes.len());
    assert_eq!(Ticket::decode(&bytes).unwrap(), ticket);
    for len in 0..bytes.len() {
        refused(Ticket::decode(&bytes[..len]), &[Kind::Protocol]);
    }
    let mut random = Random::new(4);
    for _ in 0..500 {
        let mut damaged = bytes.clone();
        let at = random.below(bytes.len() as u64) as usize;
        damaged[at] ^= 1 << random.below(8);
        refused(Ticket::decode(&damaged), &[Kind::Protocol]);
    }
    let mut foreign = bytes.clone();
    foreign[4..6].copy_from_slice(&99u16.to_le_bytes());
    let error = refused(Ticket::decode(&foreign), &[Kind::Protocol]);
    assert!(error.message().contains("version 99"), "{error}");
    let text = ticket.to_string();
    assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
    for damaged in ["", "towline1:", "hello", &text[1..], &text[..text.len() - 1], &format!("{text}A")] {
        refused(damaged.parse::<Ticket>(), &[Kind::Protocol]);
    }
    assert!(!format!("{ticket:?}").contains(&text[text.len() - 20..]), "the tag is not shown");
}

/// The ticket of an endpoint that is closed, or of an earlier life of it, gives an error and no bytes.
pub fn tickets_of_the_gone_are_refused(bench: &Bench) {
    let gone = &[Kind::Stale, Kind::Disconnected];
    let owner = Owner::open(bench.path, "mortal", bench.setting, "");
    let region = owner.register(64, bench.kind(), Access::READ).unwrap();
    let ticket = region.ticket();
    let remote = bench.remote(&ticket);
    let local = bench.local_stamped(64, THEIRS);
    drop(region);
    drop(owner);
    refused(bench.user.import(&ticket), gone);
    // The same name lives again.
    let again = Owner::open(bench.path, "mortal", bench.setting, "");
    let _region = again.register(64, bench.kind(), Access::READ).unwrap();
    refused(bench.user.import(&ticket), gone);
    refused(outcome(bench.user.read(&remote, &local).start()), gone);
    THEIRS.verify_storage(local.storage(), 0, 64).unwrap();
}

/// Many tickets are imported at once; each has its own outcome, in order.
pub fn a_batch_of_tickets_gets_an_answer_each(bench: &Bench) {
    let other = Owner::open(bench.path, "other", bench.setting, "");
    let mut regions = Vec::new();
    for number in 0..40 {
        let owner = if number % 2 == 0 { &bench.owner } else { &other };
        let region = owner.register(4096, bench.kind(), Access::READ).unwrap();
        region.fill(Stamp::new(number, 1));
        regions.push(region);
    }
    let tickets: Vec<Ticket> = regions.iter().map(|region| region.ticket()).collect();
    for number in [3, 8] {
        regions[number].deregister(STALL).unwrap();
    }
    let answers = bench.user.import_many(&tickets).unwrap();
    assert_eq!(answers.len(), tickets.len());
    let local = bench.local(4096);
    for (number, answer) in answers.into_iter().enumerate() {
        match answer {
            Err(error) => {
                assert!([3, 8].contains(&number) && error.kind() == Kind::Stale, "{number}: {error}");
            }
            Ok(remote) => {
                assert_eq!(&**remote.peer(), if number % 2 == 0 { "owner" } else { "other" });
                outcome(bench.user.read(&remote, &local).start()).unwrap();
                Stamp::new(number as u16, 1).verify_storage(local.storage(), 0, 4096).unwrap();
            }
        }
    }
    assert!(bench.user.import_many(&[]).unwrap().is_empty());
}

/// Where an owner has a secret, a ticket alone does not open it. (Within one process no secret is asked for.)
pub fn secrets_open_and_shut(bench: &Bench) {
    let owner = Owner::open(bench.path, "careful", bench.setting, "open-sesame");
    let region = owner.register(64, bench.kind(), Access::READ).unwrap();
    region.fill(THEIRS);
    let user = |secret: Option<&[u8]>| {
        let options = options("user").routing(bench.routing.clone());
        secret.into_iter().fold(options, |options, secret| options.secret(secret)).open().unwrap()
    };
    let knows = user(Some(b"open-sesame"));
    let remote = knows.import(&region.ticket()).unwrap();
    let local = knows.register(towline::SystemStorage::new(64).unwrap(), Access::NONE).unwrap();
    outcome(knows.read(&remote, &local).start()).unwrap();
    THEIRS.verify_storage(local.storage(), 0, 64).unwrap();
    if bench.properties.contact == Contact::Nothing {
        return;
    }
    for unauthenticated in [user(Some(b"open-barley")), user(None)] {
        refused(unauthenticated.import(&region.ticket()), &[Kind::PermissionDenied]);
    }
    // A side with a secret trusts no side without one.
    let plain = bench.stamped(64, Access::READ, THEIRS);
    refused(knows.import(&plain.ticket()), &[Kind::PermissionDenied]);
}
