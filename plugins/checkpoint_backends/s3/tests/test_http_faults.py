"""The proxy passes everything on but what it was told to spoil, and spoils that as it was told."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.http_faults import (
    Fault,
    FaultProxy,
    flip_answer_bit,
    flip_request_bit,
    lose_answer,
    refuse,
    reset,
    stall,
    truncate,
)


class Echo(BaseHTTPRequestHandler):
    """Remembers what it was asked, answers with the body that it got."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, self.headers["Host"], body))
        self.send_response(200)
        self.send_header("X-Mine", "ü".encode().decode("latin-1"))
        self.send_header("Content-Length", str(len(body) or 5))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"empty")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.seen = []
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server: ThreadingHTTPServer) -> Iterator[FaultProxy]:
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        yield proxy


def ask(proxy: FaultProxy, method: str = "PUT", target: str = "/a%2Fb?c=%20+d", body: bytes = b"hello"):
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, target, body or None, {"Host": "signed.example"})
        response = connection.getresponse()
        return response.status, response.getheader("X-Mine"), response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
def test_what_is_not_spoiled_passes_unchanged(proxy, server, method):
    big = bytes(range(256)) * 10_000
    for body in (b"hello", big):
        assert ask(proxy, method, body=body) == (200, "Ã¼", body)
    assert server.seen == [(method, "/a%2Fb?c=%20+d", "signed.example", body) for body in (b"hello", big)]
    assert [(r.method, r.target, r.body) for r in proxy.requests] == [(*s[:2], s[3]) for s in server.seen]


def test_an_answer_to_head_keeps_its_length(proxy):
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    for _ in range(2):  # on one connection: a body that came after all would be read as the next answer
        connection.request("HEAD", "/")
        response = connection.getresponse()
        assert (response.status, response.getheader("Content-Length"), response.read()) == (200, "5", b"")
    connection.close()


def test_a_refusal_never_reaches_the_server(proxy, server):
    proxy.inject(refuse(503, b"no", {"X-Mine": "yes"}))
    assert ask(proxy) == (503, "yes", b"no")
    assert server.seen == []
    assert ask(proxy)[0] == 200


@pytest.mark.parametrize(("fault", "reached"), [(reset, 0), (lose_answer, 1), (stall(0.1), 0)])
def test_broken_connections_give_no_answer_before_or_after_the_work(proxy, server, fault: Fault, reached: int):
    proxy.inject(fault)
    with pytest.raises(OSError, match=r"reset|closed"):
        ask(proxy)
    assert len(server.seen) == reached
    assert ask(proxy)[0] == 200


def test_a_stall_keeps_silent_and_ends_with_the_proxy(server):
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        proxy.inject(stall(60))
        connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=0.2)
        connection.request("GET", "/")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_a_truncated_body_is_shorter_than_it_says(proxy):
    proxy.inject(truncate(3))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy)
    assert caught.value.partial == b"hel"


def test_one_bit_is_flipped_on_the_way_there_or_back(proxy, server):
    proxy.inject(flip_request_bit)
    proxy.inject(flip_answer_bit, at=1)
    assert (ask(proxy)[2], server.seen[-1][3]) == (b"hemlo", b"hemlo")
    assert (ask(proxy)[2], server.seen[-1][3]) == (b"hemlo", b"hello")
    assert ask(proxy)[2] == b"hello"


def test_faults_wait_for_their_request(proxy):
    proxy.inject(refuse(500), at=1, times=2, matching=lambda request: request.method == "PUT")
    proxy.inject(refuse(501), at=1, times=None, matching=lambda request: request.method == "GET")
    assert [ask(proxy, "PUT")[0] for _ in range(4)] == [200, 500, 500, 200]
    assert [ask(proxy, "GET")[0] for _ in range(4)] == [200, 501, 501, 501]
    proxy.clear()
    assert proxy.requests == []
    assert [ask(proxy, method)[0] for method in ("PUT", "GET")] == [200, 200]


def test_the_first_of_two_faults_strikes(proxy):
    proxy.inject(refuse(500), times=1)
    proxy.inject(refuse(501), times=2)
    assert [ask(proxy)[0] for _ in range(3)] == [500, 501, 200]
