"""Makes ``dynamo.nixl_connect`` resolve to `towline.nixl_connect`.

Either put the directory that ``python -m towline dropin-path`` prints first on the path::

    PYTHONPATH=$(python -m towline dropin-path) python -m my_worker

or, at the start of the program::

    import towline.dropin
    towline.dropin.install()

Where peers run the original, passive operations have to be offered to NIXL: ``dropin-path --offer nixl``, or
``install(offer="nixl")``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Literal

_PACKAGE = "dynamo"
_NAME = "dynamo.nixl_connect"
_DIRECTORY = Path(__file__).parent / "_dropin"
_OFFERED_TO_NIXL = Path(__file__).parent / "_dropin_nixl"

Offer = Literal["towline", "nixl"]
"""Who can take part in passive operations: peers that use Towline, or peers that use NIXL."""


def path(offer: Offer = "towline") -> Path:
    """The directory to put first on the path. ``offer`` is that of connectors that are not told."""
    return _OFFERED_TO_NIXL if offer == "nixl" else _DIRECTORY


class _Finder(MetaPathFinder):
    """Finds our module before anything else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        file = _DIRECTORY / "dynamo" / "nixl_connect" / "__init__.py"
        return importlib.util.spec_from_file_location(fullname, file)


class _NamespaceFinder(MetaPathFinder):
    """Finds the package around it where nothing else does: Dynamo need not be installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE:
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(_DIRECTORY / "dynamo")]
        return spec


_finder = _Finder()
_namespace_finder = _NamespaceFinder()


def install(*, offer: Offer | None = None) -> None:
    """Makes ``import dynamo.nixl_connect`` give `towline.nixl_connect` from now on. Again changes nothing but the offer.

    Call it before the first import of ``dynamo.nixl_connect``: what was imported from the original before stays as it is, and a
    warning says so. ``offer`` says to whom connectors offer memory that are not told; ``"nixl"`` where peers run the original.
    """
    from .nixl_connect._connector import offer_by_default

    if offer is not None:
        offer_by_default(offer)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
        sys.meta_path.append(_namespace_finder)
    from . import nixl_connect

    before = sys.modules.get(_NAME)
    if before is not None and before is not nixl_connect:
        warnings.warn(
            "dynamo.nixl_connect was imported before towline.dropin.install(); names that were imported from it still "
            "are the original's",
            RuntimeWarning,
            stacklevel=2,
        )
        sys.modules[_NAME] = nixl_connect
        package = sys.modules.get(_PACKAGE)
        if package is not None:
            package.nixl_connect = nixl_connect  # type: ignore[attr-defined]


def uninstall() -> None:
    """Takes `install` back, for the imports to come."""
    for finder in (_finder, _namespace_finder):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    from . import nixl_connect

    if sys.modules.get(_NAME) is nixl_connect:
        del sys.modules[_NAME]
        package = sys.modules.get(_PACKAGE)
        if package is not None and getattr(package, "nixl_connect", None) is nixl_connect:
            del package.nixl_connect
