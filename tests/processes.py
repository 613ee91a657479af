"""Start ``python -m nxdt_core …``, a script or ``python -c …`` as a fork of a process that has made the imports.

Importing torch takes CPU-seconds, and a test of two ranks starts three processes. :class:`Popen` and :func:`run`
are those of :mod:`subprocess`, with the same arguments, results and real processes: a child of the caller with its own
id, arguments, environment, directory, streams, session and signals. Where a program's imports or another environment
are what a test is about, it uses :mod:`subprocess`. These do the same for other programs, for an environment whose
variables the interpreter or a library reads only once, and under ``--samples=all``, so that ``make test-full`` forks
nothing.

A server makes the forks (:mod:`tests.fork_server`), also those of the ranks that a forked launcher starts, of the
workers of pytest-xdist, which have servers of their own, and of the server of rank pools. Another, which has not
imported the libraries of Hugging Face, makes those whose variables differ in what these libraries read once.
"""

from __future__ import annotations

import inspect
import itertools
import json
import multiprocessing.util
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "SPARE",
    "WITHOUT_HUB",
    "ForkClient",
    "Popen",
    "enabled",
    "fork_rank_pools",
    "fork_workers",
    "forks",
    "inherited_server",
    "new_server",
    "pause",
    "run",
    "take_interrupts",
    "use",
]

