"""
The private native half of `towline`.
"""

# Generated from the Rust sources by `make stubs`. Do not edit.
import builtins
import sys
from collections.abc import Iterable
from ._errors import Error
from typing_extensions import CapsuleType
from _typeshed import SupportsGetItem
from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["__build__", "__version__", "Audit", "Beginning", "CommConfig", "Communicator", "Completions", "Connector", "Descriptor", "DeviceArray", "Endpoint", "ExplainedPath", "Explanation", "Import", "Layout", "NixlAgent", "NixlRegion", "NixlRequest", "Notification", "Operation", "PathStats", "PeerAudit", "PeerView", "Program", "Quotas", "Region", "RegisteredBuffer", "Remote", "SharedArray", "Span", "Stats", "Ticket", "Tls", "Transfer", "Waiter", "Window", "Work", "array_type", "cuda_device_of", "device_from_text", "group_end", "group_poison", "group_start", "held", "is_main_interpreter", "metadata_from_json", "metadata_owner", "nccl_found", "nccl_unique_id", "nixl_pack", "nixl_unpack", "paths", "unique_id", "unique_id_from_text", "unique_id_texts", "use_stream"]

__build__: Final[str]
__version__: Final[str]

@final
class Audit:
    """
    Who used a region, or all regions of an endpoint, and who was refused, as far as the owner can see.
    """
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def incomplete(self, /) -> bool:
        """
        Whether some peer was given the memory itself, so that the numbers are not all there is.
        """
    @property
    def peers(self, /) -> list[PeerAudit]:
        """
        The peers, by name.
        """
    @property
    def unauthenticated(self, /) -> list[tuple[str, int]]:
        """
        Of an endpoint: who was refused before it had proven to hold any ticket, as pairs of where it came from and how often.
        """

@final
class Beginning:
    """
    An active operation that is about to begin. Dropping it gives the claim back.
    """
    def abandon(self, /) -> None:
        """
        Gives the claim back.
        """
    def poll(self, /, waiter: Waiter) -> bool:
        """
        Whether it has begun or failed; if not, the waiter is woken when there is news.
        """
    def result(self, /) -> Operation:
        """
        The operation, once; or raises why there is none.
        """
    def wait(self, /) -> None:
        """
        Blocks until it has begun or failed. The endpoint's limits bound it.
        """

@final
class CommConfig:
    """
    Settings: what is not set is the default, or what the parent has.
    """
    def __new__(cls, /, *, blocking: bool | None, timeout: SupportsFloat | SupportsIndex | None, contexts: SupportsIndex | None, signals: SupportsIndex | None, name: str | None, listen: SupportsGetItem[int, str], advertise: SupportsGetItem[int, str], require: SupportsGetItem[int, str], forbid: SupportsGetItem[int, str], gpu: SupportsIndex | None = None, tls: Tls | None = None, quotas: Quotas | None = None, share_between_containers: bool | None = None, nixl_lend_over: SupportsGetItem[int, str] | None = None) -> CommConfig: ...

@final
class Communicator:
    """
    A rank's membership in a group.
    """
    def abort(self, /) -> None: ...
    def async_error(self, /) -> "tuple[int, Error | None]":
        """
        How far the work is, and why it failed, where it has.
        """
    def barrier(self, /) -> Work: ...
    @property
    def blocking(self, /) -> bool: ...
    def collective(self, /, kind: str, send: Any | None, recv: Any | None, op: SupportsIndex, scalar: Any | None, root: SupportsIndex, algorithm: str | None) -> Work:
        """
        A collective call or a message; `root` is the peer of a message.
        """
    def dead_ranks(self, /) -> list[int]: ...
    def destroy(self, /) -> None: ...
    def explain(self, /) -> str: ...
    def finalize(self, /) -> None: ...
    @property
    def gpu(self, /) -> int | None:
        """
        The GPU that it is on; `None` on the host.
        """
    @staticmethod
    def init(nranks: SupportsIndex, rank: SupportsIndex, id: bytes, config: CommConfig) -> Communicator: ...
    @staticmethod
    def init_all(count: SupportsIndex, config: CommConfig) -> list[Communicator]: ...
    @staticmethod
    def init_all_on(gpus: SupportsGetItem[int, SupportsIndex], config: CommConfig) -> list[Communicator]: ...
    def is_near(self, /, rank: SupportsIndex) -> bool:
        """
        Whether that rank's memory can be shared with this process.
        """
    @property
    def is_valid(self, /) -> bool: ...
    @property
    def name(self, /) -> str: ...
    def nranks(self, /) -> int: ...
    def open_handles(self, /) -> int: ...
    def rank(self, /) -> int: ...
    def register_buffer(self, /, buffer: Any) -> RegisteredBuffer: ...
    def register_window(self, /, buffer: Any, flags: SupportsIndex, unequal_sizes: bool) -> tuple[Window | None, Work]:
        """
        The window, and the registration that is in flight. A rank without a usable buffer notifies the others.
        """
    def revoke(self, /) -> None: ...
    def shrink(self, /, exclude: SupportsGetItem[int, SupportsIndex], config: CommConfig | None) -> Communicator: ...
    def signal(self, /, peer: SupportsIndex, index: SupportsIndex, context: SupportsIndex) -> Work: ...
    def signals(self, /, peer: SupportsIndex, index: SupportsIndex, context: SupportsIndex) -> int:
        """
        How many signals have come on that counter so far, taken or not.
        """
    def split(self, /, color: SupportsIndex | None, key: SupportsIndex, config: CommConfig | None) -> Communicator | None:
        """
        The communicator of this rank's colour; `None` for a rank without one.
        """
    def synchronize(self, /) -> None: ...
    def wait_signal(self, /, signals: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]], apart: bool) -> Work:
        """
        Waits for signals: rows of peer, count, index and context. `apart`: beside everything else, on a thread of its own.
        """

