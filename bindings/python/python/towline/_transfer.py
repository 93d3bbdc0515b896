"""Transfers in flight: to be awaited, waited for, polled or cancelled."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from . import _native, aio
from ._errors import Error, Timeout

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class BlockFailure:
    """Some blocks of a transfer that failed, and why."""

    blocks: range
    """The blocks, numbered in the order in which the request named them; in each part from 0."""
    error: Error
    part: int = 0
    """The part of the request that they belong to."""


class Transfer(Generic[T_co]):
    """One request in flight, over one or many regions of a peer.

    ``await`` it in any event loop, or ``wait()`` for it in code without one. Both return the word that an atomic
    operation found, and ``None`` for reads and writes. Dropping a transfer does not stop it: the memory that it touches
    stays alive until it has ended.
    """

    __slots__ = ("_native", "__weakref__")

    def __init__(self, native: _native.Transfer) -> None:
        self._native = native

    def __await__(self) -> Generator[object, None, T_co]:
        """Ends when the transfer has. Cancelling the task cancels the transfer, and the await ends only once the local
        memory is safe to reuse."""
        if not self._native.done():
            yield from aio.ended(self._native).__await__()
        return self.result()

    def wait(self, timeout: float | None = None) -> T_co:
        """Blocks until it has ended, without holding the GIL.

        Without a timeout the transfer's own limits bound the wait. With one, raises ``Timeout`` when it is still in
        flight then; it goes on.
        """
        if not self._native.done() and not self._native.wait(timeout):
            raise Timeout(f"still in flight after {timeout} s", op="wait", transport=self.path)
        return self.result()

    def result(self) -> T_co:
        """What it gave, or raises why it failed; ``Invalid`` while it is in flight."""
        return cast(T_co, self._native.result())

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def quiet(self) -> bool:
        """Whether nothing of it can touch the local memory any more, nor change the owner's.

        That is so when it has ended, but for three cases: NIXL cannot stop what it has begun; over a Unix stream an
        owner that is stopped in the middle of a reduction, an atomic or a write to a file finishes it when it goes on;
        and of a write to another host that was given up, bytes may be on their way until the owner has said that no
        more of them lands. Where nobody can ask any more, since that host has vanished or this endpoint was closed, it
        stays false.
        """
        return self._native.quiet()

    def cancel(self) -> None:
        """Asks it to stop. It ends, with ``Canceled``, once the local memory is safe to reuse: wait for that.

        Over a stream that takes two seconds at most, whatever the limits are.
        """
        self._native.cancel()

    @property
    def path(self) -> str:
        """The path that the bytes take; that of the first part, where parts take different ones."""
        return self._native.path

    @property
    def nbytes(self) -> int:
        """How many bytes were asked for."""
        return self._native.nbytes

    def failures(self) -> list[BlockFailure]:
        """The blocks that failed and why; empty when all went well or while it is in flight."""
        failures = self._native.failures()
        return [BlockFailure(range(start, stop), error, part) for part, start, stop, error in failures]

    def __repr__(self) -> str:
        state = "ended" if self._native.done() else "in flight"
        return f"<Transfer of {self.nbytes} bytes over {self.path}, {state}>"
