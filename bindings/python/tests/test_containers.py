"""Processes of one user that the kernel keeps apart, as containers are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import LIMIT

import towline

APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

OWNER = """
import sys, towline
endpoint = towline.Endpoint("owner", share_between_containers=sys.argv[1] == "True")
buffer = towline.empty(4096)
memoryview(buffer)[:5] = b"hello"
region = endpoint.register(buffer, "read")
print(region.ticket(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    try:
        tried = subprocess.run([*APART, "true"], capture_output=True, text=True, timeout=LIMIT)
    except FileNotFoundError:
        pytest.skip("there is no command unshare")
    if tried.returncode != 0:
        pytest.skip(f"no pid namespace can be made here: {tried.stderr.strip()}")


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_containers_share_memory_only_where_both_sides_say_so(theirs: bool, ours: bool) -> None:
    command = [*APART, sys.executable, "-c", OWNER, str(theirs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        ticket = owner.stdout.readline().strip()
        with towline.Endpoint("user", share_between_containers=ours) as user:
            remote = user.import_(ticket)
            assert remote.path == ("mapped" if theirs and ours else "unix")
            if remote.path == "unix":
                why = next(one.reason for one in remote.explain().paths if one.path == "mapped")
                assert "pid namespace" in why and "share_between_containers" in why
            target = bytearray(5)
            with user.register(target, "none") as local:
                user.read(remote, local).wait()
            assert target == b"hello"
        owner.stdin.close()
        assert owner.wait(LIMIT) == 0
