"""The namespace: models and caches that must not share KV don't, and those that may do."""

import copy
import itertools
import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvplug import namespace
from kvplug.errors import ConfigError, UnsupportedError
from kvplug.namespace import namespace_fields, namespace_fingerprint, shard_id


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's class of that name."""


class SlidingWindowSpec(SimpleNamespace):
    """Stands for vLLM's class of that name."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Stands for vLLM's class of that name."""


class HfConfig:
    """Stands for a Hugging Face configuration."""

    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return copy.deepcopy(self.values)


def write_weights(directory, content=b"weights"):
    header = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    encoded = json.dumps(header).encode()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + content)
    return directory


def make_model(path, **changes):
    """Make a model configuration with the fields and methods of vLLM's that matter here."""
    values = {
        "model": str(path),
        "model_weights": "",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "seed": 0,
        "max_model_len": 1024,
        "trust_remote_code": False,
        "code_revision": None,
        "is_encoder_decoder": False,
        "use_mla": False,
        "multimodal_config": None,
        "layers": 32,
        "kv_heads": 8,
        "head_size": 128,
        "hf_config": HfConfig(model_type="llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    } | changes
    model = SimpleNamespace(**values)
    model.get_total_num_hidden_layers = lambda: model.layers
    model.get_total_num_kv_heads = lambda: model.kv_heads
    model.get_head_size = lambda: model.head_size

    def layer_range(parallel):
        share = model.layers // parallel.pipeline_parallel_size
        stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
        return stage * share, (stage + 1) * share

    model.get_layers_start_end_indices = layer_range
    return model


def make_config(path, *, model=None, cache=None, parallel=None, load=None, **changes):
    """Make a vLLM configuration; a dict per part changes fields of it."""
    cache_values = {"cache_dtype": "auto", "block_size": 16, "kv_cache_layout": "NHD"} | (cache or {})
    parallel_values = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0} | (parallel or {})
    return SimpleNamespace(
        **{
            "model_config": make_model(path, **(model or {})),
            "cache_config": SimpleNamespace(**cache_values),
            "parallel_config": SimpleNamespace(**parallel_values),
            "load_config": SimpleNamespace(**{"load_format": "auto", "download_dir": None} | (load or {})),
            "attention_config": SimpleNamespace(backend=None),
            "speculative_config": None,
            "lora_config": None,
        }
        | changes
    )


def make_caches(*specs, **fields):
    specs = specs or (FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16"),)
    groups = [SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=100, kv_cache_groups=groups, **fields)


def fingerprint(config, caches=None, **options):
    value = namespace_fingerprint(config, caches or make_caches(), **options)
    assert len(value) == 32
    return value


@pytest.fixture
def path(tmp_path):
    return write_weights(tmp_path / "model")


def test_d7_equal_configurations_are_equal(path, tmp_path):
    """D7, the control: the same model and cache have the same namespace, also at another path, rank, parallel size."""
    one = fingerprint(make_config(path))
    copied = write_weights(tmp_path / "elsewhere")
    parallel = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "rank": 5}
    share = make_caches(FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16"))
    other = make_config(copied, parallel=parallel, model={"hf_config": HfConfig(**_hf(_name_or_path=str(copied)))})
    assert fingerprint(other, share) == one


def _hf(**changes):
    base = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return base | changes


CHANGES = {
    "dtype": {"model": {"dtype": "float16"}},
    "quantization": {"model": {"quantization": "awq"}},
    "quantization options": {"model": {"quantization_config": {"bits": 4}}},
    "e4m3": {"cache": {"cache_dtype": "fp8_e4m3"}},
    "e5m2": {"cache": {"cache_dtype": "fp8_e5m2"}},
    "unquantized layers": {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
    "measured scales": {"cache": {"calculate_kv_scales": True}},
    "state dtype": {"cache": {"mamba_ssm_cache_dtype": "float32"}},
    "layout": {"cache": {"kv_cache_layout": "HND"}},
    "layers": {"model": {"layers": 31}},
    "kv heads": {"model": {"kv_heads": 4}},
    "head size": {"model": {"head_size": 64}},
    "rope": {"model": {"hf_config": HfConfig(**_hf(rope_parameters={"rope_type": "yarn", "factor": 4.0}))}},
    "overrides": {"model": {"hf_config": HfConfig(**_hf(sliding_window=64))}},
    "implementation": {"model": {"model_impl": "transformers"}},
    "code": {"model": {"trust_remote_code": True, "code_revision": "abc"}},
    "dummy weights": {"load": {"load_format": "dummy"}},
    "dummy weights of another seed": {"load": {"load_format": "dummy"}, "model": {"seed": 1}},
    "attention backend": {"attention_config": SimpleNamespace(backend="FLASHINFER")},
    "images": {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 1})}},
    "adapter modules": {"lora_config": SimpleNamespace(target_modules=["q_proj"], lora_dtype="auto")},
}


