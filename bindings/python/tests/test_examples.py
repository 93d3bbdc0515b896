"""The examples run, the pages that show one show the one that runs, and links between pages lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/python"
NATS = ROOT / ".tools/nats-server"


def run(example: str, *arguments: str, **environment: str) -> str:
    """Runs an example to its end and returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout


class Running:
    """A program that runs until it is asked to stop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def until(self, pattern: str) -> str:
        """Reads what it prints up to a line with that in it, and returns what matched."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if found := re.search(pattern, line):
                return found[0]
        raise AssertionError(f"it ended without saying {pattern!r}: {''.join(seen)}")


@contextlib.contextmanager
def running(*command: str, codes: tuple[int, ...] = (0,)) -> Iterator[Running]:
    """Starts a program, and stops it by SIGTERM, when it must exit with one of those codes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield Running(process)
        process.terminate()
        rest, _ = process.communicate(timeout=30)
        assert process.returncode in codes, f"exit code {process.returncode}: {rest}"
        assert "Traceback" not in rest, rest
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def nats_server() -> str:
    """The path of the nats-server, which is unpacked from its Debian package into .tools if it is not installed."""
    unpacked = NATS / "usr/sbin/nats-server"
    for known in (shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin"), unpacked):
        if known is not None and Path(known).exists():
            return str(known)
    try:
        NATS.mkdir(parents=True, exist_ok=True)
        for command in (
            ["apt-get", "download", "nats-server"],
            ["sh", "-c", "dpkg-deb -x nats-server_*.deb . && rm nats-server_*.deb"],
        ):
            subprocess.run(command, cwd=NATS, check=True, capture_output=True, text=True, timeout=45)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"nats-server is not installed, and its Debian package cannot be fetched: {error}"
        if {"nats", "all"} & set(os.environ.get("TOWLINE_REQUIRE", "").split(",")):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(unpacked)


def test_the_quick_start_moves_bytes_and_says_how() -> None:
    printed = run("quickstart.py")
    assert "1048576 bytes over inproc" in printed
    assert "-> inproc" in printed and "- tcp" in printed, "it does not say why not the others"


def test_the_four_operations_end_in_pairs() -> None:
    printed = run("operations.py")
    assert "read: 1048576 bytes from encode" in printed
    assert "write: 1048576 bytes to decode" in printed


def test_the_pages_of_a_request_move_between_two_processes() -> None:
    printed = run("paged_kv_cache.py")
    assert "393216 bytes over mapped into the pages" in printed
    assert "are free again" in printed


def test_the_blocks_of_requests_are_read_out_of_a_cache_that_is_a_list_of_layers() -> None:
    printed = run("layered_kv_cache.py")
    assert "491520 bytes of 60 layers over" in printed
    assert "3 requests were read" in printed


def test_ranks_reduce_and_put_into_windows() -> None:
    printed = run("communicator.py")
    assert "all_reduce of 1048576 bytes among 4: direct, because" in printed
    assert "a block from rank 3, one to rank 1 over mapped" in printed


def test_code_for_dynamo_runs_unmodified() -> None:
    command = [sys.executable, "-m", "towline", "dropin-path"]
    path = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout.strip()
    assert "read: DONE, 262144 bytes" in run("dynamo_worker.py", PYTHONPATH=path)


def test_workers_hand_over_metadata_by_http() -> None:
    with running(sys.executable, str(EXAMPLES / "http_encode.py"), "0") as encode:
        url = encode.until(r"http://[\d.:]+")
        printed = run("http_decode.py", url, "a cat on a mat")
        assert "read 229376 bytes from encode over mapped" in printed
        encode.until("was taken")


def test_workers_hand_over_metadata_by_nats(nats_server: str) -> None:
    # -1 is any free port. Some versions exit with 1 when they are stopped.
    with running(nats_server, "-a", "127.0.0.1", "-p", "-1", codes=(0, 1)) as server:
        url = "nats://" + server.until(r"(?<=client connections on )[\d.:]+")
        with running(sys.executable, str(EXAMPLES / "nats_encode.py"), url) as encode:
            encode.until("ready")
            printed = run("nats_decode.py", url, "a cat on a mat")
            assert "read 229376 bytes from encode over mapped" in printed
            encode.until("was taken")


@pytest.mark.parametrize("page", ["README.md", "bindings/python/README.md"])
def test_the_quick_start_in_a_readme_is_the_one_that_runs(page: str) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert (EXAMPLES / "quickstart.py").read_text() in shown, f"{page} shows another quick start"


def test_what_the_readme_shows_of_the_communicator_is_what_runs() -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    program = (EXAMPLES / "communicator.py").read_text()
    assert any(textwrap.indent(block, " " * 8) in program for block in shown)


def test_every_example_is_run_by_a_test() -> None:
    tests = Path(__file__).read_text()
    programs = [path.name for path in EXAMPLES.glob("*.py") if path.name != "model.py"]
    assert not [name for name in programs if f'"{name}"' not in tests]


def test_links_between_the_pages_of_the_repository_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    pages.append(ROOT / "bindings/python/README.md")
    broken = []
    for page in pages:
        # Without code, which may show how a link is written.
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
