"""Wrong types, wrong values and hostile metadata, through `towline.connect`."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

import towline
from towline import Connector, Descriptor, Device, DeviceKind, RdmaMetadata, SerializedDescriptor

FROZEN = numpy.zeros(8, numpy.uint8)
FROZEN.setflags(write=False)
GRID = numpy.zeros((4, 4), numpy.float32)


@pytest.fixture
def connector() -> Iterator[Connector]:
    with Connector("wrong") as connector:
        yield connector


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ValueError),
        ("", ValueError),
        ("meta", ValueError),
        ("mps", ValueError),
        ("cuda:x", ValueError),
        ("cuda:-1", ValueError),
        ("cudafoo", ValueError),
        ("xpu:99999999999", ValueError),
        ("c" * 1_000_000, ValueError),
        ((DeviceKind.CUDA, -1), ValueError),
        (("cuda", 0), TypeError),
        ((2, 0), TypeError),
        ([DeviceKind.CUDA, 0], TypeError),
        ((DeviceKind.CUDA,), TypeError),
        ((DeviceKind.CUDA, "0"), TypeError),
        ((DeviceKind.CUDA, 0, 0), TypeError),
        (5, TypeError),
        (object(), TypeError),
    ],
)
def test_what_is_no_device_is_refused(given: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected, match="device"):
        Device(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ValueError),
        (b"", ValueError),
        (bytearray(), ValueError),
        ("text", TypeError),
        (5, TypeError),
        (5.0, TypeError),
        ([1, 2], TypeError),
        ({}, TypeError),
        (object(), TypeError),
        ((), TypeError),
        ((1,), TypeError),
        ((b"bytes",), TypeError),
        (("1", 2), TypeError),
        ((1, "2"), TypeError),
        ((1, 2, 3), TypeError),
        ((1, 2, None), TypeError),
        ((1, 2, "cpu", None, None), TypeError),
        ((True, 8), TypeError),
        ((GRID, 5), TypeError),
        ((GRID, None), TypeError),
        ((GRID,), TypeError),
        ((GRID, "cpu", None), TypeError),
        (([1, 2], "cpu"), TypeError),
        ((None, "cpu"), TypeError),
        ((object(), "cpu"), TypeError),
        ((GRID, "meta"), ValueError),
        ((GRID, "cuda:0"), ValueError),
        ((1, 2, "nowhere"), ValueError),
        ((0, 8), ValueError),
        ((4096, 0), ValueError),
        ((4096, -8), ValueError),
        ((-4096, 8), ValueError),
        ((4096, 1 << 63), ValueError),
        ((1 << 64, 8), ValueError),
        (((1 << 64) - 4, 8), ValueError),
        (GRID[:, ::-2], ValueError),
        (GRID[::-1], ValueError),
        ((GRID[:, :0:-1], "cpu"), ValueError),
        (numpy.zeros(0), ValueError),
    ],
)
def test_what_has_no_memory_is_refused(given: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected, match="data|descriptor|device") as caught:
        Descriptor(given)
    assert type(caught.value) in (TypeError, towline.Invalid)


def test_a_cuda_array_must_be_whole() -> None:
    from test_connect import Cuda

    for changes in ({"strides": (8, 8)}, {"data": 5}, {"typestr": "f"}, {"shape": None}):
        with pytest.raises(ValueError, match="data"):
            Descriptor(Cuda(**changes))
    with pytest.raises(ValueError, match="device"):
        Descriptor((Cuda(), "cpu"))


@pytest.mark.parametrize("name", [5, b"bytes", ["a"], object()])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="name"):
        Connector(name)


def test_wrong_settings_of_a_connector_are_refused(connector: Connector) -> None:
    with pytest.raises(ValueError, match="name"):
        Connector("")
    with pytest.raises(ValueError, match="name"):
        Connector("x" * 5000)
    with pytest.raises(TypeError, match="endpoint"):
        Connector(endpoint="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name"):
        Connector("x", endpoint=connector.endpoint)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="unclaimed_timeout"):
            Connector(unclaimed_timeout=wrong)
        with pytest.raises(ValueError, match="unclaimed_timeout"):
            connector.create_readable_sync(Descriptor(b"x"), unclaimed_timeout=wrong)
    with pytest.raises(TypeError, match="unclaimed_timeout"):
        connector.create_readable_sync(
            Descriptor(b"x"),
            unclaimed_timeout="long",  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("local", [None, 5, b"bytes", [5], [None], (b"x",), {}, object()])
def test_operations_take_descriptors_only(local: Any, connector: Connector) -> None:
    readable = connector.create_readable_sync(Descriptor(b"x"))
    writable = connector.create_writable_sync(Descriptor(bytearray(1)))
    calls: list[Callable[[], Any]] = [
        lambda: connector.create_readable(local),
        lambda: connector.create_writable(local),
        lambda: connector.begin_read(readable.metadata(), local),
        lambda: connector.begin_write(local, writable.metadata()),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="local"):
            asyncio.run(call())
    synchronous: list[Callable[[], Any]] = [
        lambda: connector.create_readable_sync(local),
        lambda: connector.create_writable_sync(local),
        lambda: connector.begin_read_sync(readable.metadata(), local),
        lambda: connector.begin_write_sync(local, writable.metadata()),
    ]
    for call in synchronous:
        with pytest.raises(TypeError, match="local"):
            call()


def test_wrong_pairs_are_refused_before_any_byte_moves(connector: Connector) -> None:
    readable = connector.create_readable_sync(Descriptor(b"12345678"))
    writable = connector.create_writable_sync(Descriptor(bytearray(8)))
    target = Descriptor(bytearray(8))
    with pytest.raises(ValueError, match="WRITE.*READ"):
        connector.begin_read_sync(writable.metadata(), target)
    with pytest.raises(ValueError, match="READ.*WRITE"):
        connector.begin_write_sync(target, readable.metadata())
    for local, why in (
        ([], "local"),
        ([target, target], "2 local descriptors for 1"),
        (Descriptor(bytearray(7)), "7 local bytes for 8"),
        (Descriptor(bytearray(9)), "9 local bytes for 8"),
        (Descriptor(b"12345678"), "local: .*read-only"),
        (Descriptor(FROZEN), "local: .*read-only"),
    ):
        with pytest.raises(ValueError, match=why):
            connector.begin_read_sync(readable.metadata(), local)
    for local in (Descriptor(bytes(8)), Descriptor(FROZEN)):
        with pytest.raises(ValueError, match="local: .*read-only"):
            connector.create_writable_sync(local)
    for wrong in (None, 5, "{}", {}, readable, readable.metadata().to_dict()):
        with pytest.raises(TypeError, match="remote_metadata"):
            connector.begin_read_sync(wrong, target)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="remote_metadata"):
            connector.begin_write_sync(target, wrong)  # type: ignore[arg-type]
    # The arguments of a write come the other way round.
    with pytest.raises(TypeError, match="remote_metadata"):
        connector.begin_write_sync(writable.metadata(), target)  # type: ignore[arg-type]
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            readable.wait(timeout)
        with pytest.raises(ValueError, match="timeout"):
            asyncio.run(readable.wait_for_completion(timeout))
    with pytest.raises(TypeError, match="timeout"):
        readable.wait("1")  # type: ignore[arg-type]
    with pytest.raises(towline.Invalid, match="not ended"):
        readable.result()
    for what in (None, 5, connector.endpoint):
        with pytest.raises(TypeError, match="connector"):
            target.register_memory(what)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="connector"):
            target.deregister_memory(what)  # type: ignore[arg-type]
    assert connector.begin_read_sync(readable.metadata(), target).wait() is None  # type: ignore[func-returns-value]


PART = {"device": "cpu", "ptr": 17, "size": 8}
PLAIN = {
    "descriptors": [PART],
    "nixl_metadata": "b64:AAAA",
    "notification_key": "key",
    "operation_kind": 1,
}

HOSTILE: list[dict[str, Any]] = [
    {"extra": 1},
    {"descriptors": None},
    {"descriptors": "text"},
    {"descriptors": {}},
    {"descriptors": []},
    {"descriptors": [5]},
    {"descriptors": [{}]},
    {"descriptors": [PART | {"more": 1}]},
    {"descriptors": [PART | {"ptr": 0}]},
    {"descriptors": [PART | {"ptr": -1}]},
    {"descriptors": [PART | {"ptr": 1 << 64}]},
    {"descriptors": [PART | {"ptr": "17"}]},
    {"descriptors": [PART | {"size": 0}]},
    {"descriptors": [PART | {"size": -8}]},
    {"descriptors": [PART | {"size": 1 << 63}]},
    {"descriptors": [PART | {"size": 1 << 200}]},
    {"descriptors": [PART | {"size": 8.5}]},
    {"descriptors": [PART | {"size": True}]},
    {"descriptors": [PART | {"device": "gpu:0"}]},
    {"descriptors": [PART | {"device": "host"}]},
    {"descriptors": [PART | {"device": "cudaX"}]},
    {"descriptors": [PART | {"device": None}]},
    {"nixl_metadata": None},
    {"nixl_metadata": ""},
    {"nixl_metadata": 5},
    {"notification_key": None},
    {"notification_key": ""},
    {"operation_kind": 0},
    {"operation_kind": 3},
    {"operation_kind": -1},
    {"operation_kind": 256},
    {"operation_kind": "READ"},
    {"operation_kind": True},
    {"operation_kind": None},
]


@pytest.mark.parametrize("change", HOSTILE, ids=repr)
def test_damaged_metadata_is_refused(change: dict[str, Any]) -> None:
    values = PLAIN | change
    with pytest.raises(ValueError):
        RdmaMetadata.from_dict(values)
    if change != {"nixl_metadata": ""}:  # which is seen when it is opened
        with pytest.raises(ValueError):
            RdmaMetadata.from_json(json.dumps(values))


def test_damaged_text_is_refused() -> None:
    for text in ("", "null", "[]", "{}", "{", "\0", "[" * 100_000, "5", '"' + "a" * 5_000_000 + '"'):
        with pytest.raises(ValueError):
            RdmaMetadata.from_json(text)
    with pytest.raises(towline.Protocol, match="UTF-8"):
        RdmaMetadata.from_json(b"\xff\xfe")
    for key in PLAIN:
        with pytest.raises(towline.Protocol, match=key):
            RdmaMetadata.from_dict({name: value for name, value in PLAIN.items() if name != key})
    wrong: Any
    for wrong in (None, 5, []):
        with pytest.raises(TypeError, match="text"):
            RdmaMetadata.from_json(wrong)
        with pytest.raises(TypeError, match="values"):
            RdmaMetadata.from_dict(wrong)


def test_the_constructors_of_metadata_say_which_argument_is_wrong() -> None:
    part = SerializedDescriptor("cpu", 17, 8)
    for wrong, argument in (
        ((5, 17, 8), "device"),
        (("cpu", "17", 8), "ptr"),
        (("cpu", True, 8), "ptr"),
        (("cpu", 17, 8.0), "size"),
    ):
        with pytest.raises(TypeError, match=argument):
            SerializedDescriptor(*wrong)
    for arguments, argument in (
        ((part, "x", "k", 1), "descriptors"),
        (([5], "x", "k", 1), "descriptors"),
        (([part], 5, "k", 1), "nixl_metadata"),
        (([part], "x", None, 1), "notification_key"),
        (([part], "x", "k", "1"), "operation_kind"),
    ):
        with pytest.raises(TypeError, match=argument):
            RdmaMetadata(*arguments)
    made = RdmaMetadata([part], "x", "k", 1)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        made.nixl_metadata = "y"  # type: ignore[misc]


def changed(metadata: RdmaMetadata, **changes: Any) -> RdmaMetadata:
    return RdmaMetadata.from_dict(metadata.to_dict() | changes)


def test_forged_metadata_is_refused(connector: Connector) -> None:
    secret = bytearray(b"other bytes that were not offered")
    offered = connector.create_readable_sync(Descriptor(b"12345678"))
    writable = connector.create_writable_sync(Descriptor(bytearray(8)))
    registered = Descriptor(secret)
    registered.register_memory(connector)
    good = offered.metadata()
    target = bytearray(8)
    raw = base64.b64decode(good.nixl_metadata[4:])

    def text(data: bytes) -> str:
        return "b64:" + base64.b64encode(data).decode()

    def refused(metadata: RdmaMetadata, size: int = 8) -> None:
        with pytest.raises(towline.Error):
            connector.begin_read_sync(metadata, Descriptor(bytearray(size)))

    for opaque in (
        "b64:",
        "b64:%%%",
        "zz",
        "00",
        text(b"TOWC"),
        text(raw[:-1]),
        text(raw + b"\0"),
        text(raw[:6] + bytes(16) + raw[22:]),
        "A" * 3_000_000,
        writable.metadata().nixl_metadata,
    ):
        refused(changed(good, nixl_metadata=opaque))
    for position in range(0, len(raw), 3):
        flipped = raw[:position] + bytes([raw[position] ^ 0x41]) + raw[position + 1 :]
        refused(changed(good, nixl_metadata=text(flipped)))
    part = good.to_dict()["descriptors"][0]
    refused(changed(good, descriptors=[part | {"size": 9}]), 9)
    refused(changed(good, descriptors=[part | {"size": 7}]), 7)
    refused(changed(good, descriptors=[part | {"device": "cuda:0"}]))
    with pytest.raises(ValueError):
        connector.begin_read_sync(
            changed(good, descriptors=[part] * 2), [Descriptor(bytearray(8)), Descriptor(bytearray(8))]
        )
    refused(changed(good, descriptors=[part] * 1025))
    refused(changed(good, operation_kind=2))
    # The token is no address: whatever it says, the offered bytes are what is read.
    forged = changed(good, descriptors=[part | {"ptr": registered.ptr}])
    connector.begin_read_sync(forged, Descriptor(target)).wait()
    assert target == b"12345678"


def test_metadata_of_nixl_is_recognised(connector: Connector) -> None:
    stream = zlib.compress(b"nixl agent metadata" * 20, 6)
    for opaque in ("b64:" + base64.b64encode(stream).decode(), stream.hex()):
        metadata = RdmaMetadata.from_dict(PLAIN | {"nixl_metadata": opaque})
        with pytest.raises(towline.Unsupported, match="made by NIXL"):
            connector.begin_read_sync(metadata, Descriptor(bytearray(8)))
        with pytest.raises(towline.Unsupported, match="made by NIXL"):
            asyncio.run(connector.begin_read(metadata, Descriptor(bytearray(8))))
