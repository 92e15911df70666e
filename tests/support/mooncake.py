"""A Mooncake Store on the loopback interface: a master, storage nodes, and ways to hurt them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envlib.system_libraries import FOLDER, LIBRARIES, is_there

from support.env_script import ROOT
from support.signals import pause, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HOST = "127.0.0.1"
_START_TIMEOUT = 30.0

#: Runs its arguments as a command that is killed when the process that started it dies.
_LAUNCHER = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL); "  # PR_SET_PDEATHSIG
    "os.execv(sys.argv[1], sys.argv[1:])"
)

#: In this order: each needs those before it.
_PRELOADED = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "libnuma.so.1")


def missing() -> str | None:
    """Return what is missing here to run Mooncake, or None."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:  # a folder of that name is no package
        return "Mooncake isn't installed: pip install mooncake-transfer-engine-non-cuda"
    lacking = [name for name in LIBRARIES if not is_there(name, ROOT / FOLDER)]
    return f"{', '.join(lacking)} missing: make env unpacks it on Debian and Ubuntu" if lacking else None


def preload() -> None:
    """Load the system libraries of `build/libraries` into this process, so that Mooncake's client finds them."""
    for name in _PRELOADED:
        if (ROOT / FOLDER / name).exists():
            ctypes.CDLL(str(ROOT / FOLDER / name), mode=ctypes.RTLD_GLOBAL)


def environment() -> dict[str, str]:
    """Return the environment of a process that runs Mooncake, on the loopback interface."""
    path = os.environ.get("LD_LIBRARY_PATH")
    found = [str(ROOT / FOLDER), *([path] if path else [])]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(found), "MC_TCP_BIND_ADDRESS": _HOST, "MC_LOG_LEVEL": "ERROR"}


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((_HOST, port), 5).close()
        return True
    return False


class Process:
    """A running server."""

    def __init__(self, program: str, arguments: list[str], log: Path) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        binary = Path(spec.origin).with_name(program)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, str(binary), *arguments],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop it as SIGSTOP does: its connections stay, and nobody answers."""
        pause(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        resume(self._process.pid)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


class MooncakeStore:
    """A master, and the storage nodes that it knows.

    Args:
        folder: For logs.
        lease_ms: How long a key is leased that was read or looked up.
        client_ttl: Seconds after which the master gives up on a silent node.
    """

    def __init__(self, folder: Path, *, lease_ms: int = 500, client_ttl: int = 2) -> None:
        self._folder = folder
        self._options = ["--default_kv_lease_ttl", str(lease_ms), "--client_ttl", str(client_ttl)]
        self._port = free_port()
        self._metrics_port = free_port()
        #: The storage nodes.
        self.nodes: list[Process] = []
        self._client: Any = None
        self.start_master()

    @property
    def address(self) -> str:
        """Host and port of the master."""
        return f"{_HOST}:{self._port}"

    @property
    def metrics_address(self) -> str:
        """Host and port of the master's metrics."""
        return f"{_HOST}:{self._metrics_port}"

    def start_master(self) -> None:
        """Start a master, which knows no key and no node; nodes that are running come back to it by themselves."""
        arguments = ["--rpc_address", _HOST, "--rpc_port", str(self._port)]
        arguments += ["--metrics_host", _HOST, "--metrics_port", str(self._metrics_port), *self._options]
        #: The master.
        self.master = Process("mooncake_master", arguments, self._folder / "master.log")
        self._wait(lambda: _listens(self._port) and self.metric("master_key_count") == 0, "the master didn't start")

    def add_node(self, nbytes: int) -> Process:
        """Start a storage node that lends so many bytes, and wait until the master knows it."""
        before = self.metric("master_total_capacity_bytes") or 0
        arguments = ["--master_server_address", self.address, "--metadata_server", "P2PHANDSHAKE", "--host", _HOST]
        arguments += ["--port", str(free_port()), "--global_segment_size", str(nbytes)]
        node = Process("mooncake_client", arguments, self._folder / "node.log")
        self.nodes.append(node)
        self.wait_for_capacity(int(before) + nbytes)
        return node

    def remove_node(self, node: Process) -> None:
        """Kill a node, and wait until the master has given up on it."""
        capacity = self.metric("master_total_capacity_bytes") or 0
        node.kill()
        self.nodes.remove(node)
        self._wait(lambda: (self.metric("master_total_capacity_bytes") or 0) < capacity, "the node is still there")

    def wait_for_capacity(self, nbytes: int) -> None:
        """Wait until the master has that many bytes of storage."""
        self._wait(
            lambda: self.metric("master_total_capacity_bytes") == nbytes, f"there are no {nbytes} bytes of storage"
        )

    def metric(self, name: str) -> float | None:
        """Return one of the master's metrics; None if it doesn't answer."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            return next((float(line.split()[1]) for line in lines if line.startswith(name + " ")), None)
        return None

    def clear(self) -> None:
        """Remove all keys, leased ones too. Needs `preload`."""
        if self._client is None:
            client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            assert client.setup(_HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", self.address) == 0
            self._client = client
        removed = self._client.remove_all(force=True)
        assert removed >= 0, removed

    def log(self) -> str:
        """Return the end of what master and nodes have printed."""
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(self._folder.glob("*.log")))

    def stop(self) -> None:
        """End everything."""
        if self._client is not None:
            self._client.close()
        for process in (*self.nodes, self.master):
            process.kill()

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while not condition():
            if time.monotonic() > deadline or not self.master.running:
                raise AssertionError(f"{problem}:\n{self.log()}")
            time.sleep(0.05)


@contextlib.contextmanager
def mooncake_store(*nodes: int, lease_ms: int = 500, client_ttl: int = 2) -> Iterator[MooncakeStore]:
    """Run a store with nodes of the given bytes, and end it.

    Raises:
        AssertionError: It didn't start; the message has its logs.
    """
    with tempfile.TemporaryDirectory(prefix="kvplug-mooncake-") as folder:
        store = MooncakeStore(Path(folder), lease_ms=lease_ms, client_ttl=client_ttl)
        try:
            for nbytes in nodes:
                store.add_node(nbytes)
            yield store
        finally:
            store.stop()
