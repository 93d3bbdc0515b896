"""What is raised, and what it says."""

from __future__ import annotations

import array
import asyncio
import pickle
from typing import Any

import pytest
from conftest import MakePeer

import towline

PARENTS: dict[type[towline.Error], type[Exception]] = {
    towline.Disconnected: ConnectionError,
    towline.Exhausted: OSError,
    towline.Internal: RuntimeError,
    towline.Invalid: ValueError,
    towline.Native: OSError,
    towline.NotFound: LookupError,
    towline.PermissionDenied: PermissionError,
    towline.Protocol: ValueError,
    towline.Timeout: TimeoutError,
    towline.Unsupported: NotImplementedError,
}


def test_every_kind_has_its_class_and_its_second_parent() -> None:
    from towline._errors import BY_KIND

    assert len(BY_KIND) == 13
    for kind, cls in BY_KIND.items():
        assert cls.kind == kind == cls.__name__ and issubclass(cls, towline.Error)
        assert cls.retryable == (kind in ("Disconnected", "Exhausted", "Timeout"))
        assert issubclass(cls, PARENTS.get(cls, towline.Error))
    assert not issubclass(towline.Canceled, asyncio.CancelledError)


def test_an_error_tells_what_happened_and_can_be_pickled(
    peer: MakePeer, endpoint: towline.Endpoint
) -> None:
    remote = endpoint.import_(peer(access="read").ticket)
    local = endpoint.register(bytearray(8), "none")
    with pytest.raises(towline.PermissionDenied) as caught:
        endpoint.write(remote, local)
    error = caught.value
    assert (error.kind, error.op, error.peer) == ("PermissionDenied", "write", "peer")
    assert str(error) == f"write: {error.message} (PermissionDenied, peer peer)"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.peer == "peer"


