"""A drop-in for ``dynamo.nixl_connect``: the same names on Towline's engine, without NIXL.

Code written for Dynamo runs unmodified when ``dynamo.nixl_connect`` resolves to this module: put the directory that
``python -m towline dropin-path`` prints first on the path, or call `towline.dropin.install`. Peers that run the original are
understood too, where NIXL is installed: metadata of theirs is recognised, and ``Connector(offer="nixl")``, or a drop-in that
was installed with ``offer="nixl"``, makes metadata that they understand.

Names, argument orders, exception types and the fields of the metadata are those of the original. What is better:

* an operation starts when it is made, its end wakes who waits (nothing polls), and `wait_for_completion` takes a timeout;
* a peer that dies, a deadline, a mismatch: both sides end as ERRORED or CANCELLED, with the cause;
* passive operations can be cancelled; what has ended keeps its status; a locally cancelled one does not raise;
* a registration made by `Descriptor.register_memory` stays, whatever operations come and go;
* a connector can be on both ends, and everything can be used from any thread and any event loop;
* memory with gaps is never a target, ``bytes`` are never written, and a ``bytearray`` cannot be resized while it is described;
* device names are read exactly: ``"cudafoo"`` and ``"cuda:-1"`` are refused.

`towline.connect` has the same operations with Towline's own errors.
"""

from __future__ import annotations

from .._devices import Device, DeviceKind, OperationKind, OperationStatus
from ._connector import Connection, Connector, Remote
from ._descriptor import Descriptor
from ._models import RdmaMetadata, SerializedDescriptor
from ._nixl import _NixlImportProxy as _NixlImportProxy
from ._operations import (
    AbstractOperation,
    ActiveOperation,
    PassiveOperation,
    ReadableOperation,
    ReadOperation,
    WritableOperation,
    WriteOperation,
)

nixl_api = _NixlImportProxy("nixl._api")
nixl_bindings = _NixlImportProxy("nixl._bindings")

__all__ = [
    "AbstractOperation",
    "ActiveOperation",
    "Connection",
    "Connector",
    "Descriptor",
    "Device",
    "DeviceKind",
    "OperationKind",
    "OperationStatus",
    "PassiveOperation",
    "RdmaMetadata",
    "ReadOperation",
    "ReadableOperation",
    "Remote",
    "SerializedDescriptor",
    "WritableOperation",
    "WriteOperation",
]
