"""`towline.nixl_connect` with the original's wire form on NIXL: a process that uses NIXL's own API as the original does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import run_python
from test_nixl import Plain, needs_nixl, pattern, plain

import towline
import towline.nixl
from towline import dropin
from towline import nixl_connect as nc

__all__ = ["plain"]

SIZES = [1 << 20, 4096, 333]


@pytest.fixture
def connector() -> Iterator[nc.Connector]:
    needs_nixl()
    connector = nc.Connector(offer="nixl", nixl_devices=["lo"])
    yield connector
    connector.close()


def sent(metadata: nc.RdmaMetadata) -> Any:
    return json.loads(metadata.model_dump_json())


def registered(connector: nc.Connector) -> int:
    """How much memory its agent of NIXL has registered."""
    return len(connector._shared_connection()._side()._regions)


async def ends(operation: nc.AbstractOperation) -> None:
    await operation.wait_for_completion(timeout=50)
    assert operation.status is nc.OperationStatus.COMPLETE


@pytest.mark.parametrize("hex", [False, True])
def test_the_original_reads_and_writes_our_operations(
    connector: nc.Connector, plain: Callable[[], Plain], hex: bool
) -> None:
    peer = plain()

    async def main() -> None:
        sources = [numpy.frombuffer(pattern(size, 5), numpy.uint8).copy() for size in SIZES]
        with await connector.create_readable([nc.Descriptor((one, "cpu")) for one in sources]) as readable:
            metadata = sent(readable.metadata(hex_encode=hex))
            assert set(metadata) == {"descriptors", "nixl_metadata", "notification_key", "operation_kind"}
            assert [one["ptr"] for one in metadata["descriptors"]] == [one.ctypes.data for one in sources]
            assert readable.status is nc.OperationStatus.INITIALIZED
            reply = peer.ask("begin", kind="READ", metadata=metadata, seed=None)
            assert reply == {"status": "DONE", "peer": f"{connector.name}-1"}
            await ends(readable)
        assert peer.bytes() == [pattern(size, 5) for size in SIZES]

        targets = [bytearray(size) for size in SIZES]
        with await connector.create_writable([nc.Descriptor(one) for one in targets]) as writable:
            metadata = sent(writable.metadata(hex_encode=hex))
            assert metadata["operation_kind"] == 2
            waiting = asyncio.ensure_future(ends(writable))
            await asyncio.to_thread(peer.ask, "begin", kind="WRITE", metadata=metadata, seed=77)
            await waiting
        assert [bytes(one) for one in targets] == [pattern(size, 77) for size in SIZES]
        assert registered(connector) == 0

    asyncio.run(main())


@pytest.mark.parametrize("hex", [False, True])
def test_our_operations_read_and_write_those_of_the_original(
    plain: Callable[[], Plain], hex: bool
) -> None:
    peer = plain()
    # Which of them it is, the metadata says; that NIXL may be used has to be said.
    connector = nc.Connector(nixl_devices=["lo"])

    async def main() -> None:
        offer = peer.ask("offer", kind="READ", sizes=SIZES, seed=8, hex=hex)
        metadata = nc.RdmaMetadata.model_validate(offer)
        targets = [bytearray(size) for size in SIZES]
        with await connector.begin_read(metadata, [nc.Descriptor(one) for one in targets]) as read:
            assert read.remote.name == f"{peer.name}-1"
            await ends(read)
            assert len(read.results()) == 3
        assert [bytes(one) for one in targets] == [pattern(size, 8) for size in SIZES]
        assert peer.ask("wait") == {"status": "DONE"}
        peer.ask("forget")

        # A second operation with the same peer, which has other memory by now.
        offer = peer.ask("offer", kind="WRITE", sizes=SIZES, seed=None, hex=hex)
        metadata = nc.RdmaMetadata.model_validate(offer)
        sources = [pattern(size, 99) for size in SIZES]
        with await connector.begin_write([nc.Descriptor(one) for one in sources], metadata) as write:
            await ends(write)
        assert peer.ask("wait") == {"status": "DONE"}
        assert peer.bytes() == sources
        assert registered(connector) == 0

    asyncio.run(main())
    connector.close()


def test_two_of_ours_can_meet_over_nixl(connector: nc.Connector) -> None:
    other = nc.Connector(nixl_devices=["lo"])

    async def main() -> None:
        source, target = bytearray(pattern(1 << 16, 3)), bytearray(1 << 16)
        descriptor = nc.Descriptor(source)
        descriptor._data_size = 1000
        with await connector.create_readable(descriptor) as readable:
            local = nc.Descriptor(target)
            local._data_size = 1000
            with await other.begin_read(readable.metadata(), local) as read:
                await ends(read)
            await ends(readable)
        assert bytes(target) == pattern(1 << 16, 3)[:1000] + bytes((1 << 16) - 1000)

    asyncio.run(main())
    other.close()


def test_passive_operations_are_cancelled_and_forgotten(connector: nc.Connector) -> None:
    async def main() -> None:
        data = bytearray(4096)
        with await connector.create_readable(nc.Descriptor(data)) as readable:
            with pytest.raises(TimeoutError):
                await readable.wait_for_completion(timeout=0.05)
            readable.cancel()
            await readable.wait_for_completion()
            assert readable.status is nc.OperationStatus.CANCELLED
        assert registered(connector) == 0
        # One that nobody keeps lets go of its memory too.
        forgotten = await connector.create_writable(nc.Descriptor(data))
        assert registered(connector) == 1
        del forgotten, readable
        gc.collect()
        assert registered(connector) == 0
        data.extend(b"x")
        # Two operations on the same memory do not take it from each other.
        shared = nc.Descriptor(data)
        with await connector.create_readable(shared) as one:
            with await connector.create_readable(shared) as two:
                assert two.metadata().notification_key != one.metadata().notification_key
            assert one.status is nc.OperationStatus.INITIALIZED
            assert one.metadata().descriptors[0].ptr == shared.ptr

    asyncio.run(main())
    deadline = time.monotonic() + 30
    while any(thread.name == "towline-nixl" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread waits for nothing"
        time.sleep(0.01)


def test_what_nixl_cannot_do_is_refused(connector: nc.Connector, plain: Callable[[], Plain]) -> None:
    peer = plain()

    async def main() -> None:
        offer = peer.ask("offer", kind="READ", sizes=[4096], seed=1)
        metadata = nc.RdmaMetadata.model_validate(offer)
        with pytest.raises(ValueError, match="read-only"):
            await connector.begin_read(metadata, nc.Descriptor(bytes(4096)))
        with pytest.raises(ValueError, match="read-only"):
            await connector.create_writable(nc.Descriptor(bytes(4096)))
        gaps = numpy.zeros((64, 128), numpy.uint8)[:, ::2]
        with pytest.raises(ValueError, match="gaps"):
            await connector.create_readable(nc.Descriptor((gaps, "cpu")))
        with pytest.raises(ValueError, match="4096 remote"):
            await connector.begin_read(metadata, nc.Descriptor(bytearray(4097)))
        # Memory that the peer did not offer.
        wrong = nc.RdmaMetadata.model_validate(
            offer | {"descriptors": [{"device": "cpu", "ptr": 4096, "size": 4096}]}
        )
        with pytest.raises(RuntimeError):
            await connector.begin_read(wrong, nc.Descriptor(bytearray(4096)))
        # After all of that it still works.
        target = bytearray(4096)
        with await connector.begin_read(metadata, nc.Descriptor(target)) as read:
            await ends(read)
        assert target == pattern(4096, 1)

    asyncio.run(main())


def test_a_peer_that_has_died_is_an_error_and_others_go_on(plain: Callable[[], Plain]) -> None:
    connector, dead, alive = nc.Connector(nixl_devices=["lo"]), plain(), plain()

    async def main() -> None:
        metadata = nc.RdmaMetadata.model_validate(dead.ask("offer", kind="READ", sizes=[4096], seed=1))
        first = bytearray(4096)
        with await connector.begin_read(metadata, nc.Descriptor(first)) as read:
            await ends(read)
        dead.kill()
        with pytest.raises(RuntimeError):
            with await connector.begin_read(metadata, nc.Descriptor(bytearray(4096))) as read:
                await read.wait_for_completion(timeout=50)
        target = bytearray(4096)
        metadata = nc.RdmaMetadata.model_validate(alive.ask("offer", kind="READ", sizes=[4096], seed=2))
        with await connector.begin_read(metadata, nc.Descriptor(target)) as read:
            await ends(read)
        assert first == pattern(4096, 1) and target == pattern(4096, 2)

    asyncio.run(main())
    connector.close()


def listening() -> set[str]:
    """Where this process listens by TCP."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                found.add(row[1])
    return found


