"""Weights are identified by what is in them, wherever they lie."""

import json
import os
import struct
import time
from types import SimpleNamespace

import pytest

from kvplug import weights as weights_module
from kvplug.errors import ConfigError
from kvplug.weights import content_digest, describe_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = SimpleNamespace(load_format="auto", download_dir=None)


def write_safetensors(file, tensors, metadata=None):
    """Write a safetensors file from names and bytes, each a one-dimensional U8 tensor."""
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return file


def make_model(model, **fields):
    return SimpleNamespace(**{"model": str(model), "revision": None, "seed": 0} | fields)


def weights(size=40_000):
    return {"embed": b"e" * size, "layer.0": b"0" * size, "layer.1": b"1" * 10, "empty": b""}


def digest_with(directory, **changes):
    write_safetensors(directory / "model.safetensors", weights() | changes)
    return content_digest(directory)


def test_equal_weights_at_other_paths(tmp_path):
    """The same tensors are the same weights under another path and file name, with other metadata."""
    one = digest_with(tmp_path / "one")
    write_safetensors(tmp_path / "deep" / "two" / "other.safetensors", weights(), {"format": "pt"})
    assert content_digest(tmp_path / "deep" / "two") == one


def test_equal_weights_in_other_files(tmp_path):
    """How tensors are spread over files doesn't matter."""
    tensors = list(weights().items())
    write_safetensors(tmp_path / "two" / "model-00001.safetensors", dict(tensors[2:]))
    write_safetensors(tmp_path / "two" / "model-00002.safetensors", dict(tensors[:2]))
    assert content_digest(tmp_path / "two") == digest_with(tmp_path / "one")


def test_d7_a_fine_tune_is_not_its_base(tmp_path):
    """D7: one tensor's values changed, with equal names and shapes, are other weights; so are other shapes."""
    changed = [
        digest_with(tmp_path / "base"),
        digest_with(tmp_path / "all", embed=b"f" * 40_000),
        digest_with(tmp_path / "start", embed=b"f" + b"e" * 39_999),
        digest_with(tmp_path / "middle", embed=b"e" * 20_000 + b"f" + b"e" * 19_999),
        digest_with(tmp_path / "end", embed=b"e" * 39_999 + b"f"),
        digest_with(tmp_path / "small", **{"layer.1": b"1" * 9 + b"2"}),
        digest_with(tmp_path / "longer", embed=b"e" * 40_001),
        digest_with(tmp_path / "more", extra=b"x"),
    ]
    assert len(set(changed)) == len(changed)


def test_swapped_tensors_are_other_weights(tmp_path):
    """Contents are bound to their tensors' names."""
    assert digest_with(tmp_path / "a", embed=b"0" * 40_000, **{"layer.0": b"e" * 40_000}) != digest_with(tmp_path / "b")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_other_formats_are_sampled(tmp_path, name):
    """Files of other formats are told apart by size and samples from start to end, alone and in a directory."""
    size = 8 << 20
    contents = [b"a" * size, b"a" * (size - 1) + b"b", b"b" + b"a" * (size - 1), b"a" * (size + 1)]
    digests = []
    for number, content in enumerate(contents):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        file.write_bytes(content)
        digests.append(content_digest(file))
        assert content_digest(file.parent) == digests[-1]
    assert len(set(digests)) == len(contents)


def test_leftovers_of_training_do_not_count(tmp_path):
    """What vLLM doesn't load isn't looked at."""
    before = digest_with(tmp_path / "a")
    for name in ("training_args.bin", "optimizer.pt", "config.json", ".hidden.safetensors"):
        (tmp_path / "a" / name).write_bytes(b"x")
    assert content_digest(tmp_path / "a") == before


def test_weights_in_folders(tmp_path):
    """Where there is nothing at the top, folders are looked into."""
    write_safetensors(tmp_path / "nested" / "transformer" / "model.safetensors", weights())
    assert content_digest(tmp_path / "nested") == digest_with(tmp_path / "flat")


