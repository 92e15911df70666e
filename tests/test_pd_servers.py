"""pd_reuse as it is served: vLLM servers that prefill and decode for each other behind vLLM's router.

Each of the two servers does both, for the router's pairs `forth` and `back`. Right answers are their own: under a
cache salt of its own, a request finds nothing that is stored and nothing in the paged cache, and nobody finds what it
leaves.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from support.driver import PREFILL, pd_reuse
from support.llm import Output, compare
from support.pd_up import up
from support.reuse import CLOSE, assert_differ, prompt
from support.router import route
from support.servers import Server, serve

if TYPE_CHECKING:
    from pathlib import Path

    from support.router import Router

pytestmark = [pytest.mark.engine, pytest.mark.server]

BLOCK = 32

#: Seconds that a decode engine waits for what isn't stored.
PATIENCE = 2.5

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: What makes prompts of several steps, and chats without a model's own template.
ARGS = [
    *("--max-num-batched-tokens", "128"),
    *("--chat-template", "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"),
]

GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_tokens_as_token_ids": True}

#: What a decode engine is told, where a test doesn't take it from a prefill engine's answer.
DECODE = {"do_remote_prefill": True, "do_remote_decode": False}

#: Characters that are tokens, too.
LETTERS = list(range(94))


@dataclass
class Answer:
    """What a server or a router answered.

    Attributes:
        status: Of HTTP.
        parts: What came, decoded from JSON: all of it, or the pieces of a stream.
        error: The body where the status is not 200.
        complete: Whether a stream has come to its end.
    """

    status: int
    parts: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    complete: bool = True

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """Return what came of one choice."""
        assert self.status == 200, self.error
        return [choice for part in self.parts for choice in part["choices"] if choice["index"] == index]

    def output(self, index: int = 0) -> Output:
        """Return tokens and log-probabilities of one choice, of those which it has."""
        tokens, logprobs = [], []
        for choice in self.choices(index):
            found = choice["logprobs"] or {}
            if "content" in found:  # of a chat
                tokens += [number(one["token"]) for one in found["content"]]
                logprobs += [
                    {number(e["token"]): e["logprob"] for e in one["top_logprobs"]} for one in found["content"]
                ]
            elif found:
                tokens += map(number, found["tokens"])
                logprobs += [{number(key): value for key, value in (e or {}).items()} for e in found["top_logprobs"]]
        return Output(tokens, logprobs)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return "".join(
            choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"] or ""
            for choice in self.choices()
        )

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices()[-1]["finish_reason"]

    @property
    def params(self) -> Any:
        """The `kv_transfer_params` of an answer that doesn't stream."""
        assert self.status == 200, self.error
        return self.parts[0]["kv_transfer_params"]


def salt() -> str:
    """Return a cache salt that no request had."""
    return str(uuid.uuid4())


def number(token: str) -> int:
    return int(token.removeprefix("token_id:"))


@contextlib.contextmanager
def asking(server: Server | Router | int, body, path=COMPLETIONS, *, headers=(), timeout=60.0):
    """Send a request, and give the connection on which the answer comes. Leaving the context breaks it."""
    port = server if isinstance(server, int) else server.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **dict(headers)})
        yield connection
    finally:
        connection.close()


def ask(server, body, path=COMPLETIONS, **options) -> Answer:
    """Return the answer to a request. Of a stream that breaks off, what came before."""
    with asking(server, body, path, **options) as connection, connection.getresponse() as response:
        if response.status != 200:
            return Answer(response.status, error=response.read().decode())
        if not body.get("stream"):
            return Answer(200, [json.loads(response.read())])
        answer = Answer(200, complete=False)
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in response:
                if line.strip() == b"data: [DONE]":
                    answer.complete = True
                elif line.startswith(b"data: "):
                    answer.parts.append(json.loads(line[6:]))
        return answer


