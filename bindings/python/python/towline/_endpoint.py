"""The front door: open, register, import, read, write, notify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Union, cast

from . import _native, aio
from ._errors import Invalid, Timeout
from ._part import Blocks, Part
from ._program import Program
from ._terms import Names, names, octets, request_terms
from ._transfer import Transfer

if TYPE_CHECKING:
    from typing import Self

    from ._native import Audit, Layout, Notification, Quotas, Region, Remote, Span, Stats, Ticket, Tls

Access = Literal["none", "read", "write", "read+write"]
Isolation = Literal["cooperative", "enforced"]
Remotes = Union["Remote", Sequence["Remote"], Sequence[Part]]
Locals = Union["Region", "Span", Sequence["Union[Region, Span]"], None]

DEFAULT_RECEIVE_TIMEOUT = 30.0


def _layouts(
    layouts: Layout | tuple[Layout, Layout] | Sequence[tuple[Layout, Layout]], count: int
) -> Iterable[tuple[Layout, Layout]]:
    """The remote and the local layout of each part."""
    if isinstance(layouts, _native.Layout):
        return [(layouts, layouts)] * count
    given = list(layouts)
    if len(given) == 2 and all(isinstance(layout, _native.Layout) for layout in given):
        return [cast("tuple[Layout, Layout]", tuple(given))] * count
    pairs = cast("list[tuple[Layout, Layout]]", given)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise TypeError("layouts: a Layout, a remote and a local one, or such a pair for each part")
    if len(pairs) != count:
        message = f"{len(pairs)} pairs of layouts for {count} parts"
        raise Invalid(message, op="program")
    return pairs


def _parts(remote: Sequence[Any], local: Locals) -> Iterable[tuple[Any, Any, Any, Any, Any]]:
    """The parts of a request over several regions, as the native module takes them: one by one, since there may be no room for all."""
    if local is None:
        if all(isinstance(part, Part) for part in remote):
            return ((part.remote, part.local, part.at, part.spans, part.blocks) for part in remote)
        raise TypeError("remote: without local regions every part is a Part")
    if not isinstance(local, (list, tuple)):
        raise TypeError("local: a list is needed, with a region for each remote one")
    if len(local) != len(remote):
        message = f"{len(remote)} remote regions cannot pair with {len(local)} local ones"
        raise Invalid(message, op="transfer")
    return ((theirs, ours, None, None, None) for theirs, ours in zip(remote, local))


class Endpoint:
    """This process on the fabric.

    Reachable from this host by a Unix socket and by TCP on loopback; ``listen`` names further addresses
    (``"10.0.0.5:7000"``). Tickets carry the addresses that are listened on, or those in ``advertise``. With a ``secret``,
    peers must know it too. ``timeout`` is the longest time for a transfer (plus the time of its bytes at 50 MB/s) and
    ``stall_timeout`` the longest time in which nothing moves. ``require`` and ``forbid`` name paths; with
    ``isolation="enforced"`` only those are used on which the owner of the memory checks every access, and no other process
    is given this endpoint's memory. ``tls=True`` encrypts everything over TCP, authenticated by tickets; a `Tls` says it
    with certificates. Peers must do the same. With ``checksums`` each block that goes over a socket is checked on arrival.
    ``quotas`` says how much of it peers may use. With ``share_between_containers`` on both sides memory is shared with processes of
    the same user in other containers of this host, too.

    Nothing is lent by NIXL unless ``nixl_lend_over`` names the devices over which it is, as UCX calls them: ``"mlx5_0:1"``, ``"eth0"``, or
    ``"tcp"`` for all interfaces. A peer that borrows by NIXL can read and write **all memory of this process**, and nobody checks or counts it;
    over an interface that is every program that can connect to it. Lent is only to tickets of a whole region with read and write, and over an
    interface only memory that Towline allocated (:func:`empty`).
    ``nixl_reach_over`` names the devices for an endpoint that only reaches others; without it these are the RDMA devices.

    Use it in a ``with`` or an ``async with`` block, or ``close()`` it.
    """

    __slots__ = ("_native", "__weakref__")

    def __init__(
        self,
        name: str,
        *,
        listen: Names = None,
        advertise: Names = None,
        secret: bytes | str | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        isolation: Isolation | None = None,
        max_regions: int | None = None,
        lanes: int | None = None,
        tls: Tls | bool = False,
        checksums: bool = False,
        quotas: Quotas | None = None,
        share_between_containers: bool = False,
        nixl_lend_over: Names = None,
        nixl_reach_over: Names = None,
    ) -> None:
        self._native = _native.Endpoint(
            name,
            listen=names(listen, "listen"),
            advertise=names(advertise, "advertise"),
            secret=None if secret is None else octets(secret, "secret"),
            timeout=timeout,
            stall_timeout=stall_timeout,
            require=names(require, "require"),
            forbid=names(forbid, "forbid"),
            isolation=isolation,
            max_regions=max_regions,
            lanes=lanes,
            tls=_native.Tls.by_ticket() if tls is True else (tls or None),
            checksums=checksums,
            quotas=quotas,
            share_between_containers=share_between_containers,
            nixl_lend_over=names(nixl_lend_over, "nixl_lend_over"),
            nixl_reach_over=names(nixl_reach_over, "nixl_reach_over"),
        )

    @classmethod
    def _of(cls, native: _native.Endpoint) -> Endpoint:
        endpoint = cls.__new__(cls)
        endpoint._native = native
        return endpoint

    @property
    def name(self) -> str:
        """The name that peers see."""
        return self._native.name

    @property
    def incarnation(self) -> str:
        """The life of this endpoint: another one each time it is opened."""
        return self._native.incarnation

    def register(self, obj: object, access: Access = "read") -> Region:
        """Makes the memory of an object reachable, and keeps the object alive for as long as that is so.

        Keep the region: closing or dropping it takes the memory back, and its tickets become stale.

        ``obj`` is anything with the buffer protocol, ``__array_interface__``, ``__cuda_array_interface__`` or DLPack, or a tuple of
        address, size in bytes and owner (an object that keeps the memory, or ``None``). Its memory must be contiguous. Memory
        of a GPU is looked up with the driver: memory that was freed is refused. ``access`` says what
        peers may do; ``"none"`` is right for memory that only this process reads into or writes from.

        An array of `towline.empty` (or a view of one) is mapped by peers on the same host.
        """
        return self._native.register(obj, access)

    def import_(
        self,
        ticket: Ticket | str | bytes,
        *,
        require: Names = None,
        forbid: Names = None,
        isolation: Isolation | None = None,
        timeout: float | None = None,
    ) -> Remote:
        """Makes a ticket usable here: contact with its owner if there was none, then one round trip.

        Raises ``Timeout`` when the owner has not answered in time: ``timeout``, or the endpoint's ``stall_timeout``.
        """
        return self._native.import_(
            ticket, names(require, "require"), names(forbid, "forbid"), isolation, timeout
        )

    def import_many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        *,
        require: Names = None,
        forbid: Names = None,
        isolation: Isolation | None = None,
        timeout: float | None = None,
    ) -> list[Remote]:
        """`import_` of many tickets, such as those of all layers, with one round trip for each owner.

        What is wrong with one of them is raised, with its number, and none is imported.
        """
        return self._native.import_many(
            tickets, names(require, "require"), names(forbid, "forbid"), isolation, timeout
        )

    async def import_async(
        self,
        ticket: Ticket | str | bytes,
        *,
        require: Names = None,
        forbid: Names = None,
        isolation: Isolation | None = None,
        timeout: float | None = None,
    ) -> Remote:
        """`import_` without blocking the event loop."""
        return await aio.imported(
            self._native.start_import(
                ticket, names(require, "require"), names(forbid, "forbid"), isolation, timeout
            )
        )

    def read(
        self,
        remote: Remotes,
        local: Locals = None,
        *,
        at: int | tuple[int, int, int] | None = None,
        spans: Any = None,
        blocks: Blocks | None = None,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """Starts to read: from ``remote`` into ``local``, or from many regions of one peer at once.

        Moves the whole of ``local``, from the start of the remote region; or what one of these says:

        * ``at``: a remote offset, or remote offset, local offset and length in bytes;
        * ``spans``: rows of those three numbers (an iterable of tuples, or an array of 64-bit integers);
        * ``blocks``: remote layout, remote indices, local layout, local indices, where indices are an array of 32- or
          64-bit integers, a sequence, or ``None`` for all blocks in order. An array that cannot be written to
          (``indices.flags.writeable = False``) is taken as it is, which for many blocks is most of what the call costs;
          what is wrong with a long array is how the transfer ends.

        With a list of remote regions and one of as many local ones, each pair is a *part* of one transfer, and ``at``, ``spans`` and ``blocks`` go for
        every part: ``read(layers, mine, blocks=(pages, theirs, pages, ours))`` reads the same blocks of each layer. A list of `Part` says what moves
        in each. All parts have one peer, and together one end, one set of limits and one cancel; a part that fails fails the whole, and the
        error and ``failures()`` name it.

        Once the bytes of all parts have been read, the owner gets the message ``notify``, and its 64-bit counter at ``signal[0]``
        is raised by ``signal[1]``; it lies in the region of the first part, or of the part ``signal[2]``. ``timeout`` is the longest time for this transfer, and ``stall_timeout`` the longest in which
        nothing of it moves; each stands in for the endpoint's, and leaves the other. ``require`` and ``forbid`` turn a silent slow path into an error.

        With ``stream`` (of torch or CuPy, or a handle as DLPack and ``__cuda_array_interface__`` give it) the copy is in the
        order of that CUDA stream: it begins when what is queued there is done, and what is queued there afterwards sees the
        bytes, without waiting for the transfer. Without, a transfer that has ended means that the bytes are there.
        """
        return self._start(
            False,
            remote,
            local,
            at,
            spans,
            blocks,
            notify,
            signal,
            timeout,
            stall_timeout,
            require,
            forbid,
            stream,
        )

    def write(
        self,
        remote: Remotes,
        local: Locals = None,
        *,
        at: int | tuple[int, int, int] | None = None,
        spans: Any = None,
        blocks: Blocks | None = None,
        notify: bytes | str | None = None,
        signal: tuple[int, int] | tuple[int, int, int] | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        require: Names = None,
        forbid: Names = None,
        stream: object = None,
    ) -> Transfer[None]:
        """Starts to write: from ``local`` into ``remote``. The arguments are those of `read`.

        The owner sees the message and the raised counter only after it can see all the bytes.
        """
        return self._start(
            True,
            remote,
            local,
            at,
            spans,
            blocks,
            notify,
            signal,
            timeout,
            stall_timeout,
            require,
            forbid,
            stream,
        )

    def _start(
        self,
        writes: bool,
        remote: Remotes,
        local: Locals,
        at: int | tuple[int, int, int] | None,
        spans: Any,
        blocks: Blocks | None,
        notify: bytes | str | None,
        signal: tuple[int, int] | tuple[int, int, int] | None,
        timeout: float | None,
        stall_timeout: float | None,
        require: Names,
        forbid: Names,
        stream: object,
    ) -> Transfer[None]:
        terms = request_terms(notify, signal, timeout, stall_timeout, require, forbid, stream)
        if isinstance(remote, (list, tuple)):
            return Transfer(self._native.start_parts(writes, _parts(remote, local), at, spans, blocks, terms))
        if local is None or isinstance(local, (list, tuple)):
            raise TypeError("local: a Region or a Span is needed for one remote region, and a list of them for a list")
        if signal is not None and len(signal) == 3:
            raise TypeError("signal: the part of a counter is for a request over several regions")
        return Transfer(
            self._native.start(
                writes, cast("Remote", remote), cast("Region | Span", local), at, spans, blocks, terms
            )
        )

    def program(
        self,
        remotes: Sequence[Remote],
        locals: Sequence[Region | Span],
        layouts: Layout | tuple[Layout, Layout] | Sequence[tuple[Layout, Layout]],
    ) -> Program:
        """Compiles a request, such as "blocks of all layers of this cache", to be started many times with nothing but indices.

        Each remote region pairs with a local one; the pair is a *part*. ``layouts`` says which blocks indices name: one `Layout` for both
        sides of every part, a tuple of the remote and the local one, or such a tuple for each part. Everything about regions and layouts is
        checked here, and what is wrong names its part.
        """
        if len(remotes) != len(locals):
            message = f"{len(remotes)} remote regions cannot pair with {len(locals)} local ones"
            raise Invalid(message, op="program")
        return Program(
            self._native.program(
                (theirs, ours, *both)
                for theirs, ours, both in zip(remotes, locals, _layouts(layouts, len(remotes)), strict=True)
            )
        )

    def fetch_add(self, remote: Remote, offset: int, add: int) -> Transfer[int]:
        """Adds to a 64-bit word of a remote region; the transfer gives what it held before."""
        return Transfer(self._native.fetch_add(remote, offset, add))

    def compare_swap(self, remote: Remote, offset: int, expected: int, new: int) -> Transfer[int]:
        """Replaces a 64-bit word of a remote region if it holds ``expected``; the transfer gives what it held before."""
        return Transfer(self._native.compare_swap(remote, offset, expected, new))

    def signal(self, remote: Remote, offset: int, add: int = 1) -> Transfer[None]:
        """Raises a 64-bit counter of a remote region and wakes its waiters there."""
        return Transfer(self._native.signal(remote, offset, add))

    def notify(self, remote: Remote, message: bytes | str) -> Transfer[None]:
        """Hands the owner of a remote region a message."""
        return Transfer(self._native.notify(remote, octets(message, "message")))

    def receive(self, timeout: float = DEFAULT_RECEIVE_TIMEOUT) -> Notification:
        """The next message from a peer; raises ``Timeout`` when none came in time."""
        notification = self._native.receive(timeout)
        if notification is None:
            raise Timeout(f"nothing came in {timeout} s", op="receive")
        return notification

    async def receive_async(self, timeout: float = DEFAULT_RECEIVE_TIMEOUT) -> Notification:
        """`receive` without blocking the event loop."""
        return await aio.received(self, self._native.poll_receive, timeout, "receive")

    def stats(self) -> Stats:
        """What was moved, per peer and path, and what is held."""
        return self._native.stats()

    def audit(self) -> Audit:
        """Who used this endpoint's regions, all of them together, and who was refused.

        Counted is what this process serves: a peer that was given the memory itself (``unseen``) copies without it.
        ``Region.audit`` is the same for one region.
        """
        return self._native.audit()

    def metrics(self) -> str:
        """All counters in the text form that Prometheus reads: the body of your own ``/metrics`` page."""
        return self._native.metrics()

    def close(self, timeout: float | None = None) -> None:
        """Revokes every region, ends every transfer and closes every connection, then waits until nobody touches the memory of
        any region any more. Leaving a ``with`` block does the same. Closing twice is harmless; the second call waits too.

        Raises `Timeout` when a peer or a transfer is still inside after ``timeout`` seconds (the endpoint's ``stall_timeout``
        where none is given), and says who. No new access can begin then, the memory is kept, and closing again waits again.
        """
        self._native.close(timeout)

    async def close_async(self, timeout: float | None = None) -> None:
        """`close` without blocking the event loop. Leaving an ``async with`` block does the same.

        Cancelling the task ends the wait: the endpoint is closed by then, and what is still used is as after a `Timeout`.
        """
        await aio.closed(self._native, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close_async()

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {self.incarnation[:8]}>"
