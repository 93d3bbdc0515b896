"""The figures that Python's are compared with: the same transfers by Rust code, over the same memory, in turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import towline

Indices = tuple[Sequence[int], Sequence[int]]


class Reference(Protocol):
    """Who measures the same transfers without asyncio."""

    how: str
    """Where its figures come from."""

    def prepare(self, ticket: str, nbytes: int, block: int, indices: Indices | None) -> int:
        """Makes ready to read that region: as a whole, or its blocks by index. Returns the number of that."""

    def transfers(self, number: int, count: int) -> list[float]:
        """Seconds of each of that many transfers, one after the other."""

    def operation(self, metadata: str, nbytes: int) -> float:
        """Seconds of one operation, from its beginning to its end."""

    def step(self, label: str) -> None:
        """Notes what is measured now."""


class Blocking:
    """The package's own blocking calls: Rust does the work, and each call passes through Python."""

    how = "the package's blocking calls"

    def __init__(self) -> None:
        self._endpoint = towline.Endpoint("bench-blocking")
        self._connector = towline.Connector(endpoint=self._endpoint)
        self._prepared: list[tuple[towline.Remote, towline.Region, Any]] = []
        self._memory: dict[int, towline.Descriptor] = {}

    def prepare(self, ticket: str, nbytes: int, block: int, indices: Indices | None) -> int:
        blocks = None
        if indices is not None:
            layout = towline.Layout.contiguous(nbytes, block)
            blocks = (layout, indices[0], layout, indices[1])
        remote = self._endpoint.import_(ticket)
        local = self._endpoint.register(zeroed(nbytes), "none")
        self._prepared.append((remote, local, blocks))
        return len(self._prepared) - 1

    def transfers(self, number: int, count: int) -> list[float]:
        remote, local, blocks = self._prepared[number]
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._endpoint.read(remote, local, blocks=blocks).wait()
            times.append(time.perf_counter() - start)
        return times

    def operation(self, metadata: str, nbytes: int) -> float:
        descriptor = self._memory.get(nbytes)
        if descriptor is None:
            descriptor = self._memory[nbytes] = towline.Descriptor(zeroed(nbytes))
            descriptor.register_memory(self._connector)
        remote = towline.RdmaMetadata.from_json(metadata)
        start = time.perf_counter()
        self._connector.begin_read_sync(remote, descriptor).wait()
        return time.perf_counter() - start

    def step(self, label: str) -> None:
        print(label, file=sys.stderr)


class Command:
    """The program at the other end of standard input and output: the `towline` command, which has no Python in it."""

    how = "the towline command, in Rust"

    def prepare(self, ticket: str, nbytes: int, block: int, indices: Indices | None) -> int:
        remote, local = (None, None) if indices is None else map(list, indices)
        asked = {"ticket": ticket, "bytes": nbytes, "block": block, "remote": remote, "local": local}
        return int(self._ask({"prepare": asked})["prepared"])

    def transfers(self, number: int, count: int) -> list[float]:
        seconds: list[float] = self._ask({"transfers": {"prepared": number, "count": count}})["seconds"]
        return seconds

    def operation(self, metadata: str, nbytes: int) -> float:
        asked = {"metadata": metadata, "bytes": nbytes}
        return float(self._ask({"operation": asked})["seconds"][0])

    def step(self, label: str) -> None:
        say({"step": label})

    @staticmethod
    def _ask(query: dict[str, Any]) -> dict[str, Any]:
        say(query)
        line = sys.stdin.readline()
        if not line:
            raise RuntimeError("the program that measures Rust has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"in Rust: {answer['error']}")
        return answer


def say(document: dict[str, Any]) -> None:
    """Writes one line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def zeroed(nbytes: int) -> Any:
    """Shared memory whose pages are there: missing ones would be counted as copying."""
    array = towline.empty(nbytes)
    view = memoryview(array)
    piece = bytes(min(nbytes, 1 << 20))
    for start in range(0, nbytes, len(piece)):
        view[start : start + len(piece)] = piece[: nbytes - start]
    return array