def test_metadata_of_the_original_starts_no_nixl_unless_the_user_has_opted_in(
    plain: Callable[[], Plain],
) -> None:
    needs_nixl()
    peer = plain()
    metadata = nc.RdmaMetadata.model_validate(peer.ask("offer", kind="READ", sizes=[4096], seed=8))
    target = bytearray(4096)
    plainly, limited = nc.Connector(), nc.Connector(nixl_devices=["lo"])

    async def main() -> None:
        plainly._shared_connection(), limited._shared_connection()
        before = listening()
        for connector in (plainly, nc.Connector(offer="towline")):
            with pytest.raises(towline.Unavailable, match="nixl_devices"):
                await connector.begin_read(metadata, nc.Descriptor(target))
            with pytest.raises(towline.Unavailable, match="nixl_devices"):
                nc.ReadOperation(connector._shared_connection(), metadata, nc.Descriptor(target))
        connected = listening() - before
        assert all(one.split(":")[0].endswith("0100007F") for one in connected), "more than loopback"
        assert plainly._connection is not None and plainly._connection._nixl is None
        before = listening()
        with await limited.begin_read(metadata, nc.Descriptor(target)) as read:
            await ends(read)
        assert target == pattern(4096, 8)
        new = listening() - before
        assert new, "UCX does not listen, or the test does not see it"
        assert all(one.split(":")[0].endswith("0100007F") for one in new), new

    asyncio.run(main())
    plainly.close()
    limited.close()
    unknown = nc.Connector(nixl_devices=["no-such-device"])
    with pytest.raises(towline.Unavailable, match="no-such-device"):
        asyncio.run(unknown.begin_read(metadata, nc.Descriptor(target)))
    unknown.close()


