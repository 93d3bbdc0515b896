"""The same read by NIXL's own Python API, between two processes that wait as `dynamo.nixl_connect` does.

Neither process is the one that measures: NIXL may crash a process that ends. Each reads one JSON object per line from its
standard input and writes its replies to its standard output.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import uuid
from typing import Any

from ._peer import fill, is_block, polled

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
ENVIRONMENT = {"UCX_MODULES": "^efa", "NIXL_LOG_LEVEL": "WARN"}
"""Without such an adapter, UCX's module for it may keep an agent from being made."""


def package() -> str | None:
    """The package that has NIXL's Python API, where one is installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def version() -> str:
    """Its version."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


class _Posted:
    """A transfer that was posted."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._state: str = agent.transfer(handle)

    def done(self) -> bool:
        if self._state == "PROC":
            self._state = self._agent.check_xfer_state(self._handle)
        return self._state != "PROC"

    def result(self) -> None:
        self._agent.release_xfer_handle(self._handle)
        if self._state != "DONE":
            raise RuntimeError(f"NIXL says {self._state}")


class _Awaited:
    """A notification that is waited for."""

    def __init__(self, agent: Any, key: bytes) -> None:
        self._agent, self._key = agent, key

    def done(self) -> bool:
        # Those of earlier ones are not kept, which the original does.
        return any(self._key in some for some in self._agent.get_new_notifs().values())

    def result(self) -> None:
        pass


class _Side:
    """One of the two processes: an agent, and memory that is registered once."""

    def __init__(self, nbytes: int) -> None:
        name = package()
        if name is None:
            raise RuntimeError("nixl is not installed")
        api = importlib.import_module(f"{name}._api")
        self.name = uuid.uuid4().hex
        self.agent = api.nixl_agent(self.name)
        import numpy

        memory = numpy.zeros(nbytes, numpy.uint8)
        self.memory = memory.data
        self.descriptor = (memory.ctypes.data, nbytes, 0)
        self.agent.register_memory([(*self.descriptor, "")], "DRAM")
        self.remote = ""
        self.source: tuple[int, ...] = ()

    async def perform(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "offer":
                fill(self.memory)
                metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
                _say(metadata=metadata, descriptor=self.descriptor)
            case "know":
                named = self.agent.add_remote_agent(base64.b64decode(order["metadata"]))
                self.remote = named.decode() if isinstance(named, bytes) else named
                self.source = tuple(order["descriptor"])
                _say()
            case "wait":
                await polled(_Awaited(self.agent, order["key"].encode()))
                _say(ended=time.monotonic_ns())
            case "read":
                began = time.monotonic_ns()
                handle = self.agent.initialize_xfer(
                    "READ",
                    self.agent.get_xfer_descs([self.descriptor], "DRAM"),
                    self.agent.get_xfer_descs([self.source], "DRAM"),
                    self.remote,
                    order["key"].encode(),
                )
                await polled(_Posted(self.agent, handle))
                ended = time.monotonic_ns()
                if not is_block(self.memory, 0, 0):
                    raise RuntimeError("the bytes that were read are wrong")
                _say(began=began, ended=ended)
            case other:
                raise ValueError(f"an order that this process does not know: {other}")


def _say(**answer: Any) -> None:
    _ANSWERS.write(json.dumps(answer) + "\n")
    _ANSWERS.flush()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    side: _Side | None = None
    while line := await reader.readline():
        try:
            order = json.loads(line)
            if side is None:
                side = _Side(order["bytes"])
            await side.perform(order)
        except Exception as error:
            _say(error=f"{type(error).__name__}: {error}")
    # Without the agent's end, in which NIXL may crash.
    os._exit(0)


if __name__ == "__main__":
    # What NIXL prints to standard output would be taken for a reply.
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_main())
