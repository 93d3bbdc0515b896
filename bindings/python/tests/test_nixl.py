"""Agents: on the embedded engine, and on NIXL with a process that has only NIXL."""

from __future__ import annotations

import asyncio
import base64
import doctest
import gc
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import HERE

import towline
from towline import _native, nixl
from towline.nixl import Agent, Descriptors, Engine

PATTERN = bytes(range(251))


def pattern(nbytes: int, seed: int) -> bytes:
    return (PATTERN * (nbytes // 251 + 2))[seed : seed + nbytes]


def why_no_nixl() -> str:
    """Why NIXL cannot be used here; nothing where it can."""
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        return "NIXL's wheel is not installed (pip install --no-deps nixl-cu12)"
    return ""


def needs_nixl() -> None:
    """Skips a test where NIXL is missing; fails it where it is required."""
    reason = why_no_nixl()
    if reason:
        required = os.environ.get("TOWLINE_REQUIRE", "").split(",")
        assert "nixl" not in required and "all" not in required, reason
        pytest.skip(reason)


class Plain:
    """A process that runs `nixl_peer.py`, or another one that gets its orders in the same way."""

    def __init__(self, program: Path = HERE / "nixl_peer.py", *arguments: str) -> None:
        self.name = f"plain-{uuid.uuid4().hex[:8]}"
        self.process = subprocess.Popen(
            [sys.executable, str(program), *arguments, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"UCX_MODULES": "^efa", "NIXL_LOG_LEVEL": "WARN"},
        )

    def ask(self, do: str, **order: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer

    def bytes(self) -> list[bytes]:
        return [base64.b64decode(one) for one in self.ask("bytes")["bytes"]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


@pytest.fixture
def plain() -> Iterator[Callable[[], Plain]]:
    needs_nixl()
    made: list[Plain] = []

    def make() -> Plain:
        made.append(Plain())
        return made[-1]

    yield make
    for one in made:
        one.kill()


def engines() -> list[Any]:
    reason = why_no_nixl()
    return ["embedded", pytest.param("nixl", marks=pytest.mark.skipif(bool(reason), reason=reason))]


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> Engine:
    value: Engine = request.param
    return value


def agent(engine: Engine | None) -> Agent:
    return Agent(f"agent-{uuid.uuid4().hex[:8]}", engine=engine)


def test_two_agents_read_write_and_tell_each_other(engine: Engine) -> None:
    one, two = agent(engine), agent(engine)
    assert (one.engine, one.backends) == (engine, ["UCX"]) and engine in repr(one)
    source, target = numpy.frombuffer(pattern(1 << 20, 1), numpy.uint8).copy(), bytearray(1 << 20)
    with one.register(source) as region, two.register(target) as local:
        assert (region.address, region.nbytes, len(region)) == (source.ctypes.data, 1 << 20, 1 << 20)
        peer = two.add_peer(one.metadata())
        assert peer == one.name and two.knows(peer, region.descriptors)
        assert not two.knows("nobody")
        two.connect(peer)
        two.read(local, region.descriptors, peer, notification=b"taken").wait(30)
        assert one.receive(30) == {two.name: [b"taken"]} and one.receive() == {}
        assert target == pattern(1 << 20, 1)

        target[: 1 << 19] = bytes(1 << 19)
        request = two.write(local.part(0, 1 << 19), [(region.address, 1 << 19, 0)], peer)
        asyncio.run(awaited(request))
        assert request.done() and request.error() is None
        assert source[: 1 << 19].sum() == 0 and source[1 << 19 :].tobytes() == pattern(1 << 20, 1)[1 << 19 :]
        two.notify(peer, b"a word")
        assert one.receive(30) == {two.name: [b"a word"]}
    assert region.closed and local.closed
    two.remove_peer(peer)
    assert not two.knows(peer)
    one.close()
    two.close()
    with pytest.raises(towline.Invalid, match="closed"):
        one.metadata()


async def awaited(request: nixl.Request) -> None:
    await request


def test_the_engine_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with agent("embedded") as embedded:
        assert embedded.engine == "embedded" and embedded.engine_reason == "it was asked for"
    with agent(None) as automatic:
        assert automatic.engine == ("embedded" if why_no_nixl() else "nixl")
        assert "NIXL" in automatic.engine_reason
    with pytest.raises(towline.Invalid, match="engine"):
        Agent("one", engine="other")  # type: ignore[arg-type]
    with pytest.raises(towline.Unavailable, match="NO_SUCH"):
        Agent("one", engine="embedded", backends=["NO_SUCH"])
    with Agent("one", engine="embedded", backends={"ucx": {"any": "thing"}}) as parametrised:
        assert parametrised.backends == ["UCX"]


def test_the_example_runs() -> None:
    failed, attempted = doctest.testmod(nixl)
    assert failed == 0 and attempted > 0


def test_descriptors_have_the_form_of_the_wheel() -> None:
    some = Descriptors(((0x1000, 4096, 0), (0x3000, 512, 3)), "VRAM")
    assert Descriptors.from_bytes(some.to_bytes("nixl_cu13")) == some and some.nbytes == 4608
    for damaged in (b"", b"no", some.to_bytes()[:-1], b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93."):
        with pytest.raises(towline.Protocol):
            Descriptors.from_bytes(damaged)
    assert Descriptors.from_bytes(bytearray(some.to_bytes())) == some
    with pytest.raises(TypeError, match="int"):
        Descriptors.from_bytes(4096)  # type: ignore[arg-type]
    for wrong in (((-1, 1, 0),), ((1 << 64, 1, 0),)):
        with pytest.raises(towline.Invalid):
            Descriptors(wrong)
    with pytest.raises(towline.Invalid, match="memory"):
        Descriptors(((1, 1, 0),), "TAPE").to_bytes()
    with pytest.raises(towline.Invalid, match="package"):
        some.to_bytes("posix")


def test_memory_is_kept_and_let_go(engine: Engine) -> None:
    gc.collect()
    gc.collect()  # what tests before this one have left
    before = _native.held()
    with agent(engine) as one:
        data = bytearray(4096)
        region = one.register(data)
        with pytest.raises(BufferError):
            data.extend(b"x")
        assert _native.held() == before + 1
        region.close()
        region.close()
        data.extend(b"x")
        assert _native.held() == before
        region = one.register(data)
        del region
        gc.collect()
        assert _native.held() == before


def test_read_only_memory_is_a_source_where_that_is_said(engine: Engine) -> None:
    with agent(engine) as one, agent(engine) as two:
        with pytest.raises(towline.Invalid, match="read-only"):
            one.register(b"constant bytes")
        constant = one.register(pattern(4096, 3), source_only=True)
        target = bytearray(4096)
        local = two.register(target)
        peer = two.add_peer(one.metadata())
        two.read(local, constant.descriptors, peer).wait(30)
        assert target == pattern(4096, 3)
        one.add_peer(two.metadata())
        with pytest.raises(towline.Invalid, match="source only"):
            one.read(constant, local.descriptors, two.name)
        local.close()
        constant.close()


def test_wrong_calls_say_what_is_wrong() -> None:
    with agent("embedded") as one, agent("embedded") as two:
        region, local = one.register(bytearray(4096)), two.register(bytearray(4096))
        with pytest.raises(towline.NotFound):
            two.read(local, region.descriptors, one.name)
        peer = two.add_peer(one.metadata([region]))
        with pytest.raises(towline.NotFound):
            two.read(local, [(region.address, 4097, 0)], peer)
        with pytest.raises(towline.Invalid):
            two.read([(1, 4096, 0)], region.descriptors, peer)
        with pytest.raises(towline.Invalid):
            region.part(1, 4096)
        with pytest.raises(towline.Protocol):
            two.add_peer(b"nonsense")
        with pytest.raises(towline.Unsupported, match="of NIXL"):
            two.add_peer(b"nixlSerDes|Agent")
        region.close()
        with pytest.raises(towline.Stale):
            two.read(local, region.descriptors, peer).wait(30)


OWNER = """
import base64, sys
from towline.nixl import Agent
agent = Agent("other", engine="embedded")
memory = bytearray(range(251)) * 400
region = agent.register(memory)
print(base64.b64encode(agent.metadata()).decode(), region.address, region.nbytes, flush=True)
for line in sys.stdin:
    (name, messages), = agent.receive(50).items()
    print(name, messages[0].decode(), sum(memory), flush=True)
"""


def test_another_process_on_the_embedded_engine() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None

    def notified() -> list[str]:
        assert owner.stdin is not None and owner.stdout is not None
        print("what", file=owner.stdin, flush=True)
        return owner.stdout.readline().split()

    with agent("embedded") as ours, owner.stdin, owner.stdout:
        metadata, address, nbytes = owner.stdout.readline().split()
        peer = ours.add_peer(base64.b64decode(metadata))
        target = bytearray(int(nbytes))
        with ours.register(target) as local:
            remote = [(int(address), int(nbytes), 0)]
            ours.read(local, remote, peer, notification=b"taken").wait(30)
            assert target == bytes(range(251)) * 400
            assert notified() == [ours.name, "taken", str(sum(target))]
            target[:] = b"\1" * len(target)
            ours.write(local, remote, peer, notification=b"put").wait(30)
            assert notified() == [ours.name, "put", nbytes]
            owner.kill()
            owner.wait()
            with pytest.raises(towline.Stale):
                ours.read(local, remote, peer).wait(30)


def test_a_plain_process_is_read_and_written_and_told(plain: Callable[[], Plain]) -> None:
    peer = plain()
    offer = peer.ask("plain", nbytes=1 << 20, seed=7)
    remote = Descriptors.from_bytes(base64.b64decode(offer["descs"]))
    assert len(remote) == 2 and remote.nbytes == 1 << 20
    memory = bytearray(1 << 20)
    with agent("nixl") as ours, ours.register(memory) as region:
        name = ours.add_peer(base64.b64decode(offer["metadata"]))
        assert name == f"{peer.name}-1"
        halves = [(region.address, 1 << 19, 0), (region.address + (1 << 19), 1 << 19, 0)]
        ours.read(halves, remote, name, notification=b"read").wait(30)
        assert memory == pattern(1 << 20, 7)
        assert peer.ask("notified") == {"from": ours.name, "message": "read"}
        memory[:] = pattern(1 << 20, 100)
        ours.write(halves, remote, name, notification=b"written").wait(30)
        assert peer.ask("notified") == {"from": ours.name, "message": "written"}
        assert peer.bytes() == [pattern(1 << 20, 100)]


def test_a_plain_process_reads_and_writes_here_and_tells(plain: Callable[[], Plain]) -> None:
    peer = plain()
    package = peer.ask("plain", nbytes=1 << 16, seed=9)["package"]
    memory = bytearray(1 << 16)
    with agent("nixl") as ours, ours.register(memory) as region:
        order = {
            "metadata": base64.b64encode(ours.metadata()).decode(),
            "descs": base64.b64encode(region.descriptors.to_bytes(package)).decode(),
        }
        assert peer.ask("move", op="WRITE", message="put", **order) == {"status": "DONE"}
        assert ours.receive(30) == {f"{peer.name}-1": [b"put"]}
        assert memory == pattern(1 << 16, 9)
        memory[:] = pattern(1 << 16, 30)
        assert peer.ask("move", op="READ", message="taken", **order) == {"status": "DONE"}
        assert ours.receive(30) == {f"{peer.name}-1": [b"taken"]}
        assert peer.bytes() == [pattern(1 << 16, 30)]
