"""Numbers and settings: nccl4py's enumerations, constants and dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _native
from .._devices import Device, DeviceKind

if TYPE_CHECKING:
    import numpy


class Result(IntEnum):
    """How a call, or the work of a communicator, ended: NCCL's numbers."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8

    Success = 0
    UnhandledCudaError = 1
    SystemError = 2
    InternalError = 3
    InvalidArgument = 4
    InvalidUsage = 5
    RemoteError = 6
    InProgress = 7
    Timeout = 8


_MEANINGS = {
    Result.SUCCESS: "no error",
    Result.UNHANDLED_CUDA_ERROR: "a call into CUDA failed",
    Result.SYSTEM_ERROR: "the operating system refused something",
    Result.INTERNAL_ERROR: "the library broke one of its own rules",
    Result.INVALID_ARGUMENT: "an argument is wrong",
    Result.INVALID_USAGE: "the call is not possible here or now",
    Result.REMOTE_ERROR: "another rank failed, died or gave up",
    Result.IN_PROGRESS: "work is in progress",
    Result.TIMEOUT: "some ranks did not arrive in time",
}


def get_error_string(code: int) -> str:
    """What a number of `Result` means, in words."""
    try:
        return _MEANINGS[Result(code)]
    except ValueError:
        return f"unknown result {code}"


class WindowFlag(IntFlag):
    """How a window is registered; for `Communicator.register_window`."""

    DEFAULT = 0
    """Default window registration."""
    COLL_SYMMETRIC = 1
    """The buffers lie at equal offsets in their allocations on all ranks, which is checked."""
    STRICT_ORDERING = 2
    """Puts to one peer become visible in the order in which they were asked for, also over a network."""

    Default = 0
    CollSymmetric = 1
    StrictOrdering = 2


class CommShrinkFlag(IntFlag):
    """What `Communicator.shrink` does to the work of the parent."""

    DEFAULT = 0
    """Nothing: it has ended, or failed."""
    ABORT = 1
    """Ends it first, as `Communicator.revoke` does."""

    Default = 0
    Abort = 1


class NcclRedOp(IntEnum):
    """How the elements of all ranks become one."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4

    Sum = 0
    Prod = 1
    Max = 2
    Min = 3
    Avg = 4


SUM, PROD, MAX, MIN, AVG = NcclRedOp


class NcclDataType(IntEnum):
    """The types of elements that NCCL knows, by its numbers.

    >>> FLOAT32.itemsize, FLOAT32.type_name
    (4, 'float32')
    """

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    CHAR = 0
    INT = 2
    HALF = 6
    FLOAT = 7
    DOUBLE = 8

    @property
    def type_name(self) -> str:
        """The name that NumPy (with ml_dtypes), torch and `empty` give it."""
        return _TYPE_NAMES[self]

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)[self]

    @property
    def numpy_dtype(self) -> numpy.dtype[Any]:
        """NumPy's type; ``TypeError`` where NumPy does not know it (ml_dtypes teaches it)."""
        import numpy

        return numpy.dtype(self.type_name)


_TYPE_NAMES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)

INT8 = CHAR = NcclDataType.INT8
UINT8 = NcclDataType.UINT8
INT32 = INT = NcclDataType.INT32
UINT32 = NcclDataType.UINT32
INT64 = NcclDataType.INT64
UINT64 = NcclDataType.UINT64
FLOAT16 = HALF = NcclDataType.FLOAT16
FLOAT32 = FLOAT = NcclDataType.FLOAT32
FLOAT64 = DOUBLE = NcclDataType.FLOAT64
BFLOAT16 = NcclDataType.BFLOAT16
FLOAT8E4M3 = NcclDataType.FLOAT8E4M3
FLOAT8E5M2 = NcclDataType.FLOAT8E5M2


class HostDevice(Device):
    """The device of a communicator on the host; its number is the one by which DLPack consumers know the CPU."""

    __slots__ = ()

    device_id = -1

    def __init__(self) -> None:
        super().__init__((DeviceKind.HOST, 0))


class CudaDevice(Device):
    """The device of a communicator on a GPU."""

    __slots__ = ()

    @property
    def device_id(self) -> int:
        """The number of the GPU."""
        return self.id


def gpu_of(device: object, op: str) -> int:
    """The number of the GPU that an argument names."""
    number = getattr(device, "device_id", None)
    if number is None and hasattr(device, "index") and hasattr(device, "type"):
        number = device.index or 0 if device.type == "cuda" else -1
    if number is None:
        number = device
    if isinstance(number, str):
        known = Device(number)
        number = known.id if known.kind is DeviceKind.CUDA else -1
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"device: a GPU is an int, a str or a device, not {type(device).__name__}")
    if not 0 <= number < 1 << 31:
        from ._errors import NcclInvalid

        raise NcclInvalid(f"device: {device!r} is not a GPU", op=op)
    return number


