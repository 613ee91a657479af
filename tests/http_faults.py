"""A proxy before a real HTTP server that spoils chosen requests: refusals, lost answers, cut bodies, stalls, bit flips.

Example::

    with FaultProxy("http://127.0.0.1:8333") as proxy:
        client = connect(proxy.url)
        proxy.inject(refuse(503, b"slow down"), at=2, times=3)      # the third, fourth and fifth request from here on
        proxy.inject(lose_answer, matching=lambda request: request.method == "PUT")
        ...
        assert [request.method for request in proxy.requests] == ["PUT", "PUT"]

Everything else passes unchanged, the ``Host`` header included, so that signed requests stay valid. Bodies are held in
memory. HTTP/1.1 with ``Content-Length`` only; no TLS.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, final
from urllib.parse import urlsplit

__all__ = [
    "Answer",
    "Exchange",
    "Fault",
    "FaultProxy",
    "Request",
    "flip_answer_bit",
    "flip_request_bit",
    "lose_answer",
    "refuse",
    "reset",
    "stall",
    "truncate",
]

_HOST = "127.0.0.1"
_UPSTREAM_TIMEOUT_S = 120.0
_OF_ONE_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that a client sent."""

    method: str
    target: str
    """Path and query, as they were sent."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response that a client receives."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    """Without those that the proxy sets itself: lengths, and what concerns the connection."""
    body: bytes = field(default=b"", repr=False)
    length: int | None = None
    """Where it is not that of the body: of an answer to HEAD."""


@final
class Exchange:
    """One request on its way, as a fault gets it: forward it or not, answer or not."""

    def __init__(self, request: Request, handler: _Handler) -> None:
        self.request = request
        self._handler = handler

    def forward(self, body: bytes | None = None) -> Answer:
        """Ask the server, with another body where one is given."""
        return self._handler.ask(self.request, self.request.body if body is None else body)

    def answer(self, answer: Answer, *, cut_at: int | None = None) -> None:
        """Answer the client; with ``cut_at``, close the connection after so many bytes of the body."""
        self._handler.send_answer(answer, cut_at)

    def reset(self) -> None:
        """Close the connection without an answer, as a crashing server does (TCP RST)."""
        self._handler.reset()

    def wait(self, seconds: float) -> None:
        """Do nothing, until the proxy closes at the latest."""
        self._handler.proxy.closing.wait(seconds)


Fault = Callable[[Exchange], None]
"""Answers one request, wrongly."""


def refuse(status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Fault:
    """Answer with ``status`` without asking the server. ``Date`` is now unless ``headers`` give it."""
    given = {"date": formatdate(usegmt=True), **{name.lower(): value for name, value in (headers or {}).items()}}
    return lambda exchange: exchange.answer(Answer(status=status, headers=tuple(given.items()), body=body))


def reset(exchange: Exchange) -> None:
    """Break the connection before the server sees the request."""
    exchange.reset()


def lose_answer(exchange: Exchange) -> None:
    """Let the server do the work, then break the connection."""
    exchange.forward()
    exchange.reset()


def stall(seconds: float) -> Fault:
    """Stay silent for so long, then break the connection; the server sees nothing."""

    def fault(exchange: Exchange) -> None:
        exchange.wait(seconds)
        exchange.reset()

    return fault


def truncate(after_bytes: int) -> Fault:
    """End the answer's body early, at a length that the headers contradict."""
    return lambda exchange: exchange.answer(exchange.forward(), cut_at=after_bytes)


def flip_request_bit(exchange: Exchange) -> None:
    """Hand the server a body in whose middle one bit is wrong."""
    exchange.answer(exchange.forward(_flipped(exchange.request.body)))


def flip_answer_bit(exchange: Exchange) -> None:
    """Hand the client a body in whose middle one bit is wrong."""
    right = exchange.forward()
    exchange.answer(Answer(status=right.status, headers=right.headers, body=_flipped(right.body)))


@dataclass(slots=True)
class _Plan:
    """A fault and the requests that it waits for."""

    fault: Fault
    at: int
    times: int | None
    matching: Callable[[Request], bool]
    seen: int = 0

    def strikes(self, request: Request) -> bool:
        if not self.matching(request):
            return False
        number, self.seen = self.seen, self.seen + 1
        return number >= self.at and (self.times is None or number < self.at + self.times)


@final
class FaultProxy:
    """Listens on a free port of 127.0.0.1 from ``with`` on, in threads of this process.

    Args:
        upstream: address of the real server, ``http://host:port``.
    """

    def __init__(self, upstream: str) -> None:
        split = urlsplit(upstream)
        self.upstream = (split.hostname or _HOST, split.port or 80)
        self.closing = threading.Event()
        self._requests: list[Request] = []
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()
        self._server = _Server((_HOST, 0), _Handler)
        self._server.proxy = self
        self.url = f"http://{_HOST}:{self._server.server_port}"
        """What clients are given instead of ``upstream``."""

    def inject(
        self,
        fault: Fault,
        *,
        at: int = 0,
        times: int | None = 1,
        matching: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        """Spoil requests that arrive from now on; of several faults for one request the first injected strikes.

        Args:
            fault: what happens to them.
            at: number of the first request to spoil, from 0, among those that match.
            times: how many in a row; None for all from there on.
            matching: which requests count.
        """
        with self._lock:
            self._plans.append(_Plan(fault, at, times, matching))

    def clear(self) -> None:
        """Forget all planned faults and recorded requests."""
        with self._lock:
            self._plans.clear()
            self._requests.clear()

    @property
    def requests(self) -> list[Request]:
        """All so far, in order of their arrival, spoiled ones included."""
        with self._lock:
            return list(self._requests)

    def fault_of(self, request: Request) -> Fault | None:
        """Record a request and return the fault for it."""
        with self._lock:
            self._requests.append(request)
            struck = [plan.fault for plan in self._plans if plan.strikes(request)]
        return struck[0] if struck else None

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="fault-proxy").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are this module's business: no traceback."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one to the server behind."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.proxy = self.server.proxy
        self._behind = http.client.HTTPConnection(*self.proxy.upstream, timeout=_UPSTREAM_TIMEOUT_S)

    def finish(self) -> None:
        self._behind.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def serve(self) -> None:
        request = Request(
            method=self.command,
            target=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length", 0))),
        )
        fault = self.proxy.fault_of(request)
        exchange = Exchange(request, self)
        if fault is None:
            exchange.answer(exchange.forward())
        else:
            fault(exchange)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def ask(self, request: Request, body: bytes) -> Answer:
        self._behind.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _OF_ONE_CONNECTION | {"expect"}:
                self._behind.putheader(name, value)
        if "content-length" in request.headers:
            self._behind.putheader("Content-Length", str(len(body)))
        self._behind.endheaders(body or None)
        response = self._behind.getresponse()
        length = response.getheader("Content-Length")
        return Answer(
            status=response.status,
            headers=tuple((name, value) for name, value in response.getheaders()),
            body=response.read(),
            length=int(length) if request.method == "HEAD" and length else None,
        )

    def send_answer(self, answer: Answer, cut_at: int | None) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _OF_ONE_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:cut_at])
        if cut_at is not None:
            self.close_connection = True

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.rfile.close()  # the socket closes with the last file object on it


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
