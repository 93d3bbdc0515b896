"""The two models: of pydantic where it is installed, since callers use its methods, and otherwise alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._pydantic_models import RdmaMetadata, SerializedDescriptor
else:
    try:
        from ._pydantic_models import RdmaMetadata, SerializedDescriptor
    except ImportError:
        from ._plain_models import RdmaMetadata, SerializedDescriptor

__all__ = ["RdmaMetadata", "SerializedDescriptor"]