@final
class Completions:
    """
    A queue of ends, and the descriptor to watch for them.
    """
    def __new__(cls, /) -> Completions: ...
    def fileno(self, /) -> int:
        """
        The descriptor that is readable while something waits to be taken.
        """
    def take(self, /) -> list[int]:
        """
        The ids that have come since the last call. Also releases memory that nobody uses any more.
        """
    def waiter(self, /, id: SupportsIndex) -> Waiter:
        """
        What puts `id` into the queue when it is woken.
        """

@final
class Connector:
    """
    Makes operations over one endpoint, which is opened when it is first needed.
    """
    def __new__(cls, /, name: str | None, endpoint: Endpoint | None) -> Connector:
        """
        Under that name, or a random one; or over an endpoint that is open.
        """
    def __repr__(self, /) -> str: ...
    def begin(self, /, kind: SupportsIndex, remote: "tuple[list[tuple[str, int, int]], str, str, int]", local: SupportsGetItem[int, Descriptor], stream: SupportsIndex | None = None) -> Beginning:
        """
        Starts to claim an operation of a peer, to read from it or to write to it, in the order of a stream if there is one.
        """
    def close(self, /, timeout: SupportsFloat | SupportsIndex | None) -> None: ...
    def create(self, /, kind: SupportsIndex, local: SupportsGetItem[int, Descriptor], unclaimed: SupportsFloat | SupportsIndex | None, stream: SupportsIndex | None = None) -> Operation:
        """
        Offers memory for one peer; `unclaimed` is how many seconds it waits for one, `None` for ever. With a stream, nobody
        claims it before the work there is done.
        """
    def endpoint(self, /) -> Endpoint:
        """
        The endpoint, opened now if it was not.
        """
    @property
    def hostname(self, /) -> str: ...
    @property
    def name(self, /) -> str: ...
    @property
    def stall_timeout(self, /) -> float:
        """
        How long closing waits where the call does not say.
        """

@final
class Descriptor:
    """
    Memory that takes part in operations.
    """
    def __new__(cls, /, data: Any) -> Descriptor:
        """
        Describes the memory of an object that can say where it is.
        """
    def after(self, /, stream: SupportsIndex) -> None:
        """
        Lets operations wait for what is queued in a stream by now, where a driver knows the memory.
        """
    @property
    def capacity(self, /) -> int: ...
    def check(self, /) -> None:
        """
        `Stale` where the memory is no longer the described object's.
        """
    def deregister(self, /, connector: Connector) -> None: ...
    @property
    def device(self, /) -> tuple[int, int]:
        """
        The number of the device's kind, and the device's own.
        """
    def freeze(self, /) -> None:
        """
        Refuses to be written from now on.
        """
    @property
    def is_registered(self, /) -> bool: ...
    @property
    def layout(self, /) -> Layout | None:
        """
        The layout through which the memory is seen, where it has gaps.
        """
    @property
    def ptr(self, /) -> int: ...
    @staticmethod
    def raw(ptr: SupportsIndex, size: SupportsIndex, kind: SupportsIndex, id: SupportsIndex, owner: Any | None) -> Descriptor:
        """
        Describes memory by its address; `owner` keeps it.
        """
    @property
    def read_only(self, /) -> bool: ...
    def register(self, /, connector: Connector) -> None: ...
    def set_size(self, /, size: SupportsIndex) -> None: ...
    @property
    def size(self, /) -> int: ...
    @staticmethod
    def view(ptr: SupportsIndex, array: tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex], SupportsGetItem[int, SupportsIndex]], kind: SupportsIndex, id: SupportsIndex, owner: Any | None) -> Descriptor:
        """
        Describes an array by the address of its first element, the bytes of one, its shape and its strides in bytes.
        """

@final
class DeviceArray:
    """
    Memory of a GPU that windows accept, as an array of one dimension or more.
    """
    @property
    def __cuda_array_interface__(self, /) -> dict[str, Any]: ...
    def __new__(cls, /, gpu: SupportsIndex, len: SupportsIndex, shape: SupportsGetItem[int, SupportsIndex], typestr: str) -> DeviceArray: ...
    @property
    def device_id(self, /) -> int: ...
    @property
    def nbytes(self, /) -> int: ...
    @property
    def ptr(self, /) -> int: ...
    @property
    def shape(self, /) -> tuple[int, ...]: ...