def rdma_devices() -> list[str]:
    """The RDMA devices of this host."""
    folder = Path("/sys/class/infiniband")
    return os.listdir(folder) if folder.is_dir() else []


def test_an_offer_to_nixl_that_names_no_device_opens_no_network_interface() -> None:
    needs_nixl()
    connector = nc.Connector(offer="nixl")
    connector._shared_connection()
    before = listening()

    async def main() -> None:
        (await connector.create_readable(nc.Descriptor(bytearray(8)))).cancel()

    if rdma_devices():
        asyncio.run(main())
    else:
        with pytest.raises(towline.Unavailable, match=r'nixl_devices=\["tcp"\]'):
            asyncio.run(main())
    assert listening() == before
    connector.close()


def test_an_agent_that_is_given_no_device_at_all_has_rdma_devices_alone() -> None:
    needs_nixl()
    before = listening()
    if rdma_devices():
        towline.nixl.Agent("without", engine="nixl", devices=[]).close()
    else:
        with pytest.raises(towline.Unavailable, match="no RDMA device"):
            towline.nixl.Agent("without", engine="nixl", devices=[])
    assert listening() == before


def test_an_agent_listens_on_the_devices_that_it_was_given() -> None:
    needs_nixl()
    before = listening()
    with contextlib.closing(towline.nixl.Agent("limited", engine="nixl", devices=["lo"])):
        new = listening() - before
        assert new and all(one.split(":")[0].endswith("0100007F") for one in new), new
    with pytest.raises(towline.Unavailable, match="no-such-device"):
        towline.nixl.Agent("none", engine="nixl", devices=["no-such-device"])
    with pytest.raises(TypeError, match="devices"):
        towline.nixl.Agent("none", devices="lo")


