"""The four operations, in their two pairs.

    python operations.py

Each function is one worker. They share a process and hand over the metadata through a queue, so that everything fits into
one file; in an application they are processes on one or two hosts, and the metadata travels in your own messages.
"""

import asyncio

import towline

EMBEDDING = bytes(range(256)) * 4096
Channel = asyncio.Queue[str]


async def offer(channel: Channel) -> None:
    """Passive: has an embedding, and lets one peer read it."""
    async with towline.Connector("encode") as connector:
        async with await connector.create_readable(towline.Descriptor(EMBEDDING)) as readable:
            await channel.put(readable.metadata().to_json())
            await readable  # until it has been read; raises when that failed, or nobody came


async def fetch(channel: Channel) -> None:
    """Active: wants the embedding, and reads it."""
    async with towline.Connector("decode") as connector:
        metadata = towline.RdmaMetadata.from_json(await channel.get())
        target = bytearray(len(EMBEDDING))
        async with await connector.begin_read(metadata, towline.Descriptor(target)) as read:
            await read  # until all bytes are in target
        print(f"read: {read.nbytes} bytes from {read.peer} over {read.path}")
        assert target == EMBEDDING


async def receive(channel: Channel) -> None:
    """Passive: wants an embedding, and lets one peer write it."""
    async with towline.Connector("decode") as connector:
        target = bytearray(len(EMBEDDING))
        async with await connector.create_writable(towline.Descriptor(target)) as writable:
            await channel.put(writable.metadata().to_json())
            await writable  # until it has been written
        assert target == EMBEDDING


async def deliver(channel: Channel) -> None:
    """Active: has the embedding, and writes it to where it is wanted."""
    async with towline.Connector("encode") as connector:
        metadata = towline.RdmaMetadata.from_json(await channel.get())
        async with await connector.begin_write(towline.Descriptor(EMBEDDING), metadata) as write:
            await write  # until the peer has all bytes
        print(f"write: {write.nbytes} bytes to {write.peer} over {write.path}")


async def main() -> None:
    for passive, active in [(offer, fetch), (receive, deliver)]:
        channel = Channel()
        async with asyncio.TaskGroup() as workers:
            workers.create_task(passive(channel))
            workers.create_task(active(channel))


if __name__ == "__main__":
    asyncio.run(main())
