"""Settings of the store: those of the tiers that are named, and an error for everything that would be ignored."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from pydantic import Field, SecretStr
from tiers import DictTier

from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry
from kvplug.errors import ConfigError
from kvplug.settings import Settings
from kvplug.store.l2 import registry
from kvplug.store.l2.registry import load_tier, tier_names
from kvplug.store.settings import StoreSettings


class _DictSettings(Settings):
    dict_url: SecretStr = Field(examples=["dict://host"], description="Where.")
    dict_ttl: int = Field(default=5, ge=1, description="Seconds.")


class ConfiguredTier(DictTier):
    """A tier with settings."""

    Settings = _DictSettings


class OtherTier(DictTier):
    """A tier without."""

    name = "other"


class Misnamed(DictTier):
    """Its entry point has another name."""

    name = "something"


class WrongSettings(DictTier):
    """Its setting doesn't begin with its name."""

    name = "wrong"

    class Settings(Settings):  # noqa: D106
        url: str = Field(default="", description="Where.")


not_a_tier = 5


@pytest.fixture(autouse=True)
def _declared(monkeypatch):
    """Declare the tiers of this module, and some that can't be used."""
    module = __name__

    def entry(name, attribute, module=module):
        return ConnectorEntry(name, module, attribute, "tiers-for-tests", "1.0", "/somewhere")

    entries = [
        entry("dict", "ConfiguredTier"),
        entry("other", "OtherTier"),
        entry("misnamed", "Misnamed"),
        entry("wrong", "WrongSettings"),
        entry("number", "not_a_tier"),
        entry("broken", "Tier", "tiers_for_tests_that_are_not_there"),
    ]
    skipped = [SkippedEntry("twice", "a", "1", "a 1 and b 1 claim this name, so neither gets it: uninstall one.")]
    found = Discovery(tuple(entries), tuple(skipped))
    monkeypatch.setattr(registry, "discover", lambda *_args, **_kwargs: found)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**globals()))


def problem_of(extra_config, environ=None):
    with pytest.raises(ConfigError) as caught:
        StoreSettings.load(extra_config, environ or {})
    return str(caught.value)


def test_without_l2_there_are_no_tiers():
    """By default there is L1 only."""
    settings = StoreSettings.load({}, {})
    assert settings.l2 == ()
    assert settings.tiers == ()


@pytest.mark.parametrize("value", ["other,dict", ["other", "dict"], ("other", "dict"), " other , dict,"])
def test_tiers_are_named_in_order(value):
    """One name, a list, or names with commas between them; their settings are read and checked with the rest."""
    settings = StoreSettings.load({"l2": value, "dict_url": "dict://a", "dict_ttl": "7"}, {})
    assert settings.l2 == ("other", "dict")
    assert settings.tiers == (OtherTier, ConfiguredTier)
    assert settings.dict_ttl == 7
    assert isinstance(settings, _DictSettings)
    assert isinstance(settings, StoreSettings)
    assert settings.source_of("dict_ttl") == "extra config"


def test_tiers_and_their_settings_may_come_from_the_environment():
    """KVPLUG_L2 and the tier's own variables do what the settings do."""
    settings = StoreSettings.load({}, {"KVPLUG_L2": "dict", "KVPLUG_DICT_URL": "dict://a:hunter2@b"})
    assert settings.dict_url.get_secret_value() == "dict://a:hunter2@b"
    assert "hunter2" not in str(settings.describe()) + repr(settings)


@pytest.mark.parametrize(
    ("extra_config", "problem"),
    [
        ({"l2": "disc"}, "There is no L2 tier 'disc': set l2 to one of broken, dict"),
        ({"l2": "twice"}, r"There is no L2 tier 'twice' (a 1 and b 1 claim this name"),
        ({"l2": "broken"}, "can't be imported (ModuleNotFoundError"),
        ({"l2": "number"}, "it is no subclass of kvplug.store.l2.Tier"),
        ({"l2": "misnamed"}, "its attribute `name` is 'something'"),
        ({"l2": "wrong"}, "its setting 'url' doesn't begin with wrong_"),
        ({"l2": "dict"}, "Setting dict_url has no default: set it to, for example, 'dict://host'."),
        ({"l2": "other,other"}, "should name each tier once"),
        ({"l2": 5}, "should be the name of a tier, or a list of names"),
        ({"l2": ["other", 5]}, "should be the name of a tier, or a list of names"),
        ({"l2": "dict", "dict_url": "x", "dict_tll": 1}, "'dict_tll' of kv_connector_extra_config is unknown"),
        ({"l2": "other", "dict_ttl": 1}, "'dict_ttl' of kv_connector_extra_config is for the L2 tier 'dict': add"),
        ({"dict_ttl": 1}, "is for the L2 tier 'dict': add 'dict' to the setting l2, or remove it."),
        ({"l2_write_policy": "some"}, "Setting l2_write_policy"),
        ({"l2_load_timeout": 0}, "greater than 0"),
        ({"l2_codec": "lz4"}, "Setting l2_codec"),
    ],
)
def test_what_is_wrong_is_told(extra_config, problem):
    """Every mistake is an error that says what to do."""
    assert problem in problem_of(extra_config)


def test_all_problems_at_once():
    """A tier that isn't there doesn't hide what else is wrong."""
    assert len(problem_of({"l2": "disc,dict", "l2_timeout": -1}).splitlines()) == 3


def test_variables_of_tiers_that_are_not_named_are_ignored():
    """One environment may serve engines with different tiers; a misspelt variable is still an error."""
    settings = StoreSettings.load({"l2": "other"}, {"KVPLUG_DICT_URL": "dict://a"})
    assert settings.tiers == (OtherTier,)
    assert "KVPLUG_DIC_URL" in problem_of({"l2": "other"}, {"KVPLUG_DIC_URL": "dict://a"})


@pytest.mark.parametrize(("text", "policy"), [("ALL", "all"), ("hot", "hits"), ("EVICTED", "evicted")])
def test_aibrix_ingestion_is_taken_over(text, policy):
    """AIBrix's kinds of ingestion have their equivalents here."""
    environ = {"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE": text, "AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE": "ours"}
    settings = StoreSettings.load({}, environ)
    assert settings.l2_write_policy == policy
    assert settings.l2_namespace == "ours"


def test_settings_of_the_same_tiers_have_one_class():
    """Loading again makes no new class: classes stay for good."""
    one, other = (StoreSettings.load({"l2": "dict", "dict_url": url}, {}) for url in ("a", "b"))
    assert type(one) is type(other)


def test_tiers_are_declared():
    """The names of tiers come from metadata; nothing is imported for that."""
    assert tier_names() == ["broken", "dict", "misnamed", "number", "other", "wrong"]
    assert load_tier("other") is OtherTier
