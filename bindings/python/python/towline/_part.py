"""One part of a request over several regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import Layout, Region, Remote, Span

Blocks = tuple["Layout", Any, "Layout", Any]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of a request over several regions of one peer: see `Endpoint.read`.

    Moves the whole of ``local``, from or to the start of ``remote``, or what one of ``at``, ``spans`` and ``blocks`` says; where it
    says nothing, what the request says of all its parts.
    """

    remote: Remote
    local: Region | Span
    at: int | tuple[int, int, int] | None = None
    spans: Any = None
    blocks: Blocks | None = None