def test_d7_every_difference_counts(path):
    """D7: each thing that makes KV of equal tokens differ makes another namespace, and no two make the same."""
    fingerprints = [fingerprint(make_config(path)), *(fingerprint(make_config(path, **c)) for c in CHANGES.values())]
    assert len(set(fingerprints)) == len(CHANGES) + 1


def test_d7_kinds_of_caches_count(path):
    """D7: block size, kind, window, dtype and number of groups make other namespaces."""
    full = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    variants = [
        make_caches(FullAttentionSpec(**full)),
        make_caches(FullAttentionSpec(**full | {"block_size": 32})),
        make_caches(FullAttentionSpec(**full | {"dtype": "uint8"})),
        make_caches(FullAttentionSpec(**full, sliding_window=64)),
        make_caches(SlidingWindowSpec(**full, sliding_window=64)),
        make_caches(SlidingWindowSpec(**full, sliding_window=128)),
        make_caches(FullAttentionSpec(**full), SlidingWindowSpec(**full, sliding_window=64)),
        make_caches(FullAttentionSpec(**full), kv_cache_layout="LBHNC"),
    ]
    assert len({fingerprint(make_config(path), caches) for caches in variants}) == len(variants)


def test_d7_the_format_version_counts(path, monkeypatch):
    """D7: content of another format version is never found."""
    before = fingerprint(make_config(path))
    monkeypatch.setattr(namespace, "FORMAT_VERSION", namespace.FORMAT_VERSION + 1)
    assert fingerprint(make_config(path)) != before


def test_d7_a_fine_tune_has_its_own(path, tmp_path):
    """D7: a fine-tune with the same configuration isn't its base."""
    tuned = write_weights(tmp_path / "tuned", b"weightz")
    assert fingerprint(make_config(tuned)) != fingerprint(make_config(path))


def test_d7_revisions_have_their_own(tmp_path):
    """D7: revisions of a model that isn't on this machine are told apart."""
    load = {"download_dir": str(tmp_path)}
    fingerprints = {
        fingerprint(make_config("org/model", load=load, model={"revision": revision})) for revision in (None, "a", "b")
    }
    assert len(fingerprints) == 3


def test_model_id_stands_for_the_weights(path, tmp_path):
    """A name set by the user replaces the weights' content, and nothing else."""
    other = write_weights(tmp_path / "other", b"others")
    named = fingerprint(make_config(path), model_id="m")
    assert fingerprint(make_config(other), model_id="m") == named
    assert fingerprint(make_config(path), model_id="n") != named
    assert fingerprint(make_config(path)) != named
    assert fingerprint(make_config(path, model={"dtype": "float16"}), model_id="m") != named
    # Where there is nothing to look at, it is the way out.
    assert fingerprint(make_config(tmp_path), model_id="m") == named


def test_the_block_size_is_the_caches(path):
    """The configuration's block size may be adjusted in one process and not in the other; that of the caches counts."""
    assert fingerprint(make_config(path, cache={"block_size": 128})) == fingerprint(make_config(path))


def test_a_group_of_layers_of_different_size_is_its_first(path):
    """The scheduler sees the first layer's spec of a group where workers see all; both have the same namespace."""
    first = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    second = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": first, "layer.1": second})
    assert fingerprint(make_config(path), make_caches(uniform)) == fingerprint(make_config(path), make_caches(first))


def test_draft_models_count_if_they_have_kv(path, tmp_path):
    """A draft model whose KV lies in the same blocks is part of the namespace, by content; n-gram lookup isn't."""
    draft, other = write_weights(tmp_path / "draft", b"draft"), write_weights(tmp_path / "other", b"other")

    def with_draft(method, model):
        draft_model = make_model(model) if model else None
        return fingerprint(
            make_config(path, speculative_config=SimpleNamespace(method=method, draft_model_config=draft_model))
        )

    plain = fingerprint(make_config(path))
    assert with_draft("ngram", path) == with_draft("suffix", None) == plain
    assert len({plain, with_draft("eagle", draft), with_draft("eagle", other), with_draft("draft_model", draft)}) == 4


def test_long_rope_depends_on_the_longest_sequence(path):
    """LongRoPE's factors are chosen by max_model_len, so it counts there, and nowhere else."""

    def with_length(length, rope_type):
        hf_config = HfConfig(**_hf(rope_parameters={"rope_type": rope_type}))
        return fingerprint(make_config(path, model={"hf_config": hf_config, "max_model_len": length}))

    assert with_length(1024, "default") == with_length(4096, "default")
    assert with_length(1024, "longrope") != with_length(4096, "longrope")


def test_the_layout_may_come_from_the_environment(path, monkeypatch):
    """Releases whose configuration has no layout take it from VLLM_KV_CACHE_LAYOUT."""
    config = make_config(path, cache={"kv_cache_layout": None})
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    unset = fingerprint(config)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert fingerprint(config) != unset


