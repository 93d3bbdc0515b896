"""The package's own benchmark runs, and its rows have the keys that `towline bench` reads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

import towline
from towline.bench import __main__ as bench
from towline.bench import _nixl
from towline.bench._figures import FIGURES, Bench, Pace, by_library, longest_pause, nixl_polling
from towline.bench._peer import Peer
from towline.bench._reference import Blocking
from towline.bench._rows import Row, Skipped, table

KEYS = {
    *("name", "path", "op", "bytes", "blocks", "block_size", "threads", "streams", "unit", "ours", "limit"),
    *("target", "ratio", "goal", "met", "p99", "rounds", "against"),
}
TINY = Pace(rounds=1, singles=3, notifications=150, large=1 << 20, blocks=64)


def run(*arguments: str, code: int = 0, answers: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "towline.bench", *arguments],
        input=answers,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_every_figure_is_measured_between_two_processes() -> None:
    rows, skipped = asyncio.run(bench.measured(TINY, Blocking()))
    assert not [one for one in skipped if one.failed], skipped
    found = {row.name for row in rows} | {one.name for one in skipped}
    assert found == {
        *("py-4k-operation", "py-4k-simulated-polling", "py-4k-nixl", "py-4k-nixl-polling"),
        *("py-overhead", "py-overhead-transfer", "py-operation-over-transfer"),
        *("py-notifications", "py-1m-pause", "py-1m", "py-1m-transfer", "py-64x4k"),
    }
    for row in rows:
        assert set(row.document()) == KEYS
        assert row.path in (None, *towline.paths()) and row.rounds > 0 and row.against, row
    polling = next(row for row in rows if row.name == "py-4k-simulated-polling")
    assert polling.met is None and "simulated" in polling.against
    assert "py-notifications" in table(rows)


def test_the_document_has_the_rows_and_what_they_were_measured_with() -> None:
    document = json.loads(run("--json", "--quick", "--repeat", "1", "--filter", "py-4k-operation"))
    assert [row["name"] for row in document["rows"]] == ["py-4k-operation"]
    assert set(document["rows"][0]) == KEYS
    assert document["rows"][0]["unit"] == "ms" and document["rows"][0]["target"] == 0.3
    assert document["skipped"] == []
    assert document["python"]["build"] in ("debug", "release")
    assert document["python"]["towline"] == towline.__version__


def test_the_rows_can_be_listed_and_a_wrong_name_is_refused() -> None:
    assert run("--list").split() == [name for names, _ in FIGURES for name in names]
    assert run("--list", "--filter", "pause").split() == ["py-64m-pause"]
    run("--filter", "no-such-row", code=2)
    run("--repeat", "0", code=2)


def test_a_program_that_measures_rust_is_asked_line_by_line() -> None:
    answers = json.dumps({"prepared": 0}) + "\n" + json.dumps({"error": "no memory"}) + "\n"
    said = run(
        *("--rust-on-stdin", "--quick", "--repeat", "1", "--filter", "py-64m-pause"),
        answers=answers,
        code=1,
    )
    lines = [json.loads(line) for line in said.splitlines()]
    assert lines[0] == {"step": "py-64m-pause"}
    assert set(lines[1]["prepare"]) == {"ticket", "bytes", "block", "remote", "local"}
    assert set(lines[2]["operation"]) == {"metadata", "bytes"}
    (skipped,) = lines[3]["report"]["skipped"]
    assert skipped["failed"] and "no memory" in skipped["reason"]


def test_a_library_with_the_interface_of_nixl_connect_can_be_measured() -> None:
    async def measure() -> Row:
        with Peer() as peer:
            return await by_library(Bench(peer, Blocking(), TINY), "towline.nixl_connect", "ours")

    assert asyncio.run(measure()).ours > 0


def test_nixl_itself_is_measured_or_the_row_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer() as peer:
        found = nixl_polling(Bench(peer, Blocking(), TINY))
        if isinstance(found, Row):
            assert found.ours > 0 and "NIXL" in found.against
        else:
            assert "nixl" in found.reason.lower() and not found.failed
        monkeypatch.setattr(_nixl, "PACKAGES", ("no_such_nixl",))
        absent = nixl_polling(Bench(peer, Blocking(), TINY))
    assert isinstance(absent, Skipped) and "no_such_nixl" in absent.reason and not absent.failed


def test_a_blocked_loop_shows_as_a_pause() -> None:
    async def blocks() -> None:
        import time

        time.sleep(0.05)

    assert asyncio.run(longest_pause(blocks())) >= 0.04


@pytest.mark.parametrize(
    ("row", "ratio", "met"),
    [
        (Row(name="a", unit="GiB/s", ours=9.0, limit=10.0, goal=0.85), 0.9, True),
        (Row(name="b", unit="us", ours=4.0, limit=1.0, goal=0.3), 0.25, False),
        (Row(name="c", unit="ms", ours=5.0, target=10.0), 2.0, True),
        (Row(name="d", unit="us", ours=-0.5, target=60.0), 1.0, True),
        (Row(name="e", unit="ms", ours=0.5, limit=0.1, target=1.0), 0.2, True),
        (Row(name="f", unit="ms", ours=5.0), None, None),
    ],
)
def test_a_row_is_judged_as_the_command_judges_its_own(
    row: Row, ratio: float | None, met: bool | None
) -> None:
    assert (row.ratio, row.met) == (ratio, met)
