"""Several patches: which are applied, skipped or refused, and how they go together."""

from __future__ import annotations

import dataclasses
import json

from kvplug_hooks.deliver import Exit, operations
from kvplug_hooks.patches.before_update_states import V1, V2
from kvplug_hooks.registry import Registry


def test_h12_a_failing_patch_in_the_middle_fails_all(env, use_patches):
    """Of three patches the second one doesn't fit: the exit status says so, and none is applied."""
    use_patches(V1, dataclasses.replace(V1, id="middle", function="GPUModelRunner.missing", import_name="other"), V2)
    message = env.refuses(Exit.UNSUPPORTED)
    assert "middle" in message
    assert "say --patch before_update_states.v1 --patch before_update_states.v2." in message
    assert env.hooked() == []
    leftovers = [
        path for path in env.site.rglob("*") if path.suffix in (".rej", ".orig") or "kvplug-hooks" in path.name
    ]
    assert leftovers == []


def test_two_patches_on_one_place_are_a_conflict(env, use_patches):
    """Neither wins, both are named."""
    use_patches(V1, dataclasses.replace(V1, id="other", import_from="kvplug.other", call="before_update_states(self)"))
    message = env.refuses(Exit.CONFLICT)
    assert "before_update_states.v1 and other" in message
    assert env.cli("status").exit_code == Exit.CONFLICT


def test_a_patch_that_is_not_needed_is_skipped_with_its_reason(env, use_patches):
    """H3: a skip is never silent; alone it has an exit status of its own, and --require makes it a failure."""
    done = dataclasses.replace(V1, id="done", not_needed=lambda source: "vLLM does this by itself.")
    use_patches(done)
    status = env.cli("status")
    assert (status.exit_code, "done: not needed. vLLM does this by itself." in status.output) == (Exit.NOT_NEEDED, True)
    before = env.snapshot()
    assert env.cli("apply").exit_code == 0
    assert env.snapshot() == before
    assert "done is not needed: vLLM does this by itself." in env.refuses(Exit.NOT_NEEDED, "apply", "--require")

    use_patches(done, V2)
    assert env.cli("apply").exit_code == 0
    assert env.hooked() == ["v2"]
    assert env.cli("status").exit_code == 0
    assert env.cli("status", "--require").exit_code == Exit.NOT_NEEDED


def test_h3_patches_of_other_architectures_are_skipped(env, use_patches):
    """Architectures decide, and what was skipped for them isn't missed afterwards."""
    use_patches(dataclasses.replace(V1, architectures=frozenset({"QwenForCausalLM"})), V2)
    result = env.cli("apply", "--architecture", "LlamaForCausalLM")
    assert result.exit_code == 0
    assert "before_update_states.v1: not concerned." in result.output
    assert "LlamaForCausalLM" in result.output
    assert env.hooked() == ["v2"]
    assert env.cli("status").exit_code == 0
    assert env.cli("apply", "--architecture", "LlamaForCausalLM", "--require").exit_code == Exit.NOT_NEEDED
    assert env.cli("apply", "--architecture", "LlamaForCausalLM", "--architecture", "QwenForCausalLM").exit_code == 0
    assert env.hooked() == ["v1", "v2"]


def test_patches_that_share_a_file(env, use_patches):
    """They come and go one by one, each time made from the original; the last revert restores it to the byte."""
    other = dataclasses.replace(
        V1,
        id="other",
        function="GPUModelRunner._update_states",
        import_from="os.path",
        import_name="exists",
        call="exists(scheduler_output)",
    )
    before = env.snapshot()
    use_patches(V1, other)
    both = env.cli("apply")
    assert both.exit_code == 0, both.output
    text = env.v1.read_bytes()
    for patch, kept in (("other", b"before_update_states"), ("before_update_states.v1", b"exists(scheduler_output)")):
        assert env.cli("revert", "--patch", patch).exit_code == 0
        assert kept in env.v1.read_bytes()
        assert env.cli("verify").exit_code == 0
        assert env.cli("apply", "--patch", patch).exit_code == 0
        assert env.v1.read_bytes() == text
    use_patches(V1)
    message = env.refuses(Exit.UNSUPPORTED, "revert", "--patch", "before_update_states.v1")
    assert "has the patches other, too" in message
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before


def test_a_patch_whose_package_was_uninstalled_is_still_known_by_name(env, use_patches):
    """What was applied is in the manifest: it is reported, and can be reverted without the package."""
    before = env.snapshot()
    use_patches(V1, dataclasses.replace(V2, id="foreign"))
    env.vllm().apply()
    use_patches(V1)
    status = env.cli("status")
    assert (status.exit_code, "foreign: applied." in status.output) == (0, True)
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before


def test_a_declaration_that_cannot_be_used_is_never_skipped_in_silence(env, monkeypatch):
    """What another distribution declares wrongly is said with each command; --require makes it a failure."""
    registry = Registry()
    registry.add((V1, V2), "test")
    registry.reject("theirs", "other 1.0", "theirs of other 1.0 can't be loaded: tell its publisher.")
    monkeypatch.setattr(operations, "known_patches", lambda: registry)
    assert "theirs of other 1.0 can't be loaded" in env.refuses(Exit.UNSUPPORTED, "apply", "--require")
    for command in ("apply", "status", "verify"):
        result = env.cli(command)
        assert (result.exit_code, "not used: theirs of other 1.0 can't be loaded" in result.output) == (0, True)
    assert json.loads(env.cli("status", "--json").stdout)["rejected"] == [registry.rejected[0].reason]
