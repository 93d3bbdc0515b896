#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::memory::SystemStorage;
use crate::region::Span;
use crate::{Endpoint, Limits};

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(60);

fn endpoint(limit: Duration) -> Endpoint {
    Endpoint::options("owner").limits(Limits::within(limit)).open().unwrap()
}

fn offer(endpoint: &Endpoint, access: Access) -> Offered {
    let storage = Buffer::new(SystemStorage::new(64).unwrap());
    Offered { region: endpoint.register(storage, access).unwrap(), keep: Box::new(()) }
}

/// An operation over that many regions, and what names them.
fn operation(endpoint: &Endpoint, access: Access, regions: usize) -> (Arc<Passive>, Vec<(u32, u64)>) {
    let offered: Vec<_> = (0..regions).map(|_| offer(endpoint, access)).collect();
    let places = offered.iter().map(|one| one.region.place_in_table()).collect();
    (
        Passive::open(
            &endpoint.core().operations,
            endpoint.limits(),
            "readable",
            access,
            offered,
            Some(LONG),
        )
        .unwrap(),
        places,
    )
}

fn claim(endpoint: &Endpoint, passive: &Passive, who: u64, region: (u32, u64)) -> Result<()> {
    let operations = &endpoint.core().operations;
    operations.claim(&passive.id, Claimer::Session(who), &format!("peer-{who}"), region, Access::READ_WRITE)
}

fn finish(endpoint: &Endpoint, passive: &Passive, who: u64, outcome: Result<()>) {
    let _ = endpoint.core().operations.finish(&passive.id, Claimer::Session(who), outcome);
}

fn failed() -> Error {
    Error::new(Kind::Exhausted, "write", "no room")
}

#[test]
fn one_session_claims_all_regions_and_ends_it() {
    let endpoint = endpoint(LONG);
    let (passive, places) = operation(&endpoint, Access::READ, 3);
    assert_eq!(passive.stage(), Stage::Waiting);
    for place in &places {
        claim(&endpoint, &passive, 1, *place).unwrap();
    }
    assert_eq!(passive.stage(), Stage::Claimed);
    assert!(endpoint.core().operations.any_claimed_by(Claimer::Session(1)));
    assert!(!endpoint.core().operations.any_claimed_by(Claimer::Session(2)));
    finish(&endpoint, &passive, 1, Ok(()));
    assert!(passive.completion.result().unwrap().is_ok());
    assert!(passive.is_quiet());
    assert_eq!((endpoint.stats().regions, endpoint.stats().operations), (0, 0));
    finish(&endpoint, &passive, 1, Err(failed()));
    passive.end(Err(failed()));
    assert!(passive.completion.result().unwrap().is_ok(), "the first end stays");
}

#[test]
fn whoever_comes_second_is_refused_and_cannot_end_it() {
    let endpoint = endpoint(LONG);
    let (passive, places) = operation(&endpoint, Access::READ, 2);
    claim(&endpoint, &passive, 1, places[0]).unwrap();
    for (who, place) in [(2, places[0]), (2, places[1]), (1, places[0])] {
        let error = claim(&endpoint, &passive, who, place).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains("already claimed by peer-1"), "{error}");
    }
    finish(&endpoint, &passive, 2, Ok(()));
    endpoint.core().operations.abandon(Claimer::Session(2), &failed());
    assert_eq!(passive.stage(), Stage::Claimed);
    claim(&endpoint, &passive, 1, places[1]).unwrap();
}

#[test]
fn only_its_own_memory_and_enough_rights_claim_it() {
    let endpoint = endpoint(LONG);
    let (passive, places) = operation(&endpoint, Access::WRITE, 1);
    let (other, elsewhere) = operation(&endpoint, Access::WRITE, 1);
    let error = claim(&endpoint, &passive, 1, elsewhere[0]).unwrap_err();
    assert_eq!(error.kind(), Kind::PermissionDenied);
    let operations = &endpoint.core().operations;
    let error = operations.claim(&passive.id, Claimer::here(), "p", places[0], Access::READ).unwrap_err();
    assert_eq!(error.kind(), Kind::PermissionDenied);
    assert_eq!((passive.stage(), other.stage()), (Stage::Waiting, Stage::Waiting));
    let unknown = operations.claim(&[0; 16], Claimer::here(), "p", places[0], Access::WRITE).unwrap_err();
    assert_eq!(unknown.kind(), Kind::Stale);
}

#[test]
fn a_claimer_that_asked_for_half_of_it_is_not_believed() {
    let endpoint = endpoint(LONG);
    let (passive, places) = operation(&endpoint, Access::READ, 2);
    claim(&endpoint, &passive, 1, places[0]).unwrap();
    finish(&endpoint, &passive, 1, Ok(()));
    assert_eq!(passive.completion.result().unwrap().unwrap_err().kind(), Kind::Protocol);
}

