"""`towline.nixl_connect` and the original `dynamo.nixl_connect` on NIXL: each takes part in the other's operations."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import HERE
from test_nixl import Plain, needs_nixl, pattern

from towline import nixl_connect as nc

SIZES = [1 << 20, 4096, 333]

FOLDER = Path(sys.prefix) / "share" / "dynamo-original"
"""Where the project's script unpacks the original from Dynamo's wheel, which has much else."""


def why_no_original() -> str:
    """Why the original cannot be run here; nothing where it can."""
    if not (FOLDER / "dynamo" / "nixl_connect" / "__init__.py").exists():
        return f"the original is not in {FOLDER.relative_to(Path(sys.prefix).parent)} (scripts/test.sh fetches it)"
    if importlib.util.find_spec("pydantic") is None:
        return "the original needs pydantic, which is not installed"
    return ""


@pytest.fixture
def original() -> Iterator[Callable[[], Plain]]:
    needs_nixl()
    reason = why_no_original()
    if reason:
        required = os.environ.get("TOWLINE_REQUIRE", "").split(",")
        assert "dynamo" not in required and "all" not in required, reason
        pytest.skip(reason)
    made: list[Plain] = []

    def make() -> Plain:
        made.append(Plain(HERE / "original_peer.py", str(FOLDER)))
        return made[-1]

    yield make
    for one in made:
        one.kill()


async def ends(operation: nc.AbstractOperation) -> None:
    await operation.wait_for_completion(timeout=50)
    assert operation.status is nc.OperationStatus.COMPLETE


@pytest.mark.parametrize("hex", [False, True])
def test_the_original_takes_part_in_our_operations(original: Callable[[], Plain], hex: bool) -> None:
    peer = original()
    connector = nc.Connector(offer="nixl", nixl_devices=["lo"])

    async def main() -> None:
        sources = [bytearray(pattern(size, 5)) for size in SIZES]
        with await connector.create_readable([nc.Descriptor(one) for one in sources]) as readable:
            metadata = json.loads(readable.metadata(hex_encode=hex).model_dump_json())
            reply = await asyncio.to_thread(peer.ask, "begin", kind="READ", metadata=metadata, sizes=SIZES, seed=None)
            assert reply == {"status": str(nc.OperationStatus.COMPLETE)}
            await ends(readable)
        assert peer.bytes() == [pattern(size, 5) for size in SIZES]

        targets = [bytearray(size) for size in SIZES]
        with await connector.create_writable([nc.Descriptor(one) for one in targets]) as writable:
            metadata = json.loads(writable.metadata(hex_encode=hex).model_dump_json())
            reply = await asyncio.to_thread(peer.ask, "begin", kind="WRITE", metadata=metadata, sizes=SIZES, seed=77)
            assert reply == {"status": str(nc.OperationStatus.COMPLETE)}
            await ends(writable)
        assert [bytes(one) for one in targets] == [pattern(size, 77) for size in SIZES]

    asyncio.run(main())
    connector.close()


@pytest.mark.parametrize("hex", [False, True])
def test_we_take_part_in_operations_of_the_original(original: Callable[[], Plain], hex: bool) -> None:
    peer = original()
    connector = nc.Connector(nixl_devices=["lo"])

    async def main() -> None:
        offer = peer.ask("offer", kind="READ", sizes=SIZES, seed=8, hex=hex)
        targets = [bytearray(size) for size in SIZES]
        metadata = nc.RdmaMetadata.model_validate(offer)
        with await connector.begin_read(metadata, [nc.Descriptor(one) for one in targets]) as read:
            await ends(read)
        assert [bytes(one) for one in targets] == [pattern(size, 8) for size in SIZES]
        assert await asyncio.to_thread(peer.ask, "wait") == {"status": str(nc.OperationStatus.COMPLETE)}

        offer = peer.ask("offer", kind="WRITE", sizes=SIZES, seed=None, hex=hex)
        metadata = nc.RdmaMetadata.model_validate(offer)
        sources = [pattern(size, 99) for size in SIZES]
        with await connector.begin_write([nc.Descriptor(one) for one in sources], metadata) as write:
            await ends(write)
        assert await asyncio.to_thread(peer.ask, "wait") == {"status": str(nc.OperationStatus.COMPLETE)}
        assert peer.bytes() == sources

    asyncio.run(main())
    connector.close()
