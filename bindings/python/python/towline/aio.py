"""How asyncio learns that something has ended: one descriptor per event loop, which the loop watches.

Nothing here polls, and no thread of the library runs Python code. What ends puts a number into the queue of the loop that
waits for it and makes the queue's descriptor readable. A loop gets its queue when it first waits for something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from . import _native
from ._errors import Timeout

if TYPE_CHECKING:
    from . import connect, nccl
    from ._transfer import Transfer

T = TypeVar("T")
Begun = TypeVar("Begun", covariant=True)


class Ending(Protocol):
    """What can be waited for: a native transfer or operation."""

    def poll(self, waiter: _native.Waiter) -> bool: ...
    def done(self) -> bool: ...
    def cancel(self) -> None: ...


class _Port:
    """The queue of one event loop, and who waits for which number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _native.Completions()
        self.waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.known: WeakKeyDictionary[object, tuple[int, _native.Waiter]] = WeakKeyDictionary()
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

    def known_waiter(self, key: object) -> tuple[int, _native.Waiter]:
        """The one waiter of that object."""
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self.waiter()
        return known

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


async def ended(
    ending: Ending, timeout: float | None = None, key: object | None = None
) -> bool:
    """Returns when it has ended; with a timeout, whether that was in time.

    A cancelled task cancels what it waits for, and still waits until nothing can touch the local memory any more: its own
    limits bound that. `key` is an object that stands for it: then it has one waiter per loop, however often it was waited
    for in vain.
    """
    loop = asyncio.get_running_loop()
    port = _port()
    number, waiter = port.waiter() if key is None else port.known_waiter(key)
    deadline = None if timeout is None else loop.time() + timeout
    cancelled: asyncio.CancelledError | None = None
    if ending.poll(waiter):
        return True
    while not ending.done():
        left = None if deadline is None or cancelled is not None else deadline - loop.time()
        if left is not None and left <= 0:
            return False
        future = port.future(number)
        alarm = None if left is None else loop.call_later(left, _wake, future)
        try:
            await future
        except asyncio.CancelledError as error:
            if cancelled is None:
                ending.cancel()
            cancelled = error
        except GeneratorExit:
            # The task is thrown away, and nobody can wait. The library keeps the memory until it is quiet.
            ending.cancel()
            raise
        finally:
            port.forget(number, future)
            if alarm is not None:
                alarm.cancel()
    if cancelled is not None:
        raise cancelled
    return True


class Beginning(Protocol[Begun]):
    """What is being started."""

    def poll(self, waiter: _native.Waiter) -> bool: ...
    def result(self) -> Begun: ...
    def abandon(self) -> None: ...


async def begun(beginning: Beginning[Begun]) -> Begun:
    """Returns the operation that has begun. Cancelling the task gives the claim back; no byte has moved then."""
    port = _port()
    number, waiter = port.waiter()
    try:
        while not beginning.poll(waiter):
            future = port.future(number)
            try:
                await future
            finally:
                port.forget(number, future)
    except BaseException:
        beginning.abandon()
        raise
    return beginning.result()


async def imported(pending: _native.Import) -> _native.Remote:
    """Returns what was imported. Cancelling the task forgets the import."""
    port = _port()
    number, waiter = port.waiter()
    while not pending.poll(waiter):
        future = port.future(number)
        try:
            await future
        finally:
            port.forget(number, future)
    return pending.result()


TURN = 0.2
"""Seconds for which a thread of the loop waits before it looks whether its task is still there."""


class Closing(Protocol):
    """What is closed, and has to wait for others: a native endpoint or connector."""

    @property
    def stall_timeout(self) -> float: ...
    def close(self, timeout: float | None) -> None: ...


async def closed(closing: Closing, timeout: float | None) -> None:
    """Closes; where that has to wait, a thread of the loop does. `Timeout` as from `close` itself. Cancelling the task ends the wait."""
    loop = asyncio.get_running_loop()
    left = closing.stall_timeout if timeout is None else timeout
    deadline, turn = loop.time() + left, 0.0
    while True:
        try:
            if turn == 0.0:
                return closing.close(0.0)
            return await in_thread(partial(closing.close, turn))
        except Timeout:
            left = deadline - loop.time()
            if left <= 0.0:
                raise
            turn = min(left, TURN)


async def in_thread(call: Callable[[], T]) -> T:
    """Makes a call in a thread of the loop; here, for the short time that it takes, where there is no room for a thread."""
    try:
        running = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError as error:
        if "thread" not in str(error):
            raise
        return call()
    return await running


async def received(
    key: object, poll: Callable[[_native.Waiter], T | None], timeout: float, op: str
) -> T:
    """Returns the first thing that `poll` gives; raises `Timeout` when none came in time.

    `key` is what is polled: it has one waiter per loop, however often it was waited for in vain.
    """
    loop = asyncio.get_running_loop()
    port = _port()
    number, waiter = port.known_waiter(key)
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
    """Tells other event loops than asyncio's which transfers and operations have ended, by a descriptor to watch.

    >>> queue = CompletionQueue()
    >>> queue.add(transfer)                         # doctest: +SKIP
    >>> select.select([queue], [], [])              # doctest: +SKIP
    >>> for transfer in queue.ready(): ...          # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._completions = _native.Completions()
        self._waiting: dict[int, Transfer[Any] | connect.Operation | nccl.Operation[Any]] = {}
        self._next_id = 0

    def fileno(self) -> int:
        """The descriptor that is readable when ``ready()`` should be called, which now and then gives nothing."""
        return self._completions.fileno()

    def add(self, transfer: Transfer[Any] | connect.Operation | nccl.Operation[Any]) -> None:
        """Has ``ready()`` give that transfer or operation when it has ended, which may be at once."""
        self._next_id += 1
        number = self._next_id
        waiter = self._completions.waiter(number)
        self._waiting[number] = transfer
        if transfer._native.poll(waiter):
            waiter.wake()

    def ready(self) -> list[Transfer[Any] | connect.Operation | nccl.Operation[Any]]:
        """What has ended since the last call; never blocks."""
        ended = (self._waiting.pop(number, None) for number in self._completions.take())
        return [transfer for transfer in ended if transfer is not None]

    def __len__(self) -> int:
        return len(self._waiting)
