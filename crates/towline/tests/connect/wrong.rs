//! What must be refused before a byte moves.

use std::time::Duration;

use data_encoding::BASE64;
use towline::connect::{Descriptor, Device, DeviceKind, OperationKind, OperationStatus, RdmaMetadata};
use towline::{Error, Kind};

use crate::scene::*;

fn refused<T>(outcome: towline::Result<T>, kind: Kind, words: &str) {
    let error: Error = outcome.err().unwrap();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(words), "{words:?} is not in {error}");
}

#[test]
fn wrong_pairings_are_invalid_and_use_nothing_up() {
    let (encode, decode) = pair("unix");
    let readable = encode.create_readable(filled(1, 100)).unwrap();
    let metadata = readable.metadata().unwrap();
    let (one, xpu) = (empty(100), Descriptor::foreign(0x1000, 100, Device::new(DeviceKind::Xpu, 0)));

    refused(decode.begin_write(&one, &metadata), Kind::Invalid, "for a READ, not for a WRITE");
    refused(
        decode.begin_read(&metadata, vec![one.clone(), empty(100)]),
        Kind::Invalid,
        "2 local descriptors for 1",
    );
    refused(decode.begin_read(&metadata, empty(99)), Kind::Invalid, "99 local bytes for 100");
    refused(decode.begin_read(&metadata, empty(101)), Kind::Invalid, "101 local bytes for 100");
    refused(decode.begin_read(&metadata, Vec::new()), Kind::Invalid, "at least one descriptor");
    refused(decode.begin_read(&metadata, empty(100).read_only()), Kind::Invalid, "read-only");
    refused(decode.begin_read(&metadata, vec![one.clone(), xpu.clone()]), Kind::Invalid, "cannot be mixed");
    refused(decode.begin_read(&metadata, xpu.clone()), Kind::Unsupported, "xpu:0");
    refused(block_on(decode.begin_read_async(&metadata, empty(99))), Kind::Invalid, "99 local bytes");
    refused(encode.create_writable(filled(1, 10).read_only()), Kind::Invalid, "read-only");
    refused(encode.create_readable(Vec::new()), Kind::Invalid, "at least one descriptor");
    refused(encode.create_readable(vec![one.clone(), xpu.clone()]), Kind::Invalid, "cannot be mixed");
    refused(encode.create_readable(vec![one.clone(); 1025]), Kind::Invalid, "at most 1024");
    refused(encode.create_readable(&xpu), Kind::Unsupported, "xpu:0");
    refused(xpu.register_memory(&encode), Kind::Unsupported, "xpu:0");
    refused(empty(10).with_size(11), Kind::Invalid, "within 1 to 10");
    refused(empty(10).with_size(0), Kind::Invalid, "within 1 to 10");
    assert!(!xpu.is_registered() && !one.is_registered());

    // The operation was not touched by any of it.
    assert_eq!(readable.status(), OperationStatus::Initialized);
    assert_eq!(regions(&decode), 0);
    decode.begin_read(&metadata, &one).unwrap().wait(None).unwrap();
    assert_eq!(bytes(&one), pattern(1, 100));
}

#[test]
fn a_read_only_source_is_fine() {
    let (encode, decode) = pair("inproc");
    let readable = encode.create_readable(filled(1, 100).read_only()).unwrap();
    let target = empty(100);
    decode.begin_read(&readable.metadata().unwrap(), &target).unwrap().wait(None).unwrap();
    let writable = decode.create_writable(&target).unwrap();
    encode
        .begin_write(filled(2, 100).read_only(), &writable.metadata().unwrap())
        .unwrap()
        .wait(None)
        .unwrap();
    assert_eq!(bytes(&target), pattern(2, 100));
}

#[test]
fn a_second_claimer_gets_nothing() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let third = over(path, "third");
        let writable = encode.create_writable(vec![empty_shared(5000), empty_shared(8)]).unwrap();
        let metadata = writable.metadata().unwrap();
        let local = || vec![empty(5000), empty(8)];
        let begun = decode.begin_write_async(vec![filled(1, 5000), filled(2, 8)], &metadata);
        eventually("it is claimed", || writable.status() == OperationStatus::InProgress);
        for connector in [&decode, &third] {
            refused(connector.begin_write(local(), &metadata), Kind::Invalid, "already claimed by decode");
        }
        let write = block_on(begun).unwrap();
        write.wait(None).unwrap();
        writable.wait(None).unwrap();
        for connector in [&decode, &third] {
            refused(connector.begin_write(local(), &metadata), Kind::Stale, "");
        }
        assert_eq!(bytes(&writable.descriptors()[1]), pattern(2, 8));
        refused(writable.metadata(), Kind::Stale, "has ended");
    }
}

