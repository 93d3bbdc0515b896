"""Not run: mypy --strict must accept it, and see the types that it claims."""

import array
import asyncio
from typing import assert_type

import towline


async def worker(text: str) -> int:
    async with towline.Endpoint("typed", listen=["127.0.0.1:0"], secret="shared", timeout=10) as endpoint:
        with endpoint.register(bytearray(4096), "read+write") as region:
            assert_type(region, towline.Region)
            narrowed = region.ticket().narrow(range=range(0, 64), access="read", lease=60.0)
            assert_type(narrowed, towline.Ticket)
            remote = await endpoint.import_async(text, forbid="tcp")
            assert_type(remote, towline.Remote)
            pages = towline.Layout.blocks(4096, 16)
            first = array.array("I", [1, 2])
            read = endpoint.read(remote, region.span(0), blocks=(pages, first, pages, None))
            assert_type(read, towline.Transfer[None])
            await read
            found = await endpoint.fetch_add(remote, 0, 1)
            assert_type(found, int)
            return found + endpoint.compare_swap(remote, 0, 1, 2).wait(timeout=1.0)


def main() -> None:
    try:
        asyncio.run(worker("towline1:"))
    except towline.Protocol as error:
        assert_type(error.peer, str | None)
    queue = towline.CompletionQueue()
    for transfer in queue.ready():
        transfer.result()
