//! What should go well.

use towline::connect::{
    Connector, Descriptor, OperationKind, OperationStatus, RdmaMetadata, ReadOperation, WriteOperation,
};
use towline::{Endpoint, Kind, MemoryAccess, SystemStorage};

use crate::scene::*;

#[test]
fn a_read_pairs_with_a_readable_over_every_path() {
    for path in paths() {
        for len in [1, 4096, (3 << 20) + 5] {
            let (encode, decode) = pair(path);
            let readable = encode.create_readable(filled(7, len)).unwrap();
            assert_eq!(readable.status(), OperationStatus::Initialized);
            let text = readable.metadata().unwrap().to_json().unwrap();

            let target = empty(len);
            let read = decode.begin_read(&text.parse().unwrap(), &target).unwrap();
            assert_eq!((read.path(), read.bytes(), read.peer()), (path, len as u64, "encode"));
            read.wait(Some(WATCHDOG)).unwrap();
            readable.wait(Some(WATCHDOG)).unwrap();
            assert_eq!(bytes(&target), pattern(7, len), "{path}");
            for status in [read.status(), readable.status()] {
                assert_eq!(status, OperationStatus::Complete);
            }
            assert_eq!((read.kind(), readable.kind()), (OperationKind::Read, OperationKind::Read));
            assert_eq!(read.results().unwrap().len(), 1);
            assert!(readable.quiet() && read.quiet() && !target.is_registered());
            assert_eq!((regions(&encode), regions(&decode)), (0, 0));
        }
    }
}

#[test]
fn a_write_pairs_with_a_writable_over_every_path() {
    for path in paths() {
        for len in [1, 4096, (3 << 20) + 5] {
            let (encode, decode) = pair(path);
            let target = empty_shared(len);
            let writable = decode.create_writable(&target).unwrap();
            let write = encode.begin_write(filled(9, len), &writable.metadata().unwrap()).unwrap();
            write.wait(Some(WATCHDOG)).unwrap();
            writable.wait(Some(WATCHDOG)).unwrap();
            assert_eq!(bytes(&target), pattern(9, len), "{path}");
            assert_eq!(
                (write.status(), writable.status()),
                (OperationStatus::Complete, OperationStatus::Complete)
            );
            assert!(writable.error().is_none() && write.error().is_none());
        }
    }
}

#[test]
fn operations_can_be_awaited() {
    for path in paths() {
        let (encode, decode) = pair(path);
        for round in 0..3 {
            let readable = encode.create_readable(filled(round, 70_000)).unwrap();
            let metadata = readable.metadata().unwrap();
            let target = empty(70_000);
            // The first contact takes a thread, the others only wait for the reply.
            let mut read: ReadOperation = block_on(decode.begin_read_async(&metadata, &target)).unwrap();
            block_on(&mut read).unwrap();
            block_on(readable).unwrap();
            assert_eq!(bytes(&target), pattern(round, 70_000));

            let sink = empty_shared(5000);
            let writable = encode.create_writable(&sink).unwrap();
            let metadata = writable.metadata().unwrap();
            let write: WriteOperation =
                block_on(decode.begin_write_async(vec![filled(1, 5000)], &metadata)).unwrap();
            block_on(write).unwrap();
            block_on(writable).unwrap();
            assert_eq!(bytes(&sink), pattern(1, 5000));
        }
    }
}

#[test]
fn several_descriptors_move_together() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let sizes = [1, 4096, 300_000, 2 << 20, 17];
        let sources: Vec<Descriptor> =
            sizes.iter().enumerate().map(|(at, len)| filled(at as u8, *len)).collect();
        let targets: Vec<Descriptor> = sizes.iter().map(|len| empty(*len)).collect();
        let readable = encode.create_readable(sources).unwrap();
        let metadata = readable.metadata().unwrap();
        assert_eq!(metadata.descriptors.len(), sizes.len());
        assert!(metadata.descriptors.iter().all(|one| one.ptr != 0));
        let read = decode.begin_read(&metadata, &targets).unwrap();
        read.wait(None).unwrap();
        readable.wait(None).unwrap();
        for (at, target) in targets.iter().enumerate() {
            assert_eq!(bytes(target), pattern(at as u8, sizes[at]), "{path} {at}");
        }
    }
}

