"""The other process of the tests on GPUs: has a tensor, lends it and shows it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch

import towline
from towline import nixl_connect
from towline.connect import Operation


def main() -> None:
    nbytes = int(sys.argv[1])
    endpoint = towline.Endpoint("peer")
    connector = towline.Connector(endpoint=endpoint)
    # Not at the start of its allocation, as most tensors of an allocator that caches.
    before = torch.zeros(512, dtype=torch.uint8, device="cuda")
    tensor = (torch.arange(nbytes, device="cuda") % 251).to(torch.uint8)
    region = endpoint.register(tensor, "read+write")
    target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    # A ticket says nothing about kernels that are still at work, and processes take turns on a GPU.
    torch.cuda.synchronize()
    operation: Operation | None = None
    dropped: Any = None
    drop_in = nixl_connect.Connector("drop-in")
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        answer = "done"
        if command == "ticket":
            answer = str(region.ticket())
        elif command == "sum":
            torch.cuda.synchronize()
            answer = str(int(tensor.to(torch.int64).sum().item()))
        elif command == "readable":
            operation = connector.create_readable_sync(towline.Descriptor(tensor))
            answer = operation.metadata().to_json()
        elif command == "writable":
            target.zero_()
            operation = connector.create_writable_sync(
                towline.Descriptor(target), stream=torch.cuda.current_stream()
            )
            answer = operation.metadata().to_json()
        elif command == "written":
            answer = str(int(target.to(torch.int64).sum().item()))
        elif command == "read-sum":
            metadata = towline.RdmaMetadata.from_json(rest)
            size = sum(one.size for one in metadata.descriptors)
            read = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            connector.begin_read_sync(metadata, towline.Descriptor(read)).wait(30)
            answer = str(int(read.to(torch.int64).sum().item()))
        elif command == "drop-in":
            torch.cuda.synchronize()
            operation = None
            if rest == "readable":
                dropped = asyncio.run(drop_in.create_readable(nixl_connect.Descriptor(tensor)))
            else:
                target.zero_()
                torch.cuda.synchronize()
                dropped = asyncio.run(drop_in.create_writable(nixl_connect.Descriptor(target)))
            answer = dropped.metadata().model_dump_json()
        elif command == "wait":
            if operation is None:
                asyncio.run(dropped.wait_for_completion())
            else:
                operation.wait(30)
        elif command == "close":
            region.close()
        print(answer, flush=True)
    del before


if __name__ == "__main__":
    main()
