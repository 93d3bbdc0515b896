"""Makes ``dynamo.nixl_connect`` resolve to `towline.nixl_connect`.

Either put the directory that ``python -m towline dropin-path`` prints first on the path::

    PYTHONPATH=$(python -m towline dropin-path) python -m my_worker

or, at the start of the program::

    import towline.dropin
    towline.dropin.install()

Where peers run the original, passive operations have to be offered to NIXL: ``dropin-path --offer nixl``, or
``install(offer="nixl")``. NIXL then uses RDMA devices. Others it uses only where they are named: ``dropin-path --nixl-devices lo``, or
``install(nixl_devices=["lo"])``. Without either, operations with such peers are refused.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Literal

from .nixl import named

_PACKAGE = "dynamo"
_NAME = "dynamo.nixl_connect"
_DIRECTORY = Path(__file__).parent / "_dropin"
_OFFERED_TO_NIXL = Path(__file__).parent / "_dropin_nixl"

Offer = Literal["towline", "nixl"]
"""Who can take part in passive operations: peers that use Towline, or peers that use NIXL."""


_MODULE = '''"""Stands for Dynamo's module of this name, and says which devices NIXL may use."""

import sys

import towline.nixl_connect
from towline.nixl_connect._connector import offer_by_default

offer_by_default({offer!r}, {devices!r})
# The module itself, so that patches of its names are seen by both names.
sys.modules[__name__] = towline.nixl_connect
'''


def path(offer: Offer = "towline", nixl_devices: Sequence[str] = ()) -> Path:
    """The directory to put first on the path. ``offer`` and ``nixl_devices`` are those of connectors that set none.

    With devices it is made in the user's cache (``$XDG_CACHE_HOME``, else ``~/.cache``).
    """
    devices = sorted(named(nixl_devices, "nixl_devices"))
    if not devices:
        return _OFFERED_TO_NIXL if offer == "nixl" else _DIRECTORY
    text = _MODULE.format(offer=offer, devices=devices)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    made = cache / "towline" / f"dropin-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    package = made / "dynamo" / "nixl_connect"
    package.mkdir(mode=0o700, parents=True, exist_ok=True)
    # At once, so that a program which starts meanwhile finds all of it.
    with tempfile.NamedTemporaryFile("w", dir=package, suffix=".new", delete=False) as file:
        file.write(text)
    os.replace(file.name, package / "__init__.py")
    return made


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


def install(*, offer: Offer | None = None, nixl_devices: Sequence[str] | None = None) -> None:
    """Makes ``import dynamo.nixl_connect`` give `towline.nixl_connect` from now on. Again changes nothing but the offer.

    Call it before the first import of ``dynamo.nixl_connect``: what was imported from the original before stays as it is, and a
    warning says so. ``offer`` says to whom connectors offer memory that do not set it; ``"nixl"`` where peers run the original. ``nixl_devices`` names
    the network devices that NIXL may use for them; see `towline.nixl_connect.Connector`.
    """
    from .nixl_connect._connector import offer_by_default

    if offer is not None or nixl_devices is not None:
        offer_by_default(offer, nixl_devices)
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