#[test]
fn the_end_of_the_session_and_the_claimers_error_name_the_peer() {
    let endpoint = endpoint(LONG);
    let (gone, places) = operation(&endpoint, Access::READ, 1);
    claim(&endpoint, &gone, 1, places[0]).unwrap();
    let (unlucky, places) = operation(&endpoint, Access::READ, 1);
    claim(&endpoint, &unlucky, 2, places[0]).unwrap();
    let died = Error::new(Kind::Disconnected, "serve", "the peer's process has died");
    endpoint.core().operations.abandon(Claimer::Session(1), &died);
    finish(&endpoint, &unlucky, 2, Err(failed()));
    for (passive, kind, peer) in [(gone, Kind::Disconnected, "peer-1"), (unlucky, Kind::Exhausted, "peer-2")]
    {
        let error = passive.completion.result().unwrap().unwrap_err();
        assert_eq!((error.kind(), error.peer(), error.op()), (kind, Some(peer), "readable"));
    }
}

#[test]
fn it_ends_only_when_its_memory_is_quiet() {
    let endpoint = endpoint(LONG);
    let offered = vec![offer(&endpoint, Access::WRITE), offer(&endpoint, Access::WRITE)];
    let inside = Span::from(&offered[1].region).core().begin_use("write").unwrap();
    let passive = Passive::open(
        &endpoint.core().operations,
        endpoint.limits(),
        "writable",
        Access::WRITE,
        offered,
        None,
    )
    .unwrap();
    passive.end(Err(failed()));
    assert!(passive.completion.result().is_none() && !passive.is_quiet());
    assert!(passive.with_regions(|_| Ok(())).is_err());
    drop(inside);
    let result = passive.completion.wait("writable", Some(Instant::now() + LONG)).unwrap();
    assert_eq!(result.unwrap_err().kind(), Kind::Exhausted);
    assert!(passive.is_quiet());
}

#[test]
fn who_stays_inside_the_memory_does_not_keep_it_from_ending() {
    let endpoint = endpoint(SHORT);
    let offered = vec![offer(&endpoint, Access::WRITE)];
    let inside = Span::from(&offered[0].region).core().begin_use("write").unwrap();
    let passive = Passive::open(
        &endpoint.core().operations,
        endpoint.limits(),
        "writable",
        Access::WRITE,
        offered,
        None,
    )
    .unwrap();
    passive.end(Err(failed()));
    let error = passive.completion.wait("writable", Some(Instant::now() + LONG)).unwrap().unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("no room; a peer was still inside"), "{error}");
    assert!(!passive.is_quiet());
    assert_eq!(endpoint.stats().parked.0, 1);
    drop(inside);
    let started = Instant::now();
    while !passive.is_quiet() {
        assert!(started.elapsed() < LONG);
        std::thread::yield_now();
    }
}

#[test]
fn deadlines_say_whether_anybody_came() {
    let endpoint = endpoint(SHORT);
    let open = |limit| {
        let offered = vec![offer(&endpoint, Access::READ)];
        let place = offered[0].region.place_in_table();
        (
            Passive::open(
                &endpoint.core().operations,
                endpoint.limits(),
                "readable",
                Access::READ,
                offered,
                limit,
            )
            .unwrap(),
            place,
        )
    };
    let (lonely, _) = open(Some(SHORT));
    let (claimed, place) = open(None);
    claim(&endpoint, &claimed, 1, place).unwrap();
    for (passive, words) in [(lonely, "no peer claimed it"), (claimed, "its claimer was not done")] {
        let error = passive.completion.wait("readable", Some(Instant::now() + LONG)).unwrap().unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
        assert!(error.message().contains(words), "{error}");
    }
}

#[test]
fn closing_the_endpoint_ends_everything_and_nothing_opens_after() {
    let endpoint = endpoint(LONG);
    let (passive, _) = operation(&endpoint, Access::READ, 1);
    let late = offer(&endpoint, Access::READ);
    endpoint.close().unwrap();
    assert_eq!(passive.completion.result().unwrap().unwrap_err().kind(), Kind::Canceled);
    let refused = Passive::open(
        &endpoint.core().operations,
        endpoint.limits(),
        "readable",
        Access::READ,
        vec![late],
        None,
    );
    assert_eq!(refused.err().unwrap().kind(), Kind::Invalid);
    assert_eq!(endpoint.stats().operations, 0);
}

#[test]
fn numbers_look_like_uuids() {
    let endpoint = endpoint(LONG);
    let (one, _) = operation(&endpoint, Access::READ, 1);
    let (other, _) = operation(&endpoint, Access::READ, 1);
    assert_ne!(one.id, other.id);
    assert_eq!((one.id[6] >> 4, one.id[8] >> 6), (4, 2));
}
