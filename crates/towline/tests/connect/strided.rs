//! Sources with gaps: described by a layout, they arrive packed.

use towline::connect::{Connector, Descriptor, OperationStatus, RdmaMetadata};
use towline::{Buffer, Kind, Layout, MemoryAccess, MemoryDescription, SharedStorage};

use crate::scene::*;

/// The bytes of a layout over a pattern, block by block.
fn packed(seed: u8, layout: &Layout) -> Vec<u8> {
    let whole = pattern(seed, layout.extent() as usize);
    let blocks = (0..layout.block_count()).map(|index| layout.offset(index).unwrap() as usize);
    blocks.flat_map(|at| whole[at..at + layout.block_len() as usize].to_vec()).collect()
}

fn view(seed: u8, layout: &Layout) -> Descriptor {
    filled(seed, layout.extent() as usize).through(layout.clone()).unwrap()
}

/// Rows with gaps, a transposed matrix, single bytes, four dimensions, more blocks than one transfer has, and one of many
/// megabytes.
fn layouts() -> Vec<Layout> {
    let strided = |item, shape: &[u64], strides: &[i64]| Layout::strided(item, shape, strides).unwrap();
    vec![
        Layout::blocks(100, 64, 10, 100).unwrap(),
        strided(4, &[50, 30], &[4, 200]),
        strided(1, &[1000], &[3]),
        strided(2, &[3, 4, 5, 6], &[2000, 400, 50, 4]),
        strided(4, &[70_000], &[8]),
        strided(4096, &[1500], &[8192]),
    ]
}

#[test]
fn a_readable_with_gaps_arrives_packed_over_every_path() {
    for path in paths() {
        for (seed, layout) in (1..).zip(layouts()) {
            let (encode, decode) = pair(path);
            let source = view(seed, &layout);
            let expected = packed(seed, &layout);
            assert_eq!((source.size(), source.capacity()), (expected.len(), expected.len()));
            let readable = encode.create_readable(&source).unwrap();
            let metadata: RdmaMetadata = readable.metadata().unwrap().to_json().unwrap().parse().unwrap();
            assert_eq!(metadata.descriptors[0].size, expected.len() as u64);
            let target = empty(expected.len());
            let read = decode.begin_read(&metadata, &target).unwrap();
            assert_eq!((read.path(), read.bytes()), (path, expected.len() as u64));
            read.wait(Some(WATCHDOG)).unwrap();
            readable.wait(Some(WATCHDOG)).unwrap();
            assert!(bytes(&target) == expected, "{path}: {layout:?}");
            assert_eq!((regions(&encode), regions(&decode)), (0, 0));
        }
    }
}

#[test]
fn a_write_from_a_source_with_gaps_arrives_packed_over_every_path() {
    for path in paths() {
        for (seed, layout) in (1..).zip(layouts()) {
            let (encode, decode) = pair(path);
            let expected = packed(seed, &layout);
            let target = empty_shared(expected.len());
            let writable = decode.create_writable(&target).unwrap();
            let write = encode.begin_write(view(seed, &layout), &writable.metadata().unwrap()).unwrap();
            write.wait(Some(WATCHDOG)).unwrap();
            writable.wait(Some(WATCHDOG)).unwrap();
            assert!(bytes(&target) == expected, "{path}: {layout:?}");
        }
    }
}

#[test]
fn views_and_plain_memory_move_together() {
    let (encode, decode) = pair("unix");
    let layouts = layouts();
    let sources = vec![view(1, &layouts[0]), filled(2, 777), view(3, &layouts[4])];
    let targets: Vec<_> = sources.iter().map(|one| empty(one.size())).collect();
    let readable = encode.create_readable(sources).unwrap();
    let read = decode.begin_read(&readable.metadata().unwrap(), &targets).unwrap();
    read.wait(Some(WATCHDOG)).unwrap();
    readable.wait(Some(WATCHDOG)).unwrap();
    assert_eq!(bytes(&targets[0]), packed(1, &layouts[0]));
    assert_eq!(bytes(&targets[1]), pattern(2, 777));
    assert!(bytes(&targets[2]) == packed(3, &layouts[4]));
}

#[test]
fn a_prefix_of_a_view_ends_within_a_block() {
    for path in paths() {
        let layout = Layout::blocks(0, 64, 10, 100).unwrap();
        for size in [1, 63, 64, 65, 300, 640] {
            let (encode, decode) = pair(path);
            let source = view(5, &layout).with_size(size).unwrap();
            let readable = encode.create_readable(&source).unwrap();
            let target = empty(size);
            decode.begin_read(&readable.metadata().unwrap(), &target).unwrap().wait(None).unwrap();
            readable.wait(Some(WATCHDOG)).unwrap();
            assert_eq!(bytes(&target), packed(5, &layout)[..size], "{path}");

            let sink = empty_shared(size);
            let writable = decode.create_writable(&sink).unwrap();
            encode.begin_write(&source, &writable.metadata().unwrap()).unwrap().wait(None).unwrap();
            writable.wait(Some(WATCHDOG)).unwrap();
            assert_eq!(bytes(&sink), packed(5, &layout)[..size], "{path}");
        }
        assert!(view(5, &layout).set_size(641).is_err());
    }
}