@final
class Endpoint:
    """
    This process on the fabric.
    """
    def __new__(cls, /, name: str, *, listen: SupportsGetItem[int, str], advertise: SupportsGetItem[int, str], secret: bytes | None, timeout: SupportsFloat | SupportsIndex | None, stall_timeout: SupportsFloat | SupportsIndex | None, require: SupportsGetItem[int, str], forbid: SupportsGetItem[int, str], isolation: str | None, max_regions: SupportsIndex | None, lanes: SupportsIndex | None, tls: Tls | None, checksums: bool, quotas: Quotas | None, share_between_containers: bool, nixl_lend_over: SupportsGetItem[int, str], nixl_reach_over: SupportsGetItem[int, str]) -> Endpoint: ...
    def audit(self, /) -> Audit: ...
    def close(self, /, timeout: SupportsFloat | SupportsIndex | None) -> None:
        """
        Closes; waits for at most that many seconds, or for the endpoint's limit, until nobody is inside its memory.
        """
    def compare_swap(self, /, remote: Remote, offset: SupportsIndex, expected: SupportsIndex, new: SupportsIndex) -> Transfer: ...
    def fetch_add(self, /, remote: Remote, offset: SupportsIndex, add: SupportsIndex) -> Transfer: ...
    def import_(self, /, ticket: "Ticket | str | bytes | bytearray | memoryview", require: SupportsGetItem[int, str], forbid: SupportsGetItem[int, str], isolation: str | None, timeout: SupportsFloat | SupportsIndex | None) -> Remote: ...
    def import_many(self, /, tickets: "Iterable[Ticket | str | bytes | bytearray | memoryview]", require: SupportsGetItem[int, str], forbid: SupportsGetItem[int, str], isolation: str | None, timeout: SupportsFloat | SupportsIndex | None) -> list[Remote]:
        """
        Makes many tickets usable here, with one round trip for each owner. What is wrong with one of them is raised for all.
        """
    @property
    def incarnation(self, /) -> str:
        """
        The life of this endpoint, as hexadecimal digits: another one each time it is opened.
        """
    def metrics(self, /) -> str: ...
    @property
    def name(self, /) -> str: ...
    def notify(self, /, remote: Remote, message: bytes) -> Transfer: ...
    def poll_receive(self, /, waiter: Waiter) -> Notification | None:
        """
        The next message if there is one; otherwise the waiter is woken when one comes.
        """
    def program(self, /, parts: "Iterable[tuple[Remote, Region | Span, Layout, Layout]]") -> Program:
        """
        Compiles a request over those parts, to be started many times with nothing but indices.
        """
    def receive(self, /, timeout: SupportsFloat | SupportsIndex) -> Notification | None:
        """
        The next message, waiting for at most that many seconds; `None` when none came.
        """
    def register(self, /, obj: Any, access: str) -> Region: ...
    def signal(self, /, remote: Remote, offset: SupportsIndex, add: SupportsIndex) -> Transfer: ...
    @property
    def stall_timeout(self, /) -> float:
        """
        How long closing waits where the call does not say.
        """
    def start(self, /, writes: bool, remote: Remote, local: "Region | Span", at: "int | tuple[int, int, int] | None", spans: Any | None, blocks: tuple[Layout, Any, Layout, Any] | None, terms: tuple[bytes | bytearray | None, tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None, SupportsFloat | SupportsIndex | None, SupportsFloat | SupportsIndex | None, SupportsGetItem[int, str], SupportsGetItem[int, str], SupportsIndex | None]) -> Transfer:
        """
        Starts a read (or, with `writes`, a write).
        """
    def start_import(self, /, ticket: "Ticket | str | bytes | bytearray | memoryview", require: SupportsGetItem[int, str], forbid: SupportsGetItem[int, str], isolation: str | None, timeout: SupportsFloat | SupportsIndex | None) -> Import: ...
    def start_parts(self, /, writes: bool, parts: "Iterable[tuple[Remote, Region | Span, int | tuple[int, int, int] | None, Any, tuple[Layout, Any, Layout, Any] | None]]", at: "int | tuple[int, int, int] | None", spans: Any | None, blocks: tuple[Layout, Any, Layout, Any] | None, terms: tuple[bytes | bytearray | None, tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None, SupportsFloat | SupportsIndex | None, SupportsFloat | SupportsIndex | None, SupportsGetItem[int, str], SupportsGetItem[int, str], SupportsIndex | None]) -> Transfer:
        """
        Starts a read (or, with `writes`, a write) of several parts.
        """
    def stats(self, /) -> Stats: ...

@final
class ExplainedPath:
    """
    One path and what became of it.
    """
    def __repr__(self, /) -> str: ...
    @property
    def enforced(self, /) -> bool:
        """
        Whether the owner checks every access on it.
        """
    @property
    def path(self, /) -> str:
        """
        The path's name.
        """
    @property
    def reason(self, /) -> str:
        """
        Why.
        """
    @property
    def verdict(self, /) -> str:
        """
        ``taken``, ``possible`` or ``refused``.
        """

