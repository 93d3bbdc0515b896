//! Checksums of blocks: what the path changes is noticed, and named.

use towline::{Access, DiskStorage, Dtype, Endpoint, Kind, Layout, ReduceOp, Storage, SystemStorage, Ticket};

use crate::middle::Middle;
use crate::{LEN, bytes, open, read, region, tcp};

fn checking(name: &str) -> Endpoint {
    Endpoint::options(name).routing(tcp()).lanes(2).checksums(true).open().unwrap()
}

/// Reads, writes, reductions, scattered blocks and small requests, all with checksums.
fn moves_everything(owner: &Endpoint, storage: impl Storage) {
    let words = !matches!(storage.place(), towline::Place::Disk);
    let region = owner.register(storage, Access::READ_WRITE).unwrap();
    let user = checking("user");
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    local.write_at(0, &bytes(3, LEN)).unwrap();
    user.write(&remote, &local).start().unwrap().wait().unwrap();
    assert!(read(&user, &remote).unwrap() == bytes(3, LEN));
    let pages = Layout::blocks(0, 4096, (LEN / 4096) as u64, 4096).unwrap();
    let (there, here) = ([1u32, 900, 3, 4, 500], [5u32, 1, 7, 9, 3]);
    let target = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    user.read(&remote, &target).blocks(&pages, &there, &pages, &here).start().unwrap().wait().unwrap();
    let mut page = vec![0; 4096];
    target.read_at(4096, &mut page).unwrap();
    assert!(page == bytes(3, LEN)[900 * 4096..901 * 4096]);
    user.read(&remote, &target).at(10, 20, 30).start().unwrap().wait().unwrap();
    user.write(&remote, &local).at(10, 10, 30).checked(false).start().unwrap().wait().unwrap();
    if words {
        user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64).start().unwrap().wait().unwrap();
        user.fetch_add(&remote, 0, 1).unwrap().wait().unwrap();
    }
}

#[test]
fn everything_moves_with_checksums() {
    let owner = open("owner", None);
    moves_everything(&owner, SystemStorage::new(LEN).unwrap());
    moves_everything(&owner, DiskStorage::new(LEN).unwrap());
}

#[test]
fn a_block_that_was_changed_on_the_way_is_an_error_that_names_it() {
    let right = bytes(1, LEN);
    for place in [100_000, 1_000_000, 7_000_000] {
        let middle = Middle::new();
        let (owner, user) = (middle.owner(None, false), checking("user"));
        let region = region(&owner, 1);
        let ticket: Ticket = region.ticket().unwrap();
        let remote = user.import(&ticket).unwrap();
        middle.flip_after(place);
        let error = read(&user, &remote).unwrap_err();
        assert!(middle.has_flipped());
        assert_eq!(error.kind(), Kind::Protocol, "{error}");
        assert!(error.to_string().contains("did not arrive as it was sent"), "{error}");
        assert!(error.to_string().contains("at offset"), "{error}");
        assert!(read(&user, &remote).unwrap() == right);

        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        local.write_at(0, &bytes(2, LEN)).unwrap();
        middle.flip_after(place);
        let transfer = user.write(&remote, &local).start().unwrap();
        let error = transfer.wait().unwrap_err();
        assert!(error.to_string().contains("did not arrive as it was sent"), "{error}");
        assert!(!transfer.failures().is_empty());
        user.write(&remote, &local).start().unwrap().wait().unwrap();
        let mut there = vec![0; LEN];
        region.read_at(0, &mut there).unwrap();
        assert!(there == bytes(2, LEN));
    }
}

#[test]
fn without_checksums_a_changed_block_goes_unnoticed() {
    let middle = Middle::new();
    let (owner, user) = (middle.owner(None, false), open("user", None));
    let region = region(&owner, 1);
    let remote = user.import(&region.ticket().unwrap()).unwrap();
    middle.flip_after(1_000_000);
    assert!(read(&user, &remote).unwrap() != bytes(1, LEN), "this is what checksums are for");
    assert!(middle.has_flipped());
}

#[test]
fn a_mistyped_ticket_is_noticed_by_who_reads_it() {
    let owner = open("owner", None);
    let text = region(&owner, 1).ticket().unwrap().to_string();
    for at in "towline1:".len()..text.len() {
        let mut typed = text.clone().into_bytes();
        typed[at] = if typed[at] == b'A' { b'B' } else { b'A' };
        let error = String::from_utf8(typed).unwrap().parse::<Ticket>().unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol);
    }
}
