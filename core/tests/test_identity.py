"""What identifies a request's KV besides its tokens."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest

from kvplug.identity import MultiModalFeature, RequestIdentity, Uncacheable, identity_of
from kvplug.keys import KeyChain
from kvplug.lora import AdapterIdentities

TOKENS = list(range(32))


def make_request(**fields):
    """Make a request with the fields of vLLM's that matter here."""
    return SimpleNamespace(
        **{"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None} | fields
    )


def make_feature(offset, length, *, identifier=None, mm_hash=None):
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality="image", identifier=identifier, mm_hash=mm_hash, mm_position=position)


def make_adapter(directory, *, weights=b"weights", config=None, file="adapter_model.safetensors"):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config or {"r": 8}))
    (directory / file).write_bytes(weights)
    return directory


def make_lora(path, *, name="adapter", number=1, **fields):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **fields)


def keys_of(request, adapters=None):
    identity = identity_of(request, adapters or AdapterIdentities())
    assert isinstance(identity, RequestIdentity), identity
    chain = KeyChain(b"n" * 32, 4, identity)
    chain.extend(TOKENS)
    return set(chain.keys)


def lora_of(lora_request, adapters=None):
    identity = identity_of(make_request(lora_request=lora_request), adapters or AdapterIdentities())
    return identity.lora if isinstance(identity, RequestIdentity) else identity


def test_a_plain_request():
    """A request of nothing but text has an empty identity."""
    assert identity_of(make_request()) == RequestIdentity()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"resumable": True}, "session"),
        ({"mm_features": [make_feature(0, 4)]}, "multimodal"),
        ({"lora_request": make_lora("/nowhere/adapter")}, "lora"),
    ],
)
def test_requests_that_must_not_be_cached(fields, kind):
    """Embeddings, streaming sessions, items without identifier and unreadable adapters are refused, with the reason."""
    identity = identity_of(make_request(**fields))
    assert isinstance(identity, Uncacheable)
    assert identity.kind == kind
    assert str(identity).endswith(".")


@pytest.mark.parametrize("field", ["lora_request", "mm_features", "cache_salt"])
def test_a_missing_field_is_not_an_unset_one(field):
    """If a vLLM has renamed a field, its requests aren't cached at all, rather than without that part."""
    request = make_request()
    delattr(request, field)
    identity = identity_of(request)
    assert isinstance(identity, Uncacheable)
    assert field in identity.reason


