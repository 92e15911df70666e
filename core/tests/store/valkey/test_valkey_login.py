"""Passwords, access rules and TLS."""

from __future__ import annotations

import logging
import threading
import traceback
from pathlib import Path

import pytest

from kvplug.store.l2.tier import TierError
from support.valkey import until

T = 5.0


@pytest.fixture(scope="module")
def locked(start_server):
    """Return a server with a password and a user who may only use keys of kvplug."""
    server = start_server()
    server.command(
        "ACL", "SETUSER", "alice", "on", ">s3cret", "~kvplug:*", "+get", "+set", "+exists", "+unlink", "+ping"
    )
    server.command("CONFIG", "SET", "requirepass", "hunter2")
    return server


@pytest.mark.server
def test_a_password_opens(locked, make_tier):
    """The default user's password, and a user with few rights, put and get; what the user may not know isn't needed."""
    for login in (":hunter2", "alice:s3cret"):
        tier = make_tier(f"valkey://{login}@127.0.0.1:{locked.port}")
        assert tier.put([b"a"], [memoryview(b"xyz")], T) == [True]
        buffer = memoryview(bytearray(3))
        assert tier.get([b"a"], [buffer], T) == [3]
        assert bytes(buffer) == b"xyz"
        tier.delete([b"a"], T)
        assert tier.exists([b"a"], T) == [False]


@pytest.mark.server
@pytest.mark.parametrize(
    ("login", "message"),
    [
        (":s3same@", r"refuses the login \(WRONGPASS\); correct the user and the password in valkey_url"),
        ("bob:s3same@", r"refuses the login \(WRONGPASS\)"),
        ("", "wants a password; add it to valkey_url"),
    ],
)
def test_a_wrong_login_is_named_but_not_shown(locked, make_tier, caplog, login, message):
    """A refused login is one sentence with host, port and remedy; the password is in no error and no log."""
    caplog.set_level(logging.DEBUG)
    tier = make_tier(f"valkey://{login}127.0.0.1:{locked.port}", opened=False)
    with pytest.raises(TierError, match=message) as caught:
        tier.open(max_value_bytes=100, timeout=T)
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert f"127.0.0.1:{locked.port}" in text
    assert "s3same" not in text


def test_a_server_that_quotes_the_password_is_not_quoted(scripted, make_tier):
    """A server without AUTH answers with what it was sent; the error has none of it."""

    def answer(data):
        return b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2'\r\n" * 2

    with pytest.raises(TierError, match=r"refuses the login \(ERR\)") as caught:
        make_tier(f"valkey://:hunter2@127.0.0.1:{scripted(answer).port}")
    assert "hunter2" not in str(caught.value)

    echo = scripted(lambda data: data[data.index(b"hunter2") :])
    with pytest.raises(TierError, match="no Valkey or Redis server sends") as caught:
        make_tier(f"valkey://:hunter2@127.0.0.1:{echo.port}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.server
def test_a_database_is_selected(server, make_tier):
    """Values are in the URL's database; one that doesn't exist is an error."""
    one, other = make_tier(f"{server.url}/1"), make_tier(server.url)
    assert one.put([b"a"], [memoryview(b"x")], T) == [True]
    assert (one.exists([b"a"], T), other.exists([b"a"], T)) == ([True], [False])
    with pytest.raises(TierError, match="DB index is out of range"):
        make_tier(f"{server.url}/99999")


@pytest.mark.server
def test_tls_is_checked(server, make_tier, tls_proxy, ca_file, authority):
    """A server whose certificate is of another authority or another host is refused, before a password is sent."""
    port = tls_proxy(server).port
    assert make_tier(f"valkeys://localhost:{port}", valkey_tls_ca=ca_file).exists([b"a"], T) == [False]
    with pytest.raises(TierError, match=rf"localhost:{port}: the TLS handshake failed \(.*certificate.*\)"):
        make_tier(f"valkeys://localhost:{port}")
    with pytest.raises(TierError, match="the TLS handshake failed"):
        make_tier(f"valkeys://127.0.0.1:{port}", valkey_tls_ca=ca_file)


@pytest.mark.server
def test_tls_with_a_certificate_of_the_client(  # noqa: PLR0917
    server, make_tier, tls_proxy, ca_file, authority, tmp_path
):
    """A server that asks for a certificate gets it; without one it ends the connection, which is an error."""
    port = tls_proxy(server, ask_for_certificate=True).port
    own = authority.issue_cert("client")
    certificate, key = tmp_path / "own.pem", tmp_path / "own.key"
    own.cert_chain_pems[0].write_to_path(str(certificate))
    own.private_key_pem.write_to_path(str(key))
    tls = {"valkey_tls_ca": ca_file, "valkey_tls_cert": certificate, "valkey_tls_key": key}
    assert make_tier(f"valkeys://localhost:{port}", **tls).put([b"a"], [memoryview(b"x")], T) == [True]
    with pytest.raises(TierError, match=f"localhost:{port}: "):
        make_tier(f"valkeys://localhost:{port}", valkey_tls_ca=ca_file)


@pytest.mark.server
def test_tls_against_a_server_without_and_the_other_way_round(server, make_tier, tls_proxy, ca_file):
    """Each mix-up is an error that says where, and what may be wrong."""
    with pytest.raises(TierError, match="the TLS handshake wasn't answered in time"):
        make_tier(f"valkeys://127.0.0.1:{server.port}", valkey_tls_ca=ca_file, timeout=1.0)
    with pytest.raises(TierError, match=r"valkeys:// if it wants TLS|ended the connection|connection broke"):
        make_tier(tls_proxy(server).port, timeout=1.0)


@pytest.mark.server
def test_tls_leaves_nothing(server, make_tier, tls_proxy, ca_file):
    """Connections by TLS are given back when the tier is closed, and when the server is gone."""
    proxy = tls_proxy(server)
    before = _descriptors(), threading.active_count()
    tier = make_tier(f"valkeys://localhost:{proxy.port}", valkey_tls_ca=ca_file)
    for _ in range(20):
        tier.exists([b"a"], T)
        proxy.reset()
    assert proxy.accepted == 20
    tier.close()
    until(lambda: (_descriptors(), threading.active_count()) == before)


def _descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