def current_gpu() -> int:
    """The current GPU of torch, where it is in use here; else the first."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


@dataclass(frozen=True, slots=True)
class WaitSignalDesc:
    """Signals to wait for: how many, from whom, on which counter."""

    peer: int
    op_count: int = 1
    signal_index: int = 0
    context: int = 0


@dataclass(kw_only=True, slots=True)
class NCCLConfig:
    """Settings of a communicator; ``None`` leaves one at its default (in `Communicator.split`: at the parent's).

    Read afresh at every use. The fields of NCCL that steer GPUs are accepted and do nothing here.
    """

    blocking: bool | None = None
    """Whether calls wait for their end (the default). Otherwise they return at once and are awaited or polled."""
    comm_name: str | None = None
    """What it is called in errors and logs."""
    num_rma_ctx: int | None = None
    """How many contexts one-sided signals have; 4 by default, equal on all ranks."""
    num_rma_sig: int | None = None
    """How many signals each context has; 32 by default, equal on all ranks."""

    timeout: float | None = None
    """Towline's own: the longest wait for another rank, in seconds; 30 by default."""
    listen: str | Iterable[str] | None = None
    """Towline's own: the addresses (``"10.0.0.5:0"``) on which this rank listens for ranks of other hosts."""
    advertise: str | Iterable[str] | None = None
    """Towline's own: the addresses by which other hosts reach this rank, where they differ."""
    require: str | Iterable[str] | None = None
    """Towline's own: only those paths to other ranks."""
    forbid: str | Iterable[str] | None = None
    """Towline's own: none of those paths."""
    tls: _native.Tls | bool | None = None
    """Towline's own: encrypts what goes over TCP between ranks, as that of `towline.Endpoint` does: ``True`` by the tickets that
    ranks give each other, a `towline.Tls` by certificates for the communicator's name. All ranks must agree, and groups that are split
    off are encrypted too. `get_unique_id` has its own, for the meeting."""
    quotas: _native.Quotas | None = None
    """Towline's own: how much of this rank one other may use, and how many unauthenticated connections it takes."""
    share_between_containers: bool | None = None
    """Towline's own: shares memory with ranks of the same user in other containers of this host, where they say so too."""
    nixl_lend_over: str | Iterable[str] | None = None
    """Towline's own: lends windows by NIXL over these devices, as `towline.Endpoint` does, and gives away as much: other ranks can read and
    write all memory of this process."""
    device: object = None
    """Towline's own: the GPU, for a group of NCCL's: its number, ``"cuda:1"`` or a device. By default the current one of
    torch, else GPU 0."""

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | int | None = None
    traffic_class: int | None = None
    collnet_enable: bool | int | None = None
    cta_policy: int | None = None
    shrink_share: bool | int | None = None
    nvls_ctas: int | None = None
    n_channels_per_net_peer: int | None = None
    nvlink_centric_sched: bool | int | None = None
    graph_usage_mode: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: bool | int | None = None
    launch_order_implicit: bool | int | None = None
    rma_eager_init: bool | int | None = None
    host_cft_mode: int | None = None
    nvls_host_mode: int | None = None

    def _make(self) -> _native.CommConfig:
        return _native.CommConfig(
            blocking=None if self.blocking is None else bool(self.blocking),
            timeout=self.timeout,
            contexts=self.num_rma_ctx,
            signals=self.num_rma_sig,
            name=self.comm_name,
            listen=names(self.listen),
            advertise=names(self.advertise),
            require=names(self.require),
            forbid=names(self.forbid),
            gpu=None if self.device is None else gpu_of(self.device, "config"),
            tls=_native.Tls.by_ticket() if self.tls is True else (self.tls or None),
            quotas=self.quotas,
            share_between_containers=self.share_between_containers,
            nixl_lend_over=names(self.nixl_lend_over) or None,
        )


def names(value: str | Iterable[str] | None) -> list[str]:
    """One name, several, or none."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


@dataclass(frozen=True, slots=True)
class NCCLCommProperties:
    """What a communicator can do."""

    rank: int
    nranks: int
    cuda_dev: int
    """The GPU; -1 on the host."""
    nvml_dev: int
    device_api_support: bool
    """False: no kernel runs here that could use it."""
    multimem_support: bool
    gin_type: int
    railed_gin_type: int
    n_lsa_teams: int | None
    """How many groups of ranks share memory: 1 where all do; ``None`` where that is not known."""
    host_rma_support: bool
    """True: windows, puts, gets, signals and waits work with every rank."""


class VersionInfo(NamedTuple):
    """The version of Towline."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def get_version() -> VersionInfo:
    """The version of the library behind this module: Towline's, since there is no NCCL."""
    major, minor, patch = _native.__version__.split("-")[0].split(".")
    return VersionInfo(int(major), int(minor), int(patch))
