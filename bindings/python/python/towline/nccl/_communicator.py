"""A rank's membership in a group."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from .. import _native
from .._devices import Device, DeviceKind
from ._collectives import Collectives, check_stream, in_stream
from ._errors import NcclInvalid, invalid, status_of
from ._handles import (
    CommResource,
    CustomRedOp,
    Operation,
    PeerView,
    RegisteredBufferHandle,
    RegisteredWindowHandle,
)
from ._types import (
    FLOAT64,
    INT64,
    CommShrinkFlag,
    CudaDevice,
    HostDevice,
    NCCLCommProperties,
    NCCLConfig,
    NcclDataType,
    Result,
    WaitSignalDesc,
    WindowFlag,
    current_gpu,
    gpu_of,
)
from ._unique_id import UniqueId

if TYPE_CHECKING:
    from typing import Self

    from .._native import Layout

Blocks = tuple["Layout", Any, "Layout", Any]
R = TypeVar("R", bound=CommResource)

_numbers = itertools.count(1)
_by_number: WeakValueDictionary[int, Communicator] = WeakValueDictionary()
_NO_COLOR = -1


def _settings(config: NCCLConfig | None) -> _native.CommConfig | None:
    if config is None:
        return None
    if not isinstance(config, NCCLConfig):
        raise TypeError(f"config: an NCCLConfig is needed, not {type(config).__name__}")
    return config._make()


class Communicator(Collectives):
    """A rank's membership in a fixed group.

    Its calls are made by all ranks in the same order, except where they say that they are local. Each has a deadline (the
    ``timeout`` of `NCCLConfig`), and its error names the ranks that it is about. A ``with`` block finalizes and destroys
    it, and aborts it where the block raises.

    >>> from towline import nccl
    >>> with nccl.Communicator.init(1, 0, nccl.get_unique_id()) as comm:
    ...     numbers = nccl.empty(4, "float32")
    ...     numbers[:] = 2.5
    ...     comm.allreduce(numbers, numbers, nccl.SUM).wait()
    ...     float(numbers[0])
    2.5
    """

    __slots__ = ("_native", "_number", "_resources", "__weakref__")

    def __init__(self, ptr: int | None = None) -> None:
        """A communicator of no group, to be initialised; or, by its ``ptr``, one that exists in this process."""
        self._native: _native.Communicator | None = None
        self._number = 0
        self._resources: dict[int, CommResource] = {}
        if ptr:
            known = _by_number.get(ptr)
            if known is None:
                raise NcclInvalid(f"ptr: there is no communicator {ptr:#x} in this process", op="init")
            self._native = known._native
            self._number = known._number
            self._resources = known._resources

    @classmethod
    def _of(cls, native: _native.Communicator | None) -> Self:
        comm = cls()
        if native is not None:
            comm._adopt(native)
        return comm

    def _adopt(self, native: _native.Communicator) -> None:
        self._native = native
        self._number = next(_numbers)
        _by_number[self._number] = self

    def _need(self, op: str) -> _native.Communicator:
        if self._native is None:
            raise invalid(op, "the communicator is not initialized, or was destroyed")
        return self._native

    # ---- how it comes to be ------------------------------------------------------------------------------

    @classmethod
    def init(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId | Sequence[UniqueId],
        config: NCCLConfig | None = None,
    ) -> Self:
        """Joins a group of ``nranks`` as ``rank``: every rank calls it with the same id, from threads, processes or hosts.

        Raises on every rank, with the ranks named: `NCCLTimeout` where some did not come in time, `NcclInvalid` where a rank
        came twice, lies outside the group, or has another idea of its size or settings.
        """
        comm = cls()
        comm.initialize(nranks, rank, unique_id, config)
        return comm

    def initialize(
        self,
        nranks: int,
        rank: int,
        unique_id: UniqueId | Sequence[UniqueId],
        config: NCCLConfig | None = None,
    ) -> None:
        """`init` in place, on a communicator of no group."""
        if self._native is not None:
            raise invalid("init", "the communicator is initialized already")
        if isinstance(unique_id, (list, tuple)):
            if not unique_id:
                raise invalid("init", "unique_id: the list is empty")
            unique_id = unique_id[0]
        if not isinstance(unique_id, UniqueId):
            raise invalid("init", f"unique_id: a UniqueId is needed, not {type(unique_id).__name__}")
        config = config or NCCLConfig()
        if config.device is None and unique_id._is_nccl:
            config = dataclasses.replace(config, device=current_gpu())
        settings = _settings(config)
        assert settings is not None
        self._adopt(_native.Communicator.init(nranks, rank, bytes(unique_id), settings))

    @classmethod
    def from_env(cls, config: NCCLConfig | None = None) -> Self:
        """`init` as ``towline launch`` wants it: by ``TOWLINE_RANK``, ``TOWLINE_NRANKS`` and ``TOWLINE_UNIQUE_ID``.

        An id serves one meeting, so that a process does this once; further groups come from `split`.
        """
        found = {}
        for name in ("TOWLINE_RANK", "TOWLINE_NRANKS", "TOWLINE_UNIQUE_ID"):
            found[name] = os.environ.get(name, "")
            if not found[name]:
                raise invalid("from_env", f"{name} is not set: start the ranks with towline launch")
        try:
            rank, nranks = int(found["TOWLINE_RANK"]), int(found["TOWLINE_NRANKS"])
        except ValueError as error:
            raise invalid("from_env", f"TOWLINE_RANK, TOWLINE_NRANKS: {error}") from error
        return cls.init(nranks, rank, UniqueId(found["TOWLINE_UNIQUE_ID"]), config)

    @classmethod
    def init_all(
        cls, devices: int | Sequence[object] | None = None, config: NCCLConfig | None = None
    ) -> list[Self]:
        """Makes a group inside this process, one communicator per rank, for threads or for groups of calls.

        ``devices`` is the number of ranks, or a list with the host's device (``-1`` or ``"cpu"``) once per rank. ``None`` is
        one rank: this host is one device. A list of GPUs (``"cuda:1"``, devices) makes a group of NCCL's, one rank on each.
        """
        if isinstance(devices, (list, tuple)) and any(_is_gpu(device) for device in devices):
            gpus = [gpu_of(device, "init_all") for device in devices]
            settings = _settings(config or NCCLConfig())
            assert settings is not None
            return [cls._of(native) for native in _native.Communicator.init_all_on(gpus, settings)]
        if devices is None:
            count = 1
        elif isinstance(devices, int) and not isinstance(devices, bool):
            count = devices
        elif isinstance(devices, (list, tuple, range)):
            for device in devices:
                host = isinstance(device, Device) and device == HostDevice()
                if not host and device != -1 and device != "cpu":
                    raise invalid("init_all", f"devices: {device!r} is not the host; it is -1 or \"cpu\"")
            count = len(devices)
        else:
            raise TypeError(f"devices: an int or a list is needed, not {type(devices).__name__}")
        if count < 0:
            raise invalid("init_all", f"devices: there are no {count} ranks")
        if count == 0:
            return []
        settings = _settings(config or NCCLConfig())
        assert settings is not None
        return [cls._of(native) for native in _native.Communicator.init_all(count, settings)]

    def split(
        self, color: int | None = None, key: int = 0, config: NCCLConfig | None = None
    ) -> Communicator:
        """Splits the group: ranks of one colour form a new one, ordered by key, then by their old rank.

        Every rank calls it. A rank without a colour gets a communicator of no group.
        """
        native = self._need("split")
        if color == _NO_COLOR:
            color = None
        if color is not None and not 0 <= color < 1 << 32:
            raise invalid("split", f"color: {color} is neither None nor within 0 to 4294967295")
        return Communicator._of(native.split(color, key, _settings(config)))

    def shrink(
        self,
        exclude_ranks: Iterable[int] | None = None,
        config: NCCLConfig | None = None,
        flag: CommShrinkFlag = CommShrinkFlag.DEFAULT,
    ) -> Communicator:
        """Makes a group of all ranks but those, at least one. Only the survivors call it, with the same list.

        It also works after a rank has died or the communicator was revoked. With ``CommShrinkFlag.ABORT``, work in flight is
        ended first.
        """
        native = self._need("shrink")
        if CommShrinkFlag(flag) & CommShrinkFlag.ABORT:
            native.revoke()
        return Communicator._of(native.shrink(list(exclude_ranks or ()), _settings(config)))

    # ---- what it is --------------------------------------------------------------------------------------

    @property
    def ptr(self) -> int:
        """A number that stands for it in this process; 0 when it belongs to no group."""
        return self._number if self.is_valid else 0

    @property
    def is_valid(self) -> bool:
        """Whether it can be used: it belongs to a group and was not destroyed or aborted."""
        return self._native is not None and self._native.is_valid

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._need("rank").rank()

    @property
    def nranks(self) -> int:
        """How many ranks the group has."""
        return self._need("nranks").nranks()

    @property
    def device(self) -> HostDevice | CudaDevice:
        """Where the memory of this communicator lives: a GPU, or the host, whose ``device_id`` is -1."""
        native = self._need("device")
        if native.gpu is not None:
            return CudaDevice((DeviceKind.CUDA, native.gpu))
        native.rank()
        return HostDevice()

    @property
    def blocking(self) -> bool:
        """Whether calls wait for their end."""
        return self._need("blocking").blocking

    @property
    def name(self) -> str:
        """What it is called in errors and logs."""
        return self._need("name").name

    @property
    def properties(self) -> NCCLCommProperties:
        """What it can do, in one value."""
        native = self._need("properties")
        rank, nranks = native.rank(), native.nranks()
        if native.gpu is not None:
            found = _native.nccl_found()
            return NCCLCommProperties(
                rank=rank,
                nranks=nranks,
                cuda_dev=native.gpu,
                nvml_dev=-1,
                device_api_support=False,
                multimem_support=False,
                gin_type=0,
                railed_gin_type=0,
                n_lsa_teams=None,
                host_rma_support=found is not None and "put with signal" in found[1],
            )
        met = native.blocking or native.async_error() == (Result.SUCCESS, None)
        together = met and all(native.is_near(peer) for peer in range(nranks))
        return NCCLCommProperties(
            rank=rank,
            nranks=nranks,
            cuda_dev=-1,
            nvml_dev=-1,
            device_api_support=False,
            multimem_support=False,
            gin_type=0,
            railed_gin_type=0,
            n_lsa_teams=1 if together else None,
            host_rma_support=True,
        )

    @property
    def device_api_support(self) -> bool:
        """False: no kernel runs here that could use windows."""
        return self.properties.device_api_support

    @property
    def multimem_support(self) -> bool:
        """False: the host has no multicast memory."""
        return self.properties.multimem_support

    @property
    def host_rma_support(self) -> bool:
        """True: windows, puts, gets, signals and waits work with every rank."""
        return self.properties.host_rma_support

    @property
    def gin_type(self) -> int:
        """0: there is no networking by kernels."""
        return self.properties.gin_type

    @property
    def cuda_dev(self) -> int:
        """-1: it is on the host."""
        return self.properties.cuda_dev

    def is_near(self, rank: int) -> bool:
        """Whether that rank's memory can be shared with this process; true for this rank itself. Local."""
        return self._need("is_near").is_near(rank)

    def dead_ranks(self) -> list[int]:
        """The ranks that cannot be reached any more. Local."""
        return self._need("dead_ranks").dead_ranks()

    # ---- how it is, and how it ends ----------------------------------------------------------------------

    def get_async_error(self) -> Result:
        """How far the work of this communicator is: in progress, success, or what it failed with. Local.

        On a blocking communicator nothing is in progress between calls; an error is the one that made it unusable.
        """
        code, error = self._need("get_async_error").async_error()
        return Result(code) if error is None else status_of(error)

    def get_last_error(self) -> str:
        """Why the work of this communicator failed, in words; empty where it has not."""
        _, error = self._need("get_last_error").async_error()
        return "" if error is None else str(error)

    def synchronize(self) -> None:
        """Waits until all work of this communicator has ended, and raises what it failed with. Local."""
        self._need("synchronize").synchronize()

    def finalize(self) -> None:
        """Waits until every rank has called it and everything of this rank that was in flight has landed.

        Later calls raise `NcclInvalid`, `destroy` excepted. A second call, and one on a communicator of no group, is
        harmless.
        """
        if self._native is not None:
            self._native.finalize()

    def destroy(self) -> None:
        """Closes all handles once work in flight has ended, and leaves the group. Local; a second call is harmless.

        Other ranks that still access windows of this one get an error; `finalize` first waits for them.
        """
        self._end(aborts=False)

    def abort(self) -> None:
        """Ends the work in flight on every rank with an error, then closes all handles. Local; unblocks every rank."""
        self._end(aborts=True)

    def _end(self, aborts: bool) -> None:
        native = self._native
        if native is None:
            return
        if aborts:
            native.abort()
        else:
            native.destroy()
        self._native = None
        for resource in list(self._resources.values()):
            resource.close()
        self._resources.clear()

    def revoke(self, flags: int = 0) -> None:
        """Ends the work in flight on every rank with an error and forbids further calls. Local.

        `shrink`, `destroy` and `abort` stay possible.
        """
        if flags:
            raise invalid("revoke", f"flags: {flags} is not 0")
        self._need("revoke").revoke()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort()
            return
        try:
            self.finalize()
        finally:
            self.destroy()

    # ---- memory ------------------------------------------------------------------------------------------

    def register_buffer(self, buffer: Any) -> RegisteredBufferHandle:
        """Registers a buffer for zero-copy communication. Local, and at once also inside a group.

        ``buffer`` is anything with the buffer protocol, ``__array_interface__`` or DLPack; its size is derived. It is kept
        alive until the handle is closed, or the communicator destroyed or aborted. Raises `NcclInvalid` where its memory is on
        a GPU, read-only or not contiguous, or the communicator is not initialised.
        """
        native = self._need("register_buffer").register_buffer(buffer)
        return self._track(RegisteredBufferHandle(self, native))

    def register_window(
        self,
        buffer: Any,
        flags: WindowFlag | int | None = None,
        *,
        unequal_sizes: bool = False,
    ) -> RegisteredWindowHandle | None:
        """Registers a window over every rank's buffer. Collective: every rank calls it, in the same order.

        The sizes are equal on all ranks, unless all say ``unequal_sizes``. Inside a group, and on a non-blocking communicator,
        the window's ``handle`` stays 0 until the registration has ended. ``None`` where windows are not supported; on the
        host they always are. Memory of `empty` or `mem_alloc` is mapped by the other ranks of this host, any other is
        reached through its owner's process.

        Raises `NcclInvalid` on every rank, naming those that differ, where sizes, flags or (with ``COLL_SYMMETRIC``)
        offsets differ, or where one rank's buffer is on a GPU, empty, read-only or not contiguous.
        """
        native = self._need("register_window")
        bits = 0 if flags is None else int(flags)
        if not 0 <= bits < 1 << 32:
            bits = (1 << 32) - 1
        window, registering = native.register_window(buffer, bits, unequal_sizes)
        if window is None:
            return None
        return self._track(RegisteredWindowHandle(self, window, registering, WindowFlag(bits)))

    def _track(self, resource: R) -> R:
        self._resources[id(resource)] = resource
        return resource

    def _forget(self, resource: CommResource) -> None:
        self._resources.pop(id(resource), None)

    def close_all_resources(self) -> None:
        """Closes everything that this communicator has handed out, in the order in which it did. Repeatable."""
        for resource in list(self._resources.values()):
            resource.close()

    # ---- one-sided access --------------------------------------------------------------------------------

    def _window(self, op: str, window: RegisteredWindowHandle | None) -> _native.Window:
        if not isinstance(window, RegisteredWindowHandle):
            raise invalid(op, f"peer_window: this rank's own handle is needed, not {window!r:.100}")
        if window._comm._native is not self._native:
            raise invalid(op, "peer_window: it belongs to another communicator")
        return window._native

    def put(
        self,
        local_buffer: Any,
        peer: int,
        peer_window: RegisteredWindowHandle | None,
        peer_window_offset: int = 0,
        *,
        blocks: Blocks | None = None,
        stream: object = None,
    ) -> Operation[None]:
        """Copies a buffer into ``peer``'s memory of a window. When the operation has ended, the bytes have landed.

        ``peer_window`` is this rank's own handle. ``peer_window_offset`` counts elements of ``local_buffer``. With ``blocks``
        (remote layout, remote indices, local layout, local indices, as in `towline.Endpoint.write`) many blocks
        move at once. Every access is checked against the peer's size.
        """
        native = self._need("put")
        window = self._window("put", peer_window)
        with in_stream(native, stream):
            work = window.put(native, local_buffer, peer, peer_window_offset, None, blocks)
        return Operation(work, "put")

    def put_signal(
        self,
        local_buffer: Any,
        peer: int,
        peer_window: RegisteredWindowHandle | None,
        peer_window_offset: int = 0,
        signal_index: int = 0,
        context: int = 0,
        flags: int = 0,
        *,
        blocks: Blocks | None = None,
        stream: object = None,
    ) -> Operation[None]:
        """`put`, then raises ``peer``'s counter of that context and index by one.

        The bytes, and all that this rank put there before, are visible before the counter is. Nothing at all only signals.
        """
        native = self._need("put_signal")
        window = self._window("put_signal", peer_window)
        if flags:
            raise invalid("put_signal", f"flags: {flags} is not 0")
        signal = (context, signal_index)
        with in_stream(native, stream):
            work = window.put(native, local_buffer, peer, peer_window_offset, signal, blocks)
        return Operation(work, "put_signal")

    def get(
        self,
        local_buffer: Any,
        peer: int,
        peer_window: RegisteredWindowHandle | None,
        peer_window_offset: int = 0,
        *,
        blocks: Blocks | None = None,
        stream: object = None,
    ) -> Operation[None]:
        """Copies ``peer``'s memory of a window into a buffer. The arguments are those of `put`."""
        native = self._need("get")
        window = self._window("get", peer_window)
        with in_stream(native, stream):
            work = window.get(native, local_buffer, peer, peer_window_offset, blocks)
        return Operation(work, "get")

    def signal(
        self,
        peer: int,
        signal_index: int = 0,
        context: int = 0,
        flags: int = 0,
        *,
        stream: object = None,
    ) -> Operation[None]:
        """Raises a counter of ``peer`` by one, after everything that this rank has put there. Local."""
        native = self._need("signal")
        if flags:
            raise invalid("signal", f"flags: {flags} is not 0")
        with in_stream(native, stream):
            return Operation(native.signal(peer, signal_index, context), "signal")

    def wait_signal(
        self, desc: WaitSignalDesc | Sequence[WaitSignalDesc], *, stream: object = None
    ) -> Operation[None]:
        """Waits until all of those signals have come, and takes them: each wait takes its own, in order.

        Signals that came before are remembered. All that their sources had put before is visible then. On a non-blocking
        communicator, later calls on it wait too; `signaled` does not hold them up.
        """
        native = self._need("wait_signal")
        with in_stream(native, stream):
            return Operation(native.wait_signal(self._signals(desc), False), "wait_signal")

    def signaled(self, desc: WaitSignalDesc | Sequence[WaitSignalDesc]) -> Operation[None]:
        """`wait_signal` beside everything else, on any communicator: returns at once, and is awaited.

        Where the task that awaits it is cancelled (by a timeout, for example), it is given up and takes no signals.
        """
        return Operation(self._need("wait_signal").wait_signal(self._signals(desc), True), "wait_signal")

    def _signals(
        self, desc: WaitSignalDesc | Sequence[WaitSignalDesc]
    ) -> list[tuple[int, int, int, int]]:
        several = [desc] if isinstance(desc, WaitSignalDesc) else list(desc)
        if not several:
            raise invalid("wait_signal", "desc: the list is empty")
        return [(one.peer, one.op_count, one.signal_index, one.context) for one in several]

    def signals(self, peer: int, signal_index: int = 0, context: int = 0) -> int:
        """How many signals have come from ``peer`` on that counter so far, taken or not. Local."""
        return self._need("signals").signals(peer, signal_index, context)

    def flush(
        self, peer_window: RegisteredWindowHandle | None, peer: int | None = None, *, stream: object = None
    ) -> Operation[None]:
        """Waits until everything that this rank has put into ``peer``'s memory (or any rank's) has landed. Local."""
        check_stream(stream)
        native = self._need("flush")
        return Operation(self._window("flush", peer_window).flush(native, peer), "flush")

    def fence(self, peer_window: RegisteredWindowHandle | None, *, stream: object = None) -> Operation[None]:
        """Waits until everything that any rank has put anywhere before its own call has landed. Collective."""
        check_stream(stream)
        native = self._need("fence")
        return Operation(self._window("fence", peer_window).fence(native), "fence")

    def fetch_add(
        self,
        peer: int,
        peer_window: RegisteredWindowHandle | None,
        peer_window_offset: int,
        add: int,
    ) -> Operation[int]:
        """Adds to a 64-bit word of ``peer``'s memory; the operation gives what it held before.

        ``peer_window_offset`` counts words of 64 bits.
        """
        native = self._need("fetch_add")
        window = self._window("fetch_add", peer_window)
        return Operation(
            window.fetch_add(native, peer, peer_window_offset, _word("fetch_add", "add", add)),
            "fetch_add",
        )

    def compare_swap(
        self,
        peer: int,
        peer_window: RegisteredWindowHandle | None,
        peer_window_offset: int,
        expected: int,
        new: int,
    ) -> Operation[int]:
        """Replaces a 64-bit word of ``peer``'s memory if it holds ``expected``; the operation gives what it held before.

        ``peer_window_offset`` counts words of 64 bits.
        """
        native = self._need("compare_swap")
        window = self._window("compare_swap", peer_window)
        words = [_word("compare_swap", "expected", expected), _word("compare_swap", "new", new)]
        return Operation(
            window.compare_swap(native, peer, peer_window_offset, *words), "compare_swap"
        )

    def peer_view(self, peer_window: RegisteredWindowHandle, rank: int) -> PeerView:
        """That rank's memory of a window, mapped here; raises where it is not shared with this process."""
        self._window("peer_view", peer_window)
        return peer_window.peer_view(rank)

    # ---- reductions of one's own -------------------------------------------------------------------------

    def create_pre_mul_sum(self, scalar: Any, datatype: NcclDataType | None = None) -> CustomRedOp:
        """A sum in which each rank's elements are multiplied by that rank's own ``scalar`` first. Local.

        ``scalar`` is an int or float (for int64 or float64 elements, unless ``datatype`` says otherwise) or an array of one
        element, whose type is taken.
        """
        op = "create_pre_mul_sum"
        self._need(op).rank()
        if isinstance(scalar, bool):
            raise invalid(op, "scalar: a number is needed, not a truth value")
        if not isinstance(scalar, (int, float)):
            name, _, count = _native.array_type(scalar)
            if count != 1:
                raise invalid(op, f"scalar: it has {count} elements, not one")
            known = next((one for one in NcclDataType if one.type_name == name), None)
            if known is None or (datatype is not None and datatype != known):
                raise invalid(op, f"scalar: it is of {name}, not of the type of the elements")
            datatype, scalar = known, scalar.item() if hasattr(scalar, "item") else memoryview(scalar)[0]
        if datatype is None:
            datatype = INT64 if isinstance(scalar, int) else FLOAT64
        try:
            datatype = NcclDataType(datatype)
        except ValueError as error:
            raise invalid(op, f"datatype: there is no type {datatype!r}") from error
        return self._track(CustomRedOp(self, 5 + next(_numbers), scalar, datatype))

    def __repr__(self) -> str:
        native = self._native
        if native is None or not native.is_valid:
            return "<Communicator of no group>"
        try:
            return f"<Communicator {native.name}: rank {native.rank()} of {native.nranks()}>"
        except NcclInvalid:
            return f"<Communicator {native.name}>"


def _is_gpu(device: object) -> bool:
    """Whether a device in a list is named as a GPU, and not by a bare number."""
    if isinstance(device, str):
        return Device(device).kind is DeviceKind.CUDA
    return getattr(device, "device_id", -1) >= 0 or getattr(device, "type", "") == "cuda"


def _word(op: str, argument: str, value: int) -> int:
    """A 64-bit word; negative numbers in two's complement."""
    if not -(1 << 63) <= value < 1 << 64:
        raise invalid(op, f"{argument}: {value} does not fit into 64 bits")
    return value & (1 << 64) - 1