def at_once(calls):
    """Call all at the same time, and return the results in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def completion(text, max_tokens=6, **options):
    """Return a request. Text is token ids."""
    return GREEDY | {"prompt": text, "max_tokens": max_tokens, "logprobs": 2} | options


def alone(server, body, path=COMPLETIONS):
    """Return the answer to a request for which everything is computed, in one engine."""
    with counted(server, {"external_prefix_cache_hits": 0, "prefix_cache_hits": 0}):
        return ask(server, body | {"cache_salt": salt(), "stream": False}, path)


def prefilled(server, body, **options):
    """Let a server prefill a prompt, and return its answer's parameters."""
    return ask(server, body | {"max_tokens": 1, "kv_transfer_params": PREFILL}, **options).params


def assert_equal(answer, expected):
    compare([answer.output()], [expected.output()], atol=CLOSE)
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason


def wait_for(condition, what, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} not in {timeout} s"
        time.sleep(0.02)


def metric(server, name):
    prefix = "kvplug_" if name.startswith(("handover", "l2_")) else ""
    gauge = name.startswith("num_requests") or name.endswith("_perc")
    return server.metric(f"vllm:{prefix}{name}{'' if gauge else '_total'}")


@contextlib.contextmanager
def counted(server, expected):
    """Demand that counts of a server have grown by so much at the end."""
    before = {name: metric(server, name) for name in expected}

    def grown():
        return {name: metric(server, name) - before[name] for name in expected}

    yield
    with contextlib.suppress(AssertionError):
        wait_for(lambda: grown() == expected, "", timeout=5)  # a step's counts come after its tokens
    assert grown() == expected


def one_token(length):
    """Return what a decode engine counts where all but one token of a prompt came from the store."""
    return {
        "handovers": 1,
        "handover_tokens_computed": 1,
        "handover_timeouts": 0,
        "external_prefix_cache_hits": length,
    }


def computed(length, timeouts=0):
    """Return what it counts where nothing came."""
    return {
        "handovers": 1,
        "handover_tokens_computed": length,
        "handover_timeouts": timeouts,
        "external_prefix_cache_hits": 0,
    }


def busy(server):
    """Return a server's requests and the part of its blocks that is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [metric(server, name) for name in names]


def assert_nothing_left(*servers):
    """Demand that servers serve on, and that no request is left in them and no block in use."""
    for server in servers:
        server.complete(prompt(3), 1, cache_salt=salt())  # they tell what there is after a step
        with contextlib.suppress(AssertionError):
            wait_for(lambda server=server: busy(server) == [0, 0, 0], "", timeout=2)
        assert busy(server) == [0, 0, 0]


def connector(folder):
    """Return the configuration of servers that share a directory."""
    store = {"l2": "disk", "disk_path": str(folder), "disk_size": "512MiB"}
    return pd_reuse(**store, handover_timeout=PATIENCE, l2_load_timeout=2)


@contextlib.contextmanager
def pair(models, folder):
    """Start two servers at the same time that share a directory."""
    # A server ends with the thread that started it.
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as stack:

        def start(_):
            return stack.enter_context(serve(models("llama"), connector=connector(folder), args=ARGS))

        yield list(threads.map(start, range(2)))


@dataclass(frozen=True)
class Cluster:
    """Two servers, the routers that ask one to prefill and the other one to decode, and the store."""

    first: Server
    second: Server
    forth: Router
    back: Router
    folder: Path

    def values(self):
        """Return the files of blocks."""
        return {path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 14}


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pd") / "l2"
    with (
        pair(models, folder) as (first, second),
        route([first.port], [second.port]) as forth,
        route([second.port], [first.port]) as back,
    ):
        yield Cluster(first, second, forth, back, folder)


def test_answers_are_those_of_one_engine(cluster):
    """J6: tokens and log-probabilities, of completions and chats, streamed or not; one token of a prompt is computed.

    J5: metrics tell that, and vLLM's own count the rest as hits. The control is a prompt whose first token is another
    one: what is loaded decides the answer.
    """
    words = "".join(map(chr, prompt(290, 3))).encode("ascii", "replace").decode()
    chat = GREEDY | {"messages": [{"role": "user", "content": words}], "max_tokens": 6}
    chat |= {"logprobs": True, "top_logprobs": 2}
    asked = [(COMPLETIONS, completion(prompt(330, 1))), (CHAT, chat)]
    expected = [alone(cluster.second, body, path) for path, body in asked]
    for router, server in ((cluster.forth, cluster.second), (cluster.back, cluster.first)):
        for (path, body), wanted in zip(asked, expected, strict=True):
            length = wanted.parts[0]["usage"]["prompt_tokens"]
            if router is cluster.forth:
                with counted(server, one_token(length)), counted(cluster.first, {"handovers": 0}):
                    answer = ask(router, body, path)
                assert_equal(answer, wanted)
            streamed = ask(router, body | {"stream": True}, path)
            assert len(streamed.parts) > 1
            assert streamed.complete
            assert_equal(streamed, wanted)
    other = prompt(330, 1)
    other[0] ^= 1
    control = alone(cluster.second, completion(other))
    assert_differ([control.output()], [expected[0].output()])
    assert_nothing_left(cluster.first, cluster.second)


def test_a_stream_of_a_new_prompt(cluster):
    """A request that streams is handed over as well, though prefill doesn't stream."""
    body = completion(prompt(333, 4))
    expected = alone(cluster.first, body)
    with counted(cluster.first, one_token(333)):
        answer = ask(cluster.back, body | {"stream": True})
    assert_equal(answer, expected)


