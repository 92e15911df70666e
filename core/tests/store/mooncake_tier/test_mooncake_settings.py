"""The tier's settings, and what is said where Mooncake's client is missing. No server, no client."""

from __future__ import annotations

import sys

import pytest

from kvplug.errors import ConfigError
from kvplug.store.l2.mooncake import MooncakeSettings, MooncakeTier, library
from kvplug.store.l2.mooncake.addresses import own_address, split_address

WHERE = MooncakeSettings(mooncake_master="127.0.0.1:1")


@pytest.fixture
def no_client():
    """Forget Mooncake's client for the test's time, and afterwards what the test took for it."""

    def take_out():
        names = [name for name in sys.modules if name.partition(".")[0] == "mooncake"]
        return {name: sys.modules.pop(name) for name in names}

    client = take_out()
    yield
    take_out()
    sys.modules.update(client)


def test_the_master_must_be_named():
    """Who chooses the tier and doesn't say where is told which setting to set."""
    with pytest.raises(ConfigError, match="set mooncake_master"):
        MooncakeTier()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:1", "http://h:1"])
def test_an_address_that_is_none_is_a_config_error(text):
    """What isn't host and port is refused when the settings are read, with an example."""
    with pytest.raises(ConfigError, match=r"mooncake_master.*host and a port.*10\.0\.0\.5:50051"):
        MooncakeSettings.load({"mooncake_master": text}, {})


def test_addresses():
    """Names, IPv4 and IPv6 addresses have ports."""
    assert split_address("store.example:50051") == ("store.example", 50051)
    assert split_address("[::1]:1") == ("::1", 1)


def test_this_machines_address_is_the_one_towards_the_master():
    """Nodes get an address that they can use: the one that packets to the master would have."""
    assert own_address("127.0.0.1:50051") == "127.0.0.1"


def test_a_missing_client_is_one_sentence_with_the_pip_command(no_client):
    """Without Mooncake's client the tier can't be made; importing it isn't tried before."""
    sys.modules["mooncake"] = None
    with pytest.raises(ConfigError, match=r"^[^.]*: pip install 'kvplug\[mooncake\]'$"):
        MooncakeTier(WHERE)


def test_a_missing_system_library_is_one_sentence_that_names_it(monkeypatch, no_client, tmp_path):
    """Mooncake's wheel needs libraries that pip can't bring: the error names file and package."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    error = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (package / "store.py").write_text(f"raise ImportError({error!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1, .*apt-get install libibverbs1 "):
        MooncakeTier(WHERE)


def test_a_client_that_is_broken_otherwise_shows_its_own_error(monkeypatch, no_client, tmp_path):
    """An error that isn't about something missing isn't called that."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("import a_module_of_its_own_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_of_its_own_that_is_missing"):
        MooncakeTier(WHERE)


def test_mooncakes_limits_follow_the_timeout_unless_the_user_set_them(monkeypatch):
    """Mooncake reads its limits from variables: those that are set stay, those set here change with the time-out."""
    # A copy, so that what is set there doesn't outlive the test.
    environment = {"MC_RPC_TIMEOUT_MS": "77"}
    monkeypatch.setattr(library, "_ours", {})
    monkeypatch.setattr(library.os, "environ", environment)
    library.bound_calls(0.3)
    assert environment["MC_RPC_TIMEOUT_MS"] == "77"
    assert environment["MC_RPC_CONNECT_TIMEOUT_MS"] == "300"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "1"
    library.bound_calls(2.5)
    assert environment["MC_RPC_TIMEOUT_MS"] == "77"
    assert environment["MC_RPC_CONNECT_TIMEOUT_MS"] == "2500"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3"