#[test]
fn as_many_descriptors_as_are_allowed_are_one_claim() {
    for path in ["inproc", "unix"] {
        let (encode, decode) = pair(path);
        let count = towline::connect::MAX_DESCRIPTORS;
        let source = towline::create_buffer(SystemStorage::new(count * 64).unwrap());
        source.write_at(0, &pattern(3, count * 64)).unwrap();
        let part = |base: &towline::Buffer, at: usize| {
            Descriptor::new(towline::OffsetBuffer::new(base.clone(), at * 64, 64).unwrap())
        };
        let target = towline::create_buffer(SystemStorage::new(count * 64).unwrap());
        let sources: Vec<_> = (0..count).map(|at| part(&source, at)).collect();
        let targets: Vec<_> = (0..count).map(|at| part(&target, at)).collect();
        let readable = encode.create_readable(sources).unwrap();
        let text = readable.metadata().unwrap().to_json().unwrap();
        let read = decode.begin_read(&RdmaMetadata::from_json(&text).unwrap(), targets).unwrap();
        read.wait(None).unwrap();
        readable.wait(None).unwrap();
        let mut got = vec![0; count * 64];
        target.read_at(0, &mut got).unwrap();
        assert_eq!(got, pattern(3, count * 64));
    }
}

#[test]
fn more_than_may_be_in_flight_is_moved_in_turns() {
    let (encode, decode) = pair("mapped");
    let (count, len) = (9, 8 << 20);
    let source = filled(4, len);
    let readable = encode.create_readable(vec![source; count]).unwrap();
    let targets: Vec<_> = (0..count).map(|_| empty(len)).collect();
    let read = decode.begin_read(&readable.metadata().unwrap(), &targets).unwrap();
    read.wait(None).unwrap();
    readable.wait(None).unwrap();
    let expected = pattern(4, len);
    assert!(targets.iter().all(|target| bytes(target) == expected));
}

#[test]
fn one_connector_can_be_both_ends() {
    for path in paths() {
        let both = over(path, "both");
        let readable = both.create_readable(filled(5, 10_000)).unwrap();
        let target = empty(10_000);
        let read = both.begin_read(&readable.metadata().unwrap(), &target).unwrap();
        read.wait(None).unwrap();
        readable.wait(None).unwrap();
        assert_eq!(bytes(&target), pattern(5, 10_000));
    }
}

#[test]
fn connectors_that_open_by_themselves_find_each_other() {
    let (one, other) = (Connector::new().unwrap(), Connector::named("other").unwrap());
    let readable = one.create_readable(filled(6, 100)).unwrap();
    let target = empty(100);
    let read = other.begin_read(&readable.metadata().unwrap(), &target).unwrap();
    read.wait(None).unwrap();
    assert_eq!(bytes(&target), pattern(6, 100));
    readable.wait(None).unwrap();
}

#[test]
fn a_prefix_is_what_the_descriptor_says_when_the_metadata_is_asked_for() {
    for path in paths() {
        let (encode, decode) = pair(path);
        let pooled = filled(8, 8192);
        let readable = encode.create_readable(&pooled).unwrap();
        pooled.set_size(1000).unwrap();
        let metadata = readable.metadata().unwrap();
        assert_eq!(metadata.descriptors[0].size, 1000);
        pooled.set_size(8192).unwrap();
        let target = empty(8192).with_size(1000).unwrap();
        decode.begin_read(&metadata, &target).unwrap().wait(None).unwrap();
        readable.wait(None).unwrap();
        let mut expected = pattern(8, 1000);
        expected.resize(8192, 0);
        assert_eq!(bytes(&target), expected);
    }
}

