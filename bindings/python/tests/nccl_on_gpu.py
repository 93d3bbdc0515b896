"""What a communicator on a GPU does. Run with the fakes by test_nccl_cuda.py, and with a real GPU by hand.

The part ``processes`` is for a real GPU only: two ranks on one, which NCCL takes from 2.30 on. It says why where they cannot run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import towline
from towline import nccl


class Array:
    """Memory of a GPU that speaks the CUDA array interface, as CuPy's arrays do."""

    def __init__(self, memory: object, offset: int, count: int, typestr: str, strides: object = None) -> None:
        interface = memory.__cuda_array_interface__  # type: ignore[attr-defined]
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": typestr,
            "data": (interface["data"][0] + offset, False),
            "strides": strides,
            "version": 3,
        }


def raises(kind: type[Exception], call: object, *words: str) -> None:
    try:
        call()  # type: ignore[operator]
    except kind as error:
        for word in words:
            assert word in str(error), str(error)
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def alone() -> None:
    unique_id = nccl.get_unique_id(device="cuda")
    assert nccl.UniqueId.from_bytes(bytes(unique_id)) == unique_id
    assert repr(unique_id) == "UniqueId(of NCCL's)"
    with nccl.Communicator.init(1, 0, unique_id) as comm:
        assert (comm.rank, comm.nranks, comm.device.device_id, str(comm.device)) == (0, 1, 0, "cuda:0")
        assert comm.properties.cuda_dev == 0
        assert comm.get_async_error() == nccl.Result.SUCCESS
        memory = nccl.mem_alloc(1 << 20, "cuda:0")
        send, recv = Array(memory, 0, 1024, "<f4"), Array(memory, 8192, 1024, "<f4")
        for call in (
            lambda: comm.allreduce(send, recv, nccl.SUM),
            lambda: comm.reduce(send, recv, nccl.MAX, root=0),
            lambda: comm.broadcast(send, recv, root=0),
            lambda: comm.allgather(send, recv),
            lambda: comm.gather(send, recv, root=0),
            lambda: comm.scatter(send, recv, root=0),
            lambda: comm.reduce_scatter(send, recv, nccl.AVG),
            lambda: comm.alltoall(send, recv),
            lambda: comm.allreduce(send, recv, comm.create_pre_mul_sum(0.5, nccl.FLOAT32)),
        ):
            call().wait()  # type: ignore[no-untyped-call]
        comm.barrier().wait()
        with nccl.group():
            comm.send(send, 0)
            comm.recv(recv, 0)
        comm.synchronize()
        with comm.register_buffer(memory) as registered:
            assert registered.size == 1 << 20
            assert comm._need("test").open_handles() == 1
        window = comm.register_window(memory, nccl.WindowFlag.COLL_SYMMETRIC)
        if window is not None and comm.host_rma_support:
            comm.put_signal(send, 0, window, peer_window_offset=4096).wait()
            comm.wait_signal(nccl.WaitSignalDesc(peer=0)).wait()
            raises(nccl.NcclInvalid, lambda: comm.put_signal(send, 0, window, peer_window_offset=1 << 18), "lie within")
        if window is not None:
            try:
                comm.put(send, 0, window, peer_window_offset=4096).wait()
                comm.get(recv, 0, window).wait()
            except towline.Unsupported as error:
                assert "ncclGetPeerDevicePointer: it came with NCCL 2.30.0" in str(error), error
            comm.flush(window, 0).wait()
            comm.fence(window).wait()
            raises(towline.Unsupported, lambda: comm.fetch_add(0, window, 0, 1), "NCCL has no fetch_add")
            window.close()
            assert window.handle == 0
        with nccl.group():
            grouped = comm.register_window(memory)
            assert grouped is not None and grouped.handle == 0
        assert comm._need("test").open_handles() == 1


def wrong() -> None:
    comm = nccl.Communicator()
    memory = nccl.mem_alloc(8192, 0)
    raises(nccl.NcclInvalid, lambda: comm.register_buffer(memory), "not initialized")
    raises(nccl.NcclInvalid, lambda: comm.register_window(memory), "not initialized")
    comm.initialize(1, 0, nccl.get_unique_id(device="cuda"), nccl.NCCLConfig(device=0, timeout=10))
    host = nccl.mem_alloc(8192)
    raises(nccl.NcclInvalid, lambda: comm.register_buffer(host), "buffer", "GPU 0")
    raises(nccl.NcclInvalid, lambda: comm.register_window(host), "buffer", "GPU 0")
    raises(nccl.NcclInvalid, lambda: comm.allreduce(memory, host), "recvbuf")
    raises(nccl.NcclInvalid, lambda: comm.register_window(Array(memory, 256, 4096, "|u1")), "4096")
    raises(nccl.NcclInvalid, lambda: comm.allreduce(Array(memory, 0, 64, "<f4", (8,)), memory), "contiguous")
    raises(TypeError, lambda: comm.allreduce(memory, memory, stream="no"))
    on_host = nccl.Communicator.init(1, 0, nccl.get_unique_id())
    raises(nccl.NcclInvalid, lambda: on_host.register_buffer(memory), "buffer")
    on_host.destroy()
    raises(
        nccl.NcclInvalid,
        lambda: nccl.Communicator.init(1, 0, nccl.get_unique_id(), nccl.NCCLConfig(device="cuda:0")),
        "get_nccl_unique_id",
    )
    comm.destroy()
    raises(nccl.NcclInvalid, lambda: comm.register_buffer(memory), "not initialized")
    assert comm.ptr == 0