def test_turns_of_one_conversation_on_different_pairs(cluster):
    """What the decode engine has generated is what the next turn's prefill begins with, on any engine."""
    text = prompt(300, 10)
    # All but the last token that is generated have KV, and ten blocks are full: one more than the prompt has.
    generated = ask(cluster.forth, completion(text, 40)).output().tokens
    following = text + generated + prompt(20, 11)
    own = len(text) // BLOCK * BLOCK
    body = completion(following, 30)
    expected = alone(cluster.second, body)
    with (
        counted(cluster.first, {"external_prefix_cache_hits": BLOCK, "prefix_cache_hits": own}),
        counted(cluster.second, {"handovers": 1, "handover_tokens_computed": 1}),
    ):
        answer = ask(cluster.forth, body)
    assert_equal(answer, expected)
    third = following + answer.output().tokens + prompt(20, 12)
    for server in (cluster.first, cluster.second):
        server.post("/reset_prefix_cache")
    body = completion(third)
    expected = alone(cluster.first, body)
    stored = (len(following) + 29) // BLOCK * BLOCK
    with (
        counted(cluster.second, {"external_prefix_cache_hits": stored, "prefix_cache_hits": 0}),
        counted(cluster.first, one_token(len(third))),
    ):
        assert_equal(ask(cluster.back, body), expected)


def crowd(router, count=4, seed=100):
    """Ask for long prompts at the same time, as several clients, and return what breaks their connections."""
    stack = contextlib.ExitStack()
    for number in range(count):
        stack.enter_context(asking(router, completion(prompt(1000, seed + number), 4)))
    return stack


def test_clients_that_leave_while_they_are_prefilled(cluster):
    """J2: the prefill engine computes nothing more for them, and holds nothing; decode is never asked."""
    with counted(cluster.second, {"handovers": 0}), counted(cluster.first, {"generation_tokens": 1}):
        with crowd(cluster.forth):
            wait_for(lambda: metric(cluster.first, "num_requests_running"), "prefill")
        assert_nothing_left(cluster.first)
    assert_nothing_left(cluster.second)


