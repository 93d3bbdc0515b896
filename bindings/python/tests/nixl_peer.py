"""A plain process of NIXL: its own Python API, used as `dynamo.nixl_connect` uses it, and nothing of Towline.

It reads one JSON object per line from its standard input and writes one reply per line to its standard output.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import sys
import time
import uuid
import zlib
from typing import Any

import numpy

PACKAGE = next(name for name in ("nixl", "nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name))
PATTERN = bytes(range(251))
KINDS = {"READ": 1, "WRITE": 2}


def pattern(nbytes: int, seed: int) -> bytes:
    return (PATTERN * (nbytes // 251 + 2))[seed : seed + nbytes]


class Peer:
    """One worker of the original: an agent, and arrays that take part in its operations."""

    def __init__(self, name: str) -> None:
        self.agent: Any = importlib.import_module(f"{PACKAGE}._api").nixl_agent(f"{name}-1")
        self.arrays: list[Any] = []
        self.handles: list[Any] = []
        self.key = ""

    def _registered(self, sizes: list[int], seed: int | None) -> list[tuple[int, int, int]]:
        """Arrays of these sizes, filled or empty, registered one by one as the original does."""
        self.arrays = []
        for size in sizes:
            content = bytes(size) if seed is None else pattern(size, seed)
            self.arrays.append(numpy.frombuffer(content, numpy.uint8).copy())
        ranges = [(array.ctypes.data, array.nbytes, 0) for array in self.arrays]
        self.handles = [self.agent.register_memory([(*one, "mem")], "DRAM") for one in ranges]
        return ranges

    def offer(self, kind: str, sizes: list[int], seed: int | None, hex: bool = False) -> dict[str, Any]:
        """A passive operation of the original: what its `metadata()` gives."""
        ranges = self._registered(sizes, seed)
        packed = zlib.compress(self.agent.get_agent_metadata(), 6)
        self.key = str(uuid.uuid4())
        return {
            "descriptors": [{"device": "cpu", "ptr": at, "size": size} for at, size, _ in ranges],
            "nixl_metadata": packed.hex() if hex else "b64:" + base64.b64encode(packed).decode(),
            "notification_key": self.key,
            "operation_kind": KINDS[kind],
        }

    def wait(self) -> dict[str, Any]:
        """Waits for the notification with the operation's key, as its `wait_for_completion` does."""
        until = time.monotonic() + 50
        while time.monotonic() < until:
            for messages in self.agent.update_notifs().values():
                if any(message.decode() == self.key for message in messages):
                    return {"status": "DONE"}
            time.sleep(0.005)
        return {"error": "no notification"}

    def begin(self, kind: str, metadata: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """An active operation of the original, from its metadata to its end."""
        assert set(metadata) == {"descriptors", "nixl_metadata", "notification_key", "operation_kind"}
        assert metadata["operation_kind"] == KINDS[kind]
        text = metadata["nixl_metadata"]
        packed = base64.b64decode(text[4:]) if text.startswith("b64:") else bytes.fromhex(text)
        name = self.agent.add_remote_agent(zlib.decompress(packed))
        name = name.decode() if isinstance(name, bytes) else name
        there = [(one["ptr"], one["size"], 0) for one in metadata["descriptors"]]
        here = self._registered([size for _, size, _ in there], seed)
        handle = self.agent.initialize_xfer(
            operation=kind,
            local_descs=self.agent.get_xfer_descs(descs=here, mem_type="DRAM"),
            remote_descs=self.agent.get_xfer_descs(descs=there, mem_type="DRAM"),
            remote_agent=name,
            notif_msg=metadata["notification_key"].encode(),
        )
        state = self.agent.transfer(handle, metadata["notification_key"].encode())
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        return {"status": state, "peer": name}

    def bytes(self) -> dict[str, Any]:
        return {"bytes": [base64.b64encode(array.tobytes()).decode() for array in self.arrays]}

    def forget(self) -> dict[str, Any]:
        for handle in self.handles:
            self.agent.deregister_memory(handle)
        self.handles = []
        return {}

    # What programs of their own do, without the original's wire form.

    def plain(self, nbytes: int, seed: int) -> dict[str, Any]:
        """The metadata and one serialized list of two ranges."""
        (at, size, device), *_ = self._registered([nbytes], seed)
        descs = self.agent.get_xfer_descs([(at, size // 2, device), (at + size // 2, size - size // 2, device)], "DRAM")
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "descs": base64.b64encode(self.agent.get_serialized_descs(descs)).decode(),
            "package": PACKAGE,
        }

    def move(self, op: str, metadata: str, descs: str, message: str) -> dict[str, Any]:
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        remote = self.agent.deserialize_descs(base64.b64decode(descs))
        array = self.arrays[0]
        local = self.agent.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM")
        handle = self.agent.initialize_xfer(op, local, remote, name, message.encode())
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        return {"status": state}

    def notified(self) -> dict[str, Any]:
        until = time.monotonic() + 50
        while time.monotonic() < until:
            new = self.agent.get_new_notifs()
            for peer, messages in new.items():
                return {"from": peer, "message": messages[0].decode()}
        return {"error": "no notification"}


def main() -> None:
    # What NIXL prints to standard output would be taken for a reply.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(peer, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    # Without the agent's end, in which NIXL may crash.
    os._exit(0)


if __name__ == "__main__":
    main()
