"""Agents of NIXL, to exchange memory with programs that use NIXL itself.

An agent runs on NIXL where that is installed, and on Towline's own transports where it is not (``engine`` says which it is, or
asks for one). On NIXL it understands what NIXL's Python API makes, and the other way round: agent metadata
(``get_agent_metadata``), serialized lists of descriptors (``get_serialized_descs``), ranges of address, length and device, and
notifications. A peer needs the same engine.

>>> import towline.nixl
>>> source, target = bytearray(b"keys and values"), bytearray(15)
>>> with towline.nixl.Agent("one", engine="embedded") as one, towline.nixl.Agent("two", engine="embedded") as two:
...     region, local = one.register(source), two.register(target)
...     peer = two.add_peer(one.metadata())                     # both travel by your own channel
...     two.read(local, region.descriptors, peer, notification=b"taken").wait()
...     one.receive(timeout=10)
...     local.close(); region.close()
{'two': [b'taken']}
>>> bytes(target)
b'keys and values'

Nothing that a peer sends is unpickled. NIXL itself trusts the metadata that it is given: take it only from peers that have proved
who they are. What is registered with NIXL every peer that has the metadata can read *and* write, until it is deregistered.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from . import _native, aio
from ._errors import Error, Invalid, Timeout

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Agent", "Descriptors", "Engine", "Range", "Region", "Request"]

Engine = Literal["nixl", "embedded"]
"""What an agent moves bytes with."""

Range = tuple[int, int, int]
"""Address, length in bytes, and device: 0 for host memory, a GPU's ordinal, a file's descriptor."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Ranges of one kind of memory, as peers get them."""

    ranges: tuple[Range, ...]
    """Address, length and device of each."""
    memory: str = "DRAM"
    """The kind of memory, in NIXL's words: ``DRAM``, ``VRAM``, ``BLOCK``, ``OBJ`` or ``FILE``."""

    def __post_init__(self) -> None:
        ranges = tuple((int(address), int(length), int(device)) for address, length, device in self.ranges)
        if any(not 0 <= number < 1 << 64 for one in ranges for number in one):
            raise Invalid("ranges: a number is negative or does not fit in 64 bits", op="nixl")
        object.__setattr__(self, "ranges", ranges)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Descriptors:
        """Reads what ``get_serialized_descs`` of NIXL's Python API has made; raises ``Protocol`` for anything else."""
        memory, ranges = _native.nixl_unpack(bytes(memoryview(data)))
        return cls(tuple(ranges), memory)

    def to_bytes(self, package: str = "nixl_cu12") -> bytes:
        """What ``deserialize_descs`` of NIXL's Python API reads, for a peer that has that package of NIXL."""
        return _native.nixl_pack(self.memory, list(self.ranges), package)

    @property
    def nbytes(self) -> int:
        """How many bytes they are in all."""
        return sum(length for _, length, _ in self.ranges)

    def __len__(self) -> int:
        return len(self.ranges)

    def _fields(self) -> tuple[str, list[Range]]:
        return self.memory, list(self.ranges)


def _packages() -> str | None:
    """The folder that holds NIXL's package for this Python, where it has one; nothing of it is imported."""
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return str(Path(spec.origin).parent.parent)
    return None


def _described(value: Region | Descriptors | Iterable[Range]) -> Descriptors:
    if isinstance(value, Region):
        return value.descriptors
    if isinstance(value, Descriptors):
        return value
    return Descriptors(tuple(value))


