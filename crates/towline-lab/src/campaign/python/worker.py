"""A worker of the campaigns in Python: the same orders as those of the worker in Rust, as far as the campaigns give them.

A line is words, and ``+N`` at its end says how many bytes follow it. It ends with its input.
"""

import asyncio
import sys
import time

import towline


def view(obj):
    return memoryview(obj).cast("B")


async def outcome(awaitable):
    """The name of the error's kind, or `none`."""
    try:
        await awaitable
        return "none"
    except asyncio.CancelledError:
        return "Canceled"
    except towline.Error as error:
        return error.kind


class Worker:
    def __init__(self, orders):
        self.orders = orders
        self.objects, self.regions, self.remotes = {}, {}, {}
        self.number = 0
        self.task = None

    def named(self, table, thing):
        self.number += 1
        table[self.number] = thing
        return self.number

    def start(self, op, remote, region, at, length, **options):
        call = self.endpoint.read if op == "read" else self.endpoint.write
        return call(self.remotes[remote], self.regions[region], at=(at, at, length), **options)

    async def perform(self, words, payload):
        match words:
            case ["open", name, *options]:
                given = dict(option.split("=", 1) for option in options)
                stall = given.get("stall")
                require = given.get("require", "").split(",")
                self.endpoint = towline.Endpoint(
                    name,
                    stall_timeout=None if stall is None else int(stall) / 1000,
                    require=[path for path in require if path],
                )
                return self.endpoint.incarnation
            case ["register", length, kind, access]:
                made = towline.empty(int(length)) if kind == "shared" else bytearray(int(length))
                number = self.named(self.regions, self.endpoint.register(made, access))
                self.objects[number] = made
                return f"{number} 0"
            case ["ticket", region]:
                return str(self.regions[int(region)].ticket())
            case ["put", region, offset]:
                at = int(offset)
                view(self.objects[int(region)])[at : at + len(payload)] = payload
                return ""
            case ["take", region, offset, length]:
                at = int(offset)
                return "", bytes(view(self.objects[int(region)])[at : at + int(length)])
            case ["import", ticket, paths]:
                remote = await self.endpoint.import_async(ticket, require=paths.split(","))
                return f"{self.named(self.remotes, remote)} {remote.path}"
            case ["forget", remote]:
                return str(self.remotes.pop(int(remote), None) is not None).lower()
            case ["loop", op, remote, region, length]:
                return await self.repeat(op, int(remote), int(region), int(length))
            case ["begin", op, remote, region, at, length]:
                transfer = self.begun = self.start(op, int(remote), int(region), int(at), int(length))
                self.task = asyncio.create_task(self.timed(transfer))
                # The task has begun to wait before the reply goes out.
                await asyncio.sleep(0)
                return "started"
            case ["ended"]:
                kind, at = await self.task
                return f"{kind} {at} {self.begun.quiet()}"
            case ["quiet"]:
                while not self.begun.quiet():
                    await asyncio.sleep(0.001)
                return ""
            case ["cancel", how, op, remote, region, at, length, micros]:
                return await self.cancel(
                    how, op, int(remote), int(region), int(at), int(length), int(micros), payload
                )
            case _:
                raise ValueError(f"no order is {words!r}")

    async def timed(self, transfer):
        kind = await outcome(transfer)
        return kind, time.monotonic_ns()

    async def repeat(self, op, remote, region, length):
        say("ok started")
        done, failed, last = 0, 0, "none"
        while self.orders.empty():
            try:
                kind = await outcome(self.start(op, remote, region, 0, length))
            except towline.Error as error:
                kind = error.kind
            if kind == "none":
                done += 1
            else:
                failed, last = failed + 1, kind
                await asyncio.sleep(0.001)
        await self.orders.get()
        return f"{done} {failed} {last}"

    async def cancel(self, how, op, remote, region, at, length, micros, payload):
        """Starts a transfer and ends it early; what is there at that moment is overwritten by the payload, if any."""
        begun = time.monotonic_ns()
        if how == "deadline":
            # Shorter ones are no deadlines at all.
            transfer = self.start(op, remote, region, at, length, timeout=max(micros, 1) / 1e6)
            kind = await outcome(transfer)
        else:
            transfer = self.start(op, remote, region, at, length)
            task = asyncio.create_task(outcome(transfer))
            # A task that is cancelled before it has begun awaits nothing.
            await asyncio.sleep(0)
            while time.monotonic_ns() - begun < micros * 1000:
                await asyncio.sleep(0)
            (task if how == "task" else transfer).cancel()
            kind = await task
        ended = time.monotonic_ns()
        assert transfer.done(), "an await has ended before its transfer"
        # An owner that took too long to answer may be seen to be still at it.
        while not transfer.quiet():
            await asyncio.sleep(0.001)
        if payload and kind != "none":
            view(self.objects[region])[:] = payload
        return f"{kind} {max(0, ended - begun - micros * 1000)}"


def say(text, payload=b""):
    sys.stdout.buffer.write(f"{text} +{len(payload)}\n".encode() + payload)
    sys.stdout.buffer.flush()


async def read_orders(orders):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        *words, length = line.decode().split()
        await orders.put((words, await reader.readexactly(int(length[1:]))))
    await orders.put(None)


async def main():
    orders = asyncio.Queue()
    reading = asyncio.create_task(read_orders(orders))
    worker = Worker(orders)
    while order := await orders.get():
        try:
            answer = await worker.perform(*order)
        except towline.Error as error:
            say(f"err {error.kind} " + str(error).replace("\n", " "))
        except Exception as error:
            say(f"err Internal {type(error).__name__}: {error}".replace("\n", " "))
        else:
            text, payload = answer if isinstance(answer, tuple) else (answer, b"")
            say(f"ok {text}", payload)
    await reading


asyncio.run(main())
