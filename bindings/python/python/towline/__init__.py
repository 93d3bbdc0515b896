"""Registered memory and one-sided transfers between inference workers.

Describe bytes once, register them, hand another worker a small ticket, and it reads or writes them at the speed of the
link in between.

>>> import towline
>>> prefill = towline.Endpoint("prefill")                 # one worker owns the bytes
>>> cache = towline.empty(1 << 20)
>>> cache[:5] = list(b"hello")
>>> region = prefill.register(cache, "read")
>>> ticket = str(region.ticket())                         # travels by your own channel
>>> decode = towline.Endpoint("decode")                   # usually another process
>>> remote = decode.import_(ticket)
>>> target = bytearray(1 << 20)
>>> with decode.register(target, "none") as local:
...     decode.read(remote, local, notify="taken").wait() # or: await decode.read(...)
>>> bytes(target[:5])
b'hello'
>>> prefill.receive().message
b'taken'
>>> decode.close(); prefill.close()
"""

from . import _native

if not _native.is_main_interpreter():
    raise ImportError("towline works in the main interpreter only: use it there, or in a process of its own")

from ._endpoint import Access, Endpoint, Isolation
from ._errors import (
    Canceled,
    Disconnected,
    Error,
    Exhausted,
    Internal,
    Invalid,
    Native,
    NotFound,
    PermissionDenied,
    Protocol,
    Stale,
    Timeout,
    Unavailable,
    Unsupported,
)
from ._native import (
    Audit,
    ExplainedPath,
    Explanation,
    Layout,
    Notification,
    PathStats,
    PeerAudit,
    Quotas,
    Region,
    Remote,
    SharedArray,
    Span,
    Stats,
    Ticket,
    Tls,
    paths,
)
from ._part import Part
from ._program import Program
from ._transfer import BlockFailure, Transfer
from .aio import CompletionQueue
from .arrays import empty
from .connect import (
    Connector,
    Descriptor,
    Device,
    DeviceKind,
    OperationKind,
    OperationStatus,
    RdmaMetadata,
    ReadableOperation,
    ReadOperation,
    SerializedDescriptor,
    WritableOperation,
    WriteOperation,
)

__version__: str = _native.__version__

__all__ = [
    "Access",
    "Audit",
    "BlockFailure",
    "Canceled",
    "CompletionQueue",
    "Connector",
    "Descriptor",
    "Device",
    "DeviceKind",
    "Disconnected",
    "Endpoint",
    "Error",
    "Exhausted",
    "ExplainedPath",
    "Explanation",
    "Internal",
    "Invalid",
    "Isolation",
    "Layout",
    "Native",
    "NotFound",
    "Notification",
    "OperationKind",
    "OperationStatus",
    "Part",
    "PathStats",
    "PeerAudit",
    "PermissionDenied",
    "Program",
    "Protocol",
    "Quotas",
    "RdmaMetadata",
    "ReadOperation",
    "ReadableOperation",
    "Region",
    "Remote",
    "SerializedDescriptor",
    "SharedArray",
    "Span",
    "Stale",
    "Stats",
    "Ticket",
    "Timeout",
    "Tls",
    "Transfer",
    "Unavailable",
    "Unsupported",
    "WritableOperation",
    "WriteOperation",
    "empty",
    "paths",
]
