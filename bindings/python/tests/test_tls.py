"""Encryption, checksums and quotas."""

import threading

import pytest
from ranks import config, every, outcomes

import towline
from towline import nccl


def test_everything_over_tcp_is_encrypted_where_both_want_it() -> None:
    with towline.Endpoint("owner", tls=True) as owner, towline.Endpoint("user", tls=towline.Tls.by_ticket()) as user:
        source = bytearray(range(256)) * 8192
        region = owner.register(source, "read")
        remote = user.import_(region.ticket(), require="tcp")
        assert "tcp+tls" in str(remote.explain())
        target = bytearray(len(source))
        user.read(remote, user.register(target, "none")).wait()
        assert target == source
        with towline.Endpoint("plain") as plain, pytest.raises(towline.PermissionDenied, match="requires TLS"):
            plain.import_(region.ticket(), require="tcp")


def test_wrong_certificates_are_refused_when_they_are_given() -> None:
    with pytest.raises(towline.Invalid, match="no certificate"):
        towline.Tls.by_certificate(b"", b"", b"")
    assert repr(towline.Tls.by_ticket()) == "<Tls(by ticket)>"


def test_blocks_are_checked_on_arrival() -> None:
    with towline.Endpoint("owner") as owner, towline.Endpoint("user", checksums=True) as user:
        source = bytearray(range(256)) * 8192
        region = owner.register(source, "read+write")
        remote = user.import_(region.ticket(), require="tcp")
        target = bytearray(len(source))
        local = user.register(target, "none")
        user.read(remote, local).wait()
        assert target == source
        user.write(remote, local).wait()


def test_quotas_bind_the_peers_of_an_endpoint() -> None:
    few = towline.Quotas(peers=1, prove_within=2.5, memory=1 << 30)
    assert (few.memory, towline.Quotas().memory) == (1 << 30, 4 << 30)
    assert (few.peers, few.prove_within) == (1, 2.5)
    assert few.requests == towline.Quotas().requests
    with pytest.raises(towline.Invalid, match="peers: -1"):
        towline.Quotas(peers=-1)
    with (
        towline.Endpoint("owner", quotas=few) as owner,
        towline.Endpoint("first") as first,
        towline.Endpoint("second") as second,
    ):
        region = owner.register(bytearray(64), "read")
        first.import_(region.ticket(), require="tcp")
        with pytest.raises(towline.Exhausted):
            second.import_(region.ticket(), require="tcp")


def _sum(comm: nccl.Communicator) -> float:
    numbers = nccl.empty(1000, "float64")
    numbers[:] = comm.rank + 1
    comm.allreduce(numbers, numbers, nccl.SUM).wait()
    return float(numbers[999])


def test_ranks_encrypt_what_goes_over_tcp_and_so_do_groups_that_are_split_off() -> None:
    def body(comm: nccl.Communicator) -> tuple[float, float]:
        whole = _sum(comm)
        part = comm.split(0, comm.rank)
        half = _sum(part)
        part.destroy()
        return whole, half

    for tls in (True, towline.Tls.by_ticket()):
        settings = config(tls=tls, require="tcp")
        assert every(2, body, settings, nccl.get_unique_id(tls=True)) == [(3.0, 3.0)] * 2


def test_a_rank_that_does_not_encrypt_is_refused_by_ranks_that_do() -> None:
    unique_id = nccl.get_unique_id()
    errors: list[Exception | None] = [None, None]

    def run(rank: int) -> None:
        settings = config(tls=rank == 0, require="tcp", timeout=3.0)
        try:
            with nccl.Communicator.init(2, rank, unique_id, settings) as comm:
                _sum(comm)
        except towline.Error as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(errors), errors
    assert any("TLS" in str(error) for error in errors), errors


def test_quotas_bind_the_ranks_of_a_group() -> None:
    settings = config(quotas=towline.Quotas(peers=0), require="tcp", timeout=3.0)
    for error in outcomes(2, _sum, settings):
        assert isinstance(error, towline.Error), error
