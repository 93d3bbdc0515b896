"""Who used a region, who was not let in, and the metrics."""

import os
import socket
import time

import towline


def test_the_audit_counts_what_the_owner_serves_and_says_what_it_does_not_see() -> None:
    with towline.Endpoint("owner", isolation="enforced") as owner, towline.Endpoint("user") as user:
        region = owner.register(towline.empty(4096), "read+write")
        ticket = region.ticket()
        remote = user.import_(ticket, require="tcp")
        local = user.register(bytearray(4096), "none")
        user.read(remote, local).wait()
        user.write(remote, local, at=(0, 0, 100)).wait()
        audit = region.audit()
        assert not audit.incomplete
        (peer,) = audit.peers
        assert (peer.peer, peer.incarnation) == ("user", user.incarnation)
        assert (peer.reads, peer.writes, peer.refused) == ((1, 4096), (1, 100), 0)
        assert "1 reads of 4096 bytes" in str(audit) and "user" in repr(peer)
        assert owner.audit().peers[0].reads == (1, 4096)

        user.import_(ticket, require="inproc")
        assert region.audit().incomplete and region.audit().peers[0].unseen


def test_metrics_are_text_that_prometheus_reads() -> None:
    with towline.Endpoint("owner") as owner, towline.Endpoint('user"1') as user:
        region = owner.register(bytearray(64), "read")
        remote = user.import_(region.ticket(), require="tcp")
        user.read(remote, user.register(bytearray(64), "none")).wait()
        lines = owner.metrics().splitlines()
        assert "towline_regions 1" in lines
        assert 'towline_served_bytes_total{peer="user\\"1",direction="read"} 64' in lines
        assert "towline_peers 1" in lines
        samples = [line for line in lines if not line.startswith("#")]
        assert all(line.rsplit(" ", 1)[1].isdigit() for line in samples)
        stats = owner.stats()
        assert (stats.peers, stats.unauthenticated) == (1, 0)


def test_who_is_refused_before_it_proves_anything_is_counted_by_where_it_comes_from() -> None:
    with towline.Endpoint("owner") as owner:
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.settimeout(30)
            attacker.connect(f"\0towline/{owner.incarnation}")
            attacker.sendall(b"\xff" * 64)
            while attacker.recv(4096):
                pass
        until = time.monotonic() + 30
        while not owner.audit().unauthenticated and time.monotonic() < until:
            time.sleep(0.01)
        assert owner.audit().unauthenticated == [(f"user {os.geteuid()} of this host", 1)]
        assert owner.stats().refused_handshakes == 1
        assert 'towline_refused_handshakes_total{reason="protocol"} 1' in owner.metrics().splitlines()
