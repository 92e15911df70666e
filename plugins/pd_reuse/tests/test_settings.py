"""Settings of pd_reuse, the store that it has without any, and the page that lists them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ByteSize, TypeAdapter

from kvplug.errors import ConfigError
from kvplug.scheduled.settings import ScheduledSettings
from kvplug_pd_reuse import settings as module
from kvplug_pd_reuse.settings import PDReuseSettings

DOCS = Path(__file__).resolve().parents[3] / "docs"
SIZES = {"l2_write_inflight_per_rank", "l2_prefetch_inflight_per_rank"}


def own():
    """Yield name and field of the settings that pd_reuse has beside others', or that are different here."""
    for name, field in PDReuseSettings.model_fields.items():
        other = ScheduledSettings.model_fields.get(name)
        if other is None or (other.default, other.description) != (field.default, field.description):
            yield name, field


def shown(name, field):
    """Return a default as the page has it. A size's is its example."""
    if name in SIZES:
        assert TypeAdapter(ByteSize).validate_python(field.examples[0]) == field.default
        return field.examples[0]
    return "[]" if field.default == () else str(field.default)


def test_the_page_lists_the_settings():
    """docs/settings.md has each with its default, variable and description, in the code's words."""
    section = (DOCS / "settings.md").read_text().split("## Hand-over of pd_reuse\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert rows == [
        (name, shown(name, field), PDReuseSettings.variable(name), field.description) for name, field in own()
    ]
    assert {name for name, _ in own()} >= {"handover_timeout", "min_reuse_tokens", "peer_layouts", *SIZES}
    assert all(field.description.endswith(".") for _, field in own())


def test_each_has_a_place_on_the_connectors_pages():
    """docs/pd_reuse.md and its limits say what each is for, and the numbers that they give are the defaults."""
    page = (DOCS / "pd_reuse.md").read_text()
    both = page + (DOCS / "pd_reuse-limits.md").read_text()
    for name, _ in own():
        assert f"`{name}`" in both, name
    settings = PDReuseSettings.load({"l2": "valkey"}, {})
    assert f"`handover_timeout` seconds ({settings.handover_timeout:g})" in page
    assert f"`max_parked_requests` ({settings.max_parked_requests})" in page
    assert f"`l2_load_timeout` ({settings.l2_load_timeout})" in page
    assert f"`l1_size_per_rank`, {settings.l1_size_per_rank >> 30} GiB" in page
    assert {settings.l2_write_inflight_per_rank, settings.l2_prefetch_inflight_per_rank} == {2 << 30}
    assert "`l2_prefetch_inflight_per_rank` (2 GiB each)" in page


# -- The store without settings ---------------------------------------------------------------------------------------


@pytest.fixture
def shared_memory(monkeypatch, tmp_path):
    """Return a directory that stands in for /dev/shm, and is 64 GiB large."""
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    size = type("Size", (), {"total": 64 << 30})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: size if path == tmp_path else pytest.fail(str(path)))
    return tmp_path


def store(extra=None, environ=None):
    """Return tiers, directory and size."""
    settings = PDReuseSettings.load(extra, environ or {})
    return settings.l2, str(getattr(settings, "disk_path", "")), getattr(settings, "disk_size", None)


def test_the_default_store_is_shared_memory(shared_memory):
    """A directory that all engines of one user on this machine have, and a quarter of what there is."""
    place = str(shared_memory / f"kvplug-pd-{os.getuid()}")
    expected = (("disk",), place, 16 << 30)
    assert store() == store({}) == store({"handover_timeout": 1}) == expected
    assert store({"l2": "disk"}) == store({}, {"KVPLUG_L2": "disk"}) == store({}, {"KVPLUG_L2": ""}) == expected
    assert list(shared_memory.iterdir()) == []


def test_what_is_set_wins(shared_memory):
    """Each of the three stays as it is set, wherever; a place that is set has the tier's own size."""
    place = str(shared_memory / f"kvplug-pd-{os.getuid()}")
    assert store({"disk_size": "1GiB"}) == store({}, {"KVPLUG_DISK_SIZE": "1GiB"}) == (("disk",), place, 1 << 30)
    elsewhere = (("disk",), "/elsewhere", 32 << 30)
    assert store({"disk_path": "/elsewhere"}) == store({}, {"KVPLUG_DISK_PATH": "/elsewhere"}) == elsewhere
    assert store({"l2": "disk", "disk_path": "/elsewhere"}) == elsewhere
    assert store({"l2": "disk"}, {"KVPLUG_DISK_PATH": "/elsewhere"}) == elsewhere
    assert store({"disk_path": "/elsewhere", "disk_size": "1GiB"}) == (("disk",), "/elsewhere", 1 << 30)
    assert store({"disk_path": "/extra"}, {"KVPLUG_DISK_PATH": "/elsewhere"})[1] == "/extra"


def test_another_store_has_nothing_of_shared_memory(monkeypatch):
    """With another tier, shared memory isn't even looked for, and the disk tier's settings are refused as ever."""
    monkeypatch.setattr(module, "_SHARED_MEMORY", Path("/nowhere"))
    assert store({"l2": "valkey"}) == store({}, {"KVPLUG_L2": "valkey"}) == (("valkey",), "", None)
    with pytest.raises(ConfigError, match="'disk_path' of kv_connector_extra_config is for the L2 tier 'disk'"):
        store({"l2": "valkey", "disk_path": "/elsewhere"})
    with pytest.raises(ConfigError, match="disk_path has no default"):
        store({"l2": "disk,valkey"})


