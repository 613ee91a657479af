"""An HTTP server for a few readers: the metrics of a run and the report of `nxdt watch`.

Clients that are silent, slow or gone cost a bounded number of threads, and print nothing.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from abc import abstractmethod
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SLOWEST_S = 10.0
"""Seconds that a client may be silent, and that it may take to read an answer."""
_MOST_CLIENTS = 32
"""Number of clients at a time, each with a thread."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Server(ThreadingHTTPServer):
    """Listens at an address, and answers each client in a thread. A client too many ends the oldest one.

    Args:
        host: address to listen at, IPv4 or IPv6.
        port: TCP port; 0 takes a free one.
        handler: answers one request.

    Raises:
        OSError: the address or port cannot be used.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.local = host in _LOOPBACK
        """True where the server is meant for this machine alone."""
        self._clients: list[socket.socket] = []
        self._free = threading.Semaphore(_MOST_CLIENTS)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a separate thread, once there are few enough."""
        if not self._free.acquire(blocking=False):
            with suppress(IndexError, OSError):  # all may have ended by now
                self._clients.pop(0).shutdown(socket.SHUT_RDWR)
            self._free.acquire()
        self._clients.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a client, which makes place for another one."""
        with suppress(ValueError):
            self._clients.remove(request)
        super().shutdown_request(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is slow, gone or closed by Ctrl-C; print the traceback of all else."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError) and request.fileno() >= 0:
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests."""

    timeout = _SLOWEST_S
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    @abstractmethod
    def respond(self) -> None:
        """Answer a request for ``path``."""

    def do_GET(self) -> None:
        """Answer, unless a page from elsewhere, whose name was pointed to this machine, asks."""
        host = self.headers.get("Host", "")
        named = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if isinstance(self.server, Server) and self.server.local and named.strip("[]") not in _LOOPBACK:
            self.answer(403, "text/plain", "This address serves its own machine.\n")
        else:
            self.respond()

    def answer(self, status: int, kind: str, text: str, **headers: str) -> None:
        """Send a text.

        Args:
            status: HTTP status code.
            kind: media type.
            text: the body.
            headers: further ones, by name with ``_`` for ``-``.
        """
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {"Content_Type": kind, "Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """End the headers with the one that all answers have: a browser must not guess what a text is."""
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing per request."""
