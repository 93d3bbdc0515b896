"""Not run: mypy --strict must accept it, and see the types that it claims."""

import array
import asyncio
from typing import assert_type

import towline
from towline import nixl_connect


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


async def operations(text: str) -> None:
    async with towline.Connector("typed", unclaimed_timeout=None) as connector:
        local = towline.Descriptor((bytearray(4096), "cpu"))
        assert_type(local.device, towline.Device)
        async with await connector.create_writable([local], unclaimed_timeout=60) as writable:
            assert_type(writable, towline.WritableOperation)
            assert_type(writable.metadata(), towline.RdmaMetadata)
            assert_type(await writable, None)
        remote = towline.RdmaMetadata.from_json(text)
        with await connector.begin_read(remote, local) as read:
            await read.wait_for_completion(timeout=1.0)
            assert_type(read.results(), list[towline.Descriptor])
            assert_type(read.error, towline.Error | None)
        assert_type(connector.begin_write_sync(local, remote), towline.WriteOperation)


async def drop_in(values: dict[str, object]) -> None:
    connector = nixl_connect.Connector()
    metadata = nixl_connect.RdmaMetadata.model_validate(values)
    with await connector.begin_read(metadata, nixl_connect.Descriptor(bytearray(8))) as read:
        assert_type(read.status, towline.OperationStatus)
        await read.wait_for_completion()


def main() -> None:
    try:
        asyncio.run(worker("towline1:"))
    except towline.Protocol as error:
        assert_type(error.peer, str | None)
    queue = towline.CompletionQueue()
    for transfer in queue.ready():
        transfer.result()