#[test]
fn what_the_user_registered_stays_registered() {
    let (encode, decode) = pair("unix");
    let (source, target) = (filled(1, 4096), empty(4096));
    source.register_memory(&encode).unwrap();
    source.register_memory(&encode).unwrap();
    target.register_memory(&decode).unwrap();
    for _ in 0..3 {
        let readable = encode.create_readable(&source).unwrap();
        decode.begin_read(&readable.metadata().unwrap(), &target).unwrap().wait(None).unwrap();
        readable.wait(None).unwrap();
        assert!(source.is_registered() && target.is_registered());
        assert_eq!((regions(&encode), regions(&decode)), (1, 1));
    }
    source.deregister_memory(&encode).unwrap();
    source.deregister_memory(&encode).unwrap();
    assert!(!source.is_registered());
    assert_eq!(regions(&encode), 0);
}

#[test]
fn two_operations_on_one_descriptor_do_not_disturb_each_other() {
    let (encode, decode) = pair("unix");
    let source = filled(2, 4096);
    let (first, second) =
        (encode.create_readable(&source).unwrap(), encode.create_readable(&source).unwrap());
    let metadata = second.metadata().unwrap();
    first.cancel();
    assert_eq!(first.wait(None).unwrap_err().kind(), Kind::Canceled);
    assert!(source.is_registered());
    let target = empty(4096);
    decode.begin_read(&metadata, &target).unwrap().wait(None).unwrap();
    second.wait(None).unwrap();
    assert_eq!(bytes(&target), pattern(2, 4096));
    assert!(!source.is_registered());
}

#[test]
fn a_descriptor_belongs_to_one_connector_at_a_time() {
    let (one, other) = (over("inproc", "one"), over("inproc", "other"));
    let descriptor = empty(100);
    descriptor.register_memory(&one).unwrap();
    for error in [
        descriptor.register_memory(&other).unwrap_err(),
        descriptor.deregister_memory(&other).unwrap_err(),
        other.create_readable(&descriptor).unwrap_err(),
    ] {
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains("another connector, one"), "{error}");
    }
    descriptor.deregister_memory(&one).unwrap();
    descriptor.register_memory(&other).unwrap();
    other.close();
    assert!(!descriptor.is_registered());
    descriptor.register_memory(&one).unwrap();
}

#[test]
fn the_older_text_form_is_understood() {
    let (encode, decode) = pair("unix");
    let readable = encode.create_readable(filled(3, 500)).unwrap();
    let metadata = readable.metadata_in_hex().unwrap();
    assert!(!metadata.nixl_metadata.contains(':'));
    assert!(readable.metadata().unwrap().nixl_metadata.starts_with("b64:"));
    assert_eq!(metadata.notification_key.len(), 36);
    let target = empty(500);
    decode.begin_read(&metadata, &target).unwrap().wait(None).unwrap();
    assert_eq!(bytes(&target), pattern(3, 500));
}

#[test]
fn a_thousand_operations_leave_nothing_behind() {
    for path in ["inproc", "mapped", "unix", "tcp"] {
        let (encode, decode) = pair(path);
        let (source, target) = (filled(1, 4096), empty(4096));
        for round in 0..1000 {
            let readable = encode.create_readable(&source).unwrap();
            let read = decode.begin_read(&readable.metadata().unwrap(), &target).unwrap();
            read.wait(None).unwrap();
            readable.wait(None).unwrap();
            if round % 100 == 99 {
                let (here, there) = (encode.endpoint().unwrap().stats(), decode.endpoint().unwrap().stats());
                assert_eq!((here.regions, there.regions), (0, 0), "{path}");
                assert_eq!((here.operations, here.parked), (0, (0, 0)));
            }
        }
    }
}

#[test]
fn a_secret_and_settings_come_with_the_endpoint() {
    let endpoint = |name: &str| Endpoint::options(name).secret(b"sixteen bytes or").open().unwrap();
    let encode = Connector::with_endpoint(endpoint("with-secret"));
    assert_eq!(encode.name(), "with-secret");
    assert!(!encode.hostname().is_empty());
    let decode = Connector::with_endpoint(endpoint("also-with-secret"));
    let readable = encode.create_readable(filled(1, 10)).unwrap();
    decode.begin_read(&readable.metadata().unwrap(), empty(10)).unwrap().wait(None).unwrap();
}
