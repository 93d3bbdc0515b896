"""Communicators on GPUs, through the fakes of the CUDA driver and of NCCL, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("nccl_on_gpu.py")


def fakes() -> dict[str, str]:
    """The fakes that Cargo has built, newest first; the test is skipped where there are none."""
    found = {}
    for setting, name in (("TOWLINE_CUDA", "cuda"), ("TOWLINE_NCCL", "nccl")):
        files = [*ROOT.glob(f"target/*/libtowline_fake_{name}.so"), *ROOT.glob(f"target/*/deps/libtowline_fake_{name}.so")]
        if not files:
            pytest.skip(f"the fake of {name} is not built: cargo build -p towline-fake-{name}")
        found[setting] = str(max(files, key=lambda file: file.stat().st_mtime))
    return found


@pytest.mark.parametrize("part", ["alone", "wrong", "ranks"])
def test_a_communicator_on_a_gpu(part: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), part],
        env={**os.environ, **fakes()},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip().endswith("done")


WAITING = """
import signal, time
from towline import nccl
signal.signal(signal.SIGALRM, signal.default_int_handler)
id, settings = nccl.get_unique_id(device="cuda"), nccl.NCCLConfig(timeout=600, device=0)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    nccl.Communicator.init(2, 0, id, settings)
except KeyboardInterrupt:
    print("interrupted", flush=True)
# NCCL's own thread still waits for the other rank, and cannot be stopped.
import os
os._exit(0)
"""


def test_ctrl_c_ends_an_init_on_a_gpu_to_which_others_do_not_come() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WAITING], env={**os.environ, **fakes()}, capture_output=True, text=True, timeout=50
    )
    assert ran.stdout == "interrupted\n", ran.stdout + ran.stderr