#[test]
fn a_view_is_no_target() {
    let (encode, decode) = pair("unix");
    let layout = Layout::blocks(0, 64, 10, 100).unwrap();
    let target = view(0, &layout);
    assert!(target.is_read_only() && target.layout() == Some(&layout));
    let readable = encode.create_readable(filled(1, 640)).unwrap();
    for refused in [
        encode.create_writable(&target).err(),
        decode.begin_read(&readable.metadata().unwrap(), &target).err(),
    ] {
        let error = refused.unwrap();
        assert!(error.kind() == Kind::Invalid && error.message().contains("not contiguous"), "{error}");
    }
    assert_eq!(readable.status(), OperationStatus::Initialized);
}

#[test]
fn layouts_that_are_no_view_of_the_storage_are_invalid() {
    let storage = Buffer::new(SharedStorage::new(1000).unwrap());
    for (layout, why) in [
        (Layout::blocks(0, 100, 11, 100), "reaches"),
        (Layout::blocks(901, 100, 1, 100), "reaches"),
        (Layout::blocks(0, 100, 9, 50), "overlap"),
        (Layout::blocks(0, 100, 9, 0), "overlap"),
        (Layout::blocks(0, 1000, u64::MAX, 0), "overlap"),
    ] {
        let error = Descriptor::strided(storage.clone(), layout.unwrap()).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.message().contains(why), "{why}: {error}");
    }
    let fits = Descriptor::strided(storage, Layout::blocks(100, 100, 9, 100).unwrap()).unwrap();
    assert_eq!((fits.size(), fits.ptr() - fits.storage().unwrap().addr()), (900, 100));
}

#[test]
fn a_view_is_paired_by_its_packed_size() {
    let (encode, decode) = pair("unix");
    let layout = Layout::blocks(0, 64, 10, 100).unwrap();
    let readable = encode.create_readable(view(1, &layout)).unwrap();
    let metadata = readable.metadata().unwrap();
    for wrong in [639, 641, 964] {
        let error = decode.begin_read(&metadata, empty(wrong)).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
    }
    // More than the view has, according to metadata that was meddled with.
    let mut meddled = metadata.clone();
    meddled.descriptors[0].size = 964;
    let error = decode.begin_read(&meddled, empty(964)).unwrap_err();
    assert!(error.kind() == Kind::Protocol && error.message().contains("size is 964"), "{error}");
    assert_eq!(readable.status(), OperationStatus::Initialized);
    decode.begin_read(&metadata, empty(640)).unwrap().wait(None).unwrap();
}

/// The metadata of a readable view, as if it were that of something to write.
#[test]
fn a_layout_in_metadata_for_a_write_is_refused() {
    let (encode, decode) = pair("unix");
    let layout = Layout::blocks(0, 64, 10, 100).unwrap();
    let readable = encode.create_readable(view(1, &layout)).unwrap();
    let mut metadata = readable.metadata().unwrap();
    metadata.operation_kind = towline::connect::OperationKind::Write;
    let error = decode.begin_write(filled(1, 640), &metadata).unwrap_err();
    assert!(error.kind() == Kind::Protocol && error.message().contains("layout"), "{error}");
    assert_eq!(readable.status(), OperationStatus::Initialized);
}

#[test]
fn a_view_can_be_registered_by_the_user_and_cancelled() {
    let layout = Layout::strided(4, &[1 << 20], &[8]).unwrap();
    for path in paths() {
        let (encode, decode) = pair(path);
        let source = view(1, &layout);
        source.register_memory(&encode).unwrap();
        let readable = encode.create_readable(&source).unwrap();
        let read = decode.begin_read(&readable.metadata().unwrap(), empty(4 << 20)).unwrap();
        read.cancel();
        let (here, there) = (read.wait(Some(WATCHDOG)), readable.wait(Some(WATCHDOG)));
        assert_eq!(here.is_ok(), there.is_ok(), "{path}");
        assert!(source.is_registered());
        source.deregister_memory(&encode).unwrap();
        assert!(!source.is_registered());
    }
}

#[test]
fn a_connector_of_its_own_reads_a_view_of_shared_memory() {
    let connector = Connector::new().unwrap();
    let matrix = SharedStorage::new(6).unwrap();
    matrix.write_at(0, b"abcdef").unwrap();
    let columns = Descriptor::strided(matrix, Layout::strided(1, &[3, 2], &[1, 3]).unwrap()).unwrap();
    let target = empty(6);
    let readable = connector.create_readable(columns).unwrap();
    connector.begin_read(&readable.metadata().unwrap(), &target).unwrap().wait(None).unwrap();
    assert_eq!(bytes(&target), b"adbecf");
}
