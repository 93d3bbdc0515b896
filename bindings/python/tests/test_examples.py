"""The examples run, and the texts that show one show the one that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/python"


def run(example: str, *arguments: str) -> str:
    """Runs an example to its end and returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_quick_start_moves_bytes_and_says_how() -> None:
    printed = run("quickstart.py")
    assert "1048576 bytes over inproc" in printed
    assert "-> inproc" in printed and "- tcp" in printed, "it does not say why not the others"


def test_the_pages_of_a_request_move_between_two_processes() -> None:
    printed = run("paged_kv_cache.py")
    assert "393216 bytes over mapped into the pages" in printed
    assert "are free again" in printed


@pytest.mark.parametrize("page", ["README.md", "bindings/python/README.md"])
def test_the_quick_start_in_a_readme_is_the_one_that_runs(page: str) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert (EXAMPLES / "quickstart.py").read_text() in shown, f"{page} shows another quick start"


def test_every_example_is_run_by_a_test() -> None:
    tests = Path(__file__).read_text()
    missing = [example.name for example in EXAMPLES.glob("*.py") if f'"{example.name}"' not in tests]
    assert not missing
