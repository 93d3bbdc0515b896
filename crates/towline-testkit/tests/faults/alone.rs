//! Crowds, forks, restarts and an empty descriptor table: each in processes of its own.

use std::time::Duration;

use towline::{Access, Kind, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::{Process, own_address};
use towline_testkit::watchdog::{eventually, watch};

use super::{STALL, all_lanes, endpoint, kind_for, local};

#[test]
fn two_hundred_endpoints_share_three_threads_and_few_descriptors() {
    const COUNT: usize = 200;
    let _watchdog =
        watch("two_hundred_endpoints_share_three_threads_and_few_descriptors", Duration::from_secs(120));
    let mut process = Process::start("crowd");
    let descriptors = process.must(&format!("crowd {COUNT}")).number(0) as usize;
    // Two sockets to listen on, the table, the region and the bell of each; two connections between neighbours, of
    // which this process has both ends.
    assert!(descriptors <= COUNT * 16, "{descriptors} descriptors for {COUNT} endpoints");
    let threads = || {
        let all = process.threads();
        all.into_iter().filter(|name| name.starts_with("towline-")).collect::<Vec<_>>()
    };
    assert!(eventually(Duration::from_secs(30), || threads().len() <= 3), "{:?}", threads());
}

#[test]
fn twenty_processes_all_read_from_all() {
    const COUNT: u16 = 20;
    let _watchdog = watch("twenty_processes_all_read_from_all", Duration::from_secs(120));
    let mut processes: Vec<Process> = (0..COUNT)
        .map(|number| {
            let mut process = Process::open(&format!("worker-{number}"), "");
            // Some can be mapped, some must be copied from by other means.
            let kind = if number % 2 == 0 { "shared" } else { "system" };
            process.must(&format!("register 262144 {kind} read"));
            process.must(&format!("fill 1 {number} 1"));
            process
        })
        .collect();
    let mut targets = String::new();
    for (number, process) in processes.iter_mut().enumerate() {
        let ticket = process.must("ticket 1").text(0).to_owned();
        targets.push_str(&format!("{ticket} {number} 1\n"));
    }
    // All at once; the replies are collected afterwards.
    for process in &mut processes {
        process.tell_with("read-all 3", targets.as_bytes());
    }
    for process in &mut processes {
        let answer = process.answer(Duration::from_secs(60)).unwrap();
        assert_eq!(answer.number(0), u64::from(COUNT));
    }
}

#[test]
fn a_mapping_is_kept_for_the_next_import_and_let_go_with_the_storage() {
    let _watchdog =
        watch("a_mapping_is_kept_for_the_next_import_and_let_go_with_the_storage", Duration::from_secs(60));
    let mut owner = Process::open("owner", "");
    let mut reader = Process::open("reader", "");
    reader.must("register 65536 system none");
    owner.must("register 65536 shared read");
    owner.must("register 65536 shared read");
    let kept = owner.must("ticket 1").text(0).to_owned();
    let other = owner.must("ticket 2").text(0).to_owned();
    for _ in 0..3 {
        for ticket in [&kept, &other] {
            let remote = reader.must(&format!("import {ticket} mapped")).number(0);
            reader.must(&format!("read {remote} 1 0 0 65536"));
            reader.must(&format!("forget {remote}"));
        }
        assert_eq!(reader.mapped_segments(), 2);
    }
    owner.must("drop 1");
    assert!(eventually(Duration::from_secs(30), || reader.mapped_segments() == 1));
    owner.kill();
    assert!(eventually(Duration::from_secs(30), || reader.mapped_segments() == 0));
}

#[test]
fn a_forked_child_can_do_nothing_and_the_parent_goes_on() {
    let _watchdog = watch("a_forked_child_can_do_nothing_and_the_parent_goes_on", Duration::from_secs(60));
    let mut owner = Process::open("owner", "");
    owner.must("register 65536 shared read+write");
    owner.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let mut parent = Process::open("parent", "");
    parent.must("register 65536 shared read+write");
    for path in ["mapped", "tcp"] {
        let remote = parent.must(&format!("import {ticket} {path}")).number(0);
        parent.must(&format!("read {remote} 1 0 0 65536"));
        if path == "mapped" {
            parent.must(&format!("pin {remote}"));
        }
        let wrong = parent.must("fork");
        assert_eq!(wrong.text(0), "", "in the child");
        // The child has dropped and closed everything that it saw; here nothing has changed.
        parent.must(&format!("read {remote} 1 0 0 65536"));
        parent.must("check 1 1 1 0 65536");
        assert!(parent.ask_with(&format!("notify {remote}"), b"still here").is_ok());
        assert_eq!(owner.must("receive 20000").payload, b"still here");
    }
    let own = parent.must("ticket 1").text(0).to_owned();
    let remote = owner.must(&format!("import {own}")).number(0);
    owner.must("register 65536 system none");
    owner.must(&format!("read {remote} {} 0 0 65536", remote + 1));
    owner.must(&format!("check {} 1 1 0 65536", remote + 1));
}

#[test]
fn without_descriptors_calls_are_exhausted_and_recover() {
    let _watchdog = watch("without_descriptors_calls_are_exhausted_and_recover", Duration::from_secs(60));
    let mut known = Process::open("known", "");
    known.must("register 4096 shared read");
    let known_ticket = known.must("ticket 1").text(0).to_owned();
    let mut unknown = Process::open("unknown", "");
    unknown.must("register 4096 shared read");
    let unknown_ticket = unknown.must("ticket 1").text(0).to_owned();
    let mut hungry = Process::open("hungry", "");
    hungry.must("register 4096 system none");
    let remote = hungry.must(&format!("import {known_ticket}")).number(0);
    hungry.must(&format!("read {remote} 1 0 0 4096"));
    for _ in 0..3 {
        hungry.must(&format!("starve {unknown_ticket} {remote} 1"));
    }
    // And it still serves others.
    hungry.must("register 4096 shared read");
    let ticket = hungry.must(&format!("ticket {}", remote + 1)).text(0).to_owned();
    known.must(&format!("import {ticket}"));
}

#[test]
fn the_tickets_of_an_owner_that_restarted_give_no_bytes() {
    let _watchdog = watch("the_tickets_of_an_owner_that_restarted_give_no_bytes", Duration::from_secs(120));
    let gone = [Kind::Stale, Kind::Disconnected];
    let user = endpoint("user");
    // The next life answers where the last one did.
    let options = format!("listen={}", own_address());
    let mut before: Vec<(Ticket, Vec<(&str, towline::Remote)>)> = Vec::new();
    for life in 0..4u16 {
        let mut owner = Process::open("phoenix", &options);
        let mut tickets = Vec::new();
        for (number, path) in all_lanes().into_iter().enumerate() {
            owner.must(&format!("register 4096 {} read+write", kind_for(path)));
            owner.must(&format!("fill {} {life} {number}", number + 1));
            let ticket: Ticket = owner.must(&format!("ticket {}", number + 1)).text(0).parse().unwrap();
            tickets.push((path, ticket));
        }
        let buffer = local(&user, 4096);
        let mine = Stamp::new(99, 9);
        for (ticket, remotes) in &before {
            mine.fill_storage(buffer.storage()).unwrap();
            for path in all_lanes() {
                let error = user.import_with(ticket, &routing(path)).unwrap_err();
                assert!(gone.contains(&error.kind()), "life {life}, {path}: {error}");
            }
            for (path, remote) in remotes {
                let error = outcome(user.read(remote, &buffer).start()).unwrap_err();
                assert!(gone.contains(&error.kind()), "life {life}, {path}: {error}");
                let error = outcome(user.write(remote, &buffer).start()).unwrap_err();
                assert!(gone.contains(&error.kind()), "life {life}, {path}: {error}");
            }
            mine.verify_storage(buffer.storage(), 0, 4096).unwrap();
        }
        let mut remotes = Vec::new();
        for (path, ticket) in &tickets {
            let remote = user.import_with(ticket, &routing(path)).unwrap();
            outcome(user.read(&remote, &buffer).start()).unwrap();
            remotes.push((*path, remote));
        }
        before.push((tickets.swap_remove(3).1, remotes));
        match life % 2 {
            0 => owner.kill(),
            _ => drop(owner.ask("exit 0")),
        }
        drop(owner);
    }
    assert!(eventually(STALL * 10, || user.stats().parked == (0, 0)));
    drop(user.register(towline::SystemStorage::new(64).unwrap(), Access::NONE).unwrap());
}
