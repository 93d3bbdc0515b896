"""The drop-in: every row of the original's behaviour that its users rely on, and what is better."""

from __future__ import annotations

import asyncio
import base64
import binascii
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import HERE, MakeWorker, run_python
from test_connect import TorchTensor
from test_process import resident, usage

import towline
from towline import _native, dropin
from towline import nixl_connect as nc

READ, WRITE = nc.OperationKind.READ, nc.OperationKind.WRITE


@pytest.fixture
def connector() -> Iterator[nc.Connector]:
    connector = nc.Connector()
    yield connector
    connector.close()


@pytest.fixture
def connection(connector: nc.Connector) -> nc.Connection:
    return asyncio.run(connector._create_connection())


async def pair(
    one: nc.Connector, other: nc.Connector, source: nc.Descriptor, target: nc.Descriptor
) -> None:
    with await one.create_readable(source) as readable:
        metadata = nc.RdmaMetadata.model_validate(json.loads(readable.metadata().model_dump_json()))
        with await other.begin_read(metadata, target) as read:
            await read.wait_for_completion()
            assert read.results() == [target]
        await readable.wait_for_completion()
        assert readable.status == nc.OperationStatus.COMPLETE


def test_the_names_are_those_of_the_original() -> None:
    classes = {name for name, value in vars(nc).items() if inspect.isclass(value) and name[0] != "_"}
    assert classes == set(nc.__all__) and len(classes) == 17
    for name in ("ReadOperation", "WriteOperation"):
        assert getattr(nc, name).__mro__[1:3] == (nc.ActiveOperation, nc.AbstractOperation)
    for name in ("ReadableOperation", "WritableOperation"):
        assert getattr(nc, name).__mro__[1:3] == (nc.PassiveOperation, nc.AbstractOperation)
    for abstract in (nc.AbstractOperation, nc.ActiveOperation, nc.PassiveOperation):
        assert inspect.isabstract(abstract)
    for function, names in (
        (nc.Connector.begin_read, ["self", "remote_metadata", "local_descriptors"]),
        (nc.Connector.begin_write, ["self", "local_descriptors", "remote_metadata"]),
        (nc.ReadOperation.__init__, ["self", "connection", "remote_metadata", "local_descriptors"]),
        (nc.WriteOperation.__init__, ["self", "connection", "local_descriptors", "remote_metadata"]),
    ):
        assert list(inspect.signature(function).parameters) == names
    for name in ("initialize", "_create_connection", "create_readable", "begin_write"):
        assert inspect.iscoroutinefunction(getattr(nc.Connector, name))
    assert inspect.iscoroutinefunction(nc.ActiveOperation._wait_for_completion_)
    for module in (nc.nixl_api, nc.nixl_bindings):
        assert isinstance(module, nc._NixlImportProxy)
        with pytest.raises(ImportError, match="NIXL Python bindings must be installed"):
            module.nixl_agent("name")
        with pytest.raises(ImportError, match="NIXL Python bindings must be installed"):
            module()


def test_both_pairings_and_a_connector_on_both_ends(connector: nc.Connector) -> None:
    async def main() -> None:
        other = nc.Connector("other")
        for one, two in ((connector, other), (connector, connector)):
            target = bytearray(1000)
            await pair(one, two, nc.Descriptor(b"r" * 1000), nc.Descriptor(target))
            assert target == b"r" * 1000
            with await one.create_writable(nc.Descriptor(target)) as writable:
                metadata = writable.metadata(hex_encode=True)
                assert bytes.fromhex(metadata.nixl_metadata)
                with await two.begin_write(nc.Descriptor(b"w" * 1000), metadata) as write:
                    await write.wait_for_completion()
                    assert write.remote.name == f"{one.name}-1" and str(write.remote) == write.remote.name
                await writable.wait_for_completion()
            assert target == b"w" * 1000
        other.close()

    asyncio.run(main())


