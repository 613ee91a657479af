"""Stages as forks of one process that has made the imports, which take most of the time of small runs.

``python -m accelerator.forks MODULE`` imports the module and reads one JSON object per line: the arguments of
:mod:`accelerator.child` and the log. It answers with the id of the process, and with its exit status once it has ended.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

__all__ = ["Fork", "Forks"]


class Forks:
    """The process that forks, from the first stage until :meth:`close`."""

    def __init__(self, environment: Mapping[str, str], *, imports: str = "nxdt_core.testing.processes.preload") -> None:
        """``imports``: the module that the process imports first."""
        self._environment = environment
        self._imports = imports
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], log: Path) -> Fork:
        """Start a stage as the leader of its own process group."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "accelerator.forks", self._imports],
                bufsize=0,  # `select` does not see what a buffer has
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                process_group=0,
            )
        return Fork(self._server, arguments, log)

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None


class Fork:
    """What the driver needs of :class:`subprocess.Popen`."""

    def __init__(self, server: subprocess.Popen[bytes], arguments: Sequence[str], log: Path) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._answers = server.stdout
        self._status: int | None = None
        server.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")
        server.stdin.flush()
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: the stage has not ended in time.
        """
        if self._status is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("stage", timeout)
            self._status = int(self._answers.readline())
        return self._status


def _serve(imports: str) -> None:
    """Fork for each line of the standard input; in a fork, be the stage."""
    try:
        import_module(imports)
    except Exception:  # each stage then fails with its own log
        traceback.print_exc()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        process = os.fork()
        if process == 0:
            _become(asked["log"])
            from accelerator.child import main

            sys.exit(main(asked["arguments"]))
        _answer(process)
        _answer(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _answer(number: int) -> None:
    os.write(1, b"%d\n" % number)


def _become(log: str) -> None:
    os.setpgid(0, 0)
    for path, flags, to in ((os.devnull, os.O_RDONLY, 0), (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
        opened = os.open(path, flags)
        os.dup2(opened, to)
        os.close(opened)
    os.dup2(1, 2)


if __name__ == "__main__":
    _serve(sys.argv[1])
