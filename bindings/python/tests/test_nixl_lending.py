"""By NIXL, an endpoint lends only where it says so, and over the devices that it names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import LIMIT
from test_nixl import needs_nixl

import towline

LENT = """
import towline
with towline.Endpoint("owner", nixl_lend_over="lo") as owner, towline.Endpoint("user", nixl_reach_over=["lo"]) as user:
    memory = towline.empty(5)
    memoryview(memory)[:] = b"hello"
    region = owner.register(memory, "read+write")
    remote = user.import_(region.ticket(), require="nixl")
    target = bytearray(5)
    with user.register(target, "none") as local:
        user.read(remote, local).wait()
    assert (remote.path, target) == ("nixl", b"hello")
    assert "all memory of the other's process" in str(remote.explain())
    assert region.audit().incomplete
    del remote
print("lent")
"""


def test_nothing_is_lent_unless_the_owner_names_devices() -> None:
    with towline.Endpoint("owner") as owner, towline.Endpoint("user", nixl_reach_over="lo") as user:
        region = owner.register(bytearray(64), "read+write")
        with pytest.raises(towline.Unavailable, match="nixl_lend_over in Python"):
            user.import_(region.ticket(), require="nixl")


def test_what_is_lent_moves_by_nixl_and_the_explanation_says_what_that_gives_away() -> None:
    needs_nixl()
    environment = os.environ | {"UCX_MODULES": "^efa", "VIRTUAL_ENV": sys.prefix}
    ran = subprocess.run(
        [sys.executable, "-c", LENT], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert ran.returncode == 0 and "lent" in ran.stdout, ran.stderr


def test_devices_that_are_not_there_are_an_error_at_once() -> None:
    with pytest.raises(towline.Unavailable, match="mlx5_99:1"):
        towline.Endpoint("owner", nixl_lend_over="mlx5_99:1")
    with pytest.raises(towline.Invalid, match="nixl_reach_over"):
        towline.Endpoint("owner", nixl_lend_over="lo", nixl_reach_over="lo")