def test_the_constructors_of_operations_work_too(connection: nc.Connection) -> None:
    async def main() -> None:
        target = bytearray(4)
        readable = nc.ReadableOperation(connection, [nc.Descriptor(b"data")])
        read = nc.ReadOperation(connection, readable.metadata(), nc.Descriptor(target))
        await read.wait_for_completion()
        await readable.wait_for_completion()
        assert target == b"data" and read.connection is connection
        writable = nc.WritableOperation(connection, nc.Descriptor(target))
        write = nc.WriteOperation(connection, nc.Descriptor(b"more"), writable.metadata())
        async with write:
            await write._wait_for_completion_()
        async with writable:
            await writable.wait_for_completion()
        assert target == b"more"

    asyncio.run(main())


def test_connectors_and_connections(connector: nc.Connector) -> None:
    assert len(connector.name) == 32 and str(connector) == connector.name
    assert connector.hostname == __import__("socket").gethostname()
    same = nc.Connector(connector.name)
    assert connector == same and connector != nc.Connector() and connector != connector.name
    assert isinstance(connector.is_cuda_available, bool)

    async def main() -> None:
        await connector.initialize()
        connection = await connector._create_connection()
        assert connection is await connector._create_connection()
        await connection.initialize()
        assert str(connection) == connection.name == f"{connector.name}-1"
        assert connection.connector is connector and isinstance(connection.metadata, bytes)
        assert connection != nc.Connection(connector, 2)
        assert not connection.release_remote_ref("nobody")
        connection.acquire_remote_ref("peer")
        connection.acquire_remote_ref("peer")
        assert not connection.release_remote_ref("peer")
        assert connection.release_remote_ref("peer")
        assert not connection.release_remote_ref("peer")

    asyncio.run(main())
    wrong: Any
    for wrong in ("", 5, b"x", ["x"]):
        with pytest.raises(TypeError, match="worker_id"):
            nc.Connector(wrong)
    with pytest.raises(TypeError, match="connector"):
        nc.Connection("x", 1)  # type: ignore[arg-type]
    for wrong in ("1", None, 1.0):
        with pytest.raises(TypeError, match="number"):
            nc.Connection(connector, wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="number"):
            nc.Connection(connector, wrong)


GRID = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ValueError),
        (memoryview(b"x"), TypeError),
        ([1, 2], TypeError),
        (5, TypeError),
        ("text", TypeError),
        (GRID, TypeError),
        ((), TypeError),
        ((1,), TypeError),
        ((GRID,), TypeError),
        ((GRID, 5), TypeError),
        ((GRID, "cpu", None), TypeError),
        ((b"bytes", "cpu"), TypeError),
        (("1", 2, "cpu"), TypeError),
        ((1, 2, 3), TypeError),
        ((1, 2, None), TypeError),
        ((GRID, "meta"), ValueError),
        ((GRID, "cuda:0"), ValueError),
        ((GRID[:, ::-2], "cpu"), ValueError),
        ((GRID[::-1], "cpu"), ValueError),
        ((1, 2, "mps"), ValueError),
    ],
)
def test_what_is_no_memory_is_refused(given: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected, match="data|device"):
        nc.Descriptor(given)


def test_what_is_memory_is_described(connector: nc.Connector) -> None:
    data = bytearray(b"bytes")
    for given, size, reference in (
        (b"bytes", 5, b"bytes"),
        (data, 5, data),
        ((GRID, "cpu"), 48, GRID),
        ((GRID, nc.Device("cpu")), 48, GRID),
        ((GRID.ctypes.data, 48), 48, None),
        ((GRID.ctypes.data, 48, "cpu"), 48, None),
        ((GRID.ctypes.data, 48, nc.Device("cpu"), GRID, "ignored"), 48, GRID),
        (TorchTensor(GRID), 48, None),
    ):
        descriptor = nc.Descriptor(given)
        assert (descriptor.size, descriptor.device.kind) == (size, nc.DeviceKind.HOST)
        assert descriptor.ptr == descriptor._data_ptr != 0 and descriptor._data_size == size
        if reference is not None:
            assert descriptor._data_ref is reference or descriptor._data_ref == reference
        assert repr(descriptor) == f"Descriptor(ptr={descriptor.ptr:#x}, size={size}, device=cpu)"
        assert descriptor.metadata.model_dump() == {"device": "cpu", "ptr": descriptor.ptr, "size": size}
        rebuilt = nc.Descriptor.from_serialized(descriptor.metadata)
        assert rebuilt.size == size and rebuilt._data_ref is None and not rebuilt.is_registered
        with pytest.raises(ValueError, match="peer's memory"):
            rebuilt.register_memory(connector)
        target = bytearray(size)
        asyncio.run(pair(connector, connector, descriptor, nc.Descriptor(target)))
    wrong: Any
    for wrong in (None, {}, descriptor):
        with pytest.raises(TypeError, match="serialized"):
            nc.Descriptor.from_serialized(wrong)


