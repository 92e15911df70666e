"""What a test process and its zygote say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One function to run in a forked process.

    Attributes:
        module: The function's module, by the name it has in the test process.
        file: The module's file; it is loaded from there where `module` can't be imported by name.
        function: Name of a module-level function.
        kwargs: Its pickled keyword arguments; opaque to the zygote, which may lack the classes in them.
        env: Changes of the environment; None removes a variable.
        timeout: Seconds until the process and its children are killed.
        log: File that takes the standard output and error of the process.
    """

    module: str
    file: str
    function: str
    kwargs: bytes
    env: dict[str, str | None] = field(default_factory=dict)
    timeout: float = 120.0
    log: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of a job: either a pickled result or what went wrong, as text."""

    result: bytes | None
    problem: str | None = None