@final
class Explanation:
    """
    Every path to a remote region; ``str`` shows it as a table.
    """
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def paths(self, /) -> list[ExplainedPath]:
        """
        The paths in order of preference.
        """
    @property
    def taken(self, /) -> str | None:
        """
        The path that transfers take.
        """

@final
class Import:
    """
    An import in flight, from when it is first asked for its end.
    """
    def poll(self, /, waiter: Waiter) -> bool:
        """
        Whether it has ended; if not, the waiter is woken when it has.
        """
    def result(self, /) -> Remote:
        """
        What was imported, once; or raises why it failed.
        """

@final
class Layout:
    """
    Names many blocks of one length by index: base, block length, counts and strides.

    ``Layout(base, block, [(count, stride), ...])`` has one to four dimensions, the outermost first.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __len__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, base: SupportsIndex, block: SupportsIndex, dims: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]) -> Layout: ...
    def __reduce__(self, /) -> tuple[type, tuple[int, int, list[tuple[int, int]]]]: ...
    def __repr__(self, /) -> str: ...
    @property
    def base(self, /) -> int:
        """
        The offset of block 0.
        """
    @property
    def block(self, /) -> int:
        """
        The bytes of one block.
        """
    @staticmethod
    def blocks(block: SupportsIndex, count: SupportsIndex, *, stride: SupportsIndex | None = None, base: "int" = 0) -> Layout:
        """
        ``count`` blocks, the first at ``base``, each ``stride`` bytes after the one before.
        """
    @staticmethod
    def contiguous(nbytes: SupportsIndex, block: SupportsIndex) -> Layout:
        """
        Blocks that lie back to back and fill ``nbytes`` bytes.
        """
    @property
    def dims(self, /) -> list[tuple[int, int]]:
        """
        The count and the stride of each dimension, the outermost first.
        """
    @property
    def extent(self, /) -> int:
        """
        One past the last byte that any block reaches.
        """
    def offset(self, /, index: SupportsIndex) -> int:
        """
        The offset of a block's first byte.
        """

@final
class NixlAgent:
    """
    An agent.
    """
    def __new__(cls, /, name: str, backends: SupportsGetItem[int, tuple[str, dict[str, str]]], engine: str | None, progress_thread: bool, packages: str | PathLike[str] | None, devices: SupportsGetItem[int, str] | None) -> NixlAgent: ...
    def backends(self, /) -> list[str]: ...
    def close(self, /) -> None: ...
    def connect(self, /, peer: str) -> None: ...
    @property
    def engine(self, /) -> str: ...
    @property
    def engine_reason(self, /) -> str: ...
    def forget(self, /, peer: str) -> None: ...
    def knows(self, /, peer: str, of: tuple[str, SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]] | None) -> bool: ...
    def load(self, /, metadata: bytes) -> str: ...
    def metadata(self, /, only: tuple[str, SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]] | None) -> bytes:
        """
        Metadata of everything, or of what covers these ranges.
        """
    @property
    def name(self, /) -> str: ...
    def notify(self, /, peer: str, message: bytes) -> None: ...
    def receive(self, /, timeout: SupportsFloat | SupportsIndex | None) -> dict[str, list[bytes]]:
        """
        The messages that have come, by who sent them; waits for the first one for at most that long.
        """
    def register(self, /, data: Any, source_only: bool) -> NixlRegion:
        """
        Registers the memory of an object, which is kept.
        """
    def transfer(self, /, reads: bool, local: tuple[str, SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]], remote: tuple[str, SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]], peer: str, notification: bytes | None) -> NixlRequest:
        """
        Starts a transfer.
        """

@final
class NixlRegion:
    """
    Memory that is registered with an agent.
    """
    def close(self, /, timeout: SupportsFloat | SupportsIndex | None) -> None:
        """
        Deregisters; where the memory is still in use, raises and stays open.
        """
    @property
    def closed(self, /) -> bool: ...
    @property
    def descriptor(self, /) -> tuple[str, tuple[int, int, int]]:
        """
        The kind of memory, and its one range.
        """
    @property
    def read_only(self, /) -> bool: ...

@final
class NixlRequest:
    """
    A transfer that was posted.
    """
    def done(self, /) -> bool: ...
    def error(self, /) -> "Error | None":
        """
        Why it has failed, where it has.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None) -> bool: ...

@final
class Notification:
    """
    A message from a peer.
    """
    def __repr__(self, /) -> str: ...
    @property
    def message(self, /) -> bytes:
        """
        What was sent.
        """
    @property
    def sender(self, /) -> str:
        """
        The name of the endpoint that sent it.
        """

