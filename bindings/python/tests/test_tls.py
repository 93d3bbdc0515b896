"""Encryption and checksums."""

import pytest

import towline


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
