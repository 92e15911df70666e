"""The tier keeps to the contract with every kind of server."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from tier_contract import TierContract

from kvplug.store.l2.valkey import ValkeySettings, ValkeyTier

pytestmark = pytest.mark.server


def _maker(url, **settings):
    return lambda: ValkeyTier(ValkeySettings(valkey_url=SecretStr(url), **settings))


class TestServer(TierContract):
    """A Valkey and a Redis server."""

    @pytest.fixture
    def new_tier(self, any_server):
        any_server.command("FLUSHALL", "SYNC")
        return _maker(any_server.url)


class TestTtl(TierContract):
    """Values that the server forgets some day."""

    @pytest.fixture
    def new_tier(self, kept_server):
        kept_server.command("FLUSHALL", "SYNC")
        return _maker(kept_server.url, valkey_ttl=1000)


class TestCluster(TierContract):
    """A cluster of three."""

    @pytest.fixture(scope="class")
    def cluster(self, start_cluster):
        return start_cluster()

    @pytest.fixture
    def new_tier(self, cluster):
        for server in cluster.servers:
            server.command("FLUSHALL", "SYNC")
        return _maker(cluster.url)


class TestTls(TierContract):
    """A connection by TLS."""

    # The proxy's descriptors and threads are of this process too, and end a moment later; see test_valkey_login.
    library_keeps_resources = True

    @pytest.fixture
    def new_tier(self, kept_server, tls_proxy, ca_file):
        kept_server.command("FLUSHALL", "SYNC")
        return _maker(f"valkeys://localhost:{tls_proxy(kept_server).port}", valkey_tls_ca=ca_file)
