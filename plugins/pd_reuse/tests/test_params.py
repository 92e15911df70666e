"""`kv_transfer_params`: whatever clients send, and what a prefill engine answers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug_pd_reuse.params import VERSION, Handover, answer, read

NAMESPACE = bytes(range(32))
OURS = {
    "version": VERSION,
    "namespace": NAMESPACE.hex(),
    "pp_size": 1,
    "num_prompt_tokens": 40,
    "num_stored_tokens": 39,
}

#: What vllm-router sends to a prefill engine.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def decode(**changed):
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvplug": OURS | changed}


def test_roles():
    """A prefill, a decode with how much is stored, and any other request."""
    assert read(PREFILL, NAMESPACE) == Handover("prefill")
    assert read({"do_remote_decode": True}, NAMESPACE) == Handover("prefill")
    assert read(decode(), NAMESPACE) == Handover("decode", 39)
    assert read({"do_remote_prefill": True}, NAMESPACE) == Handover("decode")
    assert read(None, NAMESPACE) == read({}, NAMESPACE) == Handover()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_decode": False, "do_remote_prefill": False},
        {"do_remote_decode": None, "do_remote_prefill": None},
        {"do_remote_decode": "true"},
        {"do_remote_decode": 1},
        {"do_remote_prefill": [True]},
        {"kvplug": OURS},
        [],
        [["do_remote_decode", True]],
        "do_remote_decode",
        True,
        7,
    ],
)
def test_what_is_neither_is_like_any_other_request(params):
    """Both at once, neither, or anything but a plain true."""
    assert read(params, NAMESPACE) == Handover()


def test_one_flag_is_enough():
    """The other one may be missing, or anything that isn't true."""
    for other in (None, False, "no", 0, {}):
        assert read({"do_remote_decode": True, "do_remote_prefill": other}, NAMESPACE).role == "prefill"
        assert read({"do_remote_prefill": True, "do_remote_decode": other}, NAMESPACE).role == "decode"


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({}, Handover("decode", 39)),
        ({"num_stored_tokens": 0}, Handover("decode", 0)),
        ({"num_stored_tokens": 1 << 80}, Handover("decode", 1 << 80)),
        ({"more": "later versions may say more"}, Handover("decode", 39)),
        ({"num_prompt_tokens": "not read"}, Handover("decode", 39)),
        ({"num_stored_tokens": -1}, Handover("decode")),
        ({"num_stored_tokens": None}, Handover("decode")),
        ({"num_stored_tokens": "39"}, Handover("decode")),
        ({"num_stored_tokens": 39.0}, Handover("decode")),
        ({"num_stored_tokens": True}, Handover("decode")),
        ({"num_stored_tokens": [39]}, Handover("decode")),
        ({"version": VERSION + 1}, Handover("decode", problem="version")),
        ({"version": None}, Handover("decode", problem="version")),
        ({"version": str(VERSION)}, Handover("decode", problem="version")),
        ({"version": [VERSION]}, Handover("decode", problem="version")),
        ({"version": VERSION + 1, "namespace": "other"}, Handover("decode", problem="version")),
        ({"namespace": (b"x" * 32).hex()}, Handover("decode", problem="namespace")),
        ({"namespace": None}, Handover("decode", problem="namespace")),
        ({"namespace": NAMESPACE}, Handover("decode", problem="namespace")),
        ({"namespace": [NAMESPACE.hex()]}, Handover("decode", problem="namespace")),
    ],
)
def test_problems_of_what_a_prefill_engine_says(ours, expected):
    """Another version or namespace is told apart from a count that means nothing, for which there is a wait."""
    assert read(decode(**ours), NAMESPACE) == expected


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "layouts", "problem"),
    [
        (2, 1, {(2, 1)}, ""),
        (2, 1, {(1, 1), (2, 1)}, ""),
        (2, 1, {(1, 1)}, "layout"),
        (2, 1, {(1, 2)}, "layout"),
        (2, 1, (), ""),
        ("2", 1, {(1, 1)}, ""),
        (True, 1, {(2, 1)}, ""),
        (2, None, {(1, 1)}, ""),
        ([2], {}, {(1, 1)}, ""),
    ],
)
def test_values_of_ranks_that_arent_read_arent_waited_for(tp_size, pp_size, layouts, problem):
    """Other parallel sizes than those whose values are read; what is no size says nothing."""
    params = decode(pp_size=pp_size) | {"tp_size": tp_size}
    expected = Handover("decode", problem=problem) if problem else Handover("decode", 39)
    assert read(params, NAMESPACE, layouts) == expected