def test_without_shared_memory_the_store_has_to_be_named(monkeypatch):
    """No /dev/shm is an error, which says what to set; a store that is named needs none."""
    monkeypatch.setattr(module, "_SHARED_MEMORY", Path("/nowhere"))
    with pytest.raises(ConfigError, match=r"^There is no /dev/shm .* set l2, and the settings of the tier"):
        store()
    with pytest.raises(ConfigError, match="/dev/shm"):
        store({"l2": "disk"})
    assert store({"l2": "disk", "disk_path": "/elsewhere"})[1] == "/elsewhere"


def test_j12_a_store_needs_only_what_it_names():
    """J12: no library of any store is imported with the settings, and one that is missing is told in one line."""
    code = """
import sys
for name in ("mooncake", "mooncake.store", "nixl", "redis", "valkey", "zstandard"):
    sys.modules[name] = None  # importing it fails
from kvplug_pd_reuse.settings import PDReuseSettings
for tier, extra in (("disk", {"disk_path": "/x"}), ("valkey", {}), ("mooncake", {"mooncake_master": "localhost:1"})):
    settings = PDReuseSettings.load({"l2": tier, **extra}, {})
    try:
        settings.tiers[0](settings)
    except Exception as error:
        print(tier, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "mooncake The tier mooncake needs Mooncake's client: pip install 'kvplug[mooncake]'\n"


# -- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "layouts"),
    [
        ("tp2", ((2, 1),)),
        ("tp2pp2", ((2, 2),)),
        ("tp4, tp2pp8,", ((4, 1), (2, 8))),
        (["tp1", "tp16"], ((1, 1), (16, 1))),
        (["tp2", "tp2pp1", "tp2"], ((2, 1),)),
        ("", ()),
        ([], ()),
    ],
)
def test_layouts(value, layouts):
    """One, several as a list, several with commas between them; each once, in their order."""
    settings = PDReuseSettings.load({"l2": "valkey", "peer_layouts": value}, {})
    assert settings.peer_layouts == settings.peers == layouts
    if isinstance(value, str):
        variables = {"KVPLUG_PEER_LAYOUTS": value}
        assert PDReuseSettings.load({"l2": "valkey"}, variables).peer_layouts == layouts


@pytest.mark.parametrize("value", ["tp0", "tp", "pp2", "tp2pp0", "TP2", "tp02", "2", "tp2 pp2", "tp10000", ["tp2", 4]])
def test_layouts_that_are_none(value):
    """The error shows what one looks like."""
    with pytest.raises(ConfigError, match=r"^Setting peer_layouts .* should be layouts such as tp2 or tp2pp2;"):
        PDReuseSettings.load({"l2": "valkey", "peer_layouts": value}, {})


def test_layouts_that_are_no_list():
    """A number isn't one."""
    with pytest.raises(ConfigError, match="should be a list of layouts"):
        PDReuseSettings.load({"l2": "valkey", "peer_layouts": 2}, {})


@pytest.mark.parametrize(
    ("extra", "environ", "source"),
    [
        ({"l2_write_policy": "hits"}, {}, "extra config"),
        ({}, {"KVPLUG_L2_WRITE_POLICY": "evicted"}, "KVPLUG_L2_WRITE_POLICY"),
        ({}, {"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE": "HOT"}, "AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE"),
    ],
)
def test_everything_has_to_be_stored(extra, environ, source):
    """A policy that stores some blocks only would hand nothing over; the error says where it is set."""
    with pytest.raises(ConfigError, match=rf"l2_write_policy \(from {source}\).*has to store everything"):
        PDReuseSettings.load({"l2": "valkey", **extra}, environ)
    all_of_it = {"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE": "ALL"}
    assert PDReuseSettings.load({"l2": "valkey"}, all_of_it).l2_write_policy == "all"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"handover_timout": 1}, "'handover_timout' .* did you mean 'handover_timeout'"),
        ({"transfer": "layerwise"}, "'transfer' .* is unknown"),
        ({"handover_timeout": -1}, "handover_timeout .* greater than or equal to 0"),
        ({"handover_timeout": 601}, "handover_timeout .* less than or equal to 600"),
        ({"min_reuse_tokens": 0}, "min_reuse_tokens .* greater than or equal to 1"),
        ({"max_parked_requests": 0}, "max_parked_requests .* greater than or equal to 1"),
        ({"l2_prefetch_inflight_per_rank": 0}, "l2_prefetch_inflight_per_rank .* greater than 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra, message):
    """A key that there isn't, and values that would let nothing be handed over."""
    with pytest.raises(ConfigError, match=message):
        PDReuseSettings.load({"l2": "valkey", **extra}, {})


def test_an_unknown_variable_is_refused():
    """It names what was probably meant."""
    with pytest.raises(ConfigError, match="did you mean 'KVPLUG_HANDOVER_TIMEOUT'"):
        PDReuseSettings.load({"l2": "valkey"}, {"KVPLUG_HANDOVER_TIMOUT": "1"})


@pytest.mark.parametrize("nothing", [[], "", None])
def test_without_a_store_there_is_no_hand_over(nothing):
    """A setting l2 that names no tier is refused by a sentence about it, and not about what the default would be."""
    with pytest.raises(ConfigError, match="setting l2 names none") as error:
        PDReuseSettings.load({"l2": nothing}, {})
    assert "disk" not in str(error.value)


def test_the_default_store_is_told_as_a_default(tmp_path, monkeypatch):
    """`kvplug doctor` shows what nobody has set as that."""
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    settings = PDReuseSettings.load({"disk_size": "1GiB"}, {})
    sources = {name: settings.source_of(name) for name in ("l2", "disk_path", "disk_size")}
    assert sources == {"l2": "default", "disk_path": "default", "disk_size": "extra config"}