def test_models_whose_kv_tokens_do_not_decide_are_refused(path):
    """Encoder-decoder models and attention that looks ahead are refused, with the reason."""
    with pytest.raises(UnsupportedError, match="encoder"):
        fingerprint(make_config(path, model={"is_encoder_decoder": True}))
    ahead = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", non_causal=True)
    with pytest.raises(UnsupportedError, match="looks ahead"):
        fingerprint(make_config(path), make_caches(ahead))


def test_what_has_no_content_is_refused(path):
    """A function in the model's configuration can't be compared, so it's an error that names it."""
    hf_config = HfConfig(**_hf(activation=lambda x: x))
    with pytest.raises(ConfigError, match=r"hf_config\.activation is a function"):
        fingerprint(make_config(path, model={"hf_config": hf_config}))


def test_fields_are_json_without_paths(path):
    """What goes in can be printed as JSON and has no path in it."""
    text = json.dumps(namespace_fields(make_config(path), make_caches()))
    assert str(path) not in text
    assert "model_type" in text


def test_before_there_are_caches(path):
    """Without caches, as in a diagnosis, the configuration's block size stands in."""
    assert namespace_fields(make_config(path), None)["cache"]["block_size"] == 16


@pytest.mark.parametrize(
    ("parallel", "heads", "expected"),
    [
        ({}, 8, "layers0-32.heads0-8.tp0of1.pp0of1"),
        ({"tensor_parallel_size": 2, "rank": 1}, 8, "layers0-32.heads4-8.tp1of2.pp0of1"),
        ({"tensor_parallel_size": 4, "rank": 3}, 2, "layers0-32.heads1-2.tp3of4.pp0of1"),
        ({"tensor_parallel_size": 4, "rank": 1}, 2, "layers0-32.heads0-1.tp1of4.pp0of1"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "rank": 2}, 8, "layers16-32.heads0-4.tp0of2.pp1of2"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "rank": 1},
            8,
            "layers0-32.heads4-8.tp1of2.pp0of1.pcp0of1.dcp1of2",
        ),
    ],
)
def test_d7_shards_say_what_a_rank_holds(path, parallel, heads, expected):
    """D7: the share of a rank, with replicated heads, stages and sizes, is in its name."""
    assert shard_id(make_config(path, parallel=parallel, model={"kv_heads": heads})) == expected


def test_d7_shards_of_different_ranks_differ(path):
    """D7: no two ranks of any two parallel sizes have the same name."""
    names = [
        shard_id(make_config(path, parallel={"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "rank": rank}))
        for tp, pp in itertools.product((1, 2, 4), (1, 2))
        for rank in range(tp * pp)
    ]
    assert len(set(names)) == len(names)


def test_latent_attention_has_one_head(path):
    """With latent attention, every rank holds the same."""
    parallel = {"tensor_parallel_size": 2, "rank": 1}
    assert ".heads0-1." in shard_id(make_config(path, parallel=parallel, model={"use_mla": True, "kv_heads": 16}))


FINGERPRINT_IN_A_PROCESS = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("fakes", {file!r})
fakes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fakes)
hf_config = fakes.HfConfig(**fakes._hf(things={{"b", "a", "c"}}, nested={{"z": 1, "y": (2, 3)}}))
config = fakes.make_config(Path({path!r}), model={{"hf_config": hf_config}})
print(json.dumps(fakes.fingerprint(config).hex()))
"""


def test_d6_the_namespace_is_equal_in_every_process(path):
    """D6: it doesn't depend on PYTHONHASHSEED, with sets in the model's configuration too."""
    code = FINGERPRINT_IN_A_PROCESS.format(file=__file__, path=str(path))
    values = set()
    for seed in (None, "0", "random"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        values.add(json.loads(done.stdout))
    assert len(values) == 1


def test_vllms_own_configuration(tmp_path, monkeypatch):
    """The fields are those of vLLM's own classes: geometry, dtypes and overrides of a real configuration count."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.kv_cache_interface import FullAttentionSpec as RealSpec
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    # Saves a process, which looks at the model's class.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    model = write_weights(tmp_path / "model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    (model / "config.json").write_text(json.dumps(config))
    spec = RealSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])

    def real(path=model, **options):
        arguments = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True} | options
        return EngineArgs(model=str(path), **arguments).create_engine_config()

    base = real()
    fields = namespace_fields(base, caches)
    assert fields["geometry"] == {"layers": 3, "kv_heads": 2, "head_size": 16}
    assert fields["model"]["dtype"] == "float32"
    assert fields["cache"]["specs"][0]["kind"] == "FullAttentionSpec"
    assert shard_id(base) == "layers0-3.heads0-2.tp0of1.pp0of1"
    moved = tmp_path / "moved"
    model.rename(moved)
    assert namespace_fields(real(moved), caches) == fields
    variants = [
        real(moved),
        real(moved, dtype="bfloat16"),
        real(moved, hf_overrides={"rope_theta": 5.0}),
        real(moved, load_format="dummy"),
    ]
    assert len({fingerprint(variant, caches) for variant in variants}) == len(variants)
