"""The router in front of split prefill and decode, vllm-router 0.1.17, against servers that write down what they get.

What pd_reuse relies on is asserted. What the router also does, as seen here:

- It sends fields that a request doesn't have, such as `echo: false`, and leaves out those that are null.
- A client's own `kv_transfer_params` and its `X-Request-ID` reach no engine. Both requests have one `X-Request-ID`, in
  which are the addresses of both engines.
- It sends `Authorization: Bearer $OPENAI_API_KEY`, from its own environment, whatever the client sends.
- It never tries again, nor with another pair: each request has the pair whose turn it is. Only its health check, every
  60 s by default and after three failures, takes an engine out.
- `/readiness` is answered with 200 as soon as one engine of each kind is well; `/health` only if all are.
- After SIGTERM it takes no more requests, and ends when those that are running have ended.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.router import RouterError, route

pytestmark = pytest.mark.server

#: What the prefill server answers with: Nixl's fields, and an object that the router can't know.
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": None,
    "remote_engine_id": None,
    "remote_host": None,
    "remote_port": None,
    "kvplug": {"version": 1, "tokens": 4096, "exact": 0.1, "keys": ["é", {"deep": [None, True, 2**53]}], "empty": {}},
}

PROMPT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "seed": 7, "vllm_xargs": {"unknown": [1]}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send(200, "{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.ids.append(self.headers["X-Request-ID"])
        self.server.answer(self, body)

    def send(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def send_chunk(self, text):
        """Send a piece of a streamed answer; an empty one is the end."""
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def wait_for_disconnect(self, timeout):
        """Return whether the other side goes away in that time."""
        self.connection.settimeout(timeout)
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


class StandIn(ThreadingHTTPServer):
    """A server that writes down the bodies of POST requests, and answers as it is told."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self):
        self.bodies, self.ids = [], []
        self.answer = prefill()
        #: Whether the other side went away, as soon as that is known.
        self.gone = None
        self.known = threading.Event()

    def handle_error(self, request, client_address):
        pass


def prefill(params=PARAMS):
    """Answer like a prefill engine."""
    answer = {"id": "p", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
    answer |= {} if params is None else {"kv_transfer_params": params}
    return lambda handler, _: handler.send(200, json.dumps(answer))


def decode(handler, _):
    handler.send(200, json.dumps({"id": "d", "choices": [{"index": 0, "text": "done"}]}))


def failing(status):
    return lambda handler, _: handler.send(status, '{"error": {"message": "no"}}')


def dying(handler, _):
    """Break the connection, as an engine does that dies."""
    handler.close_connection = True
    handler.connection.close()


def waiting(handler, _):
    """Answer only when the other side is gone, or after a while."""
    handler.server.gone = handler.wait_for_disconnect(10)
    handler.server.known.set()


def ask_and_leave(router):
    with pytest.raises(RouterError, match="no answer"):
        router.post("/v1/completions", PROMPT, timeout=0.3)


def start_stream(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


@pytest.fixture(scope="module")
def servers():
    """Two prefill servers, two decode servers, a router in front of the first of each, and one in front of all."""
    made = [StandIn() for _ in range(4)]
    ports = [server.server_port for server in made]
    with route(ports[:1], ports[2:3]) as one, route(ports[:2], ports[2:]) as two:
        yield made, one, two
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def pair(servers):
    """(router, prefill server, decode server)."""
    (first, _, last, _), router, _ = servers
    for server in (first, last):
        server.reset()
    last.answer = decode
    return router, first, last


def test_both_requests(pair):
    """Prefill is asked for one token, in one piece; decode is asked what the client asked, with prefill's answer.

    What is in the answer's `kv_transfer_params` goes on word for word, an object that the router can't know included.
    """
    router, prefills, decodes = pair
    status, text = router.post("/v1/completions", PROMPT | {"min_tokens": 3})
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "done")
    (asked,), (then,) = prefills.bodies, decodes.bodies
    assert asked.items() >= (PROMPT | {"max_tokens": 1, "min_tokens": 1, "stream": False}).items()
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert then.items() >= (PROMPT | {"min_tokens": 3, "stream": False}).items()
    assert json.dumps(then["kv_transfer_params"]) == json.dumps(PARAMS)
    assert prefills.ids == decodes.ids


def test_chat_that_streams(pair):
    """Only the decode request streams, and its pieces come as they are sent."""
    router, prefills, decodes = pair
    more = threading.Event()

    def stream(handler, _):
        start_stream(handler)
        handler.send_chunk('data: {"n": 1}\n\n')
        assert more.wait(10)
        handler.send_chunk("data: [DONE]\n\n")
        handler.send_chunk("")

    decodes.answer = stream
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **options}
    with router.open("/v1/chat/completions", body, timeout=10) as answer:
        assert answer.status == 200
        assert answer.readline() == b'data: {"n": 1}\n'  # while the server has not sent the rest
        more.set()
        assert answer.read() == b"\ndata: [DONE]\n\n"
    (asked,), (then,) = prefills.bodies, decodes.bodies
    assert (asked["stream"], asked["max_tokens"], asked["max_completion_tokens"]) == (False, 1, 1)
    assert "stream_options" not in asked
    assert asked["messages"] == body["messages"]
    assert then.items() >= options.items()
    assert then["kv_transfer_params"] == PARAMS


