//! Holders of a good ticket that the kernel keeps apart from the owner, of another user or in other namespaces, and that want its memory
//! all the same. They speak by themselves, because the library would not ask.

use towline::ticket::Ticket;
use towline_testkit::process::{Process, Wall};
use towline_testkit::skip::skip;

use crate::{LEN, Target};

/// Nobody's number, on Linux and elsewhere.
const NOBODY: u32 = 65_534;

/// What such a peer is passed and learns of memory that is shared within one user, and of a file.
fn grasped(target: &mut Target, attacker: &mut Process) -> [(u64, u64, bool); 2] {
    ["shared", "disk"].map(|kind| {
        let region = target.process.must(&format!("register {LEN} {kind} read+write")).number(0);
        let ticket: Ticket = target.process.must(&format!("ticket {region}")).text(0).parse().unwrap();
        let came = attacker.must(&format!("grasp {ticket}"));
        target.process.must(&format!("deregister {region} 20000"));
        (came.number(0), came.number(1), came.text(2) == "true")
    })
}

fn nothing_is_passed_across(wall: Wall, test: &str) {
    let mut attacker = match Process::start_behind(wall, "attacker") {
        Ok(attacker) => attacker,
        Err(reason) => return skip(test, "walls", &reason),
    };
    let mut target = Target::open(test);
    for round in 0..8 {
        let came = grasped(&mut target, &mut attacker);
        assert_eq!(came, [(0, 0, false); 2], "descriptors, answers and whether it may go on, round {round}");
    }
    drop(attacker);
    target.is_unharmed();
}

#[test]
fn a_holder_that_is_another_user_is_passed_no_descriptor_whatever_it_says() {
    let test = "a_holder_that_is_another_user_is_passed_no_descriptor_whatever_it_says";
    nothing_is_passed_across(Wall::User(NOBODY), test);
}

#[test]
fn a_holder_in_another_pid_namespace_is_passed_no_descriptor_whatever_it_says() {
    let test = "a_holder_in_another_pid_namespace_is_passed_no_descriptor_whatever_it_says";
    nothing_is_passed_across(Wall::PidNamespace, test);
    nothing_is_passed_across(Wall::PidNamespaceOnly, test);
}

#[test]
fn a_holder_in_another_user_namespace_is_passed_no_descriptor_whatever_it_says() {
    let test = "a_holder_in_another_user_namespace_is_passed_no_descriptor_whatever_it_says";
    nothing_is_passed_across(Wall::UserNamespace, test);
}

/// Without a wall it is, so that these tests can see it.
#[test]
fn a_holder_of_the_same_user_is_passed_memory_and_files() {
    let mut target = Target::open("a_holder_of_the_same_user_is_passed_memory_and_files");
    let mut attacker = Process::start("attacker");
    // The table, the pins, the bell and the mailbox; then the memory, or the file that was asked about.
    for (kind, came) in grasped(&mut target, &mut attacker).into_iter().enumerate() {
        assert!(came.0 >= 5 && came.1 == kind as u64 && came.2, "{came:?}");
    }
    drop(attacker);
    target.is_unharmed();
}
