"""An agent of NIXL, by its own Python API and with its default settings, that gets its orders line by line.

A line is words, and ``+N`` at its end says how many bytes follow it. It ends with its input.
"""

import os
import sys
import time

# NIXL writes its log to standard output, which is for the replies.
ANSWERS = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

import numpy as np

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:
    from nixl_cu12._api import nixl_agent, nixl_agent_config


def say(text, payload=b""):
    ANSWERS.write(f"{text} +{len(payload)}\n".encode() + payload)
    ANSWERS.flush()


class Worker:
    def perform(self, words, payload):
        match words:
            case ["open", name, length]:
                self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
                self.data = np.ones(int(length), dtype=np.uint8)
                self.agent.register_memory([(self.data.ctypes.data, len(self.data), 0, "")], mem_type="DRAM")
                return str(self.data.ctypes.data), self.agent.get_agent_metadata()
            case ["meet"]:
                self.agent.add_remote_agent(payload)
                return "", b""
            case ["fill", byte]:
                self.data[:] = int(byte)
                return "", b""
            case ["once", peer, address, length]:
                self.begin("READ", peer, int(address), int(length))
                self.until(20.0)
                self.agent.release_xfer_handle(self.handle)
                return self.state, b""
            case ["begin", op, peer, address]:
                self.begin(op, peer, int(address), len(self.data))
                return self.state, b""
            case ["ended", seconds]:
                self.until(float(seconds))
                return f"{self.state} {time.monotonic_ns()}", b""
            case ["release", byte]:
                # What the caller puts into its memory as soon as it has it back.
                begun = time.monotonic_ns()
                self.agent.release_xfer_handle(self.handle)
                took = time.monotonic_ns() - begun
                self.data[:] = int(byte)
                return str(took), b""
            case ["changed", byte, seconds]:
                until = time.monotonic() + float(seconds)
                while time.monotonic() < until:
                    self.agent.get_new_notifs()
                    time.sleep(0.001)
                return str(int((self.data != int(byte)).sum())), b""

    def begin(self, op, peer, address, length):
        local = self.agent.get_xfer_descs([(self.data.ctypes.data, length, 0)], "DRAM")
        remote = self.agent.get_xfer_descs([(address, length, 0)], "DRAM")
        self.handle = self.agent.initialize_xfer(op, local, remote, peer)
        self.state = self.agent.transfer(self.handle)

    def until(self, seconds):
        until = time.monotonic() + seconds
        try:
            while self.state == "PROC" and time.monotonic() < until:
                self.state = self.agent.check_xfer_state(self.handle)
        except Exception:
            self.state = "ERR"


worker = Worker()
while line := sys.stdin.buffer.readline():
    *words, length = line.decode().split()
    payload = sys.stdin.buffer.read(int(length[1:]))
    try:
        text, answer = worker.perform(words, payload)
        say(f"ok {text}", answer)
    except Exception as error:
        say(f"err Native {type(error).__name__}: {error}".replace("\n", " "))
os._exit(0)
