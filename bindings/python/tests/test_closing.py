"""Closing: what waits reacts to signals, and two who close wait for the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import pytest
from conftest import until_it_waits

import towline


class Rung(Exception):
    """What the handler of the alarm raises, as Ctrl-C raises KeyboardInterrupt."""


@contextmanager
def alarm(after: float) -> Iterator[None]:
    def ring(_number: int, _frame: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_an_import_whose_owner_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with towline.Endpoint("owner", advertise=address) as owner, towline.Endpoint("user") as user:
            region = owner.register(bytearray(4096))
            ticket = region.ticket()
            started = time.monotonic()
            with alarm(0.2), pytest.raises(Rung):
                user.import_(ticket, require="tcp", timeout=60)
            assert time.monotonic() - started < 30


OWNER = """
import towline
endpoint = towline.Endpoint("owner")
region = endpoint.register(bytearray(32 << 20))
print(region.ticket(), flush=True)
input()
"""


def test_a_second_close_says_that_somebody_is_still_inside() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner, towline.Endpoint("user", stall_timeout=60) as user:
        assert owner.stdout is not None
        remote = user.import_(owner.stdout.readline().strip(), require="unix")
        region = user.register(bytearray(32 << 20), "none")
        owner.send_signal(signal.SIGSTOP)
        reading = user.read(remote, region)
        first: list[type] = []

        def close() -> None:
            try:
                region.close(timeout=2)
            except towline.Timeout as error:
                first.append(type(error))

        closing = threading.Thread(target=close)
        closing.start()
        while not region.closed:
            time.sleep(0.001)
        with pytest.raises(towline.Timeout):
            region.close(timeout=0.3)
        with alarm(0.2), pytest.raises(Rung):
            region.close(timeout=60)
        closing.join(60)
        assert first == [towline.Timeout]
        owner.send_signal(signal.SIGCONT)
        reading.wait()
        region.close()
        owner.kill()


class Lender:
    """Lends the memory of an array, and may come to have another one."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self.array.__array_interface__)


def test_the_close_of_a_region_whose_memory_was_lost_says_that_somebody_is_still_inside() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner, towline.Endpoint("user", stall_timeout=60) as user:
        assert owner.stdout is not None
        remote = user.import_(owner.stdout.readline().strip(), require="unix")
        before = numpy.zeros(32 << 20, numpy.uint8)
        lender = Lender(before)
        region = user.register(lender, "none")
        owner.send_signal(signal.SIGSTOP)
        try:
            reading = user.read(remote, region)
            # It has other memory now, and the read still goes into what it had.
            lender.array = numpy.zeros(8, numpy.uint8)
            with pytest.raises(towline.Stale):
                region.ticket()
            for _ in range(2):
                with pytest.raises(towline.Timeout):
                    region.close(timeout=0.1)
        finally:
            owner.send_signal(signal.SIGCONT)
        with suppress(towline.Error):
            reading.wait()
        region.close()
        owner.kill()


def wait(region: towline.Region, ended: list[str]) -> None:
    try:
        region.wait_signal(0, 1, timeout=50)
    except towline.Error as error:
        ended.append(type(error).__name__)


def test_closing_an_endpoint_ends_a_wait_for_a_signal() -> None:
    owner = towline.Endpoint("owner")
    region = owner.register(bytearray(4096), "read+write")
    ended: list[str] = []
    waiting = threading.Thread(target=lambda: wait(region, ended))
    waiting.start()
    until_it_waits(os.getpid(), waiting.native_id)
    owner.close(timeout=30)
    waiting.join(60)
    assert ended == ["Invalid"]
    owner.close()