def test_nothing_is_held_between_prefill_and_decode(cluster):
    """J2: a prefill engine that has answered holds no blocks, though nobody has asked, or ever asks, for them."""
    body = completion(prompt(500, 110))
    params = prefilled(cluster.first, body)
    assert params["kvplug"]["num_stored_tokens"] == 500
    assert_nothing_left(cluster.first)
    assert_nothing_left(cluster.second)


def test_a_client_that_leaves_while_the_decoder_waits(cluster):
    """J1: what would be waited for isn't any more, and what comes after that is there for the next one."""
    body = completion(prompt(400, 120))
    expected = alone(cluster.second, body)
    with counted(cluster.second, {"handovers": 0, "handover_timeouts": 0}):
        with asking(cluster.second, body | {"kv_transfer_params": DECODE}):
            wait_for(lambda: metric(cluster.second, "num_requests_waiting"), "the decode request")
            began = time.monotonic()
        assert_nothing_left(cluster.second)
        assert time.monotonic() - began < PATIENCE
    with counted(cluster.second, one_token(400)):
        answer = ask(cluster.forth, body)
    assert_equal(answer, expected)
    assert_nothing_left(cluster.first, cluster.second)


def test_a_client_that_leaves_while_it_is_streamed_to(cluster):
    """The decode engine stops long before the answer's end."""
    body = completion(prompt(300, 130), 700, stream=True)
    before = metric(cluster.second, "generation_tokens")
    with asking(cluster.forth, body) as connection, connection.getresponse() as answer:
        assert answer.readline().startswith(b"data: ")
    assert_nothing_left(cluster.first, cluster.second)
    assert metric(cluster.second, "generation_tokens") - before < 500


def test_clients_that_leave_at_any_moment(cluster):
    """Whatever the request was doing: nothing is left, and the same prompts are answered right."""
    rng = random.Random(7)
    bodies = [completion(prompt(300 + 9 * i, 140 + i), 20, stream=i % 2 == 0) for i in range(16)]

    def leave(i):
        router = (cluster.forth, cluster.back)[i % 2]
        with asking(router, bodies[i]):
            time.sleep(rng.uniform(0, 1.2))

    at_once([lambda i=i: leave(i) for i in range(len(bodies))])
    assert_nothing_left(cluster.first, cluster.second)
    some = bodies[3:7]
    expected = [alone(cluster.first, body) for body in some]
    for body, wanted in zip(some, expected, strict=True):
        assert_equal(ask(cluster.forth, body), wanted)
    assert_nothing_left(cluster.first, cluster.second)


