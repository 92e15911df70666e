"""Connectors are found from metadata alone, and what can't be used is kept with its reason."""

from __future__ import annotations

import importlib_metadata
import pytest

from kvplug.discovery import discover


def _discover(*folders, environ=None, **kwargs):
    return discover(path=[str(folder) for folder in folders], environ=environ or {}, **kwargs)


def _names(found):
    return {entry.name for entry in found.entries}


def _reasons(found):
    return {entry.name: entry.reason for entry in found.skipped}


def test_an_entry_says_all_of_where_it_comes_from(tmp_path, distribution):
    """Name, module, class, distribution, version and folder of a declared connector are known without an import."""
    distribution(tmp_path, "my-conn", {"MyConnector": "my_conn.sub:MyConnector"}, version="2.1")
    (entry,) = _discover(tmp_path).entries
    assert (entry.name, entry.module, entry.attr) == ("MyConnector", "my_conn.sub", "MyConnector")
    assert (entry.distribution, entry.version, entry.location) == ("my-conn", "2.1", str(tmp_path))
    assert not entry.editable
    assert not entry.implied
    assert entry.value == "my_conn.sub:MyConnector"


def test_an_editable_install_names_its_source(tmp_path, distribution):
    """The location of an editable install is the folder that its source is in."""
    origin = {"url": "file:///home/me/my%20conn", "dir_info": {"editable": True}}
    distribution(tmp_path, "my-conn", {"C": "my_conn:C"}, direct_url=origin)
    (entry,) = _discover(tmp_path).entries
    assert (entry.location, entry.editable) == ("/home/me/my conn", True)


@pytest.mark.parametrize("origin", [{"url": "https://example.invalid/x.whl", "archive_info": {}}, [], {"dir_info": 3}])
def test_any_other_origin_is_no_editable_install(tmp_path, distribution, origin):
    """An origin that isn't an editable folder, or isn't to be understood, leaves the install folder."""
    distribution(tmp_path, "my-conn", {"C": "my_conn:C"}, direct_url=origin)
    (entry,) = _discover(tmp_path).entries
    assert (entry.location, entry.editable) == (str(tmp_path), False)


def test_a_class_is_found_under_its_own_name_too(tmp_path, distribution):
    """A class that is declared under other names is also found under its own, once."""
    distribution(tmp_path, "a", {"short": "a:AConnector", "other": "a:AConnector"})
    found = _discover(tmp_path)
    assert _names(found) == {"short", "other", "AConnector"}
    assert [entry.name for entry in found.entries if entry.implied] == ["AConnector"]
    assert {entry.value for entry in found.entries} == {"a:AConnector"}
    assert not found.skipped


def test_a_nested_class_is_found_under_its_last_name(tmp_path, distribution):
    """The own name of `a:Outer.Inner` is `Inner`."""
    distribution(tmp_path, "a", {"x": "a:Outer.Inner [extra]"})
    assert {(entry.name, entry.attr) for entry in _discover(tmp_path).entries} == {
        ("x", "Outer.Inner"),
        ("Inner", "Outer.Inner"),
    }


def test_other_groups_have_no_implied_names_and_are_not_turned_off(tmp_path, distribution):
    """What is special to connectors stays out of other groups."""
    distribution(tmp_path, "a", {"x": "a:Y"}, group="kvplug.commands")
    found = _discover(tmp_path, group="kvplug.commands", environ={"KVPLUG_DISABLE": "*"})
    assert _names(found) == {"x"}


def test_a_name_that_two_distributions_claim_goes_to_neither(tmp_path, distribution):
    """Both claimants are named with their versions; their classes' own names stay usable."""
    distribution(tmp_path, "one", {"fast": "one:OneConnector"}, version="1.5")
    distribution(tmp_path, "two", {"fast": "two:TwoConnector"}, version="2.5")
    found = _discover(tmp_path)
    assert _names(found) == {"OneConnector", "TwoConnector"}
    assert {entry.distribution for entry in found.skipped} == {"one", "two"}
    for entry in found.skipped:
        assert "one 1.5 (one:OneConnector)" in entry.reason
        assert "two 2.5 (two:TwoConnector)" in entry.reason


def test_where_names_mean_nothing_each_value_counts(tmp_path, distribution):
    """Groups whose names are free have no conflicts, and a value that is declared twice counts once."""
    distribution(tmp_path, "a", {"patches": "a:PATCHES"}, group="kvplug.patches")
    distribution(tmp_path, "b", {"patches": "b:PATCHES"}, group="kvplug.patches")
    found = _discover(tmp_path, group="kvplug.patches", unique=False)
    assert sorted(entry.value for entry in found.entries) == ["a:PATCHES", "b:PATCHES"]
    assert not found.skipped
    assert len(_discover(tmp_path, group="kvplug.patches").skipped) == 2


