import asyncio

import towline


async def main() -> None:
    # Worker A owns the bytes. Any array or buffer can be registered; peers on the same host map this one.
    prefill = towline.Endpoint("prefill")
    cache = towline.empty(1 << 20)
    memoryview(cache)[:33] = b"sixteen layers of keys and values"
    region = prefill.register(cache, "read")
    ticket = str(region.ticket())                              # send it any way you like

    # Worker B, usually another process or another host, reads them.
    decode = towline.Endpoint("decode")
    remote = await decode.import_async(ticket)
    target = bytearray(1 << 20)
    local = decode.register(target, "none")
    transfer = decode.read(remote, local, notify="taken")
    await transfer                                             # or, without an event loop: transfer.wait()
    print(f"{transfer.nbytes} bytes over {transfer.path}\n{remote.explain()}")

    # A paged cache is a few numbers, not millions of descriptors: blocks are named by index.
    pages = towline.Layout.blocks(4096, 256)                   # block length, count
    await decode.read(remote, local, blocks=(pages, [0, 8, 200], pages, [7, 1, 2]))

    # All layers of a request are one transfer: one end, one limit, one message behind all of them.
    layers = [decode.register(towline.empty(1 << 20), "none") for _ in range(3)]
    await decode.read([remote] * 3, layers, notify="three layers")

    # The same layers again and again, with nothing new but the blocks: compile the request once.
    kept = decode.program([remote] * 3, layers, pages)
    await kept.read([8, 200], [3, 4])

    assert target[:33] == target[7 * 4096 :][:33] == b"sixteen layers of keys and values"
    assert (await prefill.receive_async()).message == b"taken"
    assert (await prefill.receive_async()).message == b"three layers"
    decode.close()
    prefill.close()


asyncio.run(main())
