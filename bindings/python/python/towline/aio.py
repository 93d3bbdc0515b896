"""How asyncio learns that something has ended: one descriptor per event loop, which the loop watches.

Nothing here polls, and no thread of the library runs Python code. What ends puts a number into the queue of the loop that
waits for it and makes the queue's descriptor readable. A loop gets its queue when it first waits for something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from . import _native
from ._errors import Timeout

if TYPE_CHECKING:
    from ._transfer import Transfer

T = TypeVar("T")



class _Port:
    """The queue of one event loop, and who waits for which number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _native.Completions()
        self.waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.receivers: WeakKeyDictionary[object, tuple[int, _native.Waiter]] = WeakKeyDictionary()
        self.next_id = 0
        # The loop holds the port, not the other way round, so that a forgotten loop takes its port along.
        loop.add_reader(self.completions.fileno(), self.deliver)

    def deliver(self) -> None:
        for number in self.completions.take():
            for future in self.waiting.pop(number, ()):
                if not future.done():
                    future.set_result(None)

    def waiter(self) -> tuple[int, _native.Waiter]:
        self.next_id += 1
        return self.next_id, self.completions.waiter(self.next_id)

    def future(self, number: int) -> asyncio.Future[None]:
        """What is done when that number comes: to be awaited before control goes back to the loop."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(number, set()).add(future)
        return future

    def forget(self, number: int, future: asyncio.Future[None]) -> None:
        waiting = self.waiting.get(number)
        if waiting is not None:
            waiting.discard(future)
            if not waiting:
                del self.waiting[number]


_ports: WeakKeyDictionary[asyncio.AbstractEventLoop, _Port] = WeakKeyDictionary()


def _port() -> _Port:
    loop = asyncio.get_running_loop()
    port = _ports.get(loop)
    if port is None:
        # A loop has no hook for its closing: what the closed ones leave behind is cleared here.
        for other in list(_ports):
            if other.is_closed():
                _ports.pop(other, None)
        port = _ports[loop] = _Port(loop)
    return port


async def ended(transfer: _native.Transfer) -> None:
    """Returns when the transfer has ended.

    A cancelled task cancels the transfer, and still waits until nothing can touch the local memory any more: the
    transfer's own limits bound that.
    """
    port = _port()
    number, waiter = port.waiter()
    cancelled: asyncio.CancelledError | None = None
    if transfer.poll(waiter):
        return
    while not transfer.done():
        future = port.future(number)
        try:
            await future
        except asyncio.CancelledError as error:
            if cancelled is None:
                transfer.cancel()
            cancelled = error
        except GeneratorExit:
            # The task is thrown away, and nobody can wait. The library keeps the memory until it is quiet.
            transfer.cancel()
            raise
        finally:
            port.forget(number, future)
    if cancelled is not None:
        raise cancelled


async def imported(pending: _native.Import) -> _native.Remote:
    """Returns what was imported. Cancelling the task forgets the import."""
    port = _port()
    number, waiter = port.waiter()
    if not pending.poll(waiter):
        future = port.future(number)
        try:
            await future
        finally:
            port.forget(number, future)
    return pending.result()


async def received(
    key: object, poll: Callable[[_native.Waiter], T | None], timeout: float, op: str
) -> T:
    """Returns the first thing that `poll` gives; raises `Timeout` when none came in time.

    `key` is what is polled: it has one waiter per loop, however often it was waited for in vain.
    """
    loop = asyncio.get_running_loop()
    port = _port()
    known = port.receivers.get(key)
    if known is None:
        known = port.receivers[key] = port.waiter()
    number, waiter = known
    deadline = loop.time() + timeout
    while True:
        value = poll(waiter)
        if value is not None:
            return value
        left = deadline - loop.time()
        if left <= 0:
            raise Timeout(f"nothing came in {timeout} s", op=op)
        future = port.future(number)
        alarm = loop.call_later(left, _wake, future)
        try:
            await future
        finally:
            alarm.cancel()
            port.forget(number, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class CompletionQueue:
    """Tells other event loops than asyncio's what has ended, by a descriptor to watch.

    >>> queue = CompletionQueue()
    >>> queue.add(transfer)                         # doctest: +SKIP
    >>> select.select([queue], [], [])              # doctest: +SKIP
    >>> for transfer in queue.ready(): ...          # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._completions = _native.Completions()
        self._waiting: dict[int, Transfer[Any]] = {}
        self._next_id = 0

    def fileno(self) -> int:
        """The descriptor that is readable when ``ready()`` should be called, which now and then gives nothing."""
        return self._completions.fileno()

    def add(self, transfer: Transfer[Any]) -> None:
        """Has ``ready()`` give that transfer when it has ended, which may be at once."""
        self._next_id += 1
        number = self._next_id
        waiter = self._completions.waiter(number)
        self._waiting[number] = transfer
        if transfer._native.poll(waiter):
            waiter.wake()

    def ready(self) -> list[Transfer[Any]]:
        """The transfers that have ended since the last call; never blocks."""
        ended = (self._waiting.pop(number, None) for number in self._completions.take())
        return [transfer for transfer in ended if transfer is not None]

    def __len__(self) -> int:
        return len(self._waiting)