def ranks() -> None:
    unique_id = nccl.get_unique_id(device="cuda")
    failed: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            config = nccl.NCCLConfig(device="cuda:0", blocking=number != 0, timeout=5)
            comm = nccl.Communicator.init(2, number, unique_id, config)
            comm.synchronize()
            assert (comm.rank, comm.nranks) == (number, 2)
            half = comm.split(number)
            assert half.nranks == 1
            half.destroy()
            comm.destroy()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def processes() -> None:
    """Two ranks on one GPU, each a process: its default stream is its own."""
    unique_id = nccl.get_unique_id(device="cuda")
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(number), bytes(unique_id).hex()],
            env={**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"},
        )
        for number in range(2)
    ]
    try:
        assert [child.wait(60) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()


def tensor(memory: object) -> Any:
    """Memory of a GPU as floats that can be filled and looked at; ``None`` without torch and CuPy."""
    try:
        import torch

        return torch.as_tensor(memory, device="cuda").view(torch.float32)
    except ImportError:
        pass
    try:
        import cupy

        return cupy.asarray(memory).view(cupy.float32)
    except ImportError:
        return None


def rank() -> None:
    number, unique_id = int(sys.argv[2]), nccl.UniqueId.from_bytes(bytes.fromhex(sys.argv[3]))
    other = 1 - number
    config = nccl.NCCLConfig(device="cuda:0", timeout=20)
    try:
        comm = nccl.Communicator.init(2, number, unique_id, config)
    except (nccl.NCCLError, nccl.NcclInvalid) as error:
        if "same GPU" in str(error) or "Duplicate GPU" in str(error):
            print(f"not run: {error}")
            return
        raise
    memory = nccl.mem_alloc(1 << 20, "cuda:0")
    numbers = tensor(memory)
    if numbers is None:
        print("not run: neither torch nor CuPy is here to look at the numbers")
        return
    half = numbers.shape[0] // 2
    send, recv = numbers[:half], numbers[half:]
    send[:] = number + 1.0
    comm.allreduce(send, recv, nccl.SUM).wait()
    assert float(recv.min()) == float(recv.max()) == 3.0
    comm.allreduce(send, recv, nccl.AVG).wait()
    assert float(recv[7]) == 1.5
    comm.broadcast(send, recv, root=1).wait()
    assert float(recv[0]) == 2.0
    with nccl.group():
        comm.send(send, other)
        comm.recv(recv, other)
    comm.synchronize()
    assert float(recv[half - 1]) == other + 1.0
    with comm.register_buffer(memory) as registered:
        print(f"rank {number}: registered {registered.size} bytes, handle {registered.handle:#x}")
        comm.allreduce(send, recv, nccl.MAX).wait()
        assert float(recv[0]) == 2.0
    window = comm.register_window(memory, nccl.WindowFlag.COLL_SYMMETRIC)
    print(f"rank {number}: window {window}, host_rma_support {comm.host_rma_support}")
    if window is not None and comm.host_rma_support:
        recv[:] = 0
        comm.barrier().wait()
        for index in range(2):
            comm.put_signal(send, other, window, peer_window_offset=half, signal_index=index).wait()
            comm.wait_signal(nccl.WaitSignalDesc(peer=other, signal_index=index)).wait()
        assert float(recv.min()) == float(recv.max()) == other + 1.0
        comm.signal(other, signal_index=31, context=3).wait()
        comm.wait_signal(nccl.WaitSignalDesc(peer=other, signal_index=31, context=3)).wait()
        raises(nccl.NcclInvalid, lambda: comm.signal(other, signal_index=32), "32 signals")
        comm.fence(window).wait()
        recv[:] = number + 5.0
        comm.fence(window).wait()
        comm.get(send, other, window, peer_window_offset=half).wait()
        assert float(send.min()) == float(send.max()) == other + 5.0
        comm.fence(window).wait()
        apart = tensor(nccl.mem_alloc(4096, "cuda:0"))
        apart[:] = number + 9.0
        comm.put(apart, other, window, peer_window_offset=half)
        comm.flush(window, other).wait()
        comm.fence(window).wait()
        assert float(recv[0]) == float(recv[apart.shape[0] - 1]) == other + 9.0
        assert float(recv[apart.shape[0]]) == number + 5.0
        print(f"rank {number}: put, get, flush and fence are right")
    if window is not None:
        window.close()
    own = comm.split(number)
    assert (own.rank, own.nranks) == (0, 1)
    own.destroy()
    if number == 0:
        rest = comm.shrink([1])
        assert rest.nranks == 1
        rest.destroy()
    comm.finalize()
    comm.destroy()
    print(f"rank {number}: right")


if __name__ == "__main__":
    parts = {"alone": alone, "wrong": wrong, "ranks": ranks, "processes": processes, "rank": rank}
    parts[sys.argv[1]]()
    print("done")
