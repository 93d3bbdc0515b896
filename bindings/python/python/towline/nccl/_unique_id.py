"""Ids of meetings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import _native
from ._errors import NcclInvalid
from ._types import gpu_of, names

if TYPE_CHECKING:
    import numpy

LENGTH = 128


class UniqueId:
    """The id of a meeting: 128 bytes that carry where it takes place and the secret that lets a rank in.

    Everyone who has it can join: hand it to the ranks by a channel that you trust. ``bytes(id)`` and ``str(id)`` are for that;
    ``repr`` does not show the secret. An id serves one meeting.
    """

    __slots__ = ("_data", "__weakref__")

    def __init__(self, data: bytes | str | None = None) -> None:
        if data is None:
            self._data = bytes(LENGTH)
        elif isinstance(data, str):
            self._data = _native.unique_id_from_text(data)
        else:
            self._data = bytes(memoryview(data))
            if len(self._data) != LENGTH:
                raise NcclInvalid(
                    f"data: an id has {LENGTH} bytes, not {len(self._data)}", op="unique_id"
                )

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """The id with those 128 bytes."""
        return cls(bytes(memoryview(data)))

    @property
    def as_bytes(self) -> bytes:
        """Its 128 bytes."""
        return self._data

    @property
    def as_ndarray(self) -> numpy.ndarray[Any, Any]:
        """Its bytes as a NumPy array that cannot be written, for channels that carry arrays."""
        import numpy

        return numpy.frombuffer(self._data, numpy.uint8)

    @property
    def is_empty(self) -> bool:
        """Whether it is the empty one, which names no meeting."""
        return not any(self._data)

    @property
    def _is_nccl(self) -> bool:
        """Whether it is like an id of NCCL's: a random number, then the address of a socket of IPv4 or IPv6."""
        family = int.from_bytes(self._data[8:10], sys.byteorder)
        return not self._data.startswith(b"TLid") and family in (2, 10)

    def __bytes__(self) -> bytes:
        return self._data

    def __str__(self) -> str:
        return _native.unique_id_texts(self._data)[1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UniqueId):
            return NotImplemented
        return self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        if self.is_empty:
            return "UniqueId(empty)"
        try:
            return _native.unique_id_texts(self._data)[0]
        except NcclInvalid:
            return "UniqueId(not an id)"

    def __reduce__(self) -> tuple[type[UniqueId], tuple[bytes]]:
        return (UniqueId, (self._data,))


def get_unique_id(
    empty: bool = False,
    *,
    listen: str | Iterable[str] | None = None,
    advertise: str | Iterable[str] | None = None,
    device: object = None,
    tls: bool = False,
) -> UniqueId:
    """Opens a meeting and returns its id; with ``empty``, an id of zeros to be filled by your own channel.

    This process must live until every rank has joined. Without addresses the meeting takes place on this host only (or where
    ``TOWLINE_LISTEN`` says); ``listen`` names addresses that other hosts reach, ``advertise`` those that are written into
    the id, where they differ. What is said there is encrypted under the id's secret in any case; with ``tls`` ranks of other hosts
    come through TLS 1.3, and what was recorded stays secret when the id becomes known later.

    With a ``device`` that is a GPU (``"cuda"``), the id is one of NCCL's: the group is on GPUs, and NCCL in any other program
    takes it. Ids that NCCL made elsewhere serve too: ``UniqueId.from_bytes``.
    """
    if empty:
        return UniqueId()
    if device is not None and device != -1 and str(device) != "cpu":
        gpu_of(device, "get_unique_id")
        return UniqueId(_native.nccl_unique_id())
    return UniqueId(_native.unique_id(names(listen), names(advertise), tls))
