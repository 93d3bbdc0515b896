"""What stands where the original has NIXL's own modules."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn


class _NixlImportProxy:
    """NIXL's module of that name, imported when something of it is used: nothing here needs it."""

    def __init__(self, name: str = "nixl._api", error: ImportError | None = None) -> None:
        self._name = name
        self._error = error

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if self._error is not None:
            self._refuse(self._error)
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            self._refuse(error)
        return getattr(module, attribute)

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        self._refuse(self._error)

    def _refuse(self, error: ImportError | None) -> NoReturn:
        raise ImportError(
            "NIXL Python bindings must be installed to use NIXL itself (towline.nixl_connect does not need them)"
        ) from error