@final
class Operation:
    """
    One of the four operations, in flight or over.
    """
    def __repr__(self, /) -> str: ...
    def cancel(self, /) -> None:
        """
        Asks it to stop; it ends once the local memory is safe to reuse.
        """
    def done(self, /) -> bool: ...
    def error(self, /) -> "Error | None":
        """
        Why it failed or was cancelled, where it was.
        """
    def metadata(self, /, hex: bool) -> tuple[list[tuple[str, int, int]], str, str, int]:
        """
        What the peer needs to know; only of a passive operation.
        """
    def poll(self, /, waiter: Waiter) -> bool:
        """
        Whether it has ended; if not, the waiter is woken when it has.
        """
    def quiet(self, /) -> bool:
        """
        Whether nothing of it can touch the local memory any more.
        """
    def result(self, /) -> None:
        """
        Raises why it failed or was cancelled, if it was; `Invalid` while it has not ended.
        """
    def route(self, /) -> tuple[str, str, int]:
        """
        The peer's name, the path and the number of bytes; only of an active operation.
        """
    def status(self, /) -> int:
        """
        The number of its status.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> bool:
        """
        Waits until it has ended, and says whether it has.
        """

@final
class PathStats:
    """
    What was moved between an endpoint and one peer over one path.
    """
    def __repr__(self, /) -> str: ...
    @property
    def failures(self, /) -> int:
        """
        Transfers that ended in an error.
        """
    @property
    def path(self, /) -> str:
        """
        The path.
        """
    @property
    def peer(self, /) -> str:
        """
        The peer's name.
        """
    @property
    def reads(self, /) -> tuple[int, int]:
        """
        Reads that ended well, and their bytes.
        """
    @property
    def writes(self, /) -> tuple[int, int]:
        """
        Writes, signals and atomics that ended well, and their bytes.
        """

@final
class PeerAudit:
    """
    What one peer did with a region.
    """
    def __repr__(self, /) -> str: ...
    @property
    def incarnation(self, /) -> str:
        """
        The life of the peer that is meant, as hexadecimal digits.
        """
    @property
    def peer(self, /) -> str:
        """
        What the peer calls itself.
        """
    @property
    def reads(self, /) -> tuple[int, int]:
        """
        Requests to read that the owner served, and their bytes.
        """
    @property
    def refused(self, /) -> int:
        """
        Requests and tickets that the owner refused.
        """
    @property
    def unseen(self, /) -> bool:
        """
        Whether the peer was given the memory itself: what it copies then is not counted.
        """
    @property
    def writes(self, /) -> tuple[int, int]:
        """
        Requests to write, count and signal that the owner served, and their bytes.
        """

@final
class PeerView:
    """
    Another rank's memory, mapped here.
    """
    def close(self, /) -> None: ...
    @property
    def closed(self, /) -> bool: ...
    def load(self, /, offset: SupportsIndex) -> int:
        """
        An aligned 64-bit word; what was written before it was stored is visible.
        """
    @property
    def rank(self, /) -> int: ...
    def read(self, /, offset: SupportsIndex, nbytes: SupportsIndex) -> bytes: ...
    @property
    def size(self, /) -> int: ...
    def store(self, /, offset: SupportsIndex, value: SupportsIndex) -> None:
        """
        Writes an aligned 64-bit word, visible after everything that was written before.
        """
    def write(self, /, offset: SupportsIndex, data: bytes) -> None: ...

@final
class Program:
    """
    A request that is compiled once.
    """
    def __len__(self, /) -> int: ...
    def explain(self, /) -> list[Explanation]:
        """
        Which path each part takes, and why not the others.
        """
    def rebind(self, /, remotes: SupportsGetItem[int, Remote]) -> Program:
        """
        The same program for other remote regions.
        """
    def select(self, /, parts: SupportsGetItem[int, SupportsIndex]) -> Program:
        """
        Some of its parts, in that order.
        """
    def start(self, /, writes: bool, remote_blocks: Any, local_blocks: Any, terms: tuple[bytes | bytearray | None, tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None, SupportsFloat | SupportsIndex | None, SupportsFloat | SupportsIndex | None, SupportsGetItem[int, str], SupportsGetItem[int, str], SupportsIndex | None]) -> Transfer:
        """
        Starts a read (or, with `writes`, a write) of the same blocks of each part.
        """
    def start_each(self, /, writes: bool, lists: Any, terms: tuple[bytes | bytearray | None, tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None, SupportsFloat | SupportsIndex | None, SupportsFloat | SupportsIndex | None, SupportsGetItem[int, str], SupportsGetItem[int, str], SupportsIndex | None]) -> Transfer:
        """
        Starts a read (or, with `writes`, a write) of blocks that are named for each part.
        """

@final
class Quotas:
    """
    How much of an endpoint its peers may use; what is not set is the default. Beyond it they get ``Exhausted``.
    """
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, *, unauthenticated: SupportsIndex | None = None, prove_within: SupportsFloat | SupportsIndex | None = None, peers: SupportsIndex | None = None, connections: SupportsIndex | None = None, grants: SupportsIndex | None = None, requests: SupportsIndex | None = None, bytes: SupportsIndex | None = None, memory: SupportsIndex | None = None) -> Quotas: ...
    def __repr__(self, /) -> str: ...
    @property
    def bytes(self, /) -> int:
        """
        The bytes that these requests ask for.
        """
    @property
    def connections(self, /) -> int:
        """
        Connections of one peer.
        """
    @property
    def grants(self, /) -> int:
        """
        Granted tickets that one peer holds, on one session.
        """
    @property
    def memory(self, /) -> int:
        """
        The bytes of this process's memory that all peers together may take, 4 GiB by default: sessions, connections and what waits in
        them, grants, requests, messages, bytes on their way to and from files and GPUs. One that is alone gets three eighths of it, and
        less the more is taken. Beside it stand 72 MiB for unauthenticated connections, 64 MiB for messages of peers that have gone, and 8 MiB for each thread
        that works for peers: whatever peers do, they take no more.
        """
    @property
    def peers(self, /) -> int:
        """
        Sessions of all peers, at a time.
        """
    @property
    def prove_within(self, /) -> float:
        """
        How many seconds a connection may take to prove itself.
        """
    @property
    def requests(self, /) -> int:
        """
        Requests of one session that are not answered yet.
        """
    @property
    def unauthenticated(self, /) -> int:
        """
        Connections that have not proven themselves, at a time.
        """

@final
class Region:
    """
    Memory that other workers can reach.

    The object whose memory it is stays alive while the region does. Closing waits until no peer is inside a copy;
    so does leaving a ``with`` block. A region that is dropped instead is taken back too, without the waiting.
    """
    def __enter__(self, /) -> Region: ...
    def __exit__(self, /, *_exception: "object") -> None: ...
    def __len__(self, /) -> int: ...
    def __repr__(self, /) -> str: ...
    @property
    def access(self, /) -> str:
        """
        What peers may do with it.
        """
    def audit(self, /) -> Audit:
        """
        Who used the region and who was refused, as far as the owner can see.
        """
    def close(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> None:
        """
        Takes the memory back. Returns once no peer can touch it any more; closing twice is harmless.

        Raises ``Timeout`` when a peer is still inside a copy after ``timeout`` seconds: no new access can begin then,
        and closing can be tried again.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether it was closed.
        """
    @property
    def kind(self, /) -> str:
        """
        What the memory is made of: ``shared`` memory can be mapped by peers, ``external`` cannot.
        """
    @property
    def nbytes(self, /) -> int:
        """
        How many bytes it has.
        """
    @property
    def place(self, /) -> str:
        """
        Where the bytes live.
        """
    @property
    def readonly(self, /) -> bool:
        """
        Whether its bytes cannot be written, by any process: then it is no target for a read.
        """
    def span(self, /, offset: SupportsIndex, nbytes: SupportsIndex | None = None) -> Span:
        """
        A part of the region: ``nbytes`` bytes from ``offset`` on, or all the rest.
        """
    def ticket(self, /, layout: Layout | None = None) -> Ticket:
        """
        What your own channel carries to another worker. A layout says how the region is divided into blocks.
        """
    def wait_signal(self, /, offset: SupportsIndex, at_least: SupportsIndex, timeout: SupportsFloat | SupportsIndex = 30.0) -> int:
        """
        Waits until the 64-bit counter at that offset is at least that high, and returns it.
        """

@final
class RegisteredBuffer:
    """
    A buffer that is registered with a communicator.
    """
    def close(self, /) -> None: ...
    @property
    def handle(self, /) -> int:
        """
        The number of the registration, 0 once closed.
        """
    @property
    def size(self, /) -> int: ...

@final
class Remote:
    """
    A ticket made usable here.
    """
    def __len__(self, /) -> int: ...
    def __repr__(self, /) -> str: ...
    @property
    def access(self, /) -> str:
        """
        What the ticket allows.
        """
    def explain(self, /) -> Explanation:
        """
        Every path, the one taken, and the reason for the others.
        """
    @property
    def layout(self, /) -> Layout | None:
        """
        The layout that the owner put into the ticket.
        """
    @property
    def nbytes(self, /) -> int:
        """
        How many bytes the ticket reaches.
        """
    @property
    def path(self, /) -> str:
        """
        The path that transfers take.
        """
    @property
    def peer(self, /) -> str:
        """
        The owner's name.
        """
    @property
    def place(self, /) -> str:
        """
        Where the bytes live.
        """

@final
class SharedArray:
    """
    An array in shared memory.

    NumPy, torch and others take it over without a copy, by the buffer protocol, ``__array_interface__`` or DLPack.
    """
    @property
    def __array_interface__(self, /) -> dict[str, Any]: ...
    def __dlpack__(self, /, *, stream: Any | None = None, max_version: Any | None = None, dl_device: tuple[SupportsIndex, SupportsIndex] | None = None, copy: bool | None = None) -> "CapsuleType": ...
    def __dlpack_device__(self, /) -> tuple[int, int]: ...
    def __len__(self, /) -> int: ...
    def __new__(cls, /, shape: SupportsGetItem[int, SupportsIndex], dtype: str, format: str, typestr: str, code: SupportsIndex, bits: SupportsIndex) -> SharedArray:
        """
        An array of zeros. ``format`` is the buffer protocol's, empty where it has none for this type.
        """
    def __repr__(self, /) -> str: ...
    @property
    def dtype(self, /) -> str:
        """
        The name of the type of its elements.
        """
    @property
    def nbytes(self, /) -> int:
        """
        The number of bytes.
        """
    @property
    def shape(self, /) -> tuple[int, ...]:
        """
        The length of each dimension.
        """
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Span:
    """
    A part of a region. It does not keep the region open; a transfer that uses it does.
    """
    def __len__(self, /) -> int: ...
    def __repr__(self, /) -> str: ...
    @property
    def nbytes(self, /) -> int:
        """
        How many bytes it names.
        """
    @property
    def readonly(self, /) -> bool:
        """
        Whether its bytes cannot be written, by any process.
        """
    def span(self, /, offset: SupportsIndex, nbytes: SupportsIndex | None = None) -> Span:
        """
        A part of this part.
        """

@final
class Stats:
    """
    What an endpoint has moved and what it holds.
    """
    def __repr__(self, /) -> str: ...
    @property
    def in_flight(self, /) -> tuple[int, int]:
        """
        Requests of peers that are being served, and their bytes.
        """
    @property
    def parked(self, /) -> tuple[int, int]:
        """
        Memories of closed regions that a peer has not let go yet, and their bytes.
        """
    @property
    def paths(self, /) -> list[PathStats]:
        """
        Transfers that this endpoint started, per peer and path.
        """
    @property
    def peers(self, /) -> int:
        """
        Sessions of peers that use this endpoint's regions.
        """
    @property
    def refused(self, /) -> int:
        """
        What this endpoint refused to serve: accesses, tickets, handshakes.
        """
    @property
    def refused_handshakes(self, /) -> int:
        """
        Connections among them that did not become sessions.
        """
    @property
    def regions(self, /) -> int:
        """
        Regions that are registered now.
        """
    @property
    def unauthenticated(self, /) -> int:
        """
        Connections that have not proven themselves yet.
        """

@final
class Ticket:
    """
    What your own channel carries to another worker: who owns a region, how to reach them, and what is allowed.

    Everyone who holds a ticket may use it: treat its text like a password. ``repr`` never shows the secret part.
    """
    def __bytes__(self, /) -> bytes: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __new__(cls, /, ticket: "Ticket | str | bytes | bytearray | memoryview") -> Ticket: ...
    def __reduce__(self, /) -> tuple[type, tuple[bytes]]: ...
    def __repr__(self, /) -> str: ...
    def __str__(self, /) -> str: ...
    @property
    def access(self, /) -> str:
        """
        What may be done with them: ``none``, ``read``, ``write`` or ``read+write``.
        """
    @property
    def layout(self, /) -> Layout | None:
        """
        The layout of the region, where it has one and the ticket covers all of it.
        """
    def narrow(self, /, *, range: "builtins.range | None" = None, access: str | None = None, lease: SupportsFloat | SupportsIndex | None = None) -> Ticket:
        """
        The ticket that allows less: only those bytes, only those rights, only for that many seconds.

        ``range`` counts from the start of the present range. ``lease`` counts from the moment at which the owner made
        the first ticket.
        """
    @property
    def nbytes(self, /) -> int:
        """
        How many bytes may be touched.
        """
    @property
    def owner(self, /) -> str:
        """
        The name of the endpoint that owns the region.
        """
    @property
    def place(self, /) -> str:
        """
        Where the bytes live: ``host``, ``cuda:0`` and so on.
        """
    @property
    def range(self, /) -> builtins.range:
        """
        The bytes that may be touched, counted from the start of the region.
        """

@final
class Tls:
    """
    How an endpoint encrypts what goes over TCP, and by what it knows its peers. TLS 1.3, and nothing older.
    """
    def __repr__(self, /) -> str: ...
    @staticmethod
    def by_certificate(chain: bytes, key: bytes, authorities: bytes) -> Tls:
        """
        Uses a certificate on both sides, beside tickets and secret. All three are PEM: the chain of this endpoint's
        certificate, its private key, and the authorities whose certificates are believed. A certificate must be valid for
        the name of its endpoint, up to the first ``:`` or ``/`` of that name.
        """
    @staticmethod
    def by_ticket() -> Tls:
        """
        Makes a key for this process. Peers know each other by the tickets that they hold, and by the secret where one is
        required: nothing has to be set up.
        """

@final
class Transfer:
    """
    One request in flight.
    """
    def cancel(self, /) -> None:
        """
        Asks it to stop; it ends once the local memory is safe to reuse.
        """
    def done(self, /) -> bool:
        """
        Whether it has ended, well or not.
        """
    def failures(self, /) -> "list[tuple[int, int, int, Error]]":
        """
        The ranges of blocks that failed, each with its part and its error.
        """
    @property
    def nbytes(self, /) -> int:
        """
        How many bytes were asked for.
        """
    @property
    def path(self, /) -> str:
        """
        The path that the bytes take.
        """
    def poll(self, /, waiter: Waiter) -> bool:
        """
        Whether it has ended; if not, the waiter is woken when it has.
        """
    def quiet(self, /) -> bool:
        """
        Whether nothing of it can touch memory any more, on either side.
        """
    def result(self, /) -> int | None:
        """
        What it gave, or raises why it failed; the word that an atomic operation found.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> bool:
        """
        Waits until it has ended, and says whether it has.
        """