_MODULES = ("nxdt_core", "torch.distributed.run")
"""What ``python -m`` may name in a forked process."""
_READ_ONCE = re.compile(r"PYTHON(?!PATH$|UNBUFFERED$)|LD_|OMP_|MKL_|KMP_|GOMP_|TORCH(?!ELASTIC_|_NCCL_)|PYTORCH|CUDA")
_READ_ONCE_WITH_HUB = re.compile(rf"{_READ_ONCE.pattern}|HF_|HUGGING|TRANSFORMERS")
_SET_BY_LIBRARIES = frozenset(
    {
        "HF_XET_HIGH_PERFORMANCE",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "OMP_WAIT_POLICY",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
"""By their import, or by a command of nxdt, in the process that does so."""
_MAY_BE_MISSING = re.compile(r"LC_|LANG$|HOME$|XDG_|OPENBLAS_")
"""Not set does the same as what is set here: UTF-8, the user's directory, how fast OpenBLAS is."""
SPARE = "nxdt-spare"
"""Name of a server's process, as ``/proc/PID/comm`` tells it."""
_NAME_IN_FORKS = "nxdt_tests_processes"
"""This module in a server and its forks."""
WITHOUT_HUB = "without-hub"
"""Argument of a server that imports no library of Hugging Face."""
_KEEPS_SERVER = "NXDT_TESTS_KEEP_SERVER"


class ForkClient:
    """The caller's end of a server that forks processes for it.

    Args:
        connect: returns the connection to the server; called when the first process is wanted.
        environment: of the server.
        without_hub: whether the server has not imported what reads the variables of Hugging Face's libraries.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], environment: Mapping[str, str], *, without_hub: bool = False
    ) -> None:
        self._connect = connect
        self._connection: socket.socket | None = None
        self._environment = dict(environment)
        self._read_once = _READ_ONCE if without_hub else _READ_ONCE_WITH_HUB
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Return the connection to the server, which the first call starts."""
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a new interpreter in ``environment`` would have read what the server has read."""
        names = {*environment, *self._environment} - _SET_BY_LIBRARIES
        once = (name for name in names if self._read_once.match(name))
        if any(environment.get(name) != self._environment.get(name) for name in once):
            return False
        set_here = (name for name in environment if _MAY_BE_MISSING.match(name))
        return all(environment[name] == self._environment.get(name) for name in set_here)

    def start(self, task: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Return the process id of a new child of this process that carries out ``task``."""
        message = json.dumps(task).encode("utf-8", "surrogatepass")
        with self._lock:
            connection = self.connect()
            socket.send_fds(connection, [struct.pack("!I", len(message))], list(streams))
            connection.sendall(message)
            answer = connection.recv(4, socket.MSG_WAITALL)
        if len(answer) < 4:
            raise RuntimeError("The server that forks processes for tests has ended; what it wrote says why.")
        (pid,) = struct.unpack("!I", answer)
        return int(pid)


def new_server(*, without_hub: bool = False) -> ForkClient:
    """Return a client of a server that starts with the first process that is wanted of it, and ends with this process.

    Args:
        without_hub: leave out the libraries of Hugging Face, which read their variables at their import.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONUNBUFFERED")}

    def start() -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())]
            words += [WITHOUT_HUB] if without_hub else []
            server = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        _servers.append(server)
        return ours

    return ForkClient(start, os.environ, without_hub=without_hub)


_servers: list[subprocess.Popen[bytes]] = []
_clients: list[ForkClient] = []


def use(*clients: ForkClient) -> None:
    """Take forks from the first of the clients that fits; start new interpreters where none does."""
    _clients[:] = clients


def enabled() -> bool:
    """Return whether processes are forked at all."""
    return bool(_clients)


def _fitting(environment: Mapping[str, str]) -> ForkClient | None:
    return next((client for client in _clients if client.fits(environment)), None)


def take_interrupts() -> None:
    """Make Ctrl-C end a child, as ``preexec_fn``: a shell starts its background jobs, and their children, deaf to it.
    (A forked process always hears it.)"""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pause(process: subprocess.Popen[Any]) -> None:
    """Stop a child with SIGSTOP. A thread of it may run on until the kernel reports the child as stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class Popen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen`, forked where that makes no difference to what the process does."""

    def _execute_child(self, *arguments: Any) -> None:
        """Replaces the method that calls ``fork`` and ``exec``."""
        start: Any = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(start).bind(*arguments).arguments
        environment = {
            str(name): str(value) for name, value in (os.environ if asked["env"] is None else asked["env"]).items()
        }
        client = _fitting(environment) if forks(asked["args"]) and _is_plain(asked) else None
        if client is None:
            start(*arguments)
            return
        ends = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        task = _task(asked["args"], environment, directory=asked["cwd"], session=asked["start_new_session"])
        streams = [number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))]
        self.pid = client.start(task, streams)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _task(
    words: Sequence[Any],
    environment: dict[str, str],
    *,
    directory: Any = None,
    session: bool = False,
    inherited: Sequence[int] = (),
) -> dict[str, Any]:
    return {
        "words": [os.fspath(word) for word in words],
        "keeps_server": bool(environment.pop(_KEEPS_SERVER, "")),
        "environment": environment,
        "directory": os.path.abspath(directory or "."),
        "session": bool(session),
        "umask": int(re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())[0], 8),
        "inherited": list(inherited),
    }


@contextmanager
def fork_workers() -> Iterator[None]:
    """Start the server, and fork what is started by :mod:`subprocess` meanwhile; each fork has a server of its own."""
    _clients[0].connect()
    plain = subprocess.Popen
    os.environ[_KEEPS_SERVER] = "1"
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = plain  # type: ignore[misc]
        del os.environ[_KEEPS_SERVER]


def inherited_server() -> ForkClient | None:
    """Return the server that this process was forked with, if any. torch's launcher, which has taken ``Popen`` from
    there at its import, forks ranks by it."""
    module = sys.modules.get(_NAME_IN_FORKS)
    clients: list[ForkClient] = module._clients if module is not None else []
    return clients[0] if clients else None


def fork_rank_pools() -> None:
    """Fork the server of rank pools, which multiprocessing starts as an interpreter that makes the same imports."""
    start = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def fork(path: Any, words: Sequence[Any], descriptors: Sequence[int]) -> int:
        texts = [os.fsdecode(word) for word in words if os.fsdecode(word) != "-B"]  # of a variable that tests unset
        client = _fitting(os.environ) if "multiprocessing.forkserver" in texts[-1] and forks(texts) else None
        if client is None:
            return int(start(path, words, descriptors))
        return client.start(_task(texts, dict(os.environ), inherited=descriptors), (0, 1, 2, *descriptors))

    multiprocessing.util.spawnv_passfds = fork  # type: ignore[attr-defined]


def forks(words: Any) -> bool:
    """Return whether a command line is one that a forked process can carry out."""
    if isinstance(words, (str, bytes, os.PathLike)):
        return False
    first, *rest = map(os.fspath, words)
    rest = list(itertools.dropwhile(lambda word: word in ("-P", "-u"), rest))
    if first != sys.executable or not rest:
        return False
    return rest[:2] in (["-m", name] for name in _MODULES) or rest[0] == "-c" or rest[0].endswith(".py")


def _is_plain(asked: Mapping[str, Any]) -> bool:
    """Return whether a process needs nothing that only ``fork`` and ``exec`` can give it."""
    plain = {"executable": None, "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1}
    plain |= {"process_group": -1, "pass_fds": ()}
    return asked["preexec_fn"] in (None, take_interrupts) and all(asked[name] == value for name, value in plain.items())


def run(
    words: Sequence[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """:func:`subprocess.run` with :class:`Popen`."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
