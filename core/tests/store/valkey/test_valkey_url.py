"""`valkey_url`, and that its secrets stay secret."""

from __future__ import annotations

import traceback

import pytest
from pydantic import SecretStr

from kvplug.errors import ConfigError
from kvplug.store.l2.valkey import ValkeySettings, ValkeyTier
from kvplug.store.l2.valkey.url import Address, Target, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("valkey://h", Target((Address("h", 6379),))),
        ("redis://h:1/3", Target((Address("h", 1),), database=3)),
        ("valkeys://h/", Target((Address("h", 6379),), tls=True)),
        ("rediss://:pw@h", Target((Address("h", 6379),), tls=True, password="pw")),
        ("valkey://me:p%40%2F%3Aw@h", Target((Address("h", 6379),), username="me", password="p@/:w")),
        ("valkey://:a:b@h", Target((Address("h", 6379),), password="a:b")),
        ("valkey://a:1,b,[::1]:3/0", Target((Address("a", 1), Address("b", 6379), Address("::1", 3)))),
    ],
)
def test_a_url_says_where_and_as_whom(url, target):
    """Hosts, ports, database, TLS and login are taken from the URL, with defaults and percent-encoding."""
    assert parse_url(url) == target


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "must begin with valkey://"),
        ("hunter2", "must begin with valkey://"),
        ("hunter2://h", "must begin with valkey://"),
        ("http://:hunter2@h", "must begin with valkey://"),
        ("valkey://", "names no host"),
        ("valkey://:hunter2@", "names no host"),
        ("valkey://:hunter2@h,", "names no host"),
        ("valkey://:hunter2@h:hunter2", "port that isn't a number"),
        ("valkey://:hunter2@h:0", "port that isn't a number"),
        ("valkey://:hunter2@h:65536", "port that isn't a number"),
        ("valkey://:hunter2@h:²", "port that isn't a number"),
        ("valkey://:pass/hunter2@h", "in its user or password"),
        ("valkey://h/hunter2", "something else than a database's number"),
        ("valkey://h/0?password=hunter2", r"has a \? or a #"),
        ("valkey://:hunter2#x@h", "in its user or password"),
        ("valkey://hunter2@h", "has a user but no password"),
        ("valkey://:hunter2@[::1", "can't be read"),
        ("valkey://:hunter2@[::1]6379", "can't be read|malformed IPv6"),
        ("valkey://:hunter2\u2100@h", "can't be read"),
    ],
)
def test_a_wrong_url_is_named_but_not_shown(url, problem):
    """A malformed URL is an error that says what is wrong and how it is written, and never quotes it."""
    with pytest.raises(ConfigError, match=problem) as caught:
        ValkeyTier(ValkeySettings(valkey_url=SecretStr(url)))
    assert str(caught.value).startswith("Setting valkey_url ")
    assert "valkey://user:password@host:6379/0" in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_secret_is_nowhere_to_be_seen():
    """The settings' dump, their text, the tier's place and the parsed URL don't have the password."""
    settings = ValkeySettings.load({"valkey_url": "valkey://alice:hunter2@h:1,[::1]/2"}, {})
    tier = ValkeyTier(settings)
    target = parse_url(settings.valkey_url.get_secret_value())
    assert tier.place == "h:1,[::1]:6379"
    for text in (repr(settings), str(settings.describe()), tier.place, repr(target), str(target), repr(tier)):
        assert "hunter2" not in text
        assert "alice" not in text


def test_settings_are_checked():
    """A wrong value is an error that names the setting; the defaults are a server on this machine, without a TTL."""
    assert ValkeyTier().place == "127.0.0.1:6379"
    for wrong in ({"valkey_ttl": 0}, {"valkey_prefix": "{a}"}, {"valkey_prefix": "a b"}, {"valkey_nothing": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ValkeySettings.load(wrong, {})
    loaded = ValkeySettings.load({}, {"KVPLUG_VALKEY_TTL": "60", "KVPLUG_VALKEY_PREFIX": "team-a:"})
    assert (loaded.valkey_ttl, loaded.valkey_prefix) == (60, "team-a:")


@pytest.mark.parametrize("setting", ["valkey_tls_ca", "valkey_tls_cert"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_named(tmp_path, setting, content):
    """A file that is missing or holds no certificate is an error that names the setting and the file."""
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    settings = ValkeySettings(valkey_url=SecretStr("valkeys://h"), **{setting: file})
    with pytest.raises(ConfigError, match=rf"Setting {setting} is '.*file\.pem', which can't be used \(.+\); name a"):
        ValkeyTier(settings)
