"""The other process of the tests on GPUs: has a tensor, lends it and shows it."""

from __future__ import annotations

import sys

import torch

import towline
from towline.connect import Operation


def main() -> None:
    nbytes = int(sys.argv[1])
    endpoint = towline.Endpoint("peer")
    connector = towline.Connector(endpoint=endpoint)
    # Not at the start of its allocation, as most tensors of an allocator that caches.
    before = torch.zeros(512, dtype=torch.uint8, device="cuda")
    tensor = (torch.arange(nbytes, device="cuda") % 251).to(torch.uint8)
    region = endpoint.register(tensor, "read+write")
    operation: Operation | None = None
    for line in sys.stdin:
        command = line.split()[0]
        answer = "done"
        if command == "ticket":
            answer = str(region.ticket())
        elif command == "sum":
            torch.cuda.synchronize()
            answer = str(int(tensor.to(torch.int64).sum().item()))
        elif command == "readable":
            operation = connector.create_readable_sync(towline.Descriptor(tensor))
            answer = operation.metadata().to_json()
        elif command == "wait":
            assert operation is not None
            operation.wait(30)
        elif command == "close":
            region.close()
        print(answer, flush=True)
    del before


if __name__ == "__main__":
    main()
