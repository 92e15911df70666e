"""The demo: a real vLLM server that reuses KV through type1 or type2, measured, and compared with vLLM alone.

Run it as ``make demo``, or ``.venv/bin/python scripts/demo.py``. `docs/demo.md` says what it does and what its
numbers mean.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from demolib.client import Meter, Pass, Reply, Request, converse, send
from demolib.files import patched_vllm
from demolib.hook import hook_delivery
from demolib.model import PARAMETERS, make_model
from demolib.options import read_options
from demolib.plot import plot
from demolib.processes import CAUGHT, end
from demolib.progress import stage
from demolib.report import Passes, faults, result, table, warnings
from demolib.server import Server, ServerError, free_port
from demolib.text import conversations
from rich.console import Console

_ROOT = Path(__file__).resolve().parents[1]
_BUILD = _ROOT / "build"

#: All that names a connector.
_NAMES = {"type1": "Type1Connector", "type2": "Type2Connector"}

_START_TIMEOUT = 600.0


class _Interrupted(BaseException):
    """A signal came that asks the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


class Demo:
    """One run of the demo."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connector: str = options.connector
        self._total = options.conversations * options.turns

    def run(self) -> dict[str, Any]:
        """Do all of it.

        Returns:
            The content of `result.json`.

        Raises:
            ServerError: A server failed.

        """
        started = time.monotonic()
        port = free_port(self._options.port)
        with stage(self._console, f"Making a model of {PARAMETERS / 1e6:.0f} M parameters and its tokenizer"):
            model = make_model(_BUILD / "demo", self._options.seed)
        with self._vllm() as first:
            try:
                alone, ours = self._start(model, port, first)
                passes, hook_mode = self._passes(alone, ours)
                if self._options.l2:
                    restarted = self._restarted(model, port, ours, passes.alone.requests, first)
                    passes = replace(passes, restarted=restarted)
            finally:
                end(self._processes)
        wanted = self._options.hook if self._connector == "type1" else None
        about = self._about(time.monotonic() - started)
        return result(passes, hook_mode, about, connector=self._connector, wanted=wanted)

    @contextlib.contextmanager
    def _vllm(self) -> Iterator[Path | None]:
        """Have the vLLM of the server with the connector: the folder that has it, or None for the installed one."""
        if self._options.hook == "import":
            yield None
            return
        with contextlib.ExitStack() as stack:
            with stage(self._console, "Putting the hook into the files of a vLLM of the demo's own"):
                first = stack.enter_context(patched_vllm(self._options.out / "vllm"))
            yield first

    def _start(self, model: Path, port: int, first: Path | None) -> tuple[Server, Server]:
        """Start both servers; most of a start is imports, so two at once take little longer than one."""
        out: Path = self._options.out
        name = self._connector
        ours = Server.start(model, port, out / f"server-{name}.log", _BUILD, *self._config(), first=first)
        self._processes.append(ours.process)
        alone = Server.start(model, free_port(), out / "server-alone.log", _BUILD)
        self._processes.append(alone.process)
        with stage(self._console, f"Starting two servers: vLLM alone, and with {name} (port {port})") as show:
            self._wait([alone, ours], show)
            # A server's first request is slow for other reasons; this one shares nothing with the workload.
            for server in (alone, ours):
                send(server, Request(0, 0, ({"role": "user", "content": "Good morning. " * 20},)))
                server.reset(store=True)
        return alone, ours

    def _config(self, **settings: Any) -> tuple[str, str]:
        config: dict[str, Any] = {"kv_connector": _NAMES[self._connector], "kv_role": "kv_both"}
        if settings:
            config["kv_connector_extra_config"] = settings
        return "--kv-transfer-config", json.dumps(config)

    def _passes(self, alone: Server, ours: Server) -> tuple[Passes, str | None]:
        without, cold = self._cold(alone, ours)
        end([alone.process])
        ours.reset(store=True)
        visit = self._again(f"First visit: {self._connector} stores blocks", ours, without.requests, _nothing)
        warm = self._again(
            f"Warm: {self._connector} loads blocks, vLLM's cache is emptied",
            ours,
            without.requests,
            lambda: ours.reset(store=False),
        )
        return Passes(without, cold, visit, warm), hook_delivery(ours.log)

    def _restarted(self, model: Path, port: int, ours: Server, requests: Sequence[Request], vllm: Path | None) -> Pass:
        """Have the requests answered over an L2 tier, start the server again, and send them once more.

        It needs servers of its own: what the others stored after a reset is theirs alone, and ends with them.
        """
        end([ours.process])
        folder: Path = self._options.out / "l2"
        shutil.rmtree(folder, ignore_errors=True)
        first = self._start_over_l2(model, port, folder, "server-l2.log", vllm)
        self._again(f"First visit, over L2 ({self._options.l2})", first, requests, _nothing)
        end([first.process])
        second = self._start_over_l2(model, port, folder, "server-l2-again.log", vllm)
        title = f"After a restart: {self._connector} loads blocks from L2 ({self._options.l2})"
        found = self._again(title, second, requests, lambda: second.reset(store=False))
        end([second.process])
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def _start_over_l2(self, model: Path, port: int, folder: Path, log: str, vllm: Path | None) -> Server:
        arguments = self._config(l2=self._options.l2, disk_path=str(folder), disk_size="4GiB")
        server = Server.start(model, port, self._options.out / log, _BUILD, *arguments, first=vllm)
        self._processes.append(server.process)
        with stage(self._console, f"Starting a server over L2 ({self._options.l2})") as show:
            self._wait([server], show)
        return server

    def _wait(self, waiting: list[Server], show: Callable[[int, str], None]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while waiting := [server for server in waiting if not server.is_ready()]:
            if time.monotonic() > deadline:
                raise waiting[0].error(f"A server wasn't ready after {_START_TIMEOUT:.0f} s.")
            show(0, "still starting")
            time.sleep(0.2)

    def _cold(self, alone: Server, ours: Server) -> tuple[Pass, Pass]:
        """Have the conversations with nothing cached or stored, each request on one server right after the other.

        So whatever else the machine does meanwhile concerns both.
        """
        workload = conversations(self._options.conversations, self._options.turns)
        meters = Meter(alone, self._connector), Meter(ours, self._connector)
        with_ours = []
        with stage(self._console, "Cold: nothing is cached, on both servers", 2 * self._total) as show:

            def ask(request: Request) -> Reply:
                alone.reset(store=False)
                reply = send(alone, request)
                show(1, _said(reply))
                ours.reset(store=True)
                with_ours.append(send(ours, request))
                show(1, _said(with_ours[-1]))
                return reply

            replies = list(converse(ask, workload))
        return meters[0].read(replies), meters[1].read(with_ours)

    def _again(self, title: str, server: Server, requests: Sequence[Request], before: Callable[[], None]) -> Pass:
        """Send requests again, with something done before each."""
        meter = Meter(server, self._connector)
        replies = []
        with stage(self._console, title, len(requests)) as show:
            for request in requests:
                before()
                replies.append(send(server, request))
                show(1, _said(replies[-1]))
        return meter.read(replies)

    def _about(self, seconds: float) -> dict[str, Any]:
        import vllm

        return {
            "conversations": self._options.conversations,
            "turns": self._options.turns,
            "seed": self._options.seed,
            "seconds": seconds,
            "model_parameters": PARAMETERS,
            "threads": 1,
            "machine": {"cores": os.cpu_count(), "architecture": platform.machine()},
            "versions": {
                "python": platform.python_version(),
                "vllm": vllm.__version__,
                **{name: importlib.metadata.version(name) for name in _distributions(self._connector)},
            },
        }


def _distributions(connector: str) -> list[str]:
    return ["kvplug", f"kvplug-{connector}", *(["kvplug-hooks"] if connector == "type1" else [])]


def _nothing() -> None:
    pass


def _said(reply: Reply) -> str:
    return f"{reply.prompt_tokens:,} tokens: {reply.ttft_s:.2f} s"


@contextlib.contextmanager
def _signals_end_the_demo() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in CAUGHT}
    for each, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup's choice, for one, is kept
            signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _interrupt(number: int, _frame: object) -> None:
    for each in CAUGHT:  # the servers are being stopped: a second Ctrl-C mustn't keep that from being done
        signal.signal(each, signal.SIG_IGN)
    raise _Interrupted(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return an exit status."""
    options = read_options(arguments, _BUILD / "demo")
    console = Console(highlight=False)
    result_file, plot_file = options.out / "result.json", options.out / "ttft.png"
    try:
        with _signals_end_the_demo():
            options.out.mkdir(parents=True, exist_ok=True)
            for file in (result_file, plot_file):  # of an earlier run, which this one may not get to replace
                file.unlink(missing_ok=True)
            found = Demo(options, console).run()
            result_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            plot(found, plot_file)
    except ServerError as error:
        if error.log:
            console.print(error.log, markup=False, style="dim", soft_wrap=True)
        console.print(f"[bold red]The demo failed:[/] {error}", soft_wrap=True)
        return 1
    except _Interrupted as interrupted:
        console.print("Interrupted; the servers are stopped.")
        return interrupted.exit_status
    console.print()
    console.print(table(found))
    console.print(f"\nWritten: {result_file}, {plot_file}", soft_wrap=True)
    wrong = faults(found)
    for sentence in warnings(found):
        console.print(f"[yellow]Warning:[/] {sentence}", soft_wrap=True)
    for sentence in wrong:
        console.print(f"[bold red]The demo failed:[/] {sentence}", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
