"""Serves the state and the metrics of a run over HTTP, from a thread that only hands out finished texts."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from nxdt_core.training.monitoring.prometheus import CONTENT_TYPE

__all__ = ["MonitorServer"]

_SLOWEST_S = 10.0
"""How long a client may take for its request."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class MonitorServer:
    """Answers ``/metrics`` and ``/health`` until it is closed.

    Args:
        host: address to listen at.
        port: its port; 0 takes a free one.
        texts: returns the metrics, the health document, and when they were written (seconds since 1970).

    Raises:
        OSError: the address or port cannot be used.
    """

    def __init__(self, host: str, port: int, texts: Callable[[], tuple[str, str, float]]) -> None:
        self._server = _server_class(host)((host, port), _handler(host, texts))
        self._server.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        """Where it listens."""
        threading.Thread(target=self._server.serve_forever, name="nxdt-monitoring", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Bind without asking a name server for this machine's name, as HTTPServer does."""
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = host, self.server_address[1]

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of a client that went away."""

    return Server


def _handler(host: str, texts: Callable[[], tuple[str, str, float]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SLOWEST_S

        def do_GET(self) -> None:
            """Answer a scrape or a probe."""
            named = self.headers.get("Host", "").rpartition(":")[0].strip("[]") or self.headers.get("Host", "")
            address = urlsplit(self.path)
            metrics, health, written = texts()
            if host in _LOOPBACK and named not in _LOOPBACK:  # a page elsewhere whose name was pointed here
                self._answer(403, "text/plain", "This address serves its own machine.\n")
            elif address.path == "/metrics":
                self._answer(200, CONTENT_TYPE, metrics)
            elif address.path == "/health":
                self._health(health, written, parse_qs(address.query).get("max_age", []))
            else:
                self._answer(404, "text/plain", "There are /metrics and /health.\n")

        def _health(self, health: str, written: float, limits: list[str]) -> None:
            """503 for a run that failed, or whose state is older than a probe accepts."""
            try:
                oldest = min(map(float, limits), default=None)
            except ValueError:
                self._answer(400, "text/plain", "max_age is a number of seconds.\n")
                return
            stale = oldest is not None and time.time() - written > oldest
            failed = json.loads(health)["state"] == "failed"
            self._answer(503 if stale or failed else 200, "application/json", health)

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing per request."""

    return Handler