def test_d4_salts_share_nothing_and_stay_secret():
    """D4: salts x, y and none have disjoint keys, equal salts equal ones; the salt is in neither identity nor key."""
    sets = [keys_of(make_request(cache_salt=salt)) for salt in ("tenant-x", "tenant-y", None)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert keys_of(make_request(cache_salt="tenant-x")) == sets[0]
    identity = identity_of(make_request(cache_salt="tenant-x"))
    assert "tenant" not in repr(identity)
    assert not any(b"tenant" in key for key in sets[0])


def test_an_empty_salt_is_none():
    """An empty salt is none, to vLLM and to keys."""
    assert identity_of(make_request(cache_salt="")) == RequestIdentity()


def test_d3_images_by_their_whole_hash():
    """D3: images whose hashes differ in the high bits only, or that lie elsewhere, share nothing but text before."""
    low = "0" * 48 + "f" * 16
    high = "1" + low[1:]
    sets = [
        keys_of(make_request(mm_features=[make_feature(offset, 4, identifier=hash_)]))
        for offset, hash_ in ((9, low), (9, high), (10, low))
    ]
    text = keys_of(make_request())
    for a, b in itertools.combinations([*sets, text], 2):
        assert len(a & b) == 2


def test_d3_the_hash_stands_before_the_name():
    """The item's own hash is used where vLLM has it; an identifier may have an adapter's name in it."""
    both = identity_of(make_request(mm_features=[make_feature(0, 4, identifier="name:hash", mm_hash="hash")]))
    older = identity_of(make_request(mm_features=[make_feature(0, 4, identifier="hash")]))
    assert both == older == RequestIdentity(features=(MultiModalFeature(0, 4, "hash"),))


def test_d1_adapters_by_content(tmp_path):
    """D1: adapters A and B and none share nothing; a copy of A under another name and path shares with A."""
    first, second = make_adapter(tmp_path / "a", weights=b"A"), make_adapter(tmp_path / "b", weights=b"B")
    copy = make_adapter(tmp_path / "deep" / "copy", weights=b"A")
    requests = [None, make_lora(first), make_lora(second)]
    sets = [keys_of(make_request(lora_request=lora)) for lora in requests]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert keys_of(make_request(lora_request=make_lora(copy, name="other", number=7))) == sets[1]


def test_d1_configuration_and_form_count(tmp_path):
    """D1: the same weights with another configuration, or read in another form, are another adapter."""
    rank8 = make_adapter(tmp_path / "a", config={"r": 8})
    rank16 = make_adapter(tmp_path / "b", config={"r": 16})
    assert (
        len({lora_of(make_lora(rank8)), lora_of(make_lora(rank16)), lora_of(make_lora(rank8, is_3d_lora_weight=True))})
        == 3
    )


def test_d1_files_that_do_not_matter(tmp_path):
    """What vLLM doesn't load doesn't count: a README, a second weights file behind the one that is loaded."""
    adapter = make_adapter(tmp_path / "a")
    before = lora_of(make_lora(adapter))
    (adapter / "README.md").write_text("about")
    (adapter / "adapter_model.bin").write_bytes(b"not loaded")
    assert lora_of(make_lora(adapter)) == before


def test_d1_a_changed_adapter_is_not_used_until_it_is_loaded_again(tmp_path):
    """D1: files changed under a loaded adapter make it uncacheable, for vLLM may still use the old ones or not.

    Loaded again, in place or under a new number, it has keys of its own; changed back, it has its old ones.
    """
    adapter = make_adapter(tmp_path / "a", weights=b"old")
    adapters = AdapterIdentities()
    old = lora_of(make_lora(adapter), adapters)
    make_adapter(adapter, weights=b"new")
    refused = lora_of(make_lora(adapter), adapters)
    assert isinstance(refused, Uncacheable)
    assert "load it again" in refused.reason
    new = lora_of(make_lora(adapter, number=2), adapters)
    assert isinstance(new, bytes)
    assert new != old
    assert lora_of(make_lora(adapter, load_inplace=True), adapters) == new
    assert lora_of(make_lora(adapter), adapters) == new
    make_adapter(adapter, weights=b"old")
    assert lora_of(make_lora(adapter, number=3), adapters) == old


def test_d1_a_change_that_keeps_size_and_time_is_seen(tmp_path):
    """D1: weights replaced by others of the same size, with the old modification time, are other weights."""
    adapter = make_adapter(tmp_path / "a", weights=b"old")
    file = adapter / "adapter_model.safetensors"
    status = file.stat()
    adapters = AdapterIdentities()
    old = lora_of(make_lora(adapter), adapters)
    file.write_bytes(b"new")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert lora_of(make_lora(adapter, number=2), adapters) != old


def test_adapters_are_read_once_per_change(tmp_path, monkeypatch):
    """An adapter that hasn't changed isn't read again."""
    adapter = make_adapter(tmp_path / "a")
    adapters = AdapterIdentities()
    first = lora_of(make_lora(adapter), adapters)
    monkeypatch.setattr("pathlib.Path.open", lambda *_, **__: pytest.fail("read again"))
    assert lora_of(make_lora(adapter), adapters) == first


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
def test_every_format_that_vllm_loads(tmp_path, file):
    """Weights in each of vLLM's formats are read."""
    one, two = (make_adapter(tmp_path / name, weights=name.encode(), file=file) for name in ("one", "two"))
    assert lora_of(make_lora(one)) != lora_of(make_lora(two))


def test_adapters_in_formats_of_their_own(tmp_path):
    """Where none of the known files is there, all files count but documentation and hidden ones."""
    adapter = make_adapter(tmp_path / "a", file="shard-0.weights")
    (adapter / "nested").mkdir()
    (adapter / "nested" / "more.weights").write_bytes(b"1")
    before = lora_of(make_lora(adapter))
    (adapter / ".cache").mkdir()
    (adapter / ".cache" / "lock").write_bytes(b"x")
    assert lora_of(make_lora(adapter)) == before
    (adapter / "nested" / "more.weights").write_bytes(b"2")
    assert lora_of(make_lora(adapter)) != before


def test_tensorizer_adapters_have_their_own_place(tmp_path):
    """Older releases load a Tensorizer adapter from another directory than the path says."""
    adapter = make_adapter(tmp_path / "a", file="adapter_model.tensors")
    lora = make_lora("/nowhere", tensorizer_config_dict={"tensorizer_dir": str(adapter)})
    assert isinstance(lora_of(lora), bytes)


def test_adapters_without_weights_are_refused(tmp_path):
    """A directory with a configuration and nothing else has no content to tell it by."""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert isinstance(lora_of(make_lora(tmp_path)), Uncacheable)


def test_adapters_of_a_hub_repository(tmp_path, monkeypatch):
    """A repository is looked up in the local cache, never on the network; a copy elsewhere is the same adapter."""
    snapshot = make_adapter(tmp_path / "snapshot")
    import huggingface_hub

    def snapshot_download(repository, *, local_files_only):
        assert local_files_only
        if repository == "org/adapter":
            return str(snapshot)
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    copy = make_adapter(tmp_path / "copy")
    assert lora_of(make_lora("org/adapter")) == lora_of(make_lora(copy))
    assert isinstance(lora_of(make_lora("org/missing")), Uncacheable)


def test_vllms_own_requests(tmp_path):
    """The fields are those of vLLM's own classes: tokens, adapter, salt and image of a real request are in its keys."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    adapter = make_adapter(tmp_path / "a")

    def request(**fields):
        defaults = {"request_id": "r", "prompt_token_ids": TOKENS, "sampling_params": SamplingParams(max_tokens=1)}
        return Request(**defaults | {"pooling_params": None} | fields)

    def feature(mm_hash):
        return MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=mm_hash,
            mm_position=PlaceholderRange(offset=9, length=4),
            mm_hash=mm_hash,
        )

    def keys(real):
        identity = identity_of(real, AdapterIdentities())
        chain = KeyChain(b"n" * 32, 4, identity)
        chain.extend(real.all_token_ids)
        return set(chain.keys)

    plain = keys(request())
    assert plain == keys_of(make_request())
    assert plain.isdisjoint(keys(request(lora_request=LoRARequest("a", 1, str(adapter)))))
    assert plain.isdisjoint(keys(request(cache_salt="x")))
    image, other = keys(request(mm_features=[feature("i")])), keys(request(mm_features=[feature("j")]))
    assert image == keys_of(make_request(mm_features=[make_feature(9, 4, identifier="i")]))
    assert len(plain & image) == len(image & other) == 2
    import torch

    assert isinstance(identity_of(request(prompt_embeds=torch.zeros(32, 8))), Uncacheable)
    assert isinstance(identity_of(request(resumable=True)), Uncacheable)
