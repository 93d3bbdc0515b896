"""The encode worker of http_encode.py, with NATS as the channel. Its other half is nats_decode.py.

    nats-server -a 127.0.0.1 &
    python nats_encode.py nats://127.0.0.1:4222

Only what carries the metadata has changed. Needs NumPy and nats-py.
"""

import asyncio
import json
import signal
import sys

import nats
from model import embed
from nats.aio.msg import Msg

import towline


async def answer(connector: towline.Connector, request: Msg) -> None:
    """Answers one request with metadata, and keeps the embedding until the peer has read it."""
    embedding = embed(request.data.decode())
    readable = await connector.create_readable(towline.Descriptor(embedding), unclaimed_timeout=60)
    reply = {
        "shape": embedding.shape,
        "dtype": str(embedding.dtype),
        "metadata": readable.metadata().to_dict(),
    }
    await request.respond(json.dumps(reply).encode())
    try:
        await readable
        print("an embedding was taken, its memory is free again", flush=True)
    except towline.Error as error:
        print(f"an embedding was not taken: {error}", flush=True)


async def main(server: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    pending: set[asyncio.Task[None]] = set()

    async with towline.Connector("encode") as connector:

        async def requested(request: Msg) -> None:
            # A task for each, since NATS calls this for one message after the other.
            task = asyncio.create_task(answer(connector, request))
            pending.add(task)
            task.add_done_callback(pending.discard)

        client = await nats.connect(server)
        await client.subscribe("encode", cb=requested)
        await client.flush()
        print("ready", flush=True)
        await stopped.wait()
        await client.drain()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
