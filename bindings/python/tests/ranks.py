"""Ranks for the tests of communicators: threads of this process, or processes of their own."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from towline import nccl

T = TypeVar("T")

TIMEOUT = 20.0
"""The deadline of a group in which nobody is missing; what waits for it has gone wrong."""


def config(**settings: Any) -> nccl.NCCLConfig:
    return nccl.NCCLConfig(**{"timeout": TIMEOUT, **settings})


def outcomes(
    nranks: int, body: Callable[[nccl.Communicator], T], settings: nccl.NCCLConfig | None = None
) -> list[T | Exception]:
    """Runs the body on every rank of a new group, each on a thread of its own: what it gave or raised, by rank."""
    return [value for value, _ in _outcomes(nranks, body, settings)]


def _outcomes(
    nranks: int,
    body: Callable[[nccl.Communicator], T],
    settings: nccl.NCCLConfig | None,
    unique_id: nccl.UniqueId | None = None,
) -> list[tuple[Any, bool]]:
    unique_id = unique_id or nccl.get_unique_id()
    found: list[tuple[Any, bool]] = [(None, False)] * nranks

    def run(rank: int) -> None:
        comm = None
        try:
            comm = nccl.Communicator.init(nranks, rank, unique_id, settings or config())
            found[rank] = (body(comm), False)
        except Exception as error:
            found[rank] = (error, True)
        finally:
            if comm is not None:
                comm.destroy()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def every(
    nranks: int,
    body: Callable[[nccl.Communicator], T],
    settings: nccl.NCCLConfig | None = None,
    unique_id: nccl.UniqueId | None = None,
) -> list[T]:
    """`outcomes`, where nobody may raise."""
    found = _outcomes(nranks, body, settings, unique_id)
    # Errors that follow from another rank's are printed last.
    for kind in (AssertionError, Exception):
        for value, raised in found:
            if raised and isinstance(value, kind):
                raise value
    return [value for value, _ in found]


def _enter(target: Callable[..., Any], rank: int, arguments: tuple[Any, ...], pipe: Any) -> None:
    try:
        pipe.send(target(rank, *arguments))
    except Exception as error:
        pipe.send(error)


class Processes:
    """Ranks that are processes of their own, started afresh. What they give comes back through pipes."""

    def __init__(self, nranks: int, target: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        self.processes = []
        for rank in range(nranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(target, rank, arguments, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcome(self, rank: int) -> Any:
        """What that rank gave or raised."""
        return self.pipes[rank].recv()

    def outcomes(self) -> list[Any]:
        return [self.outcome(rank) for rank in range(len(self.pipes))]

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if exception[0] is not None:
                process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


class CudaTensor:
    """An object whose memory is on a GPU: nobody may ask it for more than that."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_options: object) -> object:
        raise AssertionError("not asked for")


class CudaArray:
    """The same, by CUDA's array interface."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
