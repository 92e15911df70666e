"""What `kvplug-hooks` says about a vLLM, and with which exit status."""

from __future__ import annotations

import enum
import errno
from typing import Literal

from kvplug_hooks.errors import UnsupportedError

__all__ = ["DeliveryError", "Exit", "State", "from_os_error", "overall"]

#: Where one patch stands in the files of one vLLM.
State = Literal["applied", "absent", "drifted", "unsupported", "conflict", "not needed", "not concerned"]


class Exit(enum.IntEnum):
    """Exit statuses. A health check can rely on them: they never change their meaning."""

    APPLIED = 0
    #: The operating system refused something, or there is a mistake in kvplug-hooks.
    FAILED = 1
    #: The command line is wrong.
    USAGE = 2
    ABSENT = 3
    DRIFTED = 4
    UNSUPPORTED = 5
    NOT_NEEDED = 6
    #: Two patches want one place.
    CONFLICT = 7
    #: Another kvplug-hooks is at work on this vLLM.
    BUSY = 8
    #: The files can't be changed by this user, or by nobody.
    READ_ONLY = 9
    #: There is no vLLM, or no interpreter that could be asked for it.
    NO_VLLM = 10
    #: The files are patched, but RECORD, bytecode or the interpreter's kvplug don't go with them.
    INCOMPLETE = 11

    @property
    def word(self) -> str:
        """The same for people: `read only`, for example."""
        return self.name.lower().replace("_", " ")


_EXITS: dict[State, Exit] = {
    # In the order in which they decide the whole, the worst first.
    "drifted": Exit.DRIFTED,
    "conflict": Exit.CONFLICT,
    "unsupported": Exit.UNSUPPORTED,
    "absent": Exit.ABSENT,
    "applied": Exit.APPLIED,
    "not needed": Exit.NOT_NEEDED,
    "not concerned": Exit.NOT_NEEDED,
}

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class DeliveryError(UnsupportedError):
    """Files can't be patched, verified or reverted here; the message says why and what to do."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        #: The exit status that says the same.
        self.code = code

    def __reduce__(self) -> tuple[type[DeliveryError], tuple[str, Exit]]:
        return type(self), (str(self), self.code)


def overall(states: list[State], *, require: bool = False) -> Exit:
    """Return the exit status for several patches: the worst, where a patch that isn't needed is fine beside others.

    Args:
        states: The states of the patches that were asked for.
        require: Whether each patch must be there, so that one that isn't needed counts as missing.

    """
    order: list[State] = list(_EXITS)
    if require:
        # What is skipped comes right before `applied`.
        order.remove("applied")
        order.append("applied")
    default: State = "not needed"
    worst = min(states, key=order.index, default=default)
    return _EXITS[worst]


def from_os_error(error: OSError, doing: str) -> DeliveryError:
    """Return the sentence for what the operating system refused.

    Args:
        error: The refusal.
        doing: What can't be done, as in `… can't be patched`.

    """
    where = f" ({error.filename}: {error.strerror})" if error.filename else f" ({error.strerror or error})"
    if error.errno in _READ_ONLY:
        return DeliveryError(
            f"{doing}{where}; run kvplug-hooks as a user who may write there, as an image is built for example, "
            "or leave the files alone: by default kvplug patches vLLM as it is imported.",
            Exit.READ_ONLY,
        )
    return DeliveryError(f"{doing}{where}; nothing was changed, remove the cause and try again.", Exit.FAILED)