@final
class Waiter:
    """
    One entry that will come into a queue.
    """
    def wake(self, /) -> None:
        """
        Puts the entry into the queue now.
        """

@final
class Window:
    """
    A window of a communicator.
    """
    @property
    def addr(self, /) -> int:
        """
        The address of this rank's memory.
        """
    def close(self, /) -> None: ...
    def compare_swap(self, /, comm: Communicator, peer: SupportsIndex, word: SupportsIndex, expected: SupportsIndex, new: SupportsIndex) -> Work: ...
    def fence(self, /, comm: Communicator) -> Work:
        """
        Waits until what any rank has put anywhere has landed. Collective.
        """
    def fetch_add(self, /, comm: Communicator, peer: SupportsIndex, word: SupportsIndex, add: SupportsIndex) -> Work: ...
    def flush(self, /, comm: Communicator, peer: SupportsIndex | None) -> Work:
        """
        Waits until what this rank has put there (or, without a peer, anywhere) has landed.
        """
    def get(self, /, comm: Communicator, local: Any, peer: SupportsIndex, offset: SupportsIndex, blocks: tuple[Layout, Any, Layout, Any] | None) -> Work:
        """
        Starts a get.
        """
    @property
    def handle(self, /) -> int:
        """
        The number of the window; 0 until it is registered and once it is closed.
        """
    def path(self, /, rank: SupportsIndex) -> str:
        """
        The path that accesses to that rank take.
        """
    def peer_view(self, /, rank: SupportsIndex) -> PeerView: ...
    def put(self, /, comm: Communicator, local: Any, peer: SupportsIndex, offset: SupportsIndex, signal: tuple[SupportsIndex, SupportsIndex] | None, blocks: tuple[Layout, Any, Layout, Any] | None) -> Work:
        """
        Starts a put; with `signal` (context and index) the counter is raised behind it.
        """
    @property
    def size(self, /) -> int: ...
    def size_of(self, /, rank: SupportsIndex) -> int: ...