#[test]
fn metadata_of_recycled_memory_is_stale() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let source = filled(1, 4096);
        // Also where the user's own registration of the same memory goes on.
        source.register_memory(&encode).unwrap();
        let readable = encode.create_readable(&source).unwrap();
        let metadata = readable.metadata().unwrap();
        drop(readable);
        let again = encode.create_readable(&source).unwrap();
        let target = empty(4096);
        refused(decode.begin_read(&metadata, &target), Kind::Stale, "");
        assert_eq!(bytes(&target), vec![0; 4096]);
        decode.begin_read(&again.metadata().unwrap(), &target).unwrap().wait(None).unwrap();
        assert_eq!(bytes(&target), pattern(1, 4096));
    }
}

#[test]
fn metadata_of_an_owner_that_is_gone_gives_an_error() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let metadata = readable.metadata().unwrap();
        encode.close();
        assert_eq!(readable.status(), OperationStatus::Cancelled);
        assert!(readable.error().unwrap().message().contains("closed"));
        let error = decode.begin_read(&metadata, empty(100)).expect_err("nobody is there");
        assert!(matches!(error.kind(), Kind::Disconnected | Kind::Stale), "{error}");
        refused(encode.create_readable(empty(1)), Kind::Invalid, "closed");
        refused(encode.begin_read(&metadata, empty(100)), Kind::Invalid, "closed");
        refused(empty(1).register_memory(&encode), Kind::Invalid, "closed");
    }
}

/// Changes the bytes of the envelope: `TOWC`, version, the operation's 16 bytes, the count, tickets.
fn meddled(metadata: &RdmaMetadata, meddle: impl FnOnce(&mut Vec<u8>)) -> RdmaMetadata {
    let text = metadata.nixl_metadata.strip_prefix("b64:").unwrap();
    let mut bytes = BASE64.decode(text.as_bytes()).unwrap();
    meddle(&mut bytes);
    RdmaMetadata { nixl_metadata: format!("b64:{}", BASE64.encode(&bytes)), ..metadata.clone() }
}

