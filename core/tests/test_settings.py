"""Settings: where they come from, and an error for everything that would be ignored."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ByteSize, Field, SecretStr

from kvplug import settings as settings_module
from kvplug.errors import ConfigError
from kvplug.settings import L1Settings, Settings
from kvplug.store.policies import policy_names
from kvplug.store.settings import StoreSettings

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
CAPACITY = "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"
POLICY = "AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY"
GIB = 1 << 30


class SecretSettings(L1Settings):
    """Settings of a connector with a password, a number and a prefix of its own."""

    env_prefix = "OTHER_"

    password: SecretStr | None = Field(default=None, description="A secret.")
    count: int = Field(default=3, description="A number.")


@pytest.fixture
def warnings(monkeypatch):
    """Collect what the settings log, as if nothing had been logged in this process yet."""
    lines = []
    monkeypatch.setattr(settings_module, "_reported", set())
    monkeypatch.setattr(settings_module.logger, "warning", lambda message, *args: lines.append(message % args))
    return lines


def problem_of(extra_config=None, environ=None, kind=L1Settings):
    with pytest.raises(ConfigError) as caught:
        kind.load(extra_config, environ or {})
    return str(caught.value)


def test_defaults():
    """Without any setting, the defaults are in effect, and known as such."""
    for extra_config in ({}, None):
        settings = L1Settings.load(extra_config, {"PATH": "/bin"})
        assert settings.l1_size_per_rank == 4 * GIB
        assert settings.l1_eviction_policy == "lru"
        assert settings.model_id is None
        assert {settings.source_of(field) for field in L1Settings.model_fields} == {"default"}


def test_extra_config_goes_before_variables_and_those_before_aibrix():
    """The extra config wins over KVPLUG_ variables, those over AIBrix's, those over defaults; the source is known."""
    environ = {CAPACITY: "1"}
    assert L1Settings.load({}, environ).l1_size_per_rank == GIB
    assert L1Settings.load({}, environ).source_of("l1_size_per_rank") == CAPACITY
    environ["KVPLUG_L1_SIZE_PER_RANK"] = "2GiB"
    assert L1Settings.load({}, environ).l1_size_per_rank == 2 * GIB
    assert L1Settings.load({}, environ).source_of("l1_size_per_rank") == "KVPLUG_L1_SIZE_PER_RANK"
    settings = L1Settings.load({"l1_size_per_rank": "3GiB"}, environ)
    assert settings.l1_size_per_rank == 3 * GIB
    assert settings.source_of("l1_size_per_rank") == "extra config"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("4GiB", 4 * GIB),
        ("512 MiB", GIB // 2),
        ("1.5gib", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        ("7 B", 7),
        (".5KiB", 512),
        ("2pb", 2 * 10**15),
        ("1EiB", 1 << 60),
        ("8G", 8 * 10**9),
        (ByteSize(GIB), GIB),
    ],
)
def test_sizes(value, size):
    """A size is a number of bytes, or a number with a unit of 1,000 or 1,024."""
    assert L1Settings.load({"l1_size_per_rank": value}, {}).l1_size_per_rank == size


@pytest.mark.parametrize(
    "value", [0, -1, "-1", "0GiB", True, 4.0, None, "", "lots", "4GiBB", "4GiB x", "4Gbit", "4Gi", "1e9", [4]]
)
def test_wrong_sizes(value):
    """A size that isn't one is an error in one sentence: setting, source, value, what it should be."""
    problem = problem_of({"l1_size_per_rank": value})
    assert problem.startswith(f"Setting l1_size_per_rank (from extra config) is {value!r}, but should be ")
    assert problem.endswith("set it to, for example, '8GiB'.")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("extra_config", "environ", "named", "near"),
    [
        ({"l1_size": "4GiB"}, {}, "'l1_size'", "'l1_size_per_rank'"),
        ({"evictionpolicy": "lru"}, {}, "'evictionpolicy'", "'l1_eviction_policy'"),
        ({}, {"KVPLUG_L1_SIZE": "4GiB"}, "KVPLUG_L1_SIZE", "'KVPLUG_L1_SIZE_PER_RANK'"),
        ({}, {"KVPLUG_DISABLED": "x"}, "KVPLUG_DISABLED", "'KVPLUG_DISABLE'"),
    ],
)
def test_unknown_settings_name_the_near_miss(extra_config, environ, named, near):
    """An unknown key or variable is an error that names it, what was probably meant, and what there is."""
    problem = problem_of(extra_config, environ)
    assert f"{named} " in problem
    assert f"did you mean {near}?" in problem
    assert "Known are " in problem


def test_unknown_settings_far_from_any():
    """Where nothing is near, there is no guess."""
    assert "did you mean" not in problem_of({"zzz": 1})


def test_all_problems_at_once():
    """Every problem is told in one error, a line each."""
    problem = problem_of({"l1_size_per_rank": 0, "x": 1}, {"KVPLUG_Y": "1", CAPACITY: "much"})
    assert len(problem.splitlines()) == 4


