"""Settings of type2, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplug.errors import ConfigError
from kvplug.store.settings import StoreSettings
from kvplug_type2.settings import Type2Settings

DOCS = Path(__file__).resolve().parents[3] / "docs"


def own():
    """Yield name and field of the settings that type2 has beside the block store's."""
    for name, field in Type2Settings.model_fields.items():
        if name not in StoreSettings.model_fields:
            yield name, field


def test_the_page_lists_the_settings():
    """docs/settings.md has each with its default, variable and description, in the code's words."""
    section = (DOCS / "settings.md").read_text().split("## Transfers of type2\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert rows == [
        (name, str(field.default), Type2Settings.variable(name), field.description) for name, field in own()
    ]
    assert all(field.description.endswith(".") for _, field in own())


def test_each_has_a_place_on_the_connectors_page():
    """docs/type2.md says what each is for, and the numbers that it gives are the defaults."""
    page = (DOCS / "type2.md").read_text()
    for name, _ in own():
        assert f"`{name}`" in page, name
    assert f"`max_parked_requests` ({Type2Settings().max_parked_requests})" in page
    assert f"`l2_load_timeout` seconds ({Type2Settings().l2_load_timeout})" in page


def test_wrong_values_are_refused_by_name():
    """What there is to choose from is in the error."""
    with pytest.raises(ConfigError, match=r"transfer.*between_steps.*layerwise"):
        Type2Settings.load({"transfer": "sometimes"}, {})
    with pytest.raises(ConfigError, match="max_parked_requests"):
        Type2Settings.load({}, {"KVPLUG_MAX_PARKED_REQUESTS": "-1"})
