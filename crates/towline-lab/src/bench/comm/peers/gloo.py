"""What torch.distributed with gloo does in the place of a group of Towline. Started by `towline bench comm`, one process
for each rank: rank, size, the file by which they meet, and the core to stay on, or -1.

Reads one order per line, "BYTES REPEATS", and answers with the seconds of one all_reduce of floats."""

import os
import sys
import time

rank, size, meeting, core = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if core >= 0:
    os.sched_setaffinity(0, {core})
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
print("ready", flush=True)
tensor = torch.zeros(0)
for line in sys.stdin:
    count, repeats = (int(word) for word in line.split())
    if tensor.numel() != count // 4:
        tensor = torch.zeros(count // 4)
        dist.all_reduce(tensor)
    dist.barrier()
    for _ in range(repeats // 8):  # others had the cores before
        dist.all_reduce(tensor)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    print((time.perf_counter() - start) / repeats, flush=True)
