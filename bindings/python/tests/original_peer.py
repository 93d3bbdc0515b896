"""A worker of Dynamo: the real `dynamo.nixl_connect` from a folder, and nothing of Towline.

It reads one JSON object per line from its standard input and writes one reply per line to its standard output.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import json
import os
import sys
import types
from typing import Any

# NIXL writes its log to standard output, which is for the replies.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

sys.path.insert(0, sys.argv[1])
if importlib.util.find_spec("torch") is None:
    # The original refuses to be imported without torch, of which it needs a class to compare with.
    torch: Any = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch
if importlib.util.find_spec("nixl") is None:
    # The name under which the original looks for it comes with a package that has nothing else.
    package = next(name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name))
    for name in ("", "._api", "._bindings"):
        sys.modules["nixl" + name] = importlib.import_module(package + name)

import numpy

original: Any = importlib.import_module("dynamo.nixl_connect")
PATTERN = bytes(range(251))


def pattern(nbytes: int, seed: int) -> bytes:
    return (PATTERN * (nbytes // 251 + 2))[seed : seed + nbytes]


class Peer:
    def __init__(self, name: str) -> None:
        self.connector = original.Connector(name)
        self.arrays: list[Any] = []
        self.operation: Any = None

    def _descriptors(self, sizes: list[int], seed: int | None) -> list[Any]:
        contents = [bytes(size) if seed is None else pattern(size, seed) for size in sizes]
        self.arrays = [numpy.frombuffer(content, numpy.uint8).copy() for content in contents]
        return [original.Descriptor((array, "cpu")) for array in self.arrays]

    async def offer(self, kind: str, sizes: list[int], seed: int | None, hex: bool = False) -> Any:
        make = self.connector.create_readable if kind == "READ" else self.connector.create_writable
        self.operation = await make(self._descriptors(sizes, seed))
        metadata = self.operation.metadata(hex_encode=True) if hex else self.operation.metadata()
        return json.loads(metadata.model_dump_json())

    async def begin(self, kind: str, metadata: Any, sizes: list[int], seed: int | None) -> Any:
        remote = original.RdmaMetadata.model_validate(metadata)
        local = self._descriptors(sizes, seed)
        if kind == "READ":
            self.operation = await self.connector.begin_read(remote, local)
        else:
            self.operation = await self.connector.begin_write(local, remote)
        return await self.wait()

    async def wait(self) -> Any:
        await asyncio.wait_for(self.operation.wait_for_completion(), 50)
        return {"status": str(self.operation.status)}

    async def bytes(self) -> Any:
        return {"bytes": [base64.b64encode(array.tobytes()).decode() for array in self.arrays]}


async def main() -> None:
    peer = Peer(sys.argv[2])
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            answer = await getattr(peer, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=ANSWERS, flush=True)
    os._exit(0)


asyncio.run(main())