def test_a_prefill_answer_without_params(pair):
    """Decode gets none either, and the router says so in its log."""
    router, prefills, decodes = pair
    prefills.answer = prefill(None)
    assert router.post("/v1/completions", PROMPT)[0] == 200
    assert "kv_transfer_params" not in decodes.bodies[0]
    assert "No kv_transfer_params for prefill" in router.log


def test_a_refused_prefill(pair):
    """What the prefill engine says about a wrong request is what the client gets; decode isn't asked."""
    router, prefills, decodes = pair
    prefills.answer = failing(400)
    assert router.post("/v1/completions", PROMPT) == (400, '{"error": {"message": "no"}}')
    assert decodes.bodies == []


@pytest.mark.parametrize("failure", [failing(500), dying], ids=["500", "dies"])
def test_a_failed_prefill(servers, failure):
    """The client gets an error, and decode isn't asked. There is no second try; the next request has the other pair."""
    (bad, good, *decodes), _, router = servers
    for server in (bad, good, *decodes):
        server.reset()
    bad.answer = failure
    for server in decodes:
        server.answer = decode
    statuses = [router.post("/v1/completions", PROMPT)[0] for _ in range(4)]
    assert sorted(statuses) == [200, 200, 500, 500]
    assert [len(server.bodies) for server in (bad, good)] == [2, 2]
    assert sum(len(server.bodies) for server in decodes) == 2


@pytest.mark.parametrize("failure", [failing(500), dying], ids=["500", "dies"])
def test_a_failed_decode(pair, failure):
    """The client gets an error; prefill isn't done again."""
    router, prefills, decodes = pair
    decodes.answer = failure
    assert router.post("/v1/completions", PROMPT)[0] == 500
    assert (len(prefills.bodies), len(decodes.bodies)) == (1, 1)


def test_a_client_that_leaves_while_it_streams(pair):
    """The decode server's connection is broken, which is how vLLM knows that it can stop."""
    router, _, decodes = pair

    def stream(handler, _):
        start_stream(handler)
        handler.send_chunk("data: {}\n\n")
        waiting(handler, _)

    decodes.answer = stream
    with router.open("/v1/completions", PROMPT | {"stream": True}) as answer:
        assert answer.readline() == b"data: {}\n"
    assert decodes.known.wait(15)
    assert decodes.gone


def test_a_client_that_leaves_while_it_is_prefilled(pair):
    """The prefill server's connection is broken, and decode is never asked."""
    router, prefills, decodes = pair
    prefills.answer = waiting
    ask_and_leave(router)
    assert prefills.known.wait(15)
    assert prefills.gone
    assert decodes.bodies == []


def test_a_client_that_leaves_while_it_is_decoded(pair):
    """The same for an answer that doesn't stream."""
    router, _, decodes = pair
    decodes.answer = waiting
    ask_and_leave(router)
    assert decodes.known.wait(15)
    assert decodes.gone