def test_a_declared_name_and_anothers_own_name_conflict(tmp_path, distribution):
    """A class is looked up by its own name in vLLM, so nobody else's connector may answer to that name."""
    distribution(tmp_path, "one", {"Fast": "one:Slow"})
    distribution(tmp_path, "two", {"x": "two:Fast"})
    found = _discover(tmp_path)
    assert _names(found) == {"Slow", "x"}
    assert set(_reasons(found)) == {"Fast"}


def test_the_same_value_from_two_distributions_is_no_conflict(tmp_path, distribution):
    """A renamed distribution beside its old metadata declares the same class: it is found once."""
    distribution(tmp_path, "conn", {"C": "conn:C"})
    distribution(tmp_path, "conn-nightly", {"C": "conn:C"})
    found = _discover(tmp_path)
    assert [entry.name for entry in found.entries] == ["C"]
    assert not found.skipped


def test_stale_metadata_beside_an_editable_install_is_deduplicated(tmp_path, distribution):
    """An editable install's dist-info and an egg-info that a build left in its source are one distribution."""
    source = distribution(tmp_path / "src", "conn", {"C": "conn:C"}, version="0.1", kind="egg-info")
    site = distribution(tmp_path / "site", "conn", {"C": "conn:C"}, version="0.2")
    found = _discover(source, site)
    assert [(entry.name, entry.version) for entry in found.entries] == [("C", "0.2")]
    assert not found.skipped


def test_g3_a_stale_egg_info_does_not_shadow_what_is_installed(tmp_path, distribution):
    """The egg-info comes first on the path and knows an old class, or none: the dist-info counts."""
    for stale in ({"C": "conn.old:C", "Gone": "conn.old:Gone"}, {}):
        source = distribution(tmp_path / f"src{len(stale)}", "conn", stale, kind="egg-info")
        site = distribution(tmp_path / "site", "conn", {"C": "conn.new:C"})
        found = _discover(source, site)
        assert [(entry.name, entry.value) for entry in found.entries] == [("C", "conn.new:C")]
        assert not found.skipped


def test_a_folder_earlier_on_the_path_shadows_a_later_one(tmp_path, distribution):
    """A second copy put before site-packages is the one that Python imports, so it is the one that counts."""
    overlay = distribution(tmp_path / "overlay", "conn", {"C": "conn.new:C"}, version="2.0")
    site = distribution(tmp_path / "site", "conn", {"C": "conn.old:C"}, version="1.0")
    assert [entry.version for entry in _discover(overlay, site).entries] == ["2.0"]
    assert [entry.version for entry in _discover(site, overlay).entries] == ["1.0"]


def test_two_versions_in_one_folder_that_disagree_are_a_conflict(tmp_path, distribution):
    """After an interrupted upgrade nothing says which metadata is right, so none is trusted."""
    distribution(tmp_path, "conn", {"C": "conn.old:C"}, version="1.0")
    distribution(tmp_path, "conn", {"C": "conn.new:C"}, version="2.0")
    found = _discover(tmp_path)
    assert not found.entries
    assert {entry.version for entry in found.skipped} == {"1.0", "2.0"}


def test_a_leftover_folder_without_metadata_does_not_hide_the_install(tmp_path, distribution):
    """An empty dist-info that an interrupted uninstall leaves behind doesn't count beside a whole one."""
    distribution(tmp_path, "conn", {"C": "conn:C"}, version="0.9", metadata=None)
    distribution(tmp_path, "conn", {"C": "conn:C"}, version="1.0")
    assert [entry.version for entry in _discover(tmp_path).entries] == ["1.0"]


@pytest.mark.parametrize("value", ["conn", "conn:", ":C", "conn C", "my-conn:C", "conn:C:D", ""])
def test_a_value_that_names_no_class_is_skipped(tmp_path, distribution, value):
    """The reason quotes the value, and the distribution's other connectors are found."""
    distribution(tmp_path, "conn", {"Bad": value, "Good": "conn:Good"})
    found = _discover(tmp_path)
    assert _names(found) == {"Good"}
    assert repr(value) in _reasons(found)["Bad"]


def test_an_entry_point_without_a_name_is_skipped(tmp_path, distribution):
    """An empty name is no name."""
    distribution(tmp_path, "conn", text="[vllm.kv_connectors]\n = conn:C\n")
    found = _discover(tmp_path)
    assert not found.entries
    assert "no name" in found.skipped[0].reason