def test_many_tensors_are_sampled_in_their_middle(tmp_path):
    """A checkpoint of more than 10,000 tensors is still told apart by each of them."""
    tensors = {f"expert.{number}": b"w" * 20 for number in range(10_001)}
    write_safetensors(tmp_path / "a" / "model.safetensors", tensors)
    write_safetensors(tmp_path / "b" / "model.safetensors", tensors | {"expert.777": b"w" * 19 + b"v"})
    assert content_digest(tmp_path / "a") != content_digest(tmp_path / "b")


def test_files_are_looked_at_again_when_they_change(tmp_path, monkeypatch):
    """Unchanged files are sampled once in a process, changed ones again."""
    before = digest_with(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: pytest.fail("read again"))
        assert content_digest(tmp_path) == before
    after = digest_with(tmp_path, embed=b"f" * 40_000)
    os.utime(tmp_path / "model.safetensors", (time.time() + 10,) * 2)
    assert after != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 10) + b"{",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 55) + b'{"cut":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}' + b"1234567",
    ],
)
def test_broken_safetensors_are_refused(tmp_path, content):
    """A file that isn't what its name says is an error with a remedy."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"isn't a complete safetensors file.*set model_id"):
        content_digest(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    """Weights that can't be told from others aren't guessed at; the error says what to set."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="set model_id"):
        describe_weights(make_model(tmp_path), LOAD)


def test_dummy_weights_are_their_seed(tmp_path):
    """Random weights are identified by their seed, and the directory isn't looked at."""
    load = SimpleNamespace(load_format="dummy", download_dir=None)
    one, two = (describe_weights(make_model(tmp_path, seed=seed), load) for seed in (0, 1))
    assert one == {"kind": "dummy", "seed": 0}
    assert one != two


def make_snapshot(cache, *, commit=COMMIT, linked=True):
    """Make a Hub cache with one repository, org/model, at one commit."""
    repository = cache / "models--org--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    if linked:
        write_safetensors(repository / "blobs" / "blob", weights())
        (snapshot / "model.safetensors").symlink_to("../../blobs/blob")
    else:
        write_safetensors(snapshot / "model.safetensors", weights())
    return snapshot


def test_hub_repositories_are_their_commit(tmp_path):
    """A repository in the local cache is its commit: by name, by branch, by commit, and by the snapshot's own path."""
    snapshot = make_snapshot(tmp_path)
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    described = [
        describe_weights(make_model("org/model", revision=revision), load) for revision in (None, "main", COMMIT)
    ]
    # With HF_HUB_OFFLINE=1, vLLM puts the path in place of the name.
    described.append(describe_weights(make_model(snapshot), LOAD))
    assert described == [{"kind": "commit", "commit": COMMIT}] * 4
    variant = describe_weights(make_model("org/model:Q4_K_M"), load)
    assert variant == {"kind": "commit", "commit": COMMIT, "variant": "Q4_K_M"}


def test_a_revision_that_vllm_has_resolved(tmp_path):
    """Recent releases keep the commit in the revision; nothing is looked up then."""

    class Resolved(str):
        __slots__ = ()
        resolved = COMMIT

    assert describe_weights(make_model("org/model", revision=Resolved("main")), LOAD)["commit"] == COMMIT


def test_other_weights_in_a_snapshot_are_seen(tmp_path):
    """Files that somebody has put into a snapshot are identified by content, not by the commit."""
    snapshot = make_snapshot(tmp_path, linked=False)
    assert describe_weights(make_model(snapshot), LOAD)["kind"] == "content"


def test_what_is_not_here_is_its_name(tmp_path, monkeypatch):
    """Without weights on this machine, name and revision stand for them, and a warning says so and what to do."""
    warnings = []
    monkeypatch.setattr(weights_module.logger, "warning", lambda message, *args: warnings.append(message % args))
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    one, two = (describe_weights(make_model("org/absent", revision=revision), load) for revision in ("a", "b"))
    assert one == {"kind": "name", "name": "org/absent", "revision": "a"}
    assert one != two
    assert len(warnings) == 2
    assert "name and revision (a) stand for them in block keys. Set model_id" in warnings[0]


def test_object_storage_is_its_uri(tmp_path):
    """Weights in object storage are their URI, though `model` is a local directory of configuration."""
    model = make_model(tmp_path, model_weights="s3://bucket/model")
    assert describe_weights(model, LOAD) == {"kind": "name", "name": "s3://bucket/model", "revision": None}
