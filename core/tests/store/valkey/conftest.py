"""Real servers, and a server that says what a test wants it to."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import ExitStack, suppress

import pytest
from pydantic import SecretStr

from kvplug.store.l2.valkey import ValkeySettings, ValkeyTier
from support.proxy import Proxy
from support.valkey import Cluster, Server, find_binary


def _binary(kind):
    try:
        return find_binary(kind)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Start servers: (kind, **options); all are killed at the end."""
    with ExitStack() as stack:

        def start(kind="valkey", **options):
            server = Server(_binary(kind), tmp_path_factory.mktemp(kind), **options)
            stack.callback(server.kill)
            return server

        yield start


@pytest.fixture(scope="session", params=["valkey", "redis"])
def any_server(request, start_server):
    """Run the test with a Valkey and with a Redis server, which keep running."""
    return start_server(request.param)


@pytest.fixture(scope="session")
def kept_server(start_server):
    """Return a Valkey server that is kept for other tests."""
    return start_server("valkey")


@pytest.fixture
def server(kept_server):
    """Return a running, empty Valkey server, which the test may kill or stop."""
    if not kept_server.running:
        kept_server.start()
    kept_server.resume()
    kept_server.command("FLUSHALL", "SYNC")
    yield kept_server
    if kept_server.running:
        kept_server.resume()


@pytest.fixture
def proxy(server):
    """Return a proxy in front of the server."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory):
    """Start clusters of three masters: (replicas=[master, …]); all are killed at the end."""
    with ExitStack() as stack:

        def start(replicas=()):
            cluster = Cluster(_binary("valkey"), tmp_path_factory.mktemp("cluster"), replicas)
            stack.callback(cluster.kill)
            return cluster

        yield start


@pytest.fixture
def make_tier():
    """Make tiers: (url or port, opened=True, **settings); all are closed at the end."""
    with ExitStack() as stack:

        def make(url, *, opened=True, timeout=10.0, **settings):
            if isinstance(url, int):
                url = f"valkey://127.0.0.1:{url}"
            tier = ValkeyTier(ValkeySettings(valkey_url=SecretStr(url), **settings))
            stack.callback(tier.close)
            if opened:
                tier.open(max_value_bytes=16 << 20, timeout=timeout)
            return tier

        yield make


class ScriptedServer:
    """Answers each connection's packets with what a function of the packet says; None closes the connection."""

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        #: What was received, by connection.
        self.received: list[list[bytes]] = []
        self._connections = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        threads = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self.received.append([])
            self._connections.append(connection)
            threads.append(threading.Thread(target=self._serve, args=(connection, self.received[-1]), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(10)

    def _serve(self, connection, received):
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                received.append(data)
                answer = self._answer(data)
                if answer is None:
                    return
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    connection.sendall(piece)

    def end_connections(self):
        """End all connections, as a load balancer does that has forgotten them."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_connections()
        self._thread.join(10)


@pytest.fixture
def scripted():
    """Start servers that answer as a function says."""
    with ExitStack() as stack:

        def start(answer):
            server = ScriptedServer(answer)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="session")
def authority():
    """Return a certificate authority."""
    return pytest.importorskip("trustme").CA()


@pytest.fixture(scope="session")
def ca_file(authority, tmp_path_factory):
    """Return the file with the authority's certificate."""
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def tls_proxy(authority):
    """Give a server a port that speaks TLS, since not every build of it can: (server, ask_for_certificate=False)."""
    with ExitStack() as stack:

        def start(server, *, ask_for_certificate=False):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("localhost").configure_cert(context)
            if ask_for_certificate:
                authority.configure_trust(context)
                context.verify_mode = ssl.CERT_REQUIRED
            return stack.enter_context(Proxy(server.port, context))

        yield start
