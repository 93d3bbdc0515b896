"""An encode worker that hands over metadata by HTTP. Its other half is http_decode.py.

    python http_encode.py 8000

POST /encode with {"text": …} answers with the metadata of a readable operation; the embedding itself is then read by the
decode worker, over the best path there is. Needs NumPy and aiohttp.
"""

import asyncio
import socket
import sys

from aiohttp import web
from model import embed

import towline


async def taken(readable: towline.ReadableOperation) -> None:
    """Keeps an embedding until the peer has read it, has failed to, or has not come in time."""
    try:
        await readable
        print("an embedding was taken, its memory is free again", flush=True)
    except towline.Error as error:
        print(f"an embedding was not taken: {error}", flush=True)


class EncodeWorker:
    def __init__(self, connector: towline.Connector) -> None:
        self.connector = connector
        self.pending: set[asyncio.Task[None]] = set()

    async def encode(self, request: web.Request) -> web.Response:
        embedding = embed((await request.json())["text"])
        # An embedding that nobody fetches within a minute is given up.
        readable = await self.connector.create_readable(
            towline.Descriptor(embedding), unclaimed_timeout=60
        )
        task = asyncio.create_task(taken(readable))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)
        # Everyone who has the metadata can read the embedding: it belongs to the peer and in no log.
        return web.json_response(
            {
                "shape": embedding.shape,
                "dtype": str(embedding.dtype),
                "metadata": readable.metadata().to_dict(),
            }
        )


def main() -> None:
    with towline.Connector("encode") as connector:
        app = web.Application()
        app.router.add_post("/encode", EncodeWorker(connector).encode)
        port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
        web.run_app(app, sock=socket.create_server(("127.0.0.1", port)))


if __name__ == "__main__":
    main()
