"""Many regions of one peer in one transfer."""

from __future__ import annotations

import numpy
import pytest

import towline

LAYERS = 12
SIZE = 1 << 14


@pytest.fixture
def layers() -> tuple[towline.Endpoint, list[bytearray], list[towline.Region]]:
    owner = towline.Endpoint("owner")
    memory = [bytearray([layer + 1]) * SIZE for layer in range(LAYERS)]
    return owner, memory, [owner.register(layer, "read+write") for layer in memory]


@pytest.mark.parametrize("path", ["inproc", "unix", "tcp"])
def test_layers_are_read_and_written_at_once(
    path: str,
    layers: tuple[towline.Endpoint, list[bytearray], list[towline.Region]],
    endpoint: towline.Endpoint,
) -> None:
    owner, memory, regions = layers
    remotes = [endpoint.import_(region.ticket(), require=path) for region in regions]
    here = [bytearray(SIZE) for _ in regions]
    local = [endpoint.register(layer, "none") for layer in here]

    transfer = endpoint.read(remotes, local, notify="all of them")
    assert transfer.wait() is None
    assert (transfer.nbytes, transfer.path, transfer.failures()) == (LAYERS * SIZE, path, [])
    assert here == memory
    assert owner.receive().message == b"all of them"

    # The same blocks of each layer.
    pages = towline.Layout.contiguous(SIZE, 1024)
    theirs, ours = numpy.array([15, 3], numpy.uint32), [0, 1]
    for layer in here:
        layer[:] = bytes(SIZE)
    assert endpoint.read(remotes, local, blocks=(pages, theirs, pages, ours)).wait() is None
    for number, layer in enumerate(here):
        assert layer == bytes([number + 1]) * 2048 + bytes(SIZE - 2048)

    # What each part says goes before what the request says; a counter of one part is raised behind all of them.
    parts = [
        towline.Part(remotes[0], local[0], at=(8, 0, 4)),
        towline.Part(remotes[1], local[1].span(0, 8), spans=[(0, 0, 2), (100, 2, 6)]),
        towline.Part(remotes[2], local[2], blocks=(pages, [1], pages, [0])),
        towline.Part(remotes[3], local[3]),
    ]
    here[0][:4] = b"some"
    here[1][:8] = b"abcdefgh"
    here[2][:1024] = bytes(1024)
    endpoint.write(parts, at=(1024, 0, 5), signal=(512, 7, 0), notify="written").wait()
    assert owner.receive().message == b"written"
    assert memory[0][8:12] == b"some" and int.from_bytes(memory[0][512:520], "little") == 0x0101010101010108
    assert memory[1][:2] + memory[1][100:106] == b"abcdefgh"
    assert memory[2] == b"\3" * 1024 + bytes(1024) + b"\3" * (SIZE - 2048)
    assert memory[3][1024:1029] == here[3][:5] and memory[3][:1024] == b"\4" * 1024


def test_a_part_that_fails_is_named(
    layers: tuple[towline.Endpoint, list[bytearray], list[towline.Region]], endpoint: towline.Endpoint
) -> None:
    _, _, regions = layers
    remotes = [endpoint.import_(region.ticket(), require="tcp") for region in regions]
    local = [endpoint.register(bytearray(SIZE), "none") for _ in regions]
    regions[5].close()
    transfer = endpoint.read(remotes, local)
    with pytest.raises(towline.Stale, match=f"part 5 of {LAYERS}"):
        transfer.wait()
    [failed] = [one for one in transfer.failures() if isinstance(one.error, towline.Stale)]
    assert (failed.part, failed.blocks) == (5, range(1))


def test_parts_that_make_no_sense_are_refused(
    layers: tuple[towline.Endpoint, list[bytearray], list[towline.Region]], endpoint: towline.Endpoint
) -> None:
    _, _, regions = layers
    remotes = [endpoint.import_(region.ticket()) for region in regions[:2]]
    local = endpoint.register(bytearray(SIZE), "none")
    with pytest.raises(towline.Invalid, match="2 remote regions cannot pair with 1"):
        endpoint.read(remotes, [local])
    with pytest.raises(towline.Invalid, match="no parts"):
        endpoint.read([], [])
    with pytest.raises(TypeError, match="Part"):
        endpoint.read(remotes)
    with pytest.raises(TypeError, match="list"):
        endpoint.read(remotes, local)
    with pytest.raises(TypeError, match="local"):
        endpoint.read(remotes[0])
    with pytest.raises(towline.Invalid, match="part 1 of 2"):
        endpoint.read([towline.Part(remotes[0], local), towline.Part(remotes[1], local, at=(1, 0, SIZE))])
    with pytest.raises(towline.Invalid, match="signal in part 2"):
        endpoint.write(remotes, [local, local], signal=(0, 1, 2))
