"""What a communicator on a GPU does. Run with the fakes by test_nccl_cuda.py, and with a real GPU by hand."""

from __future__ import annotations

import sys
import threading

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
            call().wait()
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
            raises(towline.Unsupported, lambda: comm.put(send, 0, window), "NCCL has no put")
            raises(towline.Unsupported, lambda: comm.get(recv, 0, window), "NCCL has no get")
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


if __name__ == "__main__":
    {"alone": alone, "wrong": wrong, "ranks": ranks}[sys.argv[1]]()
    print("done")
