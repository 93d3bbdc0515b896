"""The other process of the figures: owns memory, offers it, answers messages.

It reads one JSON object per line from its standard input and writes its replies to its standard output. It ends when its
input does.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import towline

FIRST_POLL, GROWTH, LONGEST = 0.005, 1.5, 0.1
"""How `dynamo.nixl_connect` waits for an operation: seconds to the first look, and how that grows."""

_TILE = 1 << 20
_MARK = struct.Struct("<QQ")
_EVERY = 4096


def fill(view: memoryview) -> None:
    """Writes bytes that say where they belong: every block of 4 KiB begins with its number."""
    tile = bytes(range(251)) * (_TILE // 251 + 1)
    for start in range(0, len(view), _TILE):
        part = view[start : start + _TILE]
        part[:] = tile[: len(part)]
    for start in range(0, len(view) - _MARK.size + 1, _EVERY):
        _MARK.pack_into(view, start, start // _EVERY, ~(start // _EVERY) & 0xFFFF_FFFF)


def is_block(view: memoryview, offset: int, number: int) -> bool:
    """Whether that block of 4 KiB is at that offset."""
    return _MARK.unpack_from(view, offset) == (number, ~number & 0xFFFF_FFFF)


async def polled(operation: Any) -> None:
    """Waits for an operation as `dynamo.nixl_connect` does: look, sleep, look again, each time after a longer sleep."""
    pause = FIRST_POLL
    while not operation.done():
        await asyncio.sleep(pause)
        pause = min(pause * GROWTH, LONGEST)
    operation.result()


class Peer:
    """The process, as its parent sees it."""

    def __init__(self, module: str = __name__, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**(environment or {}), **os.environ},
            text=True,
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other process has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the other process: {answer['error']}")
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.answer()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _Duties:
    def __init__(self) -> None:
        self.endpoint = towline.Endpoint("bench-peer")
        self.connector = towline.Connector(endpoint=self.endpoint)
        self.others: dict[str, Any] = {}
        self.memory: dict[int, towline.Descriptor] = {}
        self.kept: list[object] = []

    async def perform(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "region":
                array = towline.empty(order["bytes"])
                fill(memoryview(array))
                region = self.endpoint.register(array, "read")
                self.kept.append(region)
                _say(ticket=str(region.ticket()))
            case "offer":
                await self.offer(order["bytes"], order["polled"])
            case "offer-like":
                await self.offer_like(order["library"], order["bytes"])
            case "echo":
                await self.echo(order["ticket"])
            case other:
                raise ValueError(f"an order that this process does not know: {other}")

    async def offer(self, nbytes: int, by_polling: bool) -> None:
        descriptor = self.memory.get(nbytes)
        if descriptor is None:
            array = towline.empty(nbytes)
            fill(memoryview(array))
            descriptor = self.memory[nbytes] = towline.Descriptor(array)
            descriptor.register_memory(self.connector)
        readable = await self.connector.create_readable(descriptor)
        _say(metadata=readable.metadata().to_json())
        if by_polling:
            await polled(readable)
        else:
            await readable
        _say(ended=time.monotonic_ns())

    async def offer_like(self, library: str, nbytes: int) -> None:
        if library not in self.others:
            module = importlib.import_module(library)
            array = bytearray(nbytes)
            fill(memoryview(array))
            self.others[library] = module.Connector(), module.Descriptor(array)
        connector, descriptor = self.others[library]
        readable = await connector.create_readable(descriptor)
        _say(metadata=readable.metadata().model_dump_json())
        await readable.wait_for_completion()
        _say(ended=time.monotonic_ns())

    async def echo(self, ticket: str) -> None:
        endpoint = towline.Endpoint("bench-echo")
        region = endpoint.register(towline.empty(4096), "read")
        back = await endpoint.import_async(ticket)
        self.kept += [region, asyncio.create_task(_echo(endpoint, back))]
        _say(ticket=str(region.ticket()))


async def _echo(endpoint: towline.Endpoint, back: towline.Remote) -> None:
    while True:
        try:
            notification = await endpoint.receive_async()
        except towline.Timeout:
            continue
        if notification.message == b"ping":
            await endpoint.notify(back, b"pong")


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    duties = _Duties()
    while line := await reader.readline():
        try:
            await duties.perform(json.loads(line))
        except Exception as error:
            _say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    asyncio.run(_main())
