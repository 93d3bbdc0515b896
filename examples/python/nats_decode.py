"""A decode worker that asks nats_encode.py for embeddings and reads them.

    python nats_decode.py nats://127.0.0.1:4222 "a cat on a mat"
"""

import asyncio
import json
import sys

import nats
import numpy as np
from model import embed

import towline


async def main(server: str, text: str) -> None:
    client = await nats.connect(server)
    async with towline.Connector("decode") as connector:
        reply = json.loads((await client.request("encode", text.encode(), timeout=10)).data)

        embedding = np.empty(reply["shape"], reply["dtype"])
        metadata = towline.RdmaMetadata.from_dict(reply["metadata"])
        async with await connector.begin_read(metadata, towline.Descriptor(embedding)) as read:
            await read
        print(f"read {read.nbytes} bytes from {read.peer} over {read.path}")

    await client.drain()
    assert np.array_equal(embedding, embed(text)), "the embedding is wrong"


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