def test_what_cannot_be_registered_says_so_when_it_is_tried(connector: nc.Connector) -> None:
    for given in (b"", bytearray(), (0, 8), (4096, 0), (4096, -8), (GRID.ctypes.data, -1, "cpu")):
        descriptor = nc.Descriptor(given)
        with pytest.raises(ValueError, match="no memory"):
            descriptor.register_memory(connector)
        with pytest.raises(ValueError, match="local_descriptors"):
            asyncio.run(connector.create_readable(descriptor))
    for device in ("cuda:0", "xpu:1"):
        descriptor = nc.Descriptor((0x1000, 64, device))
        assert str(descriptor.device) == device
        with pytest.raises(RuntimeError, match=device) as caught:
            descriptor.register_memory(connector)
        assert isinstance(caught.value, towline.Unsupported)
        with pytest.raises(RuntimeError, match=device):
            asyncio.run(connector.create_writable(descriptor))


def test_memory_with_gaps_is_a_source_and_never_a_target(connector: nc.Connector) -> None:
    numbers = numpy.arange(8, dtype=numpy.uint8)
    for source, expected in (
        (numbers[::2], bytes([0, 2, 4, 6])),
        # No layout can say it: as in the original, it is copied.
        (numpy.broadcast_to(numbers[:1], (4,)), bytes(4)),
    ):
        tensor = TorchTensor(source)
        target = bytearray(4)
        asyncio.run(pair(connector, connector, nc.Descriptor(tensor), nc.Descriptor(target)))
        assert target == expected
    for local in (nc.Descriptor(TorchTensor(numbers[::2])), nc.Descriptor(tensor), nc.Descriptor(b"1234")):
        with pytest.raises(ValueError, match="local: .*(read-only|not contiguous)"):
            asyncio.run(connector.create_writable(local))

        async def read(local: nc.Descriptor) -> None:
            readable = await connector.create_readable(nc.Descriptor(b"1234"))
            await connector.begin_read(readable.metadata(), local)

        with pytest.raises(ValueError, match="local: .*(read-only|not contiguous)"):
            asyncio.run(read(local))


def test_registrations_of_the_user_stay(connector: nc.Connector) -> None:
    connection = asyncio.run(connector._create_connection())
    other = asyncio.run(nc.Connector()._create_connection())
    descriptor = nc.Descriptor(bytearray(10))
    for wrong in (None, connector, "x"):
        with pytest.raises(TypeError, match="connection"):
            descriptor.register_with_connector(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="connection"):
            descriptor.deregister_with_connector(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="connector"):
        descriptor.register_memory(connection)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not registered"):
        descriptor.deregister_with_connector(connection)
    descriptor.register_memory(connector)
    descriptor.register_with_connector(connection)
    with pytest.raises(RuntimeError, match="another"):
        descriptor.register_with_connector(other)
    with pytest.raises(RuntimeError, match="another"):
        nc.ReadableOperation(other, descriptor)
    with pytest.raises(RuntimeError, match="not registered"):
        descriptor.deregister_with_connector(other)
    first = nc.ReadableOperation(connection, descriptor)
    second = nc.ReadableOperation(connection, descriptor)
    first.__exit__(None, None, None)
    second.metadata()
    second.__exit__(None, None, None)
    assert descriptor.is_registered
    descriptor.deregister_with_connector(connection)
    assert not nc.Descriptor.is_registered.fget(descriptor)  # type: ignore[attr-defined]
    other.connector.close()


