"""A plain process of NIXL: its own Python API, nothing of Towline.

It reads one JSON object per line from its standard input and writes one reply per line to its standard output.
"""

import base64
import importlib
import importlib.util
import json
import os
import sys
import time

import numpy

PACKAGE = next(name for name in ("nixl", "nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name))


class Peer:
    def __init__(self, order):
        api = importlib.import_module(f"{PACKAGE}._api")
        self.agent = api.nixl_agent(order["name"])
        self.memory = numpy.frombuffer(
            bytes((at * 13 + at // 256 + order["seed"]) % 256 for at in range(order["bytes"])), numpy.uint8
        ).copy()
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")

    def descs(self):
        # Two ranges, so that a list is more than one.
        half = self.memory.nbytes // 2
        at = self.memory.ctypes.data
        return self.agent.get_xfer_descs([(at, half, 0), (at + half, self.memory.nbytes - half, 0)], "DRAM")

    def offer(self, order):
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "descs": base64.b64encode(self.agent.get_serialized_descs(self.descs())).decode(),
            "package": PACKAGE,
        }

    def know(self, order):
        name = self.agent.add_remote_agent(base64.b64decode(order["metadata"]))
        return {"peer": name.decode() if isinstance(name, bytes) else name}

    def move(self, order):
        """READ or WRITE between all of its memory and the ranges in the order's serialized list."""
        remote = self.agent.deserialize_descs(base64.b64decode(order["descs"]))
        handle = self.agent.initialize_xfer(
            order["op"], self.descs(), remote, order["peer"], order["message"].encode()
        )
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        return {"state": state}

    def bytes(self, order):
        return {"bytes": base64.b64encode(self.memory.tobytes()).decode()}

    def notified(self, order):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            new = self.agent.get_new_notifs()
            if new:
                return {"from": next(iter(new)), "message": next(iter(new.values()))[0].decode()}
        return {"error": "nobody said anything"}


def main():
    # What NIXL prints to standard output would be taken for a reply.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "start":
                peer = Peer(order)
                answer = {}
            else:
                answer = getattr(peer, order["do"])(order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # Without the agent's end, in which NIXL may crash.
    os._exit(0)


main()
