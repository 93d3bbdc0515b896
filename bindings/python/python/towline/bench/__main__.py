"""``python -m towline.bench``: measures what the package costs."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__, _native
from ._figures import FIGURES, Bench, Lacking, Pace
from ._peer import Peer
from ._reference import Blocking, Command, Reference, say
from ._rows import Row, Skipped, table


async def measured(
    pace: Pace, reference: Reference, wanted: str = ""
) -> tuple[list[Row], list[Skipped]]:
    """The rows whose names contain that text, and what could not be measured."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for names, figure in FIGURES:
        if not any(wanted in name for name in names):
            continue
        reference.step(names[0])
        # Each figure has a process of its own, so that none pays for what another one has left there.
        with Peer() as peer:
            try:
                async for found in figure(Bench(peer, reference, pace)):
                    if wanted not in found.name:
                        continue
                    if isinstance(found, Row):
                        rows.append(found)
                    else:
                        skipped.append(found)
            except Exception as error:
                reason = str(error) if isinstance(error, Lacking) else f"{type(error).__name__}: {error}"
                skipped.append(Skipped(names[0], reason, failed=not isinstance(error, Lacking)))
    return rows, skipped


def interpreter() -> dict[str, Any]:
    """What the figures were measured with."""
    try:
        numpy: str | None = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        numpy = None
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "towline": __version__,
        "build": _native.__build__,
        "numpy": numpy,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m towline.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer notifications")
    parser.add_argument("--filter", default="", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--repeat", type=int, metavar="ROUNDS", help="this many rounds of each row")
    parser.add_argument("--list", action="store_true", help="list the rows instead of measuring them")
    parser.add_argument(
        "--rust-on-stdin",
        action="store_true",
        help="ask the program at standard input and output for the Rust figures, as towline bench --python does",
    )
    options = parser.parse_args(arguments)
    names = [name for names, _ in FIGURES for name in names if options.filter in name]
    if not names:
        parser.error(f"no row has a name with {options.filter!r} in it; --list shows them all")
    if options.list:
        print("\n".join(names))
        return 0
    pace = Pace.quick() if options.quick else Pace()
    if options.repeat is not None:
        if options.repeat < 1:
            parser.error("--repeat: at least one round is needed")
        pace = dataclasses.replace(pace, rounds=options.repeat)
    if _native.__build__ != "release":
        print("towline: this is a debug build of the package; its figures mean little", file=sys.stderr)
    reference = Command() if options.rust_on_stdin else Blocking()
    rows, skipped = asyncio.run(measured(pace, reference, options.filter))
    document = {
        "rows": [row.document() for row in rows],
        "skipped": [{**dataclasses.asdict(one), "path": None} for one in skipped],
        "python": interpreter() | {"reference": reference.how},
    }
    if options.rust_on_stdin:
        say({"report": document})
    elif options.json:
        print(json.dumps(document, indent=2))
    else:
        print(table(rows))
        for one in skipped:
            print(f"skipped {one.name}: {one.reason}")
        print(f"\nCompared with {reference.how}; `towline bench --python` compares with Rust code.")
    return 1 if any(one.failed for one in skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
