"""Four ranks add up their gradients, and each hands its neighbour a block through a window.

    python communicator.py

Every rank is a process of its own. They meet by an id, which here travels through their standard input. The names are
those of nccl4py; the memory is the host's. Needs NumPy.
"""

import subprocess
import sys

import numpy as np

from towline import nccl

RANKS, COUNT = 4, 1 << 18


def run(rank: int, unique_id: nccl.UniqueId) -> None:
    # Every wait has this limit, and its error names the ranks that did not come.
    config = nccl.NCCLConfig(timeout=20)
    with nccl.Communicator.init(RANKS, rank, unique_id, config) as comm:
        # A collective: in memory that the others map, registered once, it needs no copies in between.
        gradients = nccl.empty(COUNT, nccl.FLOAT32)
        gradients[:] = rank + 1
        with comm.register_buffer(gradients):
            comm.allreduce(gradients, gradients, nccl.AVG)
        assert np.allclose(gradients, sum(range(1, RANKS + 1)) / RANKS)

        # One-sided: the neighbour does not take part in the copy, it only waits for the signal behind it.
        inbox = nccl.empty(1024, "int64")
        window = comm.register_window(inbox)
        right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
        comm.put_signal(np.full(512, rank), right, window, peer_window_offset=256)
        comm.wait_signal(nccl.WaitSignalDesc(peer=left))
        assert (inbox[256:768] == left).all() and not inbox[:256].any()

        if rank == 0:
            print(comm.explain())
            assert window is not None
            print(f"rank 0 of {comm.nranks}: a block from rank {left}, one to rank {right} over {window.path(right)}")


def main() -> None:
    unique_id = nccl.get_unique_id()  # this process is where they meet: it lives until all have come
    command = [sys.executable, __file__]
    others = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, text=True) for rank in range(1, RANKS)
    ]
    for other in others:
        assert other.stdin is not None
        other.stdin.write(str(unique_id))  # everyone who has the id can join: it carries a secret
        other.stdin.close()
    run(0, unique_id)
    assert [other.wait(30) for other in others] == [0] * len(others), "a rank failed"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(int(sys.argv[1]), nccl.UniqueId(sys.stdin.read()))
    else:
        main()
