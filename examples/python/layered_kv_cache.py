"""Reads the blocks of requests out of a KV cache that is a list of tensors, one for each layer, as vLLM and its like keep it.

    python layered_kv_cache.py

The decode worker imports the layers once and compiles what it will ask for again and again into a program. Each request then is one call
with two lists of block numbers, and one transfer over all layers. Tensors of torch where it is installed, otherwise arrays of NumPy.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np

import towline

try:
    import torch
except ImportError:
    torch = None

LAYERS, BLOCKS = 60, 128
SHAPE = (BLOCKS, 2, 16, 4, 8)  # blocks, keys and values, tokens of a block, heads, numbers of a head
BLOCK = 2 * 16 * 4 * 8 * 2  # bytes of a block in one layer, at two bytes a number

REQUESTS = [([17, 3, 42, 43], [0, 1, 2, 3]), ([8, 9, 100], [4, 5, 6]), ([127], [7])]


def layer(value: int) -> Any:
    """One layer of a cache."""
    return np.full(SHAPE, value, np.float16) if torch is None else torch.full(SHAPE, value, dtype=torch.float16)


def prefill() -> None:
    cache = [layer(number + 1) for number in range(LAYERS)]
    with towline.Endpoint("prefill") as endpoint:
        regions = [endpoint.register(one, "read") for one in cache]
        # The channel is yours to choose; here it is a pipe.
        tickets = [str(region.ticket()) for region in regions]
        worker = subprocess.Popen([sys.executable, __file__, "decode"], stdin=subprocess.PIPE, text=True)
        worker.communicate(json.dumps(tickets), timeout=60)
        assert worker.returncode == 0, "the decode worker failed"
        for number in range(len(REQUESTS)):
            assert endpoint.receive().message == f"request {number}".encode()
        print(f"prefill: {len(REQUESTS)} requests were read")


def decode() -> None:
    tickets = json.load(sys.stdin)
    cache = [layer(0) for _ in range(LAYERS)]
    with towline.Endpoint("decode") as endpoint:
        remotes = endpoint.import_many(tickets)
        layers = [endpoint.register(one, "none") for one in cache]

        # Once: which regions pair, and which bytes of them are block 0, block 1 …
        program = endpoint.program(remotes, layers, towline.Layout.blocks(BLOCK, BLOCKS))
        # For each request: nothing but its blocks.
        for number, (theirs, ours) in enumerate(REQUESTS):
            transfer = program.read(theirs, ours, notify=f"request {number}")
            transfer.wait()
            print(f"decode: {transfer.nbytes} bytes of {len(program)} layers over {transfer.path}")

        read = [block for _, ours in REQUESTS for block in ours]
        for number, one in enumerate(cache):
            blocks = np.asarray(one).reshape(BLOCKS, -1)
            assert (blocks[read] == number + 1).all() and not blocks[len(read) :].any(), f"layer {number} is wrong"


if __name__ == "__main__":
    if sys.argv[1:] == ["decode"]:
        decode()
    else:
        prefill()