def test_a_closed_region_is_stale_for_peers(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    owner = peer()
    remote = endpoint.import_(owner.ticket)
    local = endpoint.register(bytearray(8), "none")
    owner.tell("close")
    with pytest.raises(towline.Stale):
        endpoint.read(remote, local).wait()
    with pytest.raises(towline.Stale):
        endpoint.import_(owner.ticket)


def test_a_killed_peer_on_this_host_is_stale(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    owner = peer()
    remote = endpoint.import_(owner.ticket, require="unix")
    owner.stop()
    local = endpoint.register(bytearray(8), "none")
    transfer = endpoint.read(remote, local)
    with pytest.raises(towline.Timeout, match="in flight"):
        transfer.wait(0.05)
    owner.kill()
    with pytest.raises(towline.Stale) as caught:
        transfer.wait()
    assert (caught.value.transport, caught.value.peer) == ("unix", "peer")
    [failure] = transfer.failures()
    assert failure.blocks == range(0, 1) and isinstance(failure.error, towline.Stale)
    with pytest.raises(towline.Stale):
        endpoint.import_(owner.ticket)


def test_a_deadline_ends_a_transfer(peer: MakePeer, endpoint: towline.Endpoint) -> None:
    owner = peer()
    remote = endpoint.import_(owner.ticket, require="tcp")
    owner.stop()
    local = endpoint.register(bytearray(8), "none")
    with pytest.raises(towline.Timeout, match="0 of 8 bytes"):
        endpoint.read(remote, local, timeout=0.1).wait()


def test_a_long_timeout_leaves_the_stall_timeout_as_it_is(peer: MakePeer) -> None:
    owner = peer()
    with towline.Endpoint("impatient", stall_timeout=0.2) as of_its_own, towline.Endpoint("patient") as of_the_call:
        remotes = [one.import_(owner.ticket, require="tcp") for one in (of_its_own, of_the_call)]
        owner.stop()
        first = of_its_own.read(remotes[0], of_its_own.register(bytearray(8), "none"), timeout=600)
        second = of_the_call.read(
            remotes[1], of_the_call.register(bytearray(8), "none"), timeout=600, stall_timeout=0.2
        )
        for transfer in (first, second):
            with pytest.raises(towline.Timeout, match="0 of 8 bytes"):
                transfer.wait()


def test_damaged_tickets_are_refused_at_once(endpoint: towline.Endpoint) -> None:
    good = endpoint.register(bytes(8)).ticket()
    text = str(good)
    for bad in ("", "towline1:", "x" * 10_000_000, text[:-4], text[:30] + "A" + text[31:], "{}"):
        with pytest.raises(ValueError):
            towline.Ticket(bad)
        with pytest.raises(towline.Protocol):
            endpoint.import_(bad)
    for bad_bytes in (b"", bytes(good)[:-1], bytes(5_000_000)):
        with pytest.raises(towline.Protocol):
            towline.Ticket(bad_bytes)
    for wrong in (None, 5, [1, 2], object()):
        with pytest.raises(TypeError, match="ticket"):
            towline.Ticket(wrong)  # type: ignore[arg-type]


def test_tickets_survive_text_bytes_and_pickle(endpoint: towline.Endpoint) -> None:
    layout = towline.Layout.contiguous(4096, 256)
    ticket = endpoint.register(bytearray(4096), "read+write").ticket(layout)
    for copy in (towline.Ticket(str(ticket)), towline.Ticket(bytes(ticket)), towline.Ticket(ticket)):
        assert copy == ticket and hash(copy) == hash(ticket) and copy.layout == layout
    copy = pickle.loads(pickle.dumps(ticket))
    assert str(copy) == str(ticket)
    assert str(ticket)[9:] not in repr(ticket)
    assert (ticket.owner, ticket.nbytes, ticket.range, ticket.access, ticket.place) == (
        "test",
        4096,
        range(0, 4096),
        "read+write",
        "host",
    )


def test_a_narrowed_ticket_allows_less(endpoint: towline.Endpoint) -> None:
    region = endpoint.register(bytearray(range(100)), "read+write")
    less = region.ticket().narrow(range=range(10, 20), access="read", lease=60)
    assert (less.range, less.nbytes, less.access) == (range(10, 20), 10, "read")
    with towline.Endpoint("other") as other:
        remote = other.import_(less)
        target = bytearray(10)
        local = other.register(target, "none")
        other.read(remote, local).wait()
        assert target == bytes(range(10, 20))
        with pytest.raises(PermissionError):
            other.write(remote, local)
        ended = region.ticket().narrow(lease=0.0)
        with pytest.raises(PermissionError):
            asyncio.run(_later(other, ended))
    for bad in (range(0, 200), range(5, 5), range(0, 9, 2)):
        with pytest.raises(ValueError):
            less.narrow(range=bad)
    with pytest.raises(ValueError):
        less.narrow(access="read+write")
    with pytest.raises(ValueError, match="access"):
        less.narrow(access="rw")
    with pytest.raises(ValueError, match="lease"):
        less.narrow(lease=-1)


async def _later(endpoint: towline.Endpoint, ticket: towline.Ticket) -> None:
    await asyncio.sleep(0.05)
    await endpoint.import_async(ticket)


def test_wrong_arguments_are_named(endpoint: towline.Endpoint) -> None:
    region = endpoint.register(bytearray(64), "read+write")
    remote = endpoint.import_(region.ticket())
    layout = towline.Layout.contiguous(64, 8)
    with pytest.raises(ValueError, match="access"):
        endpoint.register(bytearray(8), "rw")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="local"):
        endpoint.read(remote, bytearray(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only one of"):
        endpoint.read(remote, region, at=0, spans=[])
    for at in (-1, (-1, 0, 1), 2**64):
        with pytest.raises(ValueError, match="at: "):
            endpoint.read(remote, region, at=at)
    with pytest.raises(TypeError, match="at: "):
        endpoint.read(remote, region, at=(1, 2))  # type: ignore[arg-type]
    for spans in ([(1, 2)], [("a", "b", "c")], [5], array.array("Q", [1, 2, 3, 4])):
        with pytest.raises(TypeError, match="spans: "):
            endpoint.read(remote, region, spans=spans)
    for negative in ([(-1, 0, 1)], array.array("q", [-1, 0, 1])):
        with pytest.raises(ValueError, match="spans: "):
            endpoint.read(remote, region, spans=negative)
    with pytest.raises(ValueError, match="negative"):
        endpoint.read(remote, region, blocks=(layout, array.array("i", [-1]), layout, [0]))
    for indices in (b"abcd", "ab", 5, [1.5], object()):
        with pytest.raises(TypeError, match=r"blocks\[1\]"):
            endpoint.read(remote, region, blocks=(layout, indices, layout, [0]))
    for indices, why in (([8], "remote index 8"), ([0, 1], "2")):
        with pytest.raises(ValueError, match=why):
            endpoint.read(remote, region, blocks=(layout, indices, layout, [0]))
    with pytest.raises(ValueError, match="timeout"):
        endpoint.read(remote, region, timeout=-1)
    with pytest.raises(ValueError, match="timeout"):
        endpoint.read(remote, region, timeout=float("nan"))
    with pytest.raises(ValueError, match="carrier-pigeon"):
        endpoint.read(remote, region, require="carrier-pigeon")
    with pytest.raises(towline.Unsupported):
        endpoint.read(remote, region, forbid=towline.paths())
    with pytest.raises(ValueError, match="isolation"):
        endpoint.import_(region.ticket(), isolation="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="listen"):
        towline.Endpoint("x", listen="localhost")
    wrong: Any
    for wrong in (5, ["x", 5], object()):
        for argument in ("listen", "advertise", "require", "forbid"):
            with pytest.raises(TypeError, match=f"{argument}: "):
                towline.Endpoint("x", **{argument: wrong})
        with pytest.raises(TypeError, match="require: "):
            endpoint.import_(region.ticket(), require=wrong)
        with pytest.raises(TypeError, match="forbid: "):
            endpoint.read(remote, region, forbid=wrong)
    # As many zeros as the number says would be a secret that everybody guesses.
    for wrong in (5, [1, 2], object()):
        with pytest.raises(TypeError, match="secret: "):
            towline.Endpoint("x", secret=wrong)
        with pytest.raises(TypeError, match="message: "):
            endpoint.notify(remote, wrong)
        with pytest.raises(TypeError, match="notify: "):
            endpoint.read(remote, region, notify=wrong)
    for wrong in ("x", 2.5, (2, "3"), None):
        with pytest.raises(TypeError, match="shape: "):
            towline.empty(wrong)
    with pytest.raises(TypeError) as caught:
        towline.Endpoint(5)  # type: ignore[arg-type]
    assert "name" in str(caught.value) + "".join(caught.value.__notes__)
    for call in (
        lambda: towline.Layout.blocks(-1, 1),
        lambda: towline.Layout.contiguous(64, 1 << 64),
        lambda: towline.Layout(0, 8, [(-1, 8)]),
        lambda: layout.offset(-1),
        lambda: region.span(-1, 8),
        lambda: region.span(0, 8).span(0, -8),
        lambda: region.wait_signal(-8, 1, 0),
        lambda: endpoint.fetch_add(remote, -8, 1),
        lambda: endpoint.compare_swap(remote, 0, -1, 1),
        lambda: endpoint.signal(remote, 0, 1 << 64),
    ):
        with pytest.raises(ValueError, match="from 0 to"):
            call()
    with pytest.raises(ValueError):
        towline.Endpoint("")
    with pytest.raises(ValueError):
        endpoint.read(remote, region, at=(60, 0, 8))
    with pytest.raises(ValueError):
        region.span(60, 8)
    with pytest.raises(ValueError):
        towline.Layout(0, 0, [(1, 1)])
    with pytest.raises(ValueError):
        endpoint.notify(remote, bytes(100_000))


def test_a_secret_keeps_out_who_does_not_know_it() -> None:
    with towline.Endpoint("owner", secret="one") as owner:
        region = owner.register(bytes(8))
        for secret, allowed in (("one", True), (b"one", True), ("two", False), (None, False)):
            with towline.Endpoint("other", secret=secret) as other:
                if allowed:
                    assert other.import_(region.ticket(), require="tcp").path == "tcp"
                else:
                    with pytest.raises(towline.Error):
                        other.import_(region.ticket(), require="tcp")


def test_closing_twice_is_harmless_and_use_after_close_is_invalid(
    endpoint: towline.Endpoint,
) -> None:
    region = endpoint.register(bytearray(8), "read+write")
    ticket = region.ticket()
    remote = endpoint.import_(ticket)
    region.close()
    region.close()
    assert region.closed and "closed" in repr(region)
    for use in (region.ticket, lambda: region.span(0), lambda: region.wait_signal(0, 1)):
        with pytest.raises(towline.Invalid, match="closed"):
            use()
    with pytest.raises(towline.Invalid, match="closed"):
        endpoint.read(remote, region)
    endpoint.close()
    endpoint.close()
    with pytest.raises(towline.Invalid, match="closed"):
        endpoint.import_(ticket)
    with pytest.raises(towline.Invalid, match="closed"):
        endpoint.receive(1)
    with pytest.raises(towline.Invalid, match="closed"):
        asyncio.run(endpoint.receive_async(1))


def test_layouts_compare_and_pickle() -> None:
    cache = towline.Layout(0, 4096, [(2, 819200), (2, 409600), (100, 4096)])
    assert (len(cache), cache.offset(301), cache.extent) == (400, 301 * 4096, 400 * 4096)
    assert pickle.loads(pickle.dumps(cache)) == cache and eval(repr(cache), vars(towline)) == cache
    assert cache != towline.Layout.blocks(4096, 400) and len({cache, cache}) == 1
    assert towline.Layout.blocks(10, 2, stride=20, base=5).offset(1) == 25