def test_the_size_is_what_the_attribute_says(connector: nc.Connector) -> None:
    async def main() -> None:
        source, pool = nc.Descriptor(bytearray(b"x" * 100)), bytearray(100)
        target = nc.Descriptor(pool)
        for size in (10, 100, 1, 50):
            pool[:] = bytes(100)
            source._data_size = target._data_size = size
            assert source.size == size
            await pair(connector, connector, source, target)
            assert bytes(pool) == b"x" * size + bytes(100 - size)
        readable = await connector.create_readable(source)
        source._data_size = 7
        assert readable.metadata().descriptors[0].size == 7
        for wrong, expected in ((0, ValueError), (101, ValueError), (-1, ValueError), ("5", TypeError)):
            source._data_size = wrong  # type: ignore[assignment]
            with pytest.raises(expected, match="_data_size"):
                readable.metadata()
            with pytest.raises(expected, match="_data_size"):
                await connector.create_readable(source)

    asyncio.run(main())


@pytest.mark.parametrize("local", [None, 5, b"x", [5], [None], (), "x", {}])
def test_operations_take_descriptors_only(local: Any, connector: nc.Connector) -> None:
    async def main() -> None:
        readable = await connector.create_readable(nc.Descriptor(b"x"))
        writable = await connector.create_writable(nc.Descriptor(bytearray(1)))
        calls: list[Callable[[], Any]] = [
            lambda: connector.create_readable(local),
            lambda: connector.create_writable(local),
            lambda: connector.begin_read(readable.metadata(), local),
            lambda: connector.begin_write(local, writable.metadata()),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="local_descriptors"):
                await call()

    asyncio.run(main())


def test_wrong_pairs_are_refused(connector: nc.Connector) -> None:
    async def main() -> None:
        connection = await connector._create_connection()
        readable = await connector.create_readable(nc.Descriptor(b"12345678"))
        writable = await connector.create_writable(nc.Descriptor(bytearray(8)))
        good, target = readable.metadata(), nc.Descriptor(bytearray(8))
        for wrong in (None, 5, "{}", good.model_dump(), readable):
            with pytest.raises(TypeError, match="remote_metadata"):
                await connector.begin_read(wrong, target)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="remote_metadata"):
                await connector.begin_write(target, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="remote_metadata"):
                nc.ReadOperation(connection, wrong, target)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="remote_metadata"):
                nc.WriteOperation(connection, target, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="remote_metadata"):
            await connector.begin_read(target, good)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="remote_metadata"):
            await connector.begin_read(writable.metadata(), target)
        with pytest.raises(RuntimeError, match="remote_metadata"):
            await connector.begin_write(target, good)
        with pytest.raises(ValueError, match="remote_metadata"):
            nc.ReadOperation(connection, writable.metadata(), target)
        with pytest.raises(ValueError, match="remote_metadata"):
            nc.WriteOperation(connection, target, good)
        with pytest.raises(TypeError, match="connection"):
            nc.ReadOperation(connector, good, target)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="connection"):
            nc.ReadableOperation(connector, target)  # type: ignore[arg-type]
        for local in (
            [],
            [target, nc.Descriptor(bytearray(8))],
            nc.Descriptor(bytearray(7)),
            nc.Descriptor(bytearray(9)),
        ):
            with pytest.raises(ValueError, match="local_descriptors"):
                await connector.begin_read(good, local)
        with pytest.raises(ValueError, match="local_descriptors"):
            await connector.create_readable([])
        mixed = [nc.Descriptor(b"x"), nc.Descriptor((0x1000, 8, "cuda:0"))]
        with pytest.raises(ValueError, match="local_descriptors: .*mixed"):
            await connector.create_readable(mixed)
        for change, expected in (
            ({"descriptors": []}, ValueError),
            ({"nixl_metadata": ""}, ValueError),
            ({"nixl_metadata": "zz"}, ValueError),
            ({"nixl_metadata": "00"}, zlib.error),
            ({"nixl_metadata": "b64:AAAA"}, zlib.error),
            ({"nixl_metadata": "b64:%%%"}, binascii.Error),
            ({"nixl_metadata": "b64:AAA"}, binascii.Error),
            ({"nixl_metadata": "b64:" + "A" * 4_000_000}, ValueError),
            ({"notification_key": ""}, ValueError),
        ):
            with pytest.raises(expected) as caught:
                await connector.begin_read(good.model_copy(update=change), target)
            assert isinstance(caught.value, ValueError)
        with pytest.raises(RuntimeError):
            await connector.begin_read(nc.RdmaMetadata(), target)
        # Nothing of this has used up the operation.
        await (await connector.begin_read(good, target)).wait_for_completion()
        await readable.wait_for_completion()
        # It is over now: a second claimer is late.
        with pytest.raises((RuntimeError, ValueError)):
            await connector.begin_read(good, target)
        with pytest.raises(RuntimeError):
            readable.metadata()

    asyncio.run(main())


