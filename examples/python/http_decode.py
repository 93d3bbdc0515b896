"""A decode worker that asks http_encode.py for embeddings and reads them.

    python http_decode.py http://127.0.0.1:8000 "a cat on a mat"
"""

import asyncio
import sys

import aiohttp
import numpy as np
from model import embed

import towline


async def main(url: str, text: str) -> None:
    async with towline.Connector("decode") as connector, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/encode", json={"text": text}) as response:
            response.raise_for_status()
            reply = await response.json()

        embedding = np.empty(reply["shape"], reply["dtype"])
        metadata = towline.RdmaMetadata.from_dict(reply["metadata"])
        async with await connector.begin_read(metadata, towline.Descriptor(embedding)) as read:
            await read
        print(f"read {read.nbytes} bytes from {read.peer} over {read.path}")

    assert np.array_equal(embedding, embed(text)), "the embedding is wrong"


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