@final
class Work:
    """
    A call in flight or over.
    """
    def cancel(self, /) -> None:
        """
        Gives up a wait for signals. Anything else goes on: the other ranks count on what was begun.
        """
    def done(self, /) -> bool:
        """
        Whether it has ended, well or not.
        """
    def poll(self, /, waiter: Waiter) -> bool:
        """
        Whether it has ended; if not, the waiter is woken when it has.
        """
    def result(self, /) -> int | None:
        """
        What it gave, or raises why it failed.
        """
    def wait(self, /, timeout: SupportsFloat | SupportsIndex | None = None) -> bool:
        """
        Waits until it has ended, and says whether it has.
        """

def array_type(buffer: Any, gpu: SupportsIndex | None = None) -> tuple[str, int, int]:
    """
    The name and size of the type of an object's elements, and how many it has.
    """

def cuda_device_of(address: SupportsIndex) -> int | None:
    """
    The GPU whose memory is at that address; `None` where no GPU has it, or without a driver.
    """

def device_from_text(text: str) -> tuple[int, int]:
    """
    The kind and the number of the device that a text names.
    """

def group_end() -> None:
    """
    Ends a group of calls on this thread; the outermost end launches them.
    """

def group_poison(op: str, why: str) -> None:
    """
    Keeps the group that is open on this thread, if any, from being launched.
    """