class AnyActive(nc.ActiveOperation):
    async def wait_for_completion(self, timeout: float | None = None) -> None:
        await self._wait_for_completion_(timeout)


class AnyOperation(nc.AbstractOperation):
    async def wait_for_completion(self, timeout: float | None = None) -> None:
        raise NotImplementedError


def test_the_checks_of_the_base_classes(connection: nc.Connection) -> None:
    local, other = nc.Descriptor(b"1234"), nc.Descriptor(b"123")
    operation: Any = AnyOperation
    arguments: tuple[Any, ...]
    for arguments, expected, argument in (
        ((None, READ, local, None, None), TypeError, "connection"),
        ((connection, 7, local, None, None), ValueError, "operation_kind"),
        ((connection, nc.OperationKind.UNSPECIFIED, local, None, None), ValueError, "operation_kind"),
        ((connection, READ, 5, None, None), TypeError, "local_descriptors"),
        ((connection, READ, [5], None, None), TypeError, "local_descriptors"),
        ((connection, READ, local, 5, None), TypeError, "remote_descriptors"),
        ((connection, READ, [], None, None), ValueError, "local_descriptors"),
        ((connection, READ, local, [], None), ValueError, "remote_descriptors"),
        ((connection, READ, local, None, 5), TypeError, "notification_key"),
        ((connection, READ, local, None, ""), ValueError, "notification_key"),
    ):
        with pytest.raises(expected, match=argument):
            operation(*arguments)
    unstarted = operation(connection, READ, local, None, None)
    assert unstarted.status is nc.OperationStatus.UNINITIALIZED and unstarted.operation_kind is READ
    with unstarted:
        unstarted.cancel()
    with pytest.raises(RuntimeError, match="no results"):
        nc.ReadOperation.__new__(nc.ReadOperation).results()

    readable = nc.ReadableOperation(connection, local)
    metadata = readable.metadata()
    remote = nc.Remote(connection, metadata.nixl_metadata)
    there = metadata.to_descriptors()
    active: Any = AnyActive
    for arguments, expected, argument in (
        ((None, READ, local, there, "key"), TypeError, "remote"),
        ((remote, 1, local, there, "key"), TypeError, "operation_kind"),
        ((remote, nc.OperationKind.UNSPECIFIED, local, there, "key"), ValueError, "operation_kind"),
        ((remote, READ, 5, there, "key"), TypeError, "local_descriptors"),
        ((remote, READ, local, 5, "key"), TypeError, "remote_descriptors"),
        ((remote, READ, [local, local], there, "key"), ValueError, "local_descriptors"),
        ((remote, READ, [local] * 3, [there] * 2, "key"), ValueError, "local_descriptors"),
        ((remote, READ, other, there, "key"), ValueError, "local_descriptors"),
        ((remote, READ, local, there, 5), TypeError, "notification_key"),
        ((remote, READ, local, there, ""), ValueError, "notification_key"),
    ):
        with pytest.raises(expected, match=argument):
            active(*arguments)
    target = bytearray(4)
    read = active(remote, READ, [nc.Descriptor(target)], [there], "key")
    asyncio.run(read.wait_for_completion())
    assert target == b"1234" and read.remote is remote


