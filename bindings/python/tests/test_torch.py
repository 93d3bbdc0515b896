"""Real tensors of torch, where it is installed: `scripts/test.sh torch` sees to that."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import MakeWorker

import towline
from towline import Connector, Descriptor, nccl, nixl
from towline import nixl_connect as nc

torch: Any = pytest.importorskip("torch", reason="torch is not installed here; scripts/test.sh torch has it")

DTYPES = ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "int64", "bool", "complex64"]


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor, packed, whatever its type."""
    packed = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(packed.reshape(-1).view(torch.uint8).numpy().tobytes())


def tensor_of(dtype: str, *shape: int) -> Any:
    count = 1
    for length in shape:
        count *= length
    return (torch.arange(count) % 100).reshape(shape).to(getattr(torch, dtype))


@pytest.fixture
def connector() -> Iterator[Connector]:
    with Connector("torch") as connector:
        yield connector


def moved(connector: Connector, source: Any, target: Any) -> None:
    readable = connector.create_readable_sync(Descriptor(source))
    connector.begin_read_sync(readable.metadata(), Descriptor(target)).wait()
    readable.wait()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_any_type_is_described_and_moved(dtype: str, connector: Connector) -> None:
    source = tensor_of(dtype, 5, 7)
    descriptor = Descriptor(source)
    assert (descriptor.ptr, descriptor.size) == (source.data_ptr(), 35 * source.element_size())
    assert str(descriptor.device) == "cpu" and descriptor.layout is None and not descriptor.readonly
    target = torch.zeros_like(source)
    moved(connector, source, target)
    assert torch.equal(source, target)
    moved(connector, (source, "cpu"), target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_with_gaps_is_a_source_without_a_copy(dtype: str, connector: Connector) -> None:
    whole = tensor_of(dtype, 6, 8, 4)
    for view in (whole[::2], whole[:, 2:5], whole[:, :, ::2], whole.transpose(0, 2), whole[0].t(), whole[1:5, 1:7, 1:2]):
        descriptor = Descriptor(view)
        assert (descriptor.ptr, descriptor.size) == (view.data_ptr(), view.numel() * view.element_size())
        assert descriptor.layout is not None and descriptor.readonly
        target = torch.zeros(view.shape, dtype=view.dtype)
        moved(connector, view, target)
        assert torch.equal(view, target)
        writable = connector.create_writable_sync(Descriptor(target.zero_()))
        connector.begin_write_sync(descriptor, writable.metadata()).wait()
        writable.wait()
        assert torch.equal(view, target)


def test_a_tensor_with_gaps_is_no_target(connector: Connector) -> None:
    target = torch.zeros(4, 4).t()[1:]
    readable = connector.create_readable_sync(Descriptor(bytes(48)))
    for attempt in (
        lambda local: connector.create_writable_sync(local),
        lambda local: connector.begin_read_sync(readable.metadata(), local),
    ):
        with pytest.raises(ValueError, match="not contiguous"):
            attempt(Descriptor(target))
    assert not target.any()


def test_tensors_that_no_layout_can_say_are_refused_with_the_reason() -> None:
    for tensor, why in (
        (torch.zeros(1, 4).expand(3, 4), "stride of axis 0 is 0"),
        (torch.zeros(8).as_strided((3, 4), (2, 1)), "overlap"),
        (torch.zeros(8).unfold(0, 4, 1), "overlap"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "lazy"),
        (torch.zeros(4, device="meta"), "meta"),
        (torch.zeros(0), "no memory"),
        (torch.zeros(0, 4)[:, ::2], "no memory"),
    ):
        with pytest.raises(ValueError, match=f"data: .*{why}"):
            Descriptor(tensor)
    with pytest.raises(RuntimeError):
        Descriptor(torch.zeros(4, 4).to_sparse())


def test_single_numbers_and_tensors_of_a_graph_are_tensors_too(connector: Connector) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    for source in (torch.tensor(7.5), parameter, torch.arange(6.0, requires_grad=True), parameter[2:4]):
        target = torch.zeros_like(source.detach())
        moved(connector, source, target)
        assert torch.equal(source.detach(), target)
    # A leaf that needs a gradient can be filled: nothing here goes through autograd.
    moved(connector, torch.ones(6), parameter)
    assert torch.equal(parameter.detach(), torch.ones(6))


def test_a_tensor_lives_while_it_is_needed(connector: Connector) -> None:
    source = torch.arange(1000)
    expected = raw(source[::2])
    gone = weakref.ref(source)
    readable = connector.create_readable_sync(Descriptor(source[::2]))
    contiguous = connector.create_readable_sync(Descriptor(source))
    del source
    gc.collect()
    for operation, size in ((readable, 4000), (contiguous, 8000)):
        got = bytearray(size)
        connector.begin_read_sync(operation.metadata(), Descriptor(got)).wait()
        operation.wait()
        if operation is readable:
            assert got == expected
    del readable, contiguous, operation
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_shared_arrays_and_tensors_are_the_same_memory(dtype: str) -> None:
    array = towline.empty((4, 8), getattr(torch, dtype))
    tensor = torch.from_dlpack(array)
    assert tensor.dtype == getattr(torch, dtype) and tuple(tensor.shape) == (4, 8)
    tensor.fill_(1)
    assert bytes(memoryview(array).cast("B") if dtype != "bfloat16" else raw(torch.from_dlpack(array))) == raw(tensor)
    assert Descriptor(array).ptr == tensor.data_ptr()
    with towline.Endpoint("torch") as endpoint, endpoint.register(tensor, "read+write") as region:
        assert region.kind == "shared"
    del array
    gc.collect()
    assert raw(tensor) == raw(torch.ones(4, 8, dtype=tensor.dtype))


def test_tensors_are_registered_without_a_copy(endpoint: towline.Endpoint) -> None:
    for dtype in DTYPES:
        plain = tensor_of(dtype, 16)
        if dtype != "bool":
            # This torch may not export truth values.
            assert endpoint.register(plain, "none").nbytes == 16 * plain.element_size()
    with pytest.raises(ValueError, match="contiguous"):
        endpoint.register(torch.ones(4, 4).t())


@pytest.mark.parametrize("path", ["mapped", "cma", "unix", "tcp"])
def test_another_process_reads_and_writes_tensors(path: str, worker: MakeWorker) -> None:
    peer = worker(path, "shared")
    whole = torch.from_dlpack(towline.empty((64, 32), "float32"))
    whole.copy_(tensor_of("float32", 64, 32))
    with Connector(endpoint=towline.Endpoint("torch", require=path)) as connector:
        for view in (whole, whole[:, 3:9], whole.t()):
            readable = connector.create_readable_sync(Descriptor(view))
            answer = peer.tell(f"read {readable.metadata().to_json()}")
            if "Unavailable" in answer:
                pytest.skip(f"{path} cannot be used here: {answer}")
            assert answer == "DONE"
            readable.wait(30)
            size = view.numel() * 4
            assert bytes.fromhex(peer.tell(f"bytes 0 {size}")) == raw(view)


class TestDropIn:
    """The rows of the original's tables, with what its callers have: tensors."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[nc.Connector, nc.Connector]]:
        pair = nc.Connector("encode"), nc.Connector("decode")
        yield pair
        for one in pair:
            one.close()

    def test_a_tensor_is_read_and_written(self, pair: tuple[nc.Connector, nc.Connector]) -> None:
        encode, decode = pair

        async def run(source: Any, target: Any) -> None:
            with await encode.create_readable(nc.Descriptor(source)) as readable:
                sent = nc.RdmaMetadata.model_validate(readable.metadata().model_dump())
                with await decode.begin_read(sent, nc.Descriptor(target)) as read:
                    await read.wait_for_completion()
                    assert read.results()[0].size == target.numel() * target.element_size()
                await readable.wait_for_completion()
            assert torch.equal(source.detach(), target)
            target.zero_()
            with await decode.create_writable(nc.Descriptor(target)) as writable:
                with await encode.begin_write(nc.Descriptor(source), writable.metadata()) as write:
                    await write.wait_for_completion()
                await writable.wait_for_completion()
            assert torch.equal(source.detach(), target)

        for dtype in ("bfloat16", "float16", "float32"):
            source = tensor_of(dtype, 16, 24)
            for view in (source, source[:, 4:9], source.t(), source[:1].expand(16, 24), source[3, 5]):
                asyncio.run(run(view, torch.zeros(view.shape, dtype=view.dtype)))
        asyncio.run(run(torch.arange(6.0, requires_grad=True), torch.zeros(6)))

    def test_a_descriptor_says_what_the_original_says(self) -> None:
        tensor = tensor_of("float16", 3, 5)
        descriptor = nc.Descriptor(tensor)
        assert (descriptor.ptr, descriptor.size, str(descriptor.device)) == (tensor.data_ptr(), 30, "cpu")
        assert descriptor._data_ref is tensor and not descriptor.is_registered
        assert descriptor.metadata.size == 30
        # With gaps: the tensor itself where a layout can say it, a copy where none can.
        assert nc.Descriptor(tensor.t())._data_ref.data_ptr() == tensor.data_ptr()
        copied = nc.Descriptor(tensor[:1].expand(3, 5))
        assert copied.ptr != tensor.data_ptr() and copied.size == 30

    def test_a_prefix_of_a_pooled_tensor_is_sent(self, pair: tuple[nc.Connector, nc.Connector]) -> None:
        encode, decode = pair
        pool, filled = nc.Descriptor(torch.zeros(1000, dtype=torch.uint8)), tensor_of("uint8", 300)
        pool.register_memory(decode)

        async def run() -> None:
            pool._data_size = 300
            readable = await encode.create_readable(nc.Descriptor(filled))
            read = await decode.begin_read(readable.metadata(), pool)
            await read.wait_for_completion()
            await readable.wait_for_completion()

        for _ in range(3):
            asyncio.run(run())
            assert pool.is_registered
            assert torch.equal(pool._data_ref[:300], filled) and not pool._data_ref[300:].any()

    def test_tensors_move_in_lists(self, pair: tuple[nc.Connector, nc.Connector]) -> None:
        encode, decode = pair
        sources = [tensor_of("float32", 10), tensor_of("bfloat16", 4, 4).t(), tensor_of("int64", 3)]
        targets = [torch.zeros(one.shape, dtype=one.dtype) for one in sources]

        async def run() -> None:
            readable = await encode.create_readable([nc.Descriptor(one) for one in sources])
            read = await decode.begin_read(readable.metadata(), [nc.Descriptor(one) for one in targets])
            await read.wait_for_completion()
            await readable.wait_for_completion()

        asyncio.run(run())
        for source, target in zip(sources, targets):
            assert torch.equal(source, target)

    def test_wrong_tensors_are_refused_as_callers_expect(self, pair: tuple[nc.Connector, nc.Connector]) -> None:
        encode, _ = pair
        empty = nc.Descriptor(torch.zeros(0))
        assert empty.size == 0
        with pytest.raises(ValueError, match="no memory"):
            empty.register_memory(encode)
        for target in (torch.zeros(4, 4).t(), torch.zeros(1, 4).expand(4, 4)):
            with pytest.raises(ValueError, match="local: .*(not contiguous|read-only)"):
                asyncio.run(encode.create_writable(nc.Descriptor(target)))
        with pytest.raises(ValueError, match="meta"):
            nc.Descriptor(torch.zeros(4, device="meta"))
        with pytest.raises(RuntimeError):
            nc.Descriptor(torch.zeros(4, 4).to_sparse())
        for wrong in ([torch.zeros(4)], (torch.zeros(4),)):
            with pytest.raises(TypeError, match="data"):
                nc.Descriptor(wrong)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_tensors_are_reduced_and_put_into_windows(dtype: str) -> None:
    comms = nccl.Communicator.init_all(2)
    tensors = [torch.full((3, 5), rank + 1).to(getattr(torch, dtype)) for rank in range(2)]
    with nccl.group():
        for comm, tensor in zip(comms, tensors, strict=True):
            comm.allreduce(tensor, tensor, nccl.SUM)
    assert all((tensor == 3).all() for tensor in tensors)

    with nccl.group():
        windows = [comm.register_window(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
    assert windows[0] is not None and windows[0].size == 15 * tensors[0].element_size()
    comms[0].put_signal(tensors[0][1] + 1, 1, windows[0], peer_window_offset=10)
    comms[1].wait_signal(nccl.WaitSignalDesc(0))
    assert (tensors[1][2] == 4).all() and (tensors[1][:2] == 3).all()
    for comm in comms:
        comm.destroy()


def test_tensors_with_gaps_and_of_shared_memory_in_collectives() -> None:
    comm = nccl.Communicator.init(1, 0, nccl.get_unique_id())
    tensor = torch.zeros(4, 4)
    with pytest.raises(nccl.NcclInvalid, match="sendbuf: .*contiguous"):
        comm.allreduce(tensor[:, 1], tensor[:, 1])
    shared = torch.from_dlpack(nccl.empty((4, 4), "float32"))
    window = comm.register_window(shared[1:3])
    assert window is not None and window.user_ptr == shared[1].data_ptr()
    gone = weakref.ref(shared)
    del shared
    comm.destroy()
    gc.collect()
    assert gone() is None


def storage_of(tensor: Any) -> Any:
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()


def resized(tensor: Any) -> None:
    storage_of(tensor).resize_(0)


def replaced(tensor: Any) -> None:
    tensor.data = torch.zeros_like(tensor)


def set_anew(tensor: Any) -> None:
    tensor.set_(torch.zeros_like(tensor))


def grown(tensor: Any) -> None:
    # The storage may stay where it is, and is another one all the same.
    storage_of(tensor).resize_(4 * len(storage_of(tensor)))


CHANGES = [resized, replaced, set_anew, grown]


@pytest.mark.parametrize("path", ["inproc", "unix", "tcp"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_lost_its_storage_is_stale_to_its_owner_and_to_peers(change: Any, path: str) -> None:
    tensor, into = torch.arange(65536), torch.zeros(65536, dtype=torch.int64)
    with towline.Endpoint("owner") as owner, towline.Endpoint("user") as user:
        region = owner.register(tensor, "read+write")
        remote = user.import_(region.ticket(), require=path)
        local = user.register(into, "none")
        user.read(remote, local).wait()
        assert torch.equal(into, torch.arange(65536))
        change(tensor)
        with pytest.raises(towline.Stale, match="resized, moved or replaced") as raised:
            region.ticket()
        assert raised.value.op == "ticket"
        into.zero_()
        with pytest.raises(towline.Stale):
            user.read(remote, local).wait()
        assert not into.any()
        # It stays so, and can be closed.
        with pytest.raises(towline.Stale, match="resized, moved or replaced"):
            region.span(0, 8)
        region.close()


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_read_into_or_written_from_a_tensor_that_lost_its_storage(change: Any) -> None:
    with towline.Endpoint("owner") as owner, towline.Endpoint("user") as user:
        served = owner.register(bytearray(64), "read+write")
        remote = user.import_(served.ticket())
        for as_span in (False, True):
            tensor = torch.ones(8, dtype=torch.int64)
            region = user.register(tensor, "none")
            local = region.span(0, 64) if as_span else region
            user.write(remote, local).wait()
            change(tensor)
            for move in (user.read, user.write):
                with pytest.raises(towline.Stale, match="resized, moved or replaced"):
                    move(remote, local)
            assert region.closed


@pytest.mark.parametrize("change", CHANGES)
def test_a_descriptor_of_a_tensor_that_lost_its_storage_begins_nothing(change: Any, connector: Connector) -> None:
    for part in (slice(None), slice(None, None, 2), slice(2, 5)):
        seen = torch.arange(64)[part]
        descriptor = Descriptor(seen)
        connector.create_readable_sync(descriptor).cancel()
        change(seen)
        with pytest.raises(towline.Stale, match="resized, moved or replaced"):
            connector.create_readable_sync(descriptor)
        with pytest.raises(towline.Stale, match="resized, moved or replaced"):
            descriptor.register_memory(connector)


def test_a_tensor_that_was_registered_and_closed_is_not_kept() -> None:
    with towline.Endpoint("owner") as owner:
        tensor = torch.arange(64)
        gone = weakref.ref(tensor)
        region = owner.register(tensor)
        region.ticket()
        del tensor
        gc.collect()
        assert gone() is not None
        region.close()
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_lost_its_storage_is_used_by_no_agent_window_or_pending_operation(change: Any) -> None:
    def tensor() -> Any:
        return torch.arange(65536)

    with nixl.Agent("one", engine="embedded") as one, nixl.Agent("two", engine="embedded") as two:
        moved, theirs = tensor(), two.register(torch.zeros(65536, dtype=torch.int64))
        region, peer = one.register(moved), one.add_peer(two.metadata())
        change(moved)
        for attempt in (one.read, one.write):
            with pytest.raises(towline.Stale):
                attempt(region, theirs.descriptors, peer)
        with pytest.raises(towline.Stale):
            one.metadata()
    comm = nccl.Communicator.init_all(1)[0]
    shown = tensor()
    window = comm.register_window(shown)
    change(shown)
    with pytest.raises(nccl.NCCLStale):
        comm.put(torch.zeros(8, dtype=torch.int64), 0, window)
    comm.destroy()
    with Connector() as connector:
        offered = tensor()
        readable = connector.create_readable_sync(Descriptor(offered))
        change(offered)
        with pytest.raises(towline.Stale):
            readable.metadata()


def test_the_blocks_of_a_cache_of_tensors_are_read_by_tensors_of_indices() -> None:
    layers, blocks, block = 6, 16, (4, 2, 8)
    shape = (blocks, *block)
    length = 4 * 2 * 8 * 2
    pages = towline.Layout.blocks(length, blocks)
    with towline.Endpoint("prefill") as prefill, towline.Endpoint("decode") as decode:
        theirs = [torch.full(shape, layer + 1, dtype=torch.float16) for layer in range(layers)]
        regions = [prefill.register(layer, "read") for layer in theirs]
        ours = [torch.zeros(shape, dtype=torch.float16) for _ in range(layers)]
        cache = decode.program(
            [decode.import_(region.ticket()) for region in regions],
            [decode.register(layer, "none") for layer in ours],
            pages,
        )
        for dtype in (torch.int32, torch.int64):
            cache.read(torch.tensor([3, 9], dtype=dtype), torch.tensor([0, 15], dtype=dtype)).wait()
            for number, layer in enumerate(ours):
                assert (layer[[0, 15]] == number + 1).all() and not layer[1:15].any()
                layer.zero_()
        # Every second number of a longer tensor is read one by one.
        cache.read(torch.arange(8)[::2], torch.arange(4)).wait()
        assert all((layer[:4] == number + 1).all() for number, layer in enumerate(ours))
        with pytest.raises(towline.Invalid, match="negative"):
            cache.read(torch.tensor([-1]), torch.tensor([0]))
        with pytest.raises(TypeError, match="remote_blocks"):
            cache.read(torch.tensor([0.5]), torch.tensor([0]))
        # FSDP does this; a program looks again at every start.
        storage_of(ours[2]).resize_(0)
        with pytest.raises(towline.Stale):
            cache.read(torch.tensor([0]), torch.tensor([0])).wait()