#[test]
fn hostile_metadata_is_refused_and_harms_nobody() {
    for path in ["inproc", "unix", "tcp"] {
        let (encode, decode) = pair(path);
        let readable = encode.create_readable(filled(1, 100)).unwrap();
        let other = encode.create_readable(filled(2, 100)).unwrap();
        let writable = encode.create_writable(empty_shared(100)).unwrap();
        let good = readable.metadata().unwrap();
        let target = empty(100);
        let read = |metadata: &RdmaMetadata| decode.begin_read(metadata, &target);

        let mixed = meddled(&good, |bytes| bytes[6] ^= 0x80);
        refused(read(&mixed), Kind::Stale, "belongs to another endpoint");

        // A ticket for another operation.
        let others = BASE64.decode(&other.metadata().unwrap().nixl_metadata.as_bytes()[4..]).unwrap();
        let stolen = meddled(&good, |bytes| bytes.splice(24.., others[24..].iter().copied()).for_each(drop));
        refused(read(&stolen), Kind::PermissionDenied, "does not offer");

        // A ticket that does not allow what is asked for.
        let mut write = writable.metadata().unwrap();
        write.operation_kind = OperationKind::Read;
        refused(read(&write), Kind::PermissionDenied, "needs r");

        // A forged tag, with a checksum that fits, reaches the owner and is refused there.
        let forged = meddled(&good, |bytes| {
            let end = bytes.len();
            bytes[end - 10] ^= 1;
            let check = towline::crypto::sha256(&[&bytes[26..end - 4]]);
            bytes[end - 4..].copy_from_slice(&check[..4]);
        });
        refused(read(&forged), Kind::PermissionDenied, "");

        for changed in [
            RdmaMetadata { nixl_metadata: "b64:eJwrLi1KzslMzEvMSQUAEUEDPA==".into(), ..good.clone() },
            RdmaMetadata { nixl_metadata: "789c4b4c4a0600024d0127".into(), ..good.clone() },
        ] {
            refused(read(&changed), Kind::Unsupported, "made by NIXL");
        }
        let mut sizes = good.clone();
        sizes.descriptors[0].size = 99;
        refused(decode.begin_read(&sizes, empty(99)), Kind::Protocol, "size is 99, and its ticket's 100");
        sizes.descriptors[0].size = u64::MAX;
        refused(read(&sizes), Kind::Protocol, "overflow");
        let mut devices = good.clone();
        devices.descriptors[0].device = Device::new(DeviceKind::Cuda, 0);
        refused(read(&devices), Kind::Protocol, "device is cuda:0");
        let mut twice = good.clone();
        twice.descriptors.push(twice.descriptors[0]);
        refused(decode.begin_read(&twice, vec![empty(100), empty(100)]), Kind::Protocol, "2 descriptors");
        let mut none = good.clone();
        none.operation_kind = OperationKind::Unspecified;
        refused(read(&none), Kind::Invalid, "<invalid>");
        none.operation_kind = OperationKind::Read;
        none.descriptors.clear();
        refused(read(&none), Kind::Invalid, "no descriptors");

        // None of that has used the operation up; a forged pointer and key are never looked at.
        assert_eq!(readable.status(), OperationStatus::Initialized);
        assert_eq!(bytes(&target), vec![0; 100]);
        let mut pointers = good;
        pointers.descriptors[0].ptr = u64::MAX;
        pointers.notification_key = "another one's".into();
        read(&pointers).unwrap().wait(None).unwrap();
        assert_eq!(bytes(&target), pattern(1, 100));
        readable.wait(None).unwrap();
        for waiting in [other.status(), writable.status()] {
            assert_eq!(waiting, OperationStatus::Initialized);
        }
    }
}

#[test]
fn nobody_can_finish_what_another_has_claimed() {
    // A second claimer of the same session is refused; neither that nor its drop may end the first one's operation.
    let (encode, decode) = pair("unix");
    let writable = encode.create_writable(empty_shared(5000)).unwrap();
    let metadata = writable.metadata().unwrap();
    let begun = decode.begin_write_async(filled(3, 5000), &metadata);
    eventually("it is claimed", || writable.status() == OperationStatus::InProgress);
    for _ in 0..20 {
        refused(block_on(decode.begin_write_async(empty(5000), &metadata)), Kind::Invalid, "already claimed");
        drop(decode.begin_write_async(empty(5000), &metadata));
    }
    refused(decode.begin_write(empty(5000), &metadata), Kind::Invalid, "already claimed");
    assert_eq!(writable.status(), OperationStatus::InProgress);
    block_on(async { begun.await?.await }).unwrap();
    writable.wait(None).unwrap();
    assert_eq!(bytes(&writable.descriptors()[0]), pattern(3, 5000));
}

#[test]
fn an_unclaimed_operation_ends_at_its_deadline() {
    let encode = over("unix", "encode");
    let source = filled(1, 100);
    let readable = encode.create_readable_within(&source, Some(Duration::from_millis(20))).unwrap();
    let metadata = readable.metadata().unwrap();
    let error = readable.wait(Some(WATCHDOG)).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    assert!(error.message().contains("no peer claimed it"), "{error}");
    assert_eq!(readable.status(), OperationStatus::Errored);
    assert!(!source.is_registered());
    refused(over("unix", "decode").begin_read(&metadata, empty(100)), Kind::Stale, "");

    encode.set_unclaimed_limit(Some(Duration::from_millis(1)));
    let writable = encode.create_writable(empty(1)).unwrap();
    assert_eq!(block_on(writable).unwrap_err().kind(), Kind::Timeout);
    encode.set_unclaimed_limit(None);
    let patient = encode.create_writable(empty(1)).unwrap();
    let gave_up = patient.wait(Some(Duration::from_millis(5))).unwrap_err();
    assert!(gave_up.kind() == Kind::Timeout && gave_up.message().contains("goes on"), "{gave_up}");
    assert_eq!(patient.status(), OperationStatus::Initialized);
}
