"""What a run found: rows with the keys of `towline bench`, and what could not be measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

GIB = float(1 << 30)
_SHOWN = {"us": "{:.2f} µs", "ms": "{:.3f} ms", "GiB/s": "{:.2f} GiB/s"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured row; `towline bench --help` says what the fields mean."""

    name: str
    unit: str
    ours: float
    path: str | None = None
    op: str | None = None
    bytes: int = 0
    blocks: int = 0
    block_size: int = 0
    threads: int | None = None
    streams: int | None = None
    limit: float | None = None
    target: float | None = None
    goal: float | None = None
    p99: float | None = None
    rounds: int = 1
    against: str = ""

    def _near(self, limit: float) -> float:
        if self.unit == "GiB/s":
            return self.ours / limit
        return limit / self.ours if self.ours > 0 else 1.0

    @property
    def ratio(self) -> float | None:
        """How near ours is to the limit, or where there is none to the target: 1.0 is equal, more is better."""
        asked = self.target if self.limit is None else self.limit
        return None if asked is None else self._near(asked)

    @property
    def met(self) -> bool | None:
        """Whether what is asked for is reached; None where nothing is."""
        judged: list[bool] = []
        if self.goal is not None and self.ratio is not None:
            judged.append(self.ratio >= self.goal)
        if self.target is not None:
            judged.append(self._near(self.target) >= 1.0)
        return all(judged) if judged else None

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio": self.ratio, "met": self.met}

    def line(self) -> tuple[str, ...]:
        show = _SHOWN[self.unit].format
        asked = ""
        if self.goal is not None:
            asked = f"ratio {self.goal:.2f}"
        elif self.target is not None:
            asked = show(self.target)
        return (
            self.name,
            self.path or "-",
            show(self.ours),
            "-" if self.limit is None else show(self.limit),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
            asked,
            {True: "met", False: "NOT MET", None: ""}[self.met],
        )


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A row that could not be measured, and why; where that is no failure, the machine lacks something."""

    name: str
    reason: str
    failed: bool = False


def table(rows: Iterable[Row]) -> str:
    """The rows as plain columns."""
    lines: list[tuple[str, ...]] = [("shape", "path", "ours", "limit", "ratio", "asked", "")]
    lines += [row.line() for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def p99(values: Sequence[float]) -> float:
    """What 99 of 100 stay below."""
    return sorted(values)[len(values) * 99 // 100]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
