"""Serves the state and the metrics of a run over HTTP, from a thread that only hands out finished texts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from urllib.parse import parse_qs

from nxdt_core.http_server import Handler, Server
from nxdt_core.train.monitoring.prometheus import CONTENT_TYPE

__all__ = ["MonitorServer"]


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
        self._server = Server(host, port, _handler(texts))
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        """Where it listens."""
        threading.Thread(target=self._server.serve_forever, name="nxdt-monitoring", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()


def _handler(texts: Callable[[], tuple[str, str, float]]) -> type[Handler]:
    class MonitorHandler(Handler):
        def respond(self) -> None:
            """Answer a scrape or a probe."""
            path, _, query = self.path.partition("?")
            metrics, health, written = texts()
            if path == "/metrics":
                self.answer(200, CONTENT_TYPE, metrics)
            elif path == "/health":
                self._health(health, written, parse_qs(query).get("max_age", []))
            else:
                self.answer(404, "text/plain", "There are /metrics and /health.\n")

        def _health(self, health: str, written: float, limits: list[str]) -> None:
            """503 for a run that failed, or whose state is older than a probe accepts."""
            try:
                oldest = min(map(float, limits), default=None)
            except ValueError:
                self.answer(400, "text/plain", "max_age is a number of seconds.\n")
                return
            stale = oldest is not None and time.time() - written > oldest
            failed = json.loads(health)["state"] == "failed"
            self.answer(503 if stale or failed else 200, "application/json", health)

    return MonitorHandler
