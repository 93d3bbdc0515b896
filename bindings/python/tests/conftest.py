"""Other processes for the tests, and a watchdog for what could hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import towline

HERE = Path(__file__).parent
LIMIT = 60.0
"""Seconds after which a test has hung."""


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Peer:
    """A process that runs `peer.py`: it owns a region, gives its ticket, and does what it is told."""

    def __init__(self, nbytes: int, access: str, memory: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), str(nbytes), access, memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ticket = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the peer has ended"
        return line

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


MakePeer = Callable[..., Peer]


@pytest.fixture
def peer() -> Iterator[MakePeer]:
    peers: list[Peer] = []

    def make(nbytes: int = 1 << 16, access: str = "read+write", memory: str = "shared") -> Peer:
        peers.append(Peer(nbytes, access, memory))
        return peers[-1]

    yield make
    for one in peers:
        one.close()


@pytest.fixture
def endpoint() -> Iterator[towline.Endpoint]:
    with towline.Endpoint("test") as endpoint:
        yield endpoint


def run_python(source: str, *arguments: str, code: int = 0, timeout: float = LIMIT) -> str:
    """Runs a program and returns what it printed; its exit code must be that."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == code, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert "panicked" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    return done.stdout