def test_j3_what_is_gone_or_another_prompts_is_computed(cluster):
    """J3: between prefill and decode, the store forgets a prompt, the end of one, or has others' bytes: never wrong."""
    bodies = [completion(prompt(320, 160 + i)) for i in range(4)]
    expected = [alone(cluster.second, body) for body in bodies]
    given, files = [], []
    for body in bodies:
        before = cluster.values()
        given.append(prefilled(cluster.first, body))
        wait_for(lambda before=before: len(cluster.values() - before) >= 320 // BLOCK, "what is stored")
        files.append(sorted(cluster.values() - before, key=lambda path: path.stat().st_mtime_ns))
    for path in (*files[0], *files[1][3:]):
        path.unlink()
    for one, other in zip(files[2], files[3], strict=True):
        mine, theirs = one.read_bytes(), other.read_bytes()
        one.write_bytes(theirs)
        other.write_bytes(mine)
    calls = [
        lambda body=body, params=params: ask(cluster.second, body | {"kv_transfer_params": params})
        for body, params in zip(bodies, given, strict=True)
    ]
    hits = metric(cluster.second, "external_prefix_cache_hits")
    with counted(cluster.second, {"handovers": 4}):
        answers = at_once(calls)
    for answer, wanted in zip(answers, expected, strict=True):
        assert_equal(answer, wanted)
    assert metric(cluster.second, "external_prefix_cache_hits") - hits < 320
    assert metric(cluster.second, "l2_damaged") > 0
    assert_nothing_left(cluster.first, cluster.second)


def test_j7_prefill_that_is_late_or_never_done(cluster):
    """J7: what comes while the decode engine waits is taken; what doesn't is computed after `handover_timeout`."""
    late, never = completion(prompt(350, 170)), completion(prompt(350, 171))
    expected = [alone(cluster.second, body) for body in (late, never)]

    def decode(body):
        began = time.monotonic()
        return ask(cluster.second, body | {"kv_transfer_params": DECODE}), time.monotonic() - began

    with counted(cluster.second, one_token(350)), ThreadPoolExecutor(1) as thread:
        future = thread.submit(decode, late)
        wait_for(lambda: metric(cluster.second, "num_requests_waiting"), "the decode request")
        prefilled(cluster.first, late)
        answer, seconds = future.result()
    assert_equal(answer, expected[0])
    with counted(cluster.second, computed(350, timeouts=1)):
        answer, seconds = decode(never)
    assert_equal(answer, expected[1])
    assert PATIENCE <= seconds < PATIENCE + 2


def test_duplicate_request_ids(cluster):
    """Two requests that call themselves the same, at the same time, on the prefill and on the decode engine."""
    bodies = [completion(prompt(length, 180 + length)) for length in (350, 390)]
    expected = [alone(cluster.second, body) for body in bodies]
    headers = {"X-Request-ID": "the same"}
    given = at_once([lambda body=body: prefilled(cluster.first, body, headers=headers) for body in bodies])
    assert [params["kvplug"]["num_prompt_tokens"] for params in given] == [350, 390]
    assert given[0]["remote_request_id"] != given[1]["remote_request_id"]
    calls = [
        lambda body=body, params=params: ask(cluster.second, body | {"kv_transfer_params": params}, headers=headers)
        for body, params in zip(bodies, given, strict=True)
    ]
    with counted(cluster.second, {"handovers": 2, "handover_tokens_computed": 2, "external_prefix_cache_hits": 740}):
        answers = at_once(calls)
    for answer, wanted in zip(answers, expected, strict=True):
        assert_equal(answer, wanted)
    assert_nothing_left(cluster.first, cluster.second)


def test_kinds_of_answers(cluster):
    """Several choices, ends by a string, also one in the first token, a single token, a prompt that is echoed."""
    text = [token % len(LETTERS) for token in prompt(300, 190)]
    letters = completion(text, 8, allowed_token_ids=LETTERS)
    said = alone(cluster.second, letters).text
    assert len(said) == 8
    kinds = {
        "first": letters | {"stop": [said[0]]},
        "third": letters | {"stop": [said[2:4]]},
        "one": letters | {"max_tokens": 1},
        # Unless it streams, the router puts the prompt's log-probabilities of the prefill engine's answer before those.
        "echo": letters | {"echo": True, "max_tokens": 2, "stream": True},
        "choices": letters | {"n": 2, "temperature": 1.0, "top_k": 1},
    }
    expected = {name: alone(cluster.second, body | {"n": 1}) for name, body in kinds.items()}
    assert [expected[name].text for name in ("first", "third", "one")] == ["", said[: said.index(said[2:4])], said[0]]
    assert [expected[name].finish_reason for name in ("first", "third")] == ["stop", "stop"]
    counts = {"first": 1, "third": 1, "one": 1, "echo": 300, "choices": 2}
    for name, body in kinds.items():
        own = body | {"cache_salt": salt()}
        number = own.get("n", 1)
        with counted(cluster.second, {"handovers": number, "handover_tokens_computed": counts[name]}):
            answer = ask(cluster.forth, own)
        assert_equal(answer, expected[name])
        if number == 2:
            compare([answer.output(1)], [expected[name].output()], atol=CLOSE)
    assert_nothing_left(cluster.first, cluster.second)


def test_requests_that_are_refused(cluster):
    """Refused by the prefill or only by the decode engine, after prefill: an error of the client's, and nothing left.

    Tokens beyond the context aren't refused: vLLM generates fewer.
    """
    too_long = completion(prompt(1030, 200))
    for server in (cluster.forth, cluster.second):
        refused = ask(server, too_long | ({"kv_transfer_params": DECODE} if server is cluster.second else {}))
        assert refused.status == 400, refused
    body = completion(prompt(1000, 201), 100)
    with counted(cluster.second, {"handovers": 0}), counted(cluster.first, {"generation_tokens": 1}):
        refused = ask(cluster.forth, body | {"min_tokens": 200})  # the router asks prefill for one
    assert refused.status == 400, refused
    expected = alone(cluster.second, body)
    with counted(cluster.second, one_token(1000)):
        answer = ask(cluster.forth, body)
    assert len(answer.output().tokens) == 24
    assert_equal(answer, expected)
    assert_nothing_left(cluster.first, cluster.second)


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


#: What isn't an object, and objects with anything in them.
NO_OBJECTS = [[], "text", 3, 1.5, True]
ODD = [
    None,
    {},
    {"do_remote_prefill": "yes", "unknown": {"a": [1, None]}},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": 1, "do_remote_decode": [], "remote_block_ids": "x", "remote_port": {}, "tp_size": -1},
    {"do_remote_prefill": True, "kvplug": [1]},
    {"do_remote_prefill": True, "kvplug": {"version": 1, "namespace": 5, "num_stored_tokens": 1e300}},
    {"do_remote_prefill": True, "kvplug": {"version": 1, "namespace": "00" * 32, "num_stored_tokens": 300}},
    {"do_remote_prefill": True, "kvplug": {"version": [2]}},
    {"do_remote_prefill": True, "kvplug": {"version": 2**63}},
    {"do_remote_prefill": True, "x" * 5000: nested(50)},
    {"do_remote_decode": True, "remote_host": 7, "kvplug": nested(3)},
    # So deep that pickling it for a worker would end the engine.
    {"do_remote_decode": True, "kvplug": nested(500)},
]


def test_parameters_of_any_shape(cluster):
    """Any JSON as `kv_transfer_params`: what isn't an object is refused, the rest decides nothing; engines serve on."""
    body = completion(prompt(300, 210))
    expected = alone(cluster.second, body)
    for params in NO_OBJECTS:
        assert ask(cluster.second, body | {"kv_transfer_params": params}).status in {400, 422}, params
    calls = [
        lambda params=params: ask(cluster.second, body | {"kv_transfer_params": params, "cache_salt": salt()})
        for params in ODD
    ]
    for answer, params in zip(at_once(calls), ODD, strict=True):
        assert answer.status == 200, (params, answer.error)
        compare([answer.output()], [expected.output()], atol=CLOSE)
    # vLLM can't send it to its engine.
    too_large = ask(cluster.second, body | {"kv_transfer_params": DECODE | {"remote_port": 2**70}})
    assert too_large.status == 400, too_large
    assert_nothing_left(cluster.second)


def test_forged_and_foreign_parameters(cluster):
    """What one engine said, changed by the client, or told for another prompt or tenant: right tokens all the same."""
    mine, theirs = prompt(310, 220), prompt(310, 221)
    body = completion(mine)
    expected, others = alone(cluster.second, body), alone(cluster.second, completion(theirs))
    params = prefilled(cluster.first, body | {"cache_salt": "mine"})

    def changed(**values):
        return params | {"kvplug": params["kvplug"] | values}

    salted = body | {"cache_salt": "mine"}
    none = {"handovers": 1, "handover_tokens_computed": 310, "external_prefix_cache_hits": 0}
    with counted(cluster.second, {name: 3 * value for name, value in none.items()}):
        tenant, stranger, more = at_once(
            [
                lambda: ask(cluster.second, body | {"cache_salt": "theirs", "kv_transfer_params": params}),
                lambda: ask(cluster.second, completion(theirs) | {"cache_salt": "mine", "kv_transfer_params": params}),
                lambda: ask(
                    cluster.second,
                    body | {"cache_salt": "other", "kv_transfer_params": changed(num_stored_tokens=10**15)},
                ),
            ]
        )
    for answer, wanted in ((tenant, expected), (stranger, others), (more, expected)):
        assert_equal(answer, wanted)
    with counted(cluster.second, {"handovers_refused": 1, "handover_tokens_computed": 1}):
        assert_equal(ask(cluster.second, salted | {"kv_transfer_params": changed(namespace="ab" * 32)}), expected)
    assert_nothing_left(cluster.first, cluster.second)


def test_engines_that_are_killed_and_come_back(cluster, models):
    """An engine is killed while it prefills, the other one while it streams; `kvplug pd up` finds a warm store.

    The router answers with an error, and doesn't try again. A client that does has the other pair, which takes what
    the killed engine has stored.
    """
    first, second = cluster.first, cluster.second
    warm, begun = completion(prompt(330, 230)), completion(prompt(200, 231), 500)
    expected = ask(cluster.forth, warm)
    long = [completion(prompt(1000, 240 + i), 4) for i in range(3)]
    long_expected = alone(second, long[0])

    stored = len(cluster.values())
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, cluster.forth, body) for body in long]
        wait_for(lambda: len(cluster.values()) >= stored + 4, "a part of a prompt")
        first.kill()
        statuses = [future.result().status for future in asked]
    assert statuses.count(500) >= 2, statuses

    # The second one also prefills here, by another of its names: the router takes no address twice.
    with route([first.port, f"localhost:{second.port}"], [second.port]) as router:
        hits = metric(second, "external_prefix_cache_hits")
        tries = [[ask(router, body) for _ in range(2)] for body in long]
        assert [sorted(answer.status for answer in both) for both in tries] == [[200, 500]] * 3
        assert metric(second, "external_prefix_cache_hits") - hits >= 4 * BLOCK
        assert_equal(max(tries[0], key=lambda answer: answer.status == 200), long_expected)
        assert_nothing_left(second)

        before = metric(second, "generation_tokens")
        with ThreadPoolExecutor(1) as thread:
            # At one of two tries it is the turn of the killed engine.
            future = thread.submit(lambda: [ask(router, begun | {"stream": True}) for _ in range(2)])
            wait_for(lambda: metric(second, "generation_tokens") >= before + 100, "the stream")
            second.kill()
            (streamed,) = [answer for answer in future.result() if answer.parts]
    assert not streamed.complete
    tokens = streamed.output().tokens
    assert 64 <= len(tokens) < 500

    # As one command starts them (docs/pd-up.md).
    settings = connector(cluster.folder)["kv_connector_extra_config"]
    with up(models("llama"), settings, args=ARGS) as (third, fourth, forth):
        with (
            counted(third, {"external_prefix_cache_hits": 330, "prefix_cache_hits": 0}),
            counted(fourth, one_token(330)),
        ):
            assert_equal(ask(forth, warm), expected)
        # The killed engine had stored what it had generated until then, but for its last blocks at most.
        following = completion(begun["prompt"] + tokens)
        wanted = alone(third, following)
        before = metric(third, "external_prefix_cache_hits")
        with counted(fourth, {"handovers": 1, "handover_tokens_computed": 1}):
            assert_equal(ask(forth, following), wanted)
        assert metric(third, "external_prefix_cache_hits") - before >= len(begun["prompt"]) + BLOCK
        # The client's own retry, of the answer that broke off.
        answer = ask(forth, begun | {"max_tokens": len(tokens)})
        compare([answer.output()], [streamed.output()], atol=CLOSE)
        assert_nothing_left(third, fourth)
