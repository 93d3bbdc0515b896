"""Requests that are compiled once and started many times with new indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._terms import Names, request_terms
from ._transfer import Transfer

if TYPE_CHECKING:
    from ._native import Explanation, Remote
    from ._native import Program as Native


class Program:
    """A request that is compiled once, such as "blocks of all layers of this cache", and started many times with new indices.

    Made by `Endpoint.program`. Each start is one transfer over all parts: one end, one set of limits, one cancel, one message or signal
    behind the bytes. Any number of starts may be in flight, from any threads. The program keeps its local regions; where a remote one is
    gone, its starts raise ``Stale`` and name the part. Where only a connection broke, the next start connects anew.

    >>> import numpy, towline
    >>> prefill, decode = towline.Endpoint("prefill"), towline.Endpoint("decode")
    >>> theirs = [towline.empty(1 << 16) for _ in range(4)]                    # the layers of a cache
    >>> theirs[3][:4096] = [7] * 4096
    >>> tickets = [prefill.register(layer, "read").ticket() for layer in theirs]
    >>> layers = [numpy.zeros(1 << 16, numpy.uint8) for _ in range(4)]
    >>> ours = [decode.register(layer, "none") for layer in layers]
    >>> pages = towline.Layout.blocks(4096, 16)
    >>> cache = decode.program([decode.import_(ticket) for ticket in tickets], ours, pages)
    >>> cache.read([0, 3], [5, 6], notify="taken").wait()                      # the same blocks of each layer
    >>> int(layers[3][5 * 4096])
    7
    >>> decode.close(); prefill.close()
    """

    __slots__ = ("_native",)

    def __init__(self, native: Native) -> None:
        self._native = native

    def __len__(self) -> int:
        """How many parts it has."""
        return len(self._native)

    def read(
        self,
        remote_blocks: Any,
        local_blocks: Any,
        *,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """Starts to read: in each part the n-th remote block goes to the n-th local one.

        Indices are an array of 32- or 64-bit integers, a sequence, or ``None`` for all blocks in order. An array that cannot be
        written to (``indices.flags.writeable = False``) is taken as it is; others are copied once. What is wrong with a long array is how
        the transfer ends, with the part and the index named. The other arguments are those of `Endpoint.read`; ``signal[2]`` is the
        part in whose region the counter lies.
        """
        terms = request_terms(notify, signal, timeout, stall_timeout, require, forbid, stream)
        return Transfer(self._native.start(False, remote_blocks, local_blocks, terms))

    def write(
        self,
        remote_blocks: Any,
        local_blocks: Any,
        *,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """Starts to write: in each part the n-th local block goes to the n-th remote one. The arguments are those of `read`."""
        terms = request_terms(notify, signal, timeout, stall_timeout, require, forbid, stream)
        return Transfer(self._native.start(True, remote_blocks, local_blocks, terms))

    def read_each(
        self,
        lists: Iterable[tuple[Any, Any]],
        *,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """`read` with blocks of its own for each part: pairs of remote and local indices, in the order of the parts."""
        terms = request_terms(notify, signal, timeout, stall_timeout, require, forbid, stream)
        return Transfer(self._native.start_each(False, lists, terms))

    def write_each(
        self,
        lists: Iterable[tuple[Any, Any]],
        *,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """`write` with blocks of its own for each part: pairs of remote and local indices, in the order of the parts."""
        terms = request_terms(notify, signal, timeout, stall_timeout, require, forbid, stream)
        return Transfer(self._native.start_each(True, lists, terms))

    def select(self, parts: Iterable[int]) -> Program:
        """Some of its parts, in that order, such as the first layers: a program of their own, whose parts are counted from 0."""
        return Program(self._native.select(list(parts)))

    def rebind(self, remotes: Sequence[Remote]) -> Program:
        """The same program for other remote regions, one for each part: those of an owner that has restarted, or of another one."""
        return Program(self._native.rebind(list(remotes)))

    def explain(self) -> list[Explanation]:
        """Which path each part takes, and why not the others."""
        return self._native.explain()

    def __repr__(self) -> str:
        paths = sorted({str(explanation.taken) for explanation in self.explain()})
        return f"<Program of {len(self)} parts, path {', '.join(paths)}>"
