"""Groups of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _native
from .._errors import Error
from ._errors import NcclInvalid


def group_start() -> None:
    """Begins a group of calls on this thread: they start together at the matching `group_end`. Groups nest."""
    _native.group_start()


def group_end(*, simulate: bool = False) -> None:
    """Ends a group; the outermost end launches its calls, and on blocking communicators waits for them.

    Where a call inside the group was refused, raises that error again and launches nothing; the communicators stay usable.
    """
    if simulate:
        raise NcclInvalid("simulate: there is no model of what calls cost", op="group_end")
    _native.group_end()


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Makes the calls of a ``with`` block a group. Where the block raises, nothing is launched.

    A group belongs to its thread: do not ``await`` inside.
    """
    _native.group_start()
    try:
        yield
    except BaseException as error:
        _native.group_poison("", f"the block was left by {type(error).__name__}: {error}")
        with contextlib.suppress(Error):
            _native.group_end()
        raise
    _native.group_end()