def test_remotes(connection: nc.Connection) -> None:
    metadata = nc.ReadableOperation(connection, nc.Descriptor(b"x")).metadata()
    raw = base64.b64decode(metadata.nixl_metadata[4:])
    for given in (metadata.nixl_metadata, raw, raw.hex()):
        with nc.Remote(connection, given) as remote:
            assert remote.name == str(remote) == connection.name and remote.connection is connection
        remote.__exit__(None, None, None)
    del remote
    wrong: Any
    for wrong in (None, 5, []):
        with pytest.raises(TypeError, match="nixl_metadata"):
            nc.Remote(connection, wrong)
        with pytest.raises(TypeError, match="connection"):
            nc.Remote(wrong, raw)
    for empty in ("", b""):
        with pytest.raises(ValueError, match="nixl_metadata"):
            nc.Remote(connection, empty)
    gc.collect()


def test_metadata_of_nixl_is_recognised(connector: nc.Connector) -> None:
    stream = zlib.compress(b"nixl agent metadata" * 20, 6)
    for text in ("b64:" + base64.b64encode(stream).decode(), stream.hex()):
        metadata = nc.RdmaMetadata(
            descriptors=[nc.SerializedDescriptor(device="cuda:0", ptr=0x7F00_0000_0000, size=8)],
            nixl_metadata=text,
            notification_key="3f0c3a5e-5bd6-4d9b-a3de-1e3b0f6a9f11",
            operation_kind=1,
        )
        with pytest.raises(RuntimeError, match="made by NIXL"):
            asyncio.run(connector.begin_read(metadata, nc.Descriptor(bytearray(8))))


PLAIN_MODELS = """
import sys
sys.modules["pydantic"] = None
"""

MODELS = r'''
import json, pickle, copy
from towline import nixl_connect as nc
def refused(make, kind=ValueError):
    try:
        make()
    except kind as error:
        assert kind is TypeError or not isinstance(error, TypeError), error
        return
    raise AssertionError("accepted")
S, R = nc.SerializedDescriptor, nc.RdmaMetadata
assert (S().ptr, S().size, S().device, R().operation_kind, R().descriptors) == (0, 0, "cpu", 0, [])
for device in ("cpu", " CUDA:1 ", "xpu", "cuda"):
    assert S(device=device, ptr=1, size=0).device == device.strip().lower()
for device in ("gpu:0", "host", "cpu:0", "", "cudaX", 5, None):
    refused(lambda: S(device=device, ptr=1, size=1))
for wrong in ({"ptr": 0}, {"ptr": -1}, {"ptr": 1 << 64}, {"ptr": "x"}, {"size": -1}, {"size": 1 << 63}, {"size": None}, {"more": 1}):
    refused(lambda: S(**wrong))
one = S(device="cpu", ptr=5, size=6)
assert one.model_dump() == {"device": "cpu", "ptr": 5, "size": 6}
assert one.to_descriptor().size == 6
refused(lambda: setattr(one, "ptr", 7))
refused(lambda: hash(one), TypeError) if nc.RdmaMetadata.__mro__[1].__name__ != "BaseModel" else None
values = {"descriptors": [one.model_dump(), one.model_dump()], "nixl_metadata": "b64:AAAA", "notification_key": "k", "operation_kind": 2}
made = R.model_validate(values)
assert made.model_dump() == values and json.loads(made.model_dump_json()) == values
assert R.model_validate_json(made.model_dump_json()) == made == R.model_validate(made) == R(**values)
assert pickle.loads(pickle.dumps(made)) == made == copy.copy(made)
assert len(made.to_descriptors()) == 2 and made != made.model_copy(update={"notification_key": "other"})
assert "AAAA" not in repr(made)
refused(lambda: R().to_descriptors())
refused(lambda: setattr(made, "operation_kind", 1))
refused(lambda: hash(made), TypeError)
for kind in (0, 3, 4, -1, 1 << 70):
    refused(lambda: R(operation_kind=kind), TypeError)
for wrong in ({"extra": 1}, {"descriptors": 5}, {"descriptors": [5]}, {"descriptors": [{"more": 1}]}, {"nixl_metadata": 5},
              {"notification_key": None}, {"operation_kind": "READ"}, {"operation_kind": None}):
    refused(lambda: R.model_validate(values | wrong))
for wrong in (None, 5, [], "text"):
    refused(lambda: R.model_validate(wrong))
for text in ("", "null", "[]", "{", "5", "[" * 100000):
    refused(lambda: R.model_validate_json(text))
print(R.__mro__[1].__module__)
'''


