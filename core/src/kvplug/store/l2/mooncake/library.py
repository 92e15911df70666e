"""Mooncake's client library: importing it, and the variables that bound its calls."""

from __future__ import annotations

import importlib
import math
import os
import re
import threading
from types import ModuleType

from kvplug.errors import ConfigError

__all__ = ["bound_calls", "load"]

_MISSING_FILE = re.compile(r"(lib[\w.+-]+?\.so[.\d]*): cannot open shared object file")

#: Where Debian and Ubuntu have what the wheel doesn't bring along.
_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "libnl-3": "libnl-3-200",
    "libnl-route-3": "libnl-route-3-200",
}

_lock = threading.Lock()
#: Variables that were set here, as they were set: what somebody else has set stays.
_ours: dict[str, str] = {}


def load() -> ModuleType:
    """Return the module `mooncake.store`.

    Raises:
        ConfigError: It, or a library of the system that it needs, isn't installed.

    """
    # Mooncake would write some twenty lines about itself to the engine's standard error.
    _set("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise
        raise ConfigError("The tier mooncake needs Mooncake's client: pip install 'kvplug[mooncake]'") from error
    except ImportError as error:
        missing = _MISSING_FILE.search(str(error))
        if missing is None:
            raise
        file = missing[1]
        package = _PACKAGES.get(file.partition(".so")[0], f"the package that has {file}")
        raise ConfigError(
            f"Mooncake's client needs the system library {file}, which isn't here: apt-get install {package} (Debian, "
            "Ubuntu), or the same for your system."
        ) from error


def bound_calls(timeout: float) -> None:
    """Have Mooncake's calls end after a small multiple of `timeout` seconds, by variables that it reads.

    Its own defaults are 30 seconds for each answer of the master and for each pause in a transfer. Variables that are
    set already stay, and all of them count for whatever else uses Mooncake in this process. What no variable bounds is
    the first contact with a storage node: where a node accepts a connection and then says nothing, that takes a minute.
    """
    milliseconds, seconds = str(math.ceil(timeout * 1000)), str(math.ceil(timeout))
    _set("MC_RPC_TIMEOUT_MS", milliseconds)
    _set("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
    _set("MC_TCP_ADMISSION_TIMEOUT_MS", milliseconds)
    _set("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds)
    _set("MC_TCP_STATUS_TIMEOUT_SEC", seconds)
    # Twenty attempts to open a client, each as long as the time-out, are too many.
    _set("MC_STORE_CLIENT_SETUP_RETRIES", "2")


def _set(variable: str, value: str) -> None:
    with _lock:
        if os.environ.get(variable, value) in (value, _ours.get(variable)):
            os.environ[variable] = _ours[variable] = value
