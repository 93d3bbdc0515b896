"""Operations over NIXL itself, with peers that run the original.

NIXL has nothing that an event loop could watch: a thread waits for the end of each transfer that is not over at once, and one
thread for the notifications of passive operations while there are some. None of them runs while nothing is in flight.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .._devices import DeviceKind, OperationKind, OperationStatus
from .._errors import Canceled, Error, Exhausted, Internal, Invalid, Timeout, Unavailable, Unsupported
from .._metadata import _Fields
from ..nixl import Agent, Range, Region, Request

if TYPE_CHECKING:
    from .. import _native
    from ._descriptor import Descriptor

SERIAL = b"nixlSerDes|"
"""What the metadata of an agent begins with."""

LONGEST = 64 << 20
"""The longest metadata that is taken; that of a thousand registrations has 50 KB."""

_LOOK = 0.2
"""Seconds after which a thread that waits for notifications looks whether it is still needed."""


def started(name: str, target: Callable[[], None]) -> threading.Thread:
    """A thread that does this; `Exhausted` where none can be started."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Exhausted(f"cannot start the thread {name}: {error}", op="nixl") from error
    return thread


def inflated(packed: bytes) -> bytes | None:
    """The metadata of an agent of NIXL in what the original sends; nothing where it is something else."""
    if packed.startswith(SERIAL):
        return packed
    if len(packed) < 2 or packed[0] & 0x0F != 8 or int.from_bytes(packed[:2], "big") % 31:
        return None
    inflater = zlib.decompressobj()
    try:
        metadata = inflater.decompress(packed, LONGEST)
    except zlib.error:
        return None
    return metadata if inflater.eof and metadata.startswith(SERIAL) else None


def agent_name(metadata: bytes) -> str:
    """The name of the agent whose metadata it is."""
    rest = metadata.removeprefix(SERIAL)
    if rest.startswith(b"Agent"):
        length = int.from_bytes(rest[5:13], "little")
        name, end = rest[13 : 13 + length], rest[13 + length : 14 + length]
        if name and len(name) == length and end == b"|":
            return name.decode(errors="replace")
    raise ValueError("nixl_metadata: it was made by NIXL and names no agent")