@pytest.mark.parametrize("models", ["pydantic", "plain"])
def test_the_models_behave_alike_with_and_without_pydantic(models: str) -> None:
    printed = run_python((PLAIN_MODELS if models == "plain" else "") + MODELS)
    assert ("pydantic" in printed) == (models == "pydantic")


def test_a_local_cancel_is_no_error_and_an_end_stays(connector: nc.Connector) -> None:
    async def main() -> None:
        readable = await connector.create_readable(nc.Descriptor(b"bytes"))
        waiting = asyncio.ensure_future(readable.wait_for_completion())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await readable.wait_for_completion(timeout=0.01)
        readable.cancel()
        await waiting
        await readable.wait_for_completion()
        assert readable.status == nc.OperationStatus.CANCELLED
        assert isinstance(readable.error, towline.Canceled)

        target = nc.Descriptor(bytearray(5))
        readable = await connector.create_readable(nc.Descriptor(b"bytes"))
        read = await connector.begin_read(readable.metadata(), target)
        await read.wait_for_completion()
        read.cancel()
        assert read.status == nc.OperationStatus.COMPLETE and read.results() == [target]
        for operation in (read, readable):
            for _ in range(3):
                operation.__exit__(None, None, None)

        # Nobody waits, nobody leaves: the operation ends with its last reference.
        readable = await connector.create_readable(nc.Descriptor(b"bytes"))
        metadata = readable.metadata()
        del readable
        with pytest.raises(RuntimeError):
            await connector.begin_read(metadata, target)
        with pytest.raises(ZeroDivisionError):
            with await connector.create_readable(nc.Descriptor(b"bytes")) as inside:
                raise ZeroDivisionError
        assert inside.status == nc.OperationStatus.CANCELLED

    asyncio.run(main())


def test_a_dead_peer_is_an_error_on_the_side_that_is_left(
    worker: MakeWorker, connector: nc.Connector
) -> None:
    async def main() -> None:
        peer = worker("unix")
        readable = await connector.create_readable(nc.Descriptor(bytearray(64 << 20)))
        peer.order(f"begin-and-stop read {readable.metadata().model_dump_json()}")
        peer.wait_until_stopped()
        if readable.status != nc.OperationStatus.COMPLETE:
            peer.kill()
            with pytest.raises(RuntimeError, match="peer") as caught:
                await readable.wait_for_completion()
            assert isinstance(caught.value.__cause__, towline.Disconnected)
            assert readable.status == nc.OperationStatus.ERRORED
            readable.__exit__(None, None, None)
        gone = worker("unix")
        metadata = nc.RdmaMetadata.model_validate_json(gone.tell("readable 100"))
        gone.kill()
        with pytest.raises(RuntimeError) as caught:
            await connector.begin_read(metadata, nc.Descriptor(bytearray(100)))
        assert isinstance(caught.value.__cause__, towline.Disconnected)

    asyncio.run(main())


def test_the_other_sides_cancel_is_an_error_here(
    worker: MakeWorker, connector: nc.Connector
) -> None:
    async def main() -> None:
        peer = worker("unix")
        readable = await connector.create_readable(nc.Descriptor(bytearray(64 << 20)))
        peer.order(f"begin-and-stop read {readable.metadata().model_dump_json()}")
        peer.wait_until_stopped()
        peer.resume()
        assert peer.answer() == "done"
        peer.tell("cancel")
        try:
            await readable.wait_for_completion()
        except RuntimeError as error:
            assert readable.status == nc.OperationStatus.CANCELLED
            assert isinstance(error.__cause__, towline.Canceled)
        else:
            assert readable.status == nc.OperationStatus.COMPLETE

    asyncio.run(main())


