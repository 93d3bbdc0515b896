"""Code as consumers of ``dynamo.nixl_connect`` write it: it knows nothing of Towline.

Run as ``consumer.py send`` (prints requests, one JSON object per line, and waits for them to be read) or as
``consumer.py receive`` (reads the requests from its standard input).
"""

# mypy: ignore-errors

import asyncio
import json
import sys
import threading

import numpy as np

import dynamo.nixl_connect as connect
from dynamo import nixl_connect
from dynamo.nixl_connect import Connector, Descriptor, OperationStatus, RdmaMetadata

COUNT = 12
POOL_BYTES = 1 << 20


def embedding(number: int) -> "np.ndarray":
    return np.full((number + 1, 1000), number, dtype=np.float32)


class Pool:
    """Descriptors over buffers that are registered once and used again and again."""

    def __init__(self, connector: Connector, count: int) -> None:
        self._free: asyncio.Queue[Descriptor] = asyncio.Queue()
        self._connector = connector
        self._count = count

    async def fill(self) -> None:
        connection = await self._connector._create_connection()
        for _ in range(self._count):
            descriptor = Descriptor((np.zeros(POOL_BYTES, dtype=np.uint8), "cpu"))
            descriptor.register_with_connector(connection)
            self._free.put_nowait(descriptor)

    async def take(self, nbytes: int) -> Descriptor:
        descriptor = await self._free.get()
        descriptor._data_size = nbytes
        return descriptor

    def give_back(self, descriptor: Descriptor) -> None:
        descriptor._data_size = POOL_BYTES
        assert descriptor.is_registered
        self._free.put_nowait(descriptor)


async def send() -> None:
    connector = Connector()
    await connector.initialize()
    waiting = []
    for number in range(COUNT):
        source = embedding(number)
        if number % 2:
            descriptor = Descriptor((source.ctypes.data, source.nbytes, "cpu", source))
        else:
            descriptor = Descriptor((source, connect.Device("cpu")))
        readable = await connector.create_readable(descriptor)
        request = {"number": number, "metadata": readable.metadata().model_dump()}
        print(json.dumps(request), flush=True)
        waiting.append((readable, readable.wait_for_completion()))
    for readable, completion in waiting:
        await completion
        readable.__exit__(None, None, None)
        assert readable.status == OperationStatus.COMPLETE
    with await connector.create_readable(Descriptor(b"as bytes")) as readable:
        print(json.dumps({"number": -1, "metadata": readable.metadata().model_dump()}), flush=True)
        await readable.wait_for_completion()
    target = bytearray(1000)
    with await connector.create_writable(Descriptor(target)) as writable:
        print(json.dumps({"number": -2, "metadata": writable.metadata().model_dump()}), flush=True)
        await writable.wait_for_completion()
    assert target == b"w" * 1000


async def receive() -> None:
    connector = Connector("decode-worker")
    pool = Pool(connector, 2)
    await pool.fill()

    async def one(request: dict) -> None:
        metadata = RdmaMetadata.model_validate(request["metadata"])
        number = request["number"]
        if number == -2:
            with await connector.begin_write(Descriptor(b"w" * 1000), metadata) as write:
                await write.wait_for_completion()
            return
        nbytes = sum(descriptor.size for descriptor in metadata.descriptors)
        descriptor = await pool.take(nbytes)
        try:
            with await connector.begin_read(metadata, descriptor) as read:
                await read.wait_for_completion()
                assert read.status == nixl_connect.OperationStatus.COMPLETE
                assert [result.size for result in read.results()] == [nbytes]
            got = descriptor._data_ref[: descriptor._data_size]
            expected = b"as bytes" if number == -1 else embedding(number).tobytes()
            assert got.tobytes() == expected, number
        finally:
            pool.give_back(descriptor)

    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def feed() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=feed, daemon=True).start()
    await asyncio.gather(
        *[asyncio.create_task(one(json.loads(await lines.get()))) for _ in range(COUNT + 2)]
    )
    print("received")


if __name__ == "__main__":
    asyncio.run(send() if sys.argv[1] == "send" else receive())
