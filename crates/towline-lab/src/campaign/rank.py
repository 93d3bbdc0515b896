"""A rank of the campaign `ranks` in Python: the same steps as those of a rank in Rust, in one group with them.

It says when it is ready, is given one order, ``rank ID NRANKS RANK SEED LANE [LISTEN]``, says when it has joined, and then which error has
ended it. The longest wait for another rank, ``TIMEOUT``, is put before this.
"""

import os
import sys
import threading
from array import array

import towline
from towline import nccl

MASK = (1 << 64) - 1
MOST = 256 << 10
ROOM = 4 * MOST


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


class Random:
    def __init__(self, seed):
        self.state = mix((seed + 0x9E3779B97F4A7C15) & MASK)

    def below(self, end):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mix(self.state) % end


class Wrong(Exception):
    pass


class Group:
    def __init__(self, comm):
        self.comm = comm
        self.step_number = 0
        self.memory = nccl.mem_alloc(ROOM)
        self.window = comm.register_window(self.memory)
        self.send, self.recv = bytearray(MOST), bytearray(MOST)
        self.kept = [comm.register_buffer(self.send), comm.register_buffer(self.recv)]

    def first(self, rank):
        return ((self.step_number * 0x9E3779B9) & MASK) ^ (rank << 40)

    def words(self, rank, length):
        """Words that tell the step and the rank that they come from."""
        first = self.first(rank)
        return array("Q", range(first, first + 3 * (length // 8), 3))

    def expect(self, what, got, right):
        if bytes(got) != bytes(right):
            at = next(at for at, (one, other) in enumerate(zip(bytes(got), bytes(right))) if one != other)
            raise Wrong(f"{what} in step {self.step_number} gave a wrong word at offset {at & ~7}")

    def step(self, random):
        """One call, the same on all ranks."""
        self.step_number += 1
        length = min(8 << random.below(16), MOST)
        match random.below(4):
            case 0:
                self.comm.barrier()
            case 1:
                self.allreduce(length)
            case 2:
                self.broadcast(length, random.below(self.comm.nranks))
            case _:
                self.put(length)

    def buffers(self, length, kind):
        send, recv = memoryview(self.send)[:length], memoryview(self.recv)[:length]
        send[:] = memoryview(self.words(self.comm.rank, length)).cast("B")
        return send.cast(kind), recv.cast(kind)

    def allreduce(self, length):
        send, recv = self.buffers(length, "Q")
        self.comm.allreduce(send, recv, nccl.SUM)
        nranks = self.comm.nranks
        first, step = sum(self.first(rank) for rank in range(nranks)), 3 * nranks
        self.expect("allreduce", recv, array("Q", range(first, first + step * (length // 8), step)))

    def broadcast(self, length, root):
        send, recv = self.buffers(length, "B")
        self.comm.broadcast(send, recv, root)
        self.expect("broadcast", recv, self.words(root, length))

    def put(self, length):
        rank, nranks = self.comm.rank, self.comm.nranks
        before = (rank - 1) % nranks
        send, _ = self.buffers(length, "B")
        put = self.comm.put_signal(send, (rank + 1) % nranks, self.window)
        self.comm.wait_signal(nccl.WaitSignalDesc(peer=before))
        self.expect("put_signal", memoryview(self.memory)[:length], self.words(before, length))
        put.wait()
        # Nobody writes there again before everybody has looked.
        self.comm.barrier()


def say(text):
    sys.stdout.write(text.replace("\n", " ") + " +0\n")
    sys.stdout.flush()


def leave_with_the_input():
    while sys.stdin.readline():
        pass
    # Whatever the rank is doing.
    os._exit(0)


def main():
    say("ok ready")
    _, unique_id, nranks, rank, seed, lane, *listen, _ = sys.stdin.readline().split()
    threading.Thread(target=leave_with_the_input, daemon=True).start()
    try:
        require = "tcp" if lane == "tcp" else None
        config = nccl.NCCLConfig(timeout=TIMEOUT, require=require, listen=listen or None)
        comm = nccl.Communicator.init(int(nranks), int(rank), nccl.UniqueId(unique_id), config)
        group = Group(comm)
        say("ok joined")
        random = Random(int(seed))
        while True:
            group.step(random)
    except towline.Error as error:
        say(f"err {error.kind} {error}")
    except Exception as error:
        say(f"err Internal {type(error).__name__}: {error}")
    # Until there is nobody to read it any more.
    threading.Event().wait()


main()