def test_one_connector_is_used_by_many_loops_at_once() -> None:
    connector = nc.Connector()
    failures: list[BaseException] = []
    gate = threading.Barrier(6)

    def work() -> None:
        async def main() -> None:
            for _ in range(30):
                target = bytearray(100)
                await pair(connector, connector, nc.Descriptor(b"y" * 100), nc.Descriptor(target))
                assert target == b"y" * 100

        try:
            gate.wait()
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    connector.close()


def test_ten_thousand_operations_leave_nothing_behind() -> None:
    async def main() -> None:
        connector = nc.Connector()
        source, target = nc.Descriptor(bytearray(64)), nc.Descriptor(bytearray(64))
        source.register_memory(connector)

        async def move(count: int) -> None:
            for _ in range(count):
                await pair(connector, connector, source, target)

        await move(1000)
        gc.collect()
        before, held, memory = usage(), _native.held(), resident()
        await move(9000)
        after = usage()
        assert after[0] <= before[0] and after[1] <= before[1] + 2
        assert _native.held() == held
        assert resident() - memory < 4 << 20
        connector.close()
        connector.close()

    asyncio.run(main())


def consumer(how: str, part: str) -> subprocess.Popen[str]:
    """The consumer's code, unmodified, in a process where `dynamo.nixl_connect` is ours."""
    script = str(HERE / "consumer.py")
    environment = dict(os.environ)
    if how == "path":
        found = subprocess.run(
            [sys.executable, "-m", "towline", "dropin-path"], capture_output=True, text=True, check=True
        )
        environment["PYTHONPATH"] = found.stdout.strip()
        command = [sys.executable, script, part]
    else:
        start = (
            "import sys, runpy, towline.dropin; towline.dropin.install(); "
            f"sys.argv = ['consumer', {part!r}]; runpy.run_path({script!r}, run_name='__main__')"
        )
        command = [sys.executable, "-c", start]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE if part == "receive" else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["path", "hook"])
def test_the_code_of_consumers_runs_unmodified(how: str) -> None:
    with consumer(how, "send") as sender, consumer(how, "receive") as receiver:
        assert sender.stdout is not None
        assert receiver.stdin is not None and receiver.stdout is not None
        for line in sender.stdout:
            receiver.stdin.write(line)
            receiver.stdin.flush()
        assert sender.wait() == 0
        assert receiver.stdout.read() == "received\n"
        assert receiver.wait() == 0


def test_the_directory_of_the_drop_in_is_a_part_of_a_namespace() -> None:
    directory = dropin.path()
    assert (directory / "dynamo" / "nixl_connect" / "__init__.py").is_file()
    assert not (directory / "dynamo" / "__init__.py").exists()


def test_the_hook_stands_beside_a_real_dynamo(tmp_path: Path) -> None:
    package = tmp_path / "dynamo"
    (package / "nixl_connect").mkdir(parents=True)
    (package / "nixl_connect" / "__init__.py").write_text("ORIGINAL = True\n")
    (package / "other.py").write_text("from dynamo import nixl_connect\n")
    run_python(
        f"""
import sys, warnings
sys.path.insert(0, {str(tmp_path)!r})
import towline.nixl_connect, towline.dropin
towline.dropin.install()
towline.dropin.install()
import dynamo.other
import dynamo.nixl_connect
assert dynamo.other.nixl_connect is dynamo.nixl_connect is towline.nixl_connect
assert towline.nixl_connect.__spec__.name == "towline.nixl_connect"
towline.dropin.uninstall()
import dynamo.nixl_connect as original
assert original.ORIGINAL
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    towline.dropin.install()
assert "imported before" in str(caught[0].message)
from dynamo import nixl_connect
assert nixl_connect is towline.nixl_connect
"""
    )


def test_the_command_line_says_what_it_knows() -> None:
    for arguments, code in (([], 2), (["--help"], 0), (["nonsense"], 2), (["--version"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "towline", *arguments], capture_output=True, text=True
        )
        assert done.returncode == code and "towline" in done.stdout + done.stderr