def test_without_a_word_of_ours_it_may_be_another_connector():
    """A prefill engine that isn't kvplug's, or whose answer a router has cut: the store is looked at."""
    for said in (None, [], "x", 3, [OURS], True):
        assert read({"do_remote_prefill": True, "kvplug": said}, NAMESPACE) == Handover("decode")
    assert read(decode() | {"kvplug": {}}, NAMESPACE) == Handover("decode", problem="version")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KNOWN = st.sampled_from(["do_remote_prefill", "do_remote_decode", "kvplug", "remote_block_ids", "x"])
FLAG = st.booleans() | JSON
SAID = JSON | st.dictionaries(
    st.sampled_from(["version", "namespace", "pp_size", "num_stored_tokens", "num_prompt_tokens"]),
    JSON | st.just(VERSION) | st.just(NAMESPACE.hex()),
)


@given(
    JSON
    | st.dictionaries(KNOWN, JSON | SAID)
    | st.fixed_dictionaries(
        {}, optional={"do_remote_prefill": FLAG, "do_remote_decode": FLAG, "tp_size": JSON, "kvplug": SAID}
    )
)
def test_read_never_raises(params):
    """Clients can send any JSON. What comes of it is one of few things, whatever it was, and it isn't changed."""
    before = repr(params)
    handover = read(params, NAMESPACE, {(1, 1)})
    assert repr(params) == before
    if handover.problem != "layout":
        assert handover == read(params, NAMESPACE)
    assert handover.role in {None, "prefill", "decode"}
    assert handover.problem in {"", "version", "namespace", "layout"}
    if handover.role != "decode":
        assert handover == Handover(handover.role)
    if handover.num_tokens is not None:
        assert type(handover.num_tokens) is int
        assert handover.num_tokens >= 0
        assert not handover.problem


def one(**fields):
    return SimpleNamespace(**({"request_id": "cmpl-7", "num_prompt_tokens": 40} | fields))


def test_an_answers_fields():
    """The convention of vLLM's Nixl connector, blank where it means nothing, and what is ours in one object."""
    said = answer(one(), NAMESPACE, engine_id="e", layout=(2, 1), num_stored_tokens=39)
    assert said == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_host": "",
        "remote_port": 0,
        "remote_engine_id": "e",
        "remote_request_id": "cmpl-7",
        "tp_size": 2,
        "kvplug": OURS,
    }


def test_an_answer_is_json_and_is_read_as_what_it_says():
    """Over a router, by this engine or by another one of the same model; by another model it is refused."""
    said = answer(one(), NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=17)
    sent = json.loads(json.dumps(said))
    assert read(sent, NAMESPACE) == Handover("decode", 17)
    assert read(sent, bytes(32)) == Handover("decode", problem="namespace")


def test_an_answer_is_a_new_dict():
    """VLLM adds to it."""
    first, second = (answer(one(), NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=17) for _ in range(2))
    first["more"] = 1
    first["kvplug"]["version"] = 99
    first["remote_block_ids"].append(3)
    assert second == answer(one(), NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=17)


def test_vllms_convention_has_the_same_keys():
    """What routers pass on between vLLM's own engines, as the installed release names it."""
    from pathlib import Path

    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    source = "".join(path.read_text() for path in Path(base.__file__).parent.glob("nixl*/*.py"))
    source += "".join(path.read_text() for path in Path(base.__file__).parent.glob("nixl_connector.py"))
    for key in set(answer(one(), NAMESPACE, engine_id="e", layout=(1, 1), num_stored_tokens=17)) - {"kvplug"}:
        assert f'"{key}"' in source or f"{key}=" in source, key