def test_metadata_that_inflates_without_end_is_refused() -> None:
    from towline.nixl_connect import _over_nixl

    bomb = zlib.compress(_over_nixl.SERIAL + bytes(_over_nixl.LONGEST + 1), 9)
    assert _over_nixl.inflated(bomb) is None
    good = _over_nixl.SERIAL + b"Agent\x03" + bytes(7) + b"one|"
    assert _over_nixl.inflated(zlib.compress(good)) == good == _over_nixl.inflated(good)
    assert _over_nixl.agent_name(good) == "one"
    for damaged in (good[:-1], good[:20], _over_nixl.SERIAL, good.replace(b"\x03", b"\xff")):
        with pytest.raises(ValueError, match="names no agent"):
            _over_nixl.agent_name(damaged)


def test_without_nixl_the_error_says_so() -> None:
    program = """
import asyncio, base64, zlib
from towline import nixl_connect as nc
metadata = nc.RdmaMetadata(
    descriptors=[nc.SerializedDescriptor(ptr=4096, size=8)],
    nixl_metadata="b64:" + base64.b64encode(zlib.compress(b"nixlSerDes|Agent\\x03" + bytes(7) + b"one|")).decode(),
    notification_key="key", operation_kind=1)
try:
    asyncio.run(nc.Connector(nixl_devices=["lo"]).begin_read(metadata, nc.Descriptor(bytearray(8))))
except RuntimeError as error:
    print(error)
try:
    asyncio.run(nc.Connector(offer="nixl").create_readable(nc.Descriptor(bytearray(8))))
except RuntimeError as error:
    print(error)
"""
    said = run_python("import os; os.environ['TOWLINE_NIXL'] = 'off'\n" + program).splitlines()
    assert len(said) == 2 and all("it is not there" in line for line in said), said


def test_who_is_offered_to_is_said_by_the_connector_or_by_the_drop_in() -> None:
    assert nc.Connector()._offer == "towline" and nc.Connector(offer="nixl")._offer == "nixl"
    with pytest.raises(ValueError, match="offer"):
        nc.Connector(offer="all")  # type: ignore[arg-type]
    ask = "from dynamo import nixl_connect as nc; print(nc.Connector()._offer, nc.Connector(offer='towline')._offer)\n"
    install = "import towline.dropin; towline.dropin.install({})\n"
    assert run_python(install.format("") + ask).split() == ["towline", "towline"]
    assert run_python(install.format("offer='nixl'") + ask).split() == ["nixl", "towline"]
    again = install.format("offer='nixl'") + install.format("") + ask
    assert run_python(again).split() == ["nixl", "towline"]
    for offer in ("towline", "nixl"):
        command = [sys.executable, "-m", "towline", "dropin-path", "--offer", offer]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert found == str(dropin.path(offer))
        said = run_python(f"import sys; sys.path.insert(0, {found!r})\n" + ask)
        assert said.split() == [offer, "towline"]


def test_the_devices_of_nixl_are_said_by_the_connector_or_by_the_drop_in(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="nixl_devices"):
        nc.Connector(nixl_devices="lo")
    ask = "from dynamo import nixl_connect as nc; one = nc.Connector(); print(one._offer, *one._nixl_devices)\n"
    install = "import towline.dropin; towline.dropin.install({})\n"
    assert run_python(install.format("nixl_devices=['lo', 'b']") + ask).split() == ["towline", "lo", "b"]
    setup = install.format("offer='nixl', nixl_devices=['lo']")
    assert run_python(setup + install.format("") + ask).split() == ["nixl", "lo"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for offer in ("towline", "nixl"):
        command = [sys.executable, "-m", "towline", "dropin-path", "--offer", offer, "--nixl-devices", "lo,b"]
        paths = {
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
            for _ in range(2)
        }
        found = paths.pop()
        assert not paths and Path(found).is_relative_to(tmp_path)
        said = run_python(f"import sys; sys.path.insert(0, {found!r})\n" + ask)
        assert said.split() == [offer, "b", "lo"]