def test_variables_that_are_no_settings():
    """Variables for other parts of kvplug, of other connectors' settings and of Kubernetes services aren't errors."""
    environ = {
        "KVPLUG_DISABLE": "*",
        "OTHER_COUNT": "3",
        "KVPLUG_SERVICE_HOST": "10.0.0.1",
        "KVPLUG_STORE_SERVICE_PORT_HTTP": "80",
        "KVPLUG_PORT": "tcp://10.0.0.1:80",
        "KVPLUG_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert L1Settings.load({}, environ) == L1Settings()


def test_an_empty_variable_is_unset():
    """A variable that is set to nothing counts as unset."""
    settings = L1Settings.load({}, {"KVPLUG_L1_SIZE_PER_RANK": "", CAPACITY: ""})
    assert settings.source_of("l1_size_per_rank") == "default"


def test_other_connectors_have_variables_of_their_own():
    """A connector's settings may have a prefix of their own, with errors of their own."""
    settings = SecretSettings.load({}, {"OTHER_COUNT": "7", "KVPLUG_L1_SIZE_PER_RANK": "1GiB"})
    assert settings.count == 7
    assert settings.source_of("count") == "OTHER_COUNT"
    assert settings.l1_size_per_rank == 4 * GIB
    assert "'OTHER_COUNT'" in problem_of({}, {"OTHER_COUNTS": "7"}, SecretSettings)


def test_secrets_are_never_shown():
    """A secret is in no error, no description and no representation; nor is the value of an unknown key."""
    for extra_config in ({"password": ["hunter2"]}, {"passwort": "hunter2"}, {"password": "hunter2", "count": "x"}):
        problem = problem_of(extra_config, kind=SecretSettings)
        assert "password" in problem or "count" in problem
        assert "hunter2" not in problem
    settings = SecretSettings.load({"password": "hunter2"}, {})
    assert settings.password.get_secret_value() == "hunter2"
    assert "hunter2" not in json.dumps(settings.describe()) + repr(settings)


def test_policies():
    """A policy's case doesn't matter; one that isn't there is an error where kvplug is asked for it."""
    assert L1Settings.load({"l1_eviction_policy": "LRU"}, {}).l1_eviction_policy == "lru"
    assert L1Settings.load({}, {POLICY: "LRU"}).source_of("l1_eviction_policy") == POLICY
    assert L1Settings.load({}, {POLICY: "S3FIFO"}).l1_eviction_policy == "s3fifo"
    assert "is 'MRU', but should be 'lru', 'fifo' or 's3fifo'." in problem_of({"l1_eviction_policy": "MRU"})
    assert "(from KVPLUG_L1_EVICTION_POLICY)" in problem_of({}, {"KVPLUG_L1_EVICTION_POLICY": "MRU"})


def test_the_setting_offers_the_policies_that_there_are():
    """Every eviction policy of the store can be chosen, and no other."""
    assert sorted(get_args(settings_module.EvictionPolicy)) == policy_names()


def test_aibrix_policies_that_are_not_there_are_ignored(warnings):
    """A policy of AIBrix's that isn't there is named as ignored, and the default is in effect."""
    settings = L1Settings.load({}, {POLICY: "ARC"})
    assert settings.source_of("l1_eviction_policy") == "default"
    assert warnings == [
        f"These AIBrix variables have no equivalent in kvplug and are ignored: {POLICY} (ARC isn't available here)."
    ]


def test_aibrix_sizes_are_fractions_of_gib():
    """AIBrix's gigabytes are 2**30 bytes, and may have a fraction; what isn't a number is an error in its terms."""
    assert L1Settings.load({}, {CAPACITY: "0.5"}).l1_size_per_rank == GIB // 2
    for value in ("much", "nan", "inf"):
        assert problem_of({}, {CAPACITY: value}) == (
            f"Environment variable {CAPACITY} is {value!r}, but should be a number of gigabytes; correct or unset it."
        )
    assert f"(from {CAPACITY}) is 0" in problem_of({}, {CAPACITY: "0"})


def test_ignored_aibrix_variables_are_named_once(warnings):
    """AIBrix variables without an equivalent are named in one line, without their values, once per process."""
    environ = {
        CAPACITY: "1",
        "AIBRIX_KV_CACHE_OL_PRISKV_PASSWORD": "hunter2",
        "VLLM_AIBRIX_SYNC_GRANULARITY": "PER_OP",
        "AIBRIX_KV_CACHE_OL_DEVICE": "",
    }
    for _ in range(3):
        L1Settings.load({}, environ)
    assert len(warnings) == 1
    assert "AIBRIX_KV_CACHE_OL_PRISKV_PASSWORD, VLLM_AIBRIX_SYNC_GRANULARITY." in warnings[0]
    assert not any(text in warnings[0] for text in ("hunter2", CAPACITY, "OL_DEVICE"))


def test_settings_cannot_be_changed():
    """What was logged at start is what stays in effect."""
    settings = L1Settings.load({}, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.model_id = "other"


def test_unknown_fields_have_no_source():
    """Asking for the source of a setting that isn't one is an error."""
    with pytest.raises(KeyError):
        L1Settings().source_of("l1_size")
    assert L1Settings(model_id="m").source_of("model_id") == "argument"


def test_every_setting_is_described():
    """Every setting of ours has a description, which ends with a period."""
    for field in StoreSettings.model_fields.values():
        assert (field.description or "").endswith(".")


def test_the_documentation_lists_the_settings():
    """The table in docs/settings.md has every setting with its default, variable, AIBrix variable and description."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\w+)` \| `([^`]*)` \| `(\w+)` \| (?:`(\w+)`)? ?\| (.*) \|", line):
            name, *rest = match.groups()
            rows[name] = rest
    expected = {}
    for name, field in StoreSettings.model_fields.items():
        aibrix = StoreSettings.aibrix_variable(name)
        default = field.default.human_readable() if hasattr(field.default, "human_readable") else field.default
        default = {(): "[]", "": '""'}.get(default, str(default).replace(".0GiB", "GiB").replace(".0MiB", "MiB"))
        expected[name] = [default, StoreSettings.variable(name), aibrix.name if aibrix else None, field.description]
    assert rows == expected


def test_the_base_has_no_settings_of_its_own():
    """`Settings` is for subclasses: by itself, it knows no key."""
    assert Settings.load({}, {}).describe() == {}
    assert "unknown" in problem_of({"l1_size_per_rank": 1}, kind=Settings)