class Region:
    """Memory that is registered with an agent; made by `Agent.register`. The object whose memory it is stays alive with it."""

    def __init__(self, native: _native.NixlRegion) -> None:
        self._native = native

    @property
    def descriptors(self) -> Descriptors:
        """The whole of it."""
        memory, one = self._native.descriptor
        return Descriptors((one,), memory)

    @property
    def address(self) -> int:
        """Where it starts."""
        return self._native.descriptor[1][0]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._native.descriptor[1][1]

    @property
    def closed(self) -> bool:
        """Whether it was deregistered."""
        return self._native.closed

    def part(self, offset: int, nbytes: int) -> Descriptors:
        """Some of it."""
        memory, (address, length, device) = self._native.descriptor
        if not (0 <= offset and 0 < nbytes and offset + nbytes <= length):
            raise Invalid(f"offset: {nbytes} bytes at {offset} do not lie within {length} bytes", op="nixl")
        return Descriptors(((address + offset, nbytes, device),), memory)

    def close(self, timeout: float | None = None) -> None:
        """Deregisters. Raises while a transfer of this agent uses it. Closing twice is harmless.

        On the engine ``"embedded"`` a peer that is inside the memory is waited for: ``Timeout`` where it still is after ``timeout``
        seconds (5 where none are given), and closing again waits again.
        """
        self._native.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes at {self.address:#x}"
        return f"<towline.nixl.Region {state}>"


class Request:
    """A transfer in flight; made by `Agent.read` and `Agent.write`. NIXL cannot stop one.

    ``await`` gives the wait to a thread: NIXL has no descriptor that an event loop could watch.
    """

    def __init__(self, native: _native.NixlRequest) -> None:
        self._native = native

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end; raises why it failed, and ``Timeout`` where it goes on after that time."""
        if not self._native.wait(timeout):
            raise Timeout(f"the transfer goes on after {timeout} s", op="wait", transport="nixl")
        error = self._native.error()
        if error is not None:
            raise error

    def error(self) -> Error | None:
        """Why it has failed, where it has."""
        return self._native.error()

    def __await__(self) -> Generator[Any, None, None]:
        # In turns, so that the thread of a task that is cancelled ends soon.
        while not self.done():
            yield from aio.in_thread(lambda: self._native.wait(aio.TURN)).__await__()
        self.wait(0)

    def __repr__(self) -> str:
        return f"<towline.nixl.Request {'done' if self.done() else 'going'}>"


def named(devices: Sequence[str], argument: str) -> tuple[str, ...]:
    """Names of devices, as they are given to UCX."""
    if isinstance(devices, str) or not all(isinstance(one, str) and one for one in devices):
        raise TypeError(f"{argument}: a list of names of devices is needed, not {devices!r:.80}")
    return tuple(devices)


class Agent:
    """Registers memory, describes it to peers, and moves bytes.

    ``backends`` are names of NIXL's plug-ins, or a mapping to their parameters. ``engine`` is ``"nixl"``, ``"embedded"``, or `None`
    for NIXL where it is there. Names must differ within a group of workers. Making one on NIXL takes about a second.

    ``devices`` names the network devices that UCX may use (``"mlx5_0:1"``, ``"lo"``, or ``"tcp"`` for all interfaces); an empty list stands for
    RDMA devices alone. Without it UCX takes what an agent of NIXL's own API has: all of them. It listens on every interface that has an
    address then, and a program that can connect there can read and write all memory of this process. The embedded engine listens on loopback.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] | Mapping[str, Mapping[str, str]] = ("UCX",),
        engine: Engine | None = None,
        progress_thread: bool = True,
        devices: Sequence[str] | None = None,
    ) -> None:
        if isinstance(backends, Mapping):
            listed = [(backend, dict(parameters)) for backend, parameters in backends.items()]
        else:
            listed = [(backend, {}) for backend in backends]
        those = None if devices is None else named(devices, "devices")
        self._native = _native.NixlAgent(name, listed, engine, progress_thread, _packages(), those)
        self._read_only: WeakSet[Region] = WeakSet()

    @property
    def name(self) -> str:
        """Its name."""
        return self._native.name

    @property
    def engine(self) -> Engine:
        """What it moves bytes with."""
        return "nixl" if self._native.engine == "nixl" else "embedded"

    @property
    def engine_reason(self) -> str:
        """Which NIXL was loaded, or why it is not that."""
        return self._native.engine_reason

    @property
    def backends(self) -> list[str]:
        """The names of its backends."""
        return self._native.backends()

    def register(self, data: object, *, source_only: bool = False) -> Region:
        """Registers the memory of an object that says where it is, or of a tuple of address, size and owner.

        With ``source_only``, memory that is read-only is taken too: the caller vouches that peers will not write to it, which NIXL
        does not check.
        """
        region = Region(self._native.register(data, source_only))
        if region._native.read_only:
            self._read_only.add(region)
        return region

    def metadata(self, regions: Iterable[Region] | None = None) -> bytes:
        """What a peer needs to reach all that is registered, or only these regions; with no regions, to connect.

        With NIXL, a peer that was not given all of it needs both: first that without regions, then that of the regions.
        """
        if regions is None:
            return self._native.metadata(None)
        ranges = [one for region in regions for one in region.descriptors.ranges]
        return self._native.metadata(("DRAM", ranges))

    def add_peer(self, metadata: bytes | bytearray | memoryview) -> str:
        """Takes in a peer's metadata (NIXL's ``get_agent_metadata``) and returns its name."""
        return self._native.load(bytes(memoryview(metadata)))

    def knows(self, peer: str, descriptors: Descriptors | Iterable[Range] | None = None) -> bool:
        """Whether the peer's metadata is here, and covers the descriptors where there are some."""
        fields = None if descriptors is None else _described(descriptors)._fields()
        return self._native.knows(peer, fields)

    def connect(self, peer: str) -> None:
        """Connects ahead of the first transfer."""
        self._native.connect(peer)

    def remove_peer(self, peer: str) -> None:
        """Forgets a peer's metadata and disconnects."""
        self._native.forget(peer)

    def read(
        self,
        local: Region | Descriptors | Iterable[Range],
        remote: Descriptors | Iterable[Range],
        peer: str,
        *,
        notification: bytes | None = None,
    ) -> Request:
        """Starts to read a peer's memory into memory that is registered here; the peer is notified when it has been read."""
        into = _described(local)
        for region in self._read_only:
            start, end = region.address, region.address + region.nbytes
            if not region.closed and any(at < end and start < at + length for at, length, _ in into.ranges):
                raise Invalid("local: it was registered as a source only", op="read")
        return self._transfer(True, into, remote, peer, notification)

    def write(
        self,
        local: Region | Descriptors | Iterable[Range],
        remote: Descriptors | Iterable[Range],
        peer: str,
        *,
        notification: bytes | None = None,
    ) -> Request:
        """Starts to write memory that is registered here to a peer's memory; the peer is notified when the bytes are there."""
        return self._transfer(False, _described(local), remote, peer, notification)

    def _transfer(
        self,
        reads: bool,
        local: Descriptors,
        remote: Descriptors | Iterable[Range],
        peer: str,
        notification: bytes | None,
    ) -> Request:
        there = _described(remote)
        return Request(
            self._native.transfer(reads, local._fields(), there._fields(), peer, notification)
        )

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a peer a message that belongs to no transfer."""
        self._native.notify(peer, message)

    def receive(self, timeout: float | None = 0.0) -> dict[str, list[bytes]]:
        """The messages that have come, by who sent them; waits for the first for at most that long, `None` for ever."""
        return self._native.receive(timeout)

    def close(self) -> None:
        """Lets go of the agent, which lives on until its regions and requests are gone. Closing twice is harmless."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<towline.nixl.Agent {self.name!r} on the engine {self.engine} ({self.engine_reason})>"
