"""Communicators under the names of nccl4py's core module, on host memory and, through NCCL, on GPUs.

A fixed group of ranks (threads, processes, hosts) registers buffers, opens windows over them, puts, gets, signals, and
reduces.

>>> from towline import nccl
>>> comms = nccl.Communicator.init_all(2)                    # usually one per process: Communicator.init
>>> buffers = [nccl.empty(4, "float32") for _ in comms]
>>> with nccl.group():                                       # one thread drives both ranks
...     windows = [comm.register_window(buffer) for comm, buffer in zip(comms, buffers)]
>>> buffers[0][:] = 1.5
>>> with nccl.group():
...     for comm, buffer in zip(comms, buffers):
...         _ = comm.allreduce(buffer, buffer, nccl.SUM)
>>> float(buffers[1][3])
1.5
>>> _ = comms[0].put_signal(buffers[0][:1], 1, windows[0], peer_window_offset=3)
>>> _ = comms[1].wait_signal(nccl.WaitSignalDesc(peer=0))
>>> for comm in comms:
...     comm.destroy()
"""

from .. import _native
from ._communicator import Communicator
from ._errors import (
    ClosedResource,
    NCCLCanceled,
    NCCLDisconnected,
    NCCLError,
    NcclInvalid,
    NCCLStale,
    NCCLTimeout,
)
from ._group import group, group_end, group_start
from ._handles import (
    CustomRedOp,
    Operation,
    PeerView,
    RegisteredBufferHandle,
    RegisteredWindowHandle,
)
from ._memory import empty, mem_alloc, mem_free
from ._types import (
    AVG,
    BFLOAT16,
    CHAR,
    DOUBLE,
    FLOAT,
    FLOAT8E4M3,
    FLOAT8E5M2,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HALF,
    INT,
    INT8,
    INT32,
    INT64,
    MAX,
    MIN,
    PROD,
    SUM,
    UINT8,
    UINT32,
    UINT64,
    CommShrinkFlag,
    CudaDevice,
    HostDevice,
    NCCLCommProperties,
    NCCLConfig,
    NcclDataType,
    NcclRedOp,
    Result,
    VersionInfo,
    WaitSignalDesc,
    WindowFlag,
    get_error_string,
    get_version,
)
from ._unique_id import UniqueId, get_unique_id

__version__: str = _native.__version__

__all__ = [
    "AVG",
    "BFLOAT16",
    "CHAR",
    "ClosedResource",
    "CommShrinkFlag",
    "Communicator",
    "CudaDevice",
    "CustomRedOp",
    "DOUBLE",
    "FLOAT",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FLOAT8E4M3",
    "FLOAT8E5M2",
    "HALF",
    "HostDevice",
    "INT",
    "INT32",
    "INT64",
    "INT8",
    "MAX",
    "MIN",
    "NCCLCanceled",
    "NCCLCommProperties",
    "NCCLConfig",
    "NCCLDisconnected",
    "NCCLError",
    "NCCLStale",
    "NCCLTimeout",
    "NcclDataType",
    "NcclInvalid",
    "NcclRedOp",
    "Operation",
    "PROD",
    "PeerView",
    "RegisteredBufferHandle",
    "RegisteredWindowHandle",
    "Result",
    "SUM",
    "UINT32",
    "UINT64",
    "UINT8",
    "UniqueId",
    "VersionInfo",
    "WaitSignalDesc",
    "WindowFlag",
    "__version__",
    "empty",
    "get_error_string",
    "get_unique_id",
    "get_version",
    "group",
    "group_end",
    "group_start",
    "mem_alloc",
    "mem_free",
]
