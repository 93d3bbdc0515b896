"""NIXL by its own Python API, for `towline bench`: an owner and a user, which get their orders on standard input.

The user answers each line with one line of JSON. Both drive their agents themselves, without NIXL's thread, which is NIXL's
best setting for transfers; `notify` is also measured with that thread, which is its default.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
import time

# NIXL writes its log to standard output, which is for the replies.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

# Where the memory is, in NIXL's words: the host's, or that of the first GPU.
KIND = os.environ.get("TOWLINE_BENCH_MEMORY", "DRAM")


def say(what):
    print(json.dumps(what), file=ANSWERS, flush=True)


def agent(name, thread):
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=thread, backends=["UCX"]))


class Host:
    """Huge pages where the machine gives them, as Towline's own memory asks for them."""

    def __init__(self, length):
        import mmap

        area = mmap.mmap(-1, length + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(area, dtype=np.uint8)
        start = -array.ctypes.data % (2 << 20)
        self.array = array[start : start + length]
        self.array[:] = 1
        self.address = self.array.ctypes.data


class Gpu:
    """By the driver alone, in the primary context, as PyTorch has its memory."""

    def __init__(self, length):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        for call, *arguments in (
            ("cuInit", 0),
            ("cuDeviceGet", ctypes.byref(device), 0),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
            ("cuCtxSetCurrent", context),
            ("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length)),
        ):
            answer = getattr(driver, call)(*arguments)
            if answer != 0:
                raise RuntimeError(f"{call}: {answer}")
        self.address = address.value


def memory(length):
    return Gpu(length) if KIND == "VRAM" else Host(length)


def ranges(base, block, indices):
    return np.array([(base + int(i) * block, block, 0) for i in indices], dtype=np.uint64)


def cpu():
    times = os.times()
    return times.user + times.system


def owner(length, thread):
    mine = agent("owner", thread)
    data = memory(length)
    mine.register_memory([(data.address, length, 0, "")], mem_type=KIND)
    say({"metadata": mine.get_agent_metadata().hex(), "address": data.address})
    line = json.loads(sys.stdin.readline())
    mine.add_remote_agent(bytes.fromhex(line["metadata"]))
    state = {"drive": True, "end": False}

    def listen():
        for text in sys.stdin:
            word = text.strip()
            if word == "cpu":
                say({"cpu": cpu()})
            else:
                state["drive"] = word == "drive"
        state["end"] = True

    threading.Thread(target=listen, daemon=True).start()
    while not state["end"]:
        if not state["drive"]:
            time.sleep(0.001)
            continue
        for messages in mine.get_new_notifs().values():
            for message in messages:
                mine.send_notif("user", message)
    os._exit(0)


class User:
    def __init__(self, length, thread, driven):
        self.driven = driven
        self.mine = agent("user", thread)
        self.data = memory(length)
        self.mine.register_memory([(self.data.address, length, 0, "")], mem_type=KIND)
        self.child = subprocess.Popen(
            [sys.executable, __file__, "owner", str(length), str(int(thread))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        reply = json.loads(self.child.stdout.readline())
        self.address = reply["address"]
        self.mine.add_remote_agent(bytes.fromhex(reply["metadata"]))
        self.tell(json.dumps({"metadata": self.mine.get_agent_metadata().hex()}))
        self.handle = None
        # The first transfer connects, for which both sides have to be driven.
        self.prepare("read", 1, 64)
        self.once()
        self.tell("rest")

    def tell(self, line):
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def prepare(self, op, blocks, block):
        near, far = list(range(blocks)), list(range(blocks))
        random.Random(1).shuffle(near)
        random.Random(2).shuffle(far)
        base = self.data.address
        if blocks == 1:
            local = self.mine.get_xfer_descs([(base, block, 0)], KIND)
            remote = self.mine.get_xfer_descs([(self.address, block, 0)], KIND)
            self.handle = self.mine.initialize_xfer(op.upper(), local, remote, "owner")
            self.make = None
            return
        everything = list(range(blocks))
        local = self.mine.prep_xfer_dlist("", ranges(base, block, everything), KIND)
        remote = self.mine.prep_xfer_dlist("owner", ranges(self.address, block, everything), KIND)
        near, far = np.array(near, dtype=np.int32), np.array(far, dtype=np.int32)
        # Block indices change from one transfer to the next, so the request is made anew, as its users do.
        self.make = lambda: self.mine.make_prepped_xfer(op.upper(), local, near, remote, far)

    def once(self):
        handle = self.make() if self.make else self.handle
        state = self.mine.transfer(handle)
        while state == "PROC":
            state = self.mine.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(state)
        if self.make:
            self.mine.release_xfer_handle(handle)

    def drive(self):
        # The owner looks for such words once a millisecond.
        self.tell("drive")
        time.sleep(0.005)

    def run(self, count):
        if self.driven:
            self.drive()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.once()
            times.append(time.perf_counter() - start)
        self.tell("rest")
        return times

    def notify(self, count):
        self.drive()
        times = []
        for number in range(count):
            start = time.perf_counter()
            self.mine.send_notif("owner", b"%d" % number)
            while not self.mine.get_new_notifs().get("owner"):
                pass
            times.append(time.perf_counter() - start)
        self.tell("rest")
        return times

    def idle(self, seconds):
        before = cpu()
        self.tell("cpu")
        theirs = json.loads(self.child.stdout.readline())["cpu"]
        time.sleep(seconds)
        self.tell("cpu")
        theirs = json.loads(self.child.stdout.readline())["cpu"] - theirs
        ours = cpu() - before
        return (ours + theirs) / seconds / 2


def main():
    length, thread = int(sys.argv[2]), sys.argv[3] == "1"
    if sys.argv[1] == "owner":
        owner(length, thread)
    # Whether the owner's processor has to do its part, which it does without pause then.
    user = User(length, thread, sys.argv[4:] == ["driven"])
    say("ready")
    for line in sys.stdin:
        words = line.split()
        if words[0] == "prepare":
            user.prepare(words[1], int(words[2]), int(words[3]))
            answer = "prepared"
        elif words[0] == "run":
            answer = user.run(int(words[1]))
        elif words[0] == "notify":
            answer = user.notify(int(words[1]))
        else:
            answer = user.idle(float(words[1]))
        say(answer)
    user.child.kill()
    os._exit(0)


main()
