"""Code as it is written for Dynamo: it imports dynamo.nixl_connect and knows nothing of Towline.

    PYTHONPATH=$(python -m towline dropin-path) python dynamo_worker.py

Neither Dynamo nor NIXL has to be installed. Needs NumPy.
"""

import asyncio
from typing import Any

import numpy as np
from dynamo import nixl_connect


async def encode(connector: nixl_connect.Connector, sent: asyncio.Queue[dict[str, Any]]) -> None:
    embeddings = np.arange(65536, dtype=np.float32)
    descriptor = nixl_connect.Descriptor((embeddings, "cpu"))
    with await connector.create_readable(descriptor) as readable:
        await sent.put(readable.metadata().model_dump())
        await readable.wait_for_completion()


async def decode(connector: nixl_connect.Connector, sent: asyncio.Queue[dict[str, Any]]) -> None:
    metadata = nixl_connect.RdmaMetadata.model_validate(await sent.get())
    embeddings = np.empty(65536, dtype=np.float32)
    descriptor = nixl_connect.Descriptor((embeddings, "cpu"))
    with await connector.begin_read(metadata, descriptor) as read:
        await read.wait_for_completion()
        print(f"read: {read.status}, {descriptor.size} bytes from {read.remote.name}")
    assert np.array_equal(embeddings, np.arange(65536))


async def main() -> None:
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with asyncio.TaskGroup() as workers:
        workers.create_task(encode(nixl_connect.Connector("encode"), sent))
        workers.create_task(decode(nixl_connect.Connector("decode"), sent))


if __name__ == "__main__":
    asyncio.run(main())