class Side:
    """The agent of a connection, made when it is first needed, and what is in flight with it."""

    def __init__(self, name: str, devices: Sequence[str] = ()) -> None:
        self._name = name
        # Those that UCX may use; without any, RDMA devices alone: nobody has said that it may listen on an interface.
        self._devices = devices
        self._lock = threading.RLock()
        self._agent: Agent | None = None
        self._closed = False
        # Several operations may use the same memory, of which NIXL takes one registration.
        self._regions: dict[tuple[int, int], tuple[Region, int]] = {}
        self._peers: dict[str, bytes] = {}
        self._waiting: dict[bytes, weakref.ref[Passive]] = {}
        self._pump: threading.Thread | None = None

    def agent(self) -> Agent:
        """The agent; making it takes about a second."""
        with self._lock:
            if self._closed:
                raise Invalid("the connection is closed", op="nixl")
            if self._agent is None:
                try:
                    self._agent = Agent(self._name, engine="nixl", devices=self._devices)
                except Unavailable as error:
                    if self._devices and "finds no device" in error.message:
                        raise
                    if not self._devices and "no RDMA device" in error.message:
                        raise Unavailable(
                            "there is no RDMA device here, and NIXL uses others only where they are named: "
                            'nixl_devices=["lo"] for peers on this host (dropin-path --nixl-devices lo), or '
                            'nixl_devices=["tcp"] for all network interfaces, where every program that connects gets all memory of this process',
                            op="nixl",
                        ) from error
                    raise Unavailable(
                        f"the peer uses NIXL (the metadata is made by NIXL), and it is not there: {error.message}",
                        op="nixl",
                    ) from error
            return self._agent

    def enlist(self, some: Sequence[Descriptor], writes: bool) -> list[Range]:
        """Registers memory for an operation; all of it, or none."""
        for one in some:
            native = one._usable("local_descriptors")
            native.check()
            if one.device.kind is not DeviceKind.HOST:
                raise Unsupported(f"local_descriptors: memory on {one.device} cannot be registered", op="register")
            if native.layout is not None:
                raise Invalid("local_descriptors: NIXL moves only memory without gaps", op="register")
            if writes and native.read_only:
                raise Invalid("local_descriptors: the memory is read-only", op="register")
        agent = self.agent()
        ranges: list[Range] = []
        try:
            for one in some:
                # All that the object has, so that operations with other parts of it find it registered.
                key = (one.ptr, one._usable("local_descriptors").capacity)
                with self._lock:
                    region, users = self._regions.get(key, (None, 0))
                    if region is None:
                        region = agent.register((*key, one))
                    self._regions[key] = (region, users + 1)
                ranges.append((key[0], one.size, 0))
        except BaseException:
            self.delist(some[: len(ranges)])
            raise
        return ranges

    def delist(self, some: Sequence[Descriptor]) -> None:
        """Gives back what `enlist` registered."""
        for one in some:
            native = one._native
            if native is None:
                continue
            key = (one.ptr, native.capacity)
            with self._lock:
                region, users = self._regions.get(key, (None, 0))
                if region is None:
                    continue
                if users > 1:
                    self._regions[key] = (region, users - 1)
                    continue
                del self._regions[key]
                region.close()

    def meet(self, metadata: bytes) -> str:
        """Takes in a peer's metadata, unless it is what was taken in last."""
        agent, name = self.agent(), agent_name(metadata)
        digest = hashlib.sha256(metadata).digest()
        with self._lock:
            if self._peers.get(name) == digest and agent.knows(name):
                return name
            try:
                name = agent.add_peer(metadata)
            except Error:
                # NIXL does not take memory that was registered anew under its old address: it has to forget the old one first.
                if not agent.knows(name):
                    raise
                agent.remove_peer(name)
                name = agent.add_peer(metadata)
            self._peers[name] = digest
        return name

    def expect(self, operation: Passive) -> None:
        """Has the operation end when its key comes."""
        with self._lock:
            self._waiting[operation.key.encode()] = weakref.ref(operation)
            if self._pump is None:
                agent = self.agent()
                self._pump = started("towline-nixl", lambda: self._receive(agent))

    def expect_no_longer(self, key: str) -> None:
        """Waits for that key no longer."""
        with self._lock:
            self._waiting.pop(key.encode(), None)

    def _receive(self, agent: Agent) -> None:
        failed: Error | None = None
        while True:
            with self._lock:
                if not self._waiting or self._closed or failed is not None:
                    self._pump = None
                    left = list(self._waiting.values()) if failed is not None else []
                    break
            try:
                came = agent.receive(_LOOK)
            except Error as error:
                failed = error
                continue
            for messages in came.values():
                for message in messages:
                    with self._lock:
                        waiting = self._waiting.pop(message, None)
                    operation = None if waiting is None else waiting()
                    if operation is not None:
                        operation._end(OperationStatus.COMPLETE, None)
        for one in left:
            operation = one()
            if operation is not None:
                operation._end(OperationStatus.ERRORED, failed)

    def close(self) -> None:
        """Ends what waits, and lets go of the agent."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            agent, self._agent = self._agent, None
        for one in waiting:
            operation = one()
            if operation is not None:
                operation.cancel()
        if agent is not None:
            agent.close()


class Operation:
    """One operation; it has the methods of the native ones."""

    def __init__(self, side: Side, kind: OperationKind, local: Sequence[Descriptor]) -> None:
        self._side = side
        self._kind = kind
        self._local = list(local)
        self._lock = threading.Lock()
        self._status = OperationStatus.INITIALIZED
        self._error: Error | None = None
        self._waiters: list[_native.Waiter] = []
        self._over = threading.Event()
        self._enlisted = False

    def status(self) -> int:
        return int(self._status)

    def done(self) -> bool:
        return self._status.is_final

    def quiet(self) -> bool:
        return self.done() and not self._enlisted

    def poll(self, waiter: _native.Waiter) -> bool:
        with self._lock:
            if not self._status.is_final:
                self._waiters.append(waiter)
            return self._status.is_final

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def result(self) -> None:
        if not self.done():
            raise Invalid("the operation has not ended", op="result")
        if self._error is not None:
            raise self._error

    def error(self) -> Error | None:
        return self._error

    def cancel(self) -> None:
        raise NotImplementedError

    def metadata(self, hex: bool) -> _Fields:
        raise TypeError("an active operation has no metadata")

    def _release(self) -> None:
        with self._lock:
            enlisted, self._enlisted = self._enlisted, False
        if enlisted:
            self._side.delist(self._local)

    def _end(self, status: OperationStatus, error: Error | None, quiet: bool = True) -> None:
        """Ends it, once. Its memory is given back first, where nothing can touch it any more."""
        if quiet:
            try:
                self._release()
            except Error as failed:
                status, error = OperationStatus.ERRORED, failed
        with self._lock:
            if self._status.is_final:
                return
            self._error, self._status = error, status
            waiters, self._waiters = self._waiters, []
        self._over.set()
        for waiter in waiters:
            waiter.wake()


class Passive(Operation):
    """Memory that waits for a peer."""

    def __init__(self, side: Side, kind: OperationKind, local: Sequence[Descriptor]) -> None:
        super().__init__(side, kind, local)
        self.key = str(uuid.uuid4())
        side.enlist(self._local, kind is OperationKind.WRITE)
        self._enlisted = True
        try:
            side.expect(self)
        except BaseException:
            self.cancel()
            raise

    def metadata(self, hex: bool) -> _Fields:
        if self.done():
            raise Invalid("the operation has ended", op="metadata")
        packed = zlib.compress(self._side.agent().metadata(), 6)
        text = packed.hex() if hex else "b64:" + base64.b64encode(packed).decode()
        descriptors = [(str(one.device), one.ptr, one.size) for one in self._local]
        return descriptors, text, self.key, int(self._kind)

    def cancel(self) -> None:
        self._side.expect_no_longer(self.key)
        self._end(OperationStatus.CANCELLED, Canceled("cancelled by the caller", op="cancel"))

    def __del__(self) -> None:
        if getattr(self, "_enlisted", False):
            self.cancel()


class Active(Operation):
    """A read or a write, in flight once it was started."""

    def __init__(
        self,
        side: Side,
        kind: OperationKind,
        local: Sequence[Descriptor],
        remote: Sequence[Range],
        metadata: bytes,
        key: str,
    ) -> None:
        super().__init__(side, kind, local)
        self._remote = list(remote)
        self._metadata = metadata
        self._key = key
        self._cancelled = False
        self._status = OperationStatus.IN_PROGRESS

    def start(self) -> None:
        """Registers the memory, meets the peer and posts the transfer; raises where that fails."""
        agent = self._side.agent()
        peer = self._side.meet(self._metadata)
        ranges = self._side.enlist(self._local, self._kind is OperationKind.READ)
        self._enlisted = True
        move = agent.read if self._kind is OperationKind.READ else agent.write
        try:
            request = move(ranges, self._remote, peer, notification=self._key.encode())
        except BaseException:
            self._release()
            raise
        if request.done():
            self._finish(request)
            return
        try:
            started("towline-nixl-transfer", lambda: self._watch(request))
        except Exhausted:
            # It is in flight and cannot be taken back: this thread waits for its end.
            self._watch(request)

    def _watch(self, request: Request) -> None:
        # The limits of the library's own transfers.
        nbytes = sum(length for _, length, _ in self._remote)
        limit = 30 + nbytes / 50e6
        try:
            request.wait(limit)
        except Timeout as error:
            if not request.done():
                late = Timeout(f"{nbytes} bytes have not been moved in {limit:.0f} s", op="wait", transport="nixl")
                late.__cause__ = error
                self._end(OperationStatus.ERRORED, late, quiet=False)
                # NIXL cannot stop it, so the memory is kept until it has let go.
                request._native.wait(None)
                self._release()
                return
        except Error:
            pass
        self._finish(request)

    def _finish(self, request: Request) -> None:
        error = request.error()
        if error is not None:
            self._end(OperationStatus.ERRORED, error)
        elif self._cancelled:
            self._end(OperationStatus.CANCELLED, Canceled("cancelled by the caller", op="cancel"))
        else:
            self._end(OperationStatus.COMPLETE, None)

    def cancel(self) -> None:
        # NIXL cannot stop a transfer: it ends as cancelled when it is over, and the memory is safe to reuse.
        self._cancelled = True


class Beginning:
    """An operation that is being started by a thread of its own: meeting a peer takes a while."""

    def __init__(self, operation: Active) -> None:
        self._operation = operation
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._waiter: _native.Waiter | None = None
        self._failed: BaseException | None = None
        started("towline-nixl-begin", self._run)

    def _run(self) -> None:
        try:
            self._operation.start()
        except BaseException as error:
            self._failed = error
        with self._lock:
            self._over.set()
            waiter = self._waiter
        if waiter is not None:
            waiter.wake()

    def poll(self, waiter: _native.Waiter) -> bool:
        with self._lock:
            self._waiter = waiter
            return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()

    def result(self) -> Active:
        if not self._over.is_set():
            raise Internal("the operation has not begun", op="begin")
        if self._failed is not None:
            raise self._failed
        return self._operation

    def abandon(self) -> None:
        self._operation.cancel()


def begin(
    side: Side,
    kind: OperationKind,
    local: Sequence[Descriptor],
    remote: Sequence[Descriptor],
    metadata: bytes,
    key: str,
) -> Beginning:
    """Starts an active operation."""
    for one in remote:
        if one.device.kind is not DeviceKind.HOST:
            raise Unsupported(f"remote_metadata: memory on {one.device} cannot be reached", op="begin")
    ranges = [(one.ptr, one.size, 0) for one in remote]
    return Beginning(Active(side, kind, local, ranges, metadata, key))