@pytest.mark.parametrize("metadata", [None, "", "Name: conn\n", "Version: 1.0\n"])
def test_missing_metadata_is_skipped(tmp_path, distribution, metadata):
    """A distribution whose name or version can't be told isn't used, and the reason says so under its names."""
    distribution(tmp_path, "conn", {"C": "conn:C"}, metadata=metadata)
    distribution(tmp_path, "good", {"G": "good:G"})
    found = _discover(tmp_path)
    assert _names(found) == {"G"}
    assert "reinstall it" in _reasons(found)["C"]
    assert [entry.distribution for entry in found.skipped] == ["conn"]


@pytest.mark.parametrize("text", ["[vllm.kv_connectors]\nthis is garbage\n", b"[vllm.kv_connectors]\nC = \xff\xfe:C\n"])
def test_garbage_in_entry_points_is_skipped(tmp_path, distribution, text):
    """A file that can't be parsed or decoded costs its own distribution, no other."""
    distribution(tmp_path, "conn", text=text)
    distribution(tmp_path, "good", {"G": "good:G"})
    found = _discover(tmp_path)
    assert _names(found) == {"G"}
    assert [entry.distribution for entry in found.skipped] == ["conn"]
    assert "entry_points.txt can't be read" in found.skipped[0].reason


def test_garbage_that_is_not_about_connectors_is_not_mentioned(tmp_path, distribution):
    """Another group's broken file is none of our business."""
    distribution(tmp_path, "other", text="[console_scripts]\nthis is garbage\n")
    assert _discover(tmp_path) == _discover()


def test_metadata_that_raises_is_skipped(tmp_path, distribution, monkeypatch):
    """Whatever reading a distribution raises, it is skipped, and the others are found."""

    class Raises(importlib_metadata.Distribution):
        def read_text(self, filename):
            return "[vllm.kv_connectors]\nC = conn:C\n" if filename == "entry_points.txt" else None

        def locate_file(self, path):
            raise NotImplementedError

        @property
        def metadata(self):
            raise RuntimeError("no metadata today")

    distribution(tmp_path, "good", {"G": "good:G"})
    found = list(importlib_metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(importlib_metadata, "distributions", lambda **_: iter([Raises(), *found]))
    found = _discover()
    assert _names(found) == {"G"}
    assert "no metadata today" in _reasons(found)["C"]


def test_a_finder_that_raises_keeps_what_was_found_before(tmp_path, distribution, monkeypatch):
    """A broken finder on sys.meta_path ends the search, not the process, and is said."""
    distribution(tmp_path, "good", {"G": "good:G"})
    found = list(importlib_metadata.distributions(path=[str(tmp_path)]))

    def distributions(**_):
        yield from found
        raise OSError("stale mount")

    monkeypatch.setattr(importlib_metadata, "distributions", distributions)
    found = _discover()
    assert _names(found) == {"G"}
    assert "stale mount" in found.skipped[0].reason


def test_kvplug_disable_turns_names_off(tmp_path, distribution):
    """Named connectors are skipped, with the variable as the reason; a class's own name goes with the declared one."""
    distribution(tmp_path, "a", {"a": "a:AConnector"})
    distribution(tmp_path, "b", {"b": "b:BConnector", "b2": "b:BConnector"})
    found = _discover(tmp_path, environ={"KVPLUG_DISABLE": " a , b,nothing"})
    assert _names(found) == {"b2", "BConnector"}
    assert set(_reasons(found)) == {"a", "AConnector", "b"}
    assert all("KVPLUG_DISABLE" in reason for reason in _reasons(found).values())


def test_kvplug_disable_turns_all_off(tmp_path, distribution):
    """An asterisk means every connector; the variable set to nothing means none."""
    distribution(tmp_path, "a", {"a": "a:AConnector"})
    assert not _discover(tmp_path, environ={"KVPLUG_DISABLE": "*"}).entries
    assert _names(_discover(tmp_path, environ={"KVPLUG_DISABLE": ""})) == {"a", "AConnector"}


def test_turning_one_claimant_s_own_name_off_settles_a_conflict(tmp_path, distribution):
    """A name whose other claimant is off belongs to the one that is left."""
    distribution(tmp_path, "one", {"Fast": "one:Slow"})
    distribution(tmp_path, "two", {"x": "two:Fast"})
    found = _discover(tmp_path, environ={"KVPLUG_DISABLE": "x"})
    assert {entry.name: entry.value for entry in found.entries} == {"Fast": "one:Slow", "Slow": "one:Slow"}