def group_start() -> None:
    """
    Begins a group of calls on this thread.
    """

def held() -> int:
    """
    The number of Python objects that are kept for the core.
    """

def is_main_interpreter() -> bool:
    """
    Whether the caller runs in the interpreter that the process began with.

    Objects of one interpreter must not be released by another, and completions do not say whose they are: the package
    refuses to be imported elsewhere.
    """

def metadata_from_json(text: str) -> tuple[list[tuple[str, int, int]], str, str, int]:
    """
    The fields of metadata in JSON.
    """

def metadata_owner(nixl_metadata: str) -> str:
    """
    The name of the endpoint whose memory the metadata names; raises where the opaque part is not Towline's.
    """

def nccl_found() -> tuple[str, list[str]] | None:
    """
    NCCL's version, as `2.28.9`, and what it has; `None` where there is no NCCL.
    """

def nccl_unique_id() -> bytes:
    """
    Makes an id of NCCL's.
    """

def nixl_pack(memory: str, ranges: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]], package: str) -> bytes:
    """
    A list of ranges in the form of NIXL's Python API.
    """

def nixl_unpack(data: bytes) -> tuple[str, list[tuple[int, int, int]]]:
    """
    The kind of memory and the ranges in what NIXL's Python API has written. Nothing is unpickled.
    """

def paths() -> list[str]:
    """
    The names of the paths, the most preferred first.
    """

def unique_id(listen: SupportsGetItem[int, str], advertise: SupportsGetItem[int, str], tls: bool) -> bytes:
    """
    Opens a meeting and returns the bytes of its id.
    """

def unique_id_from_text(text: str) -> bytes:
    """
    The bytes of the id that has that text.
    """

def unique_id_texts(id: bytes) -> tuple[str, str]:
    """
    What an id may be shown as, and its text, which has the secret in it.
    """

def use_stream(handle: SupportsIndex | None) -> None:
    """
    The stream into which this thread's calls on communicators of GPUs go from now on; `None` for the default one.
    """
