"""The server behind :mod:`tests.processes`: imports once what ``nxdt train`` imports, then forks a process per request.

``python fork_server.py FD`` serves on a connected Unix socket. A request has the three standard streams and what
:class:`tests.processes.Popen` knows of the process; the answer is its id. The process is a child of the caller. A
forked process that starts ranks, or is a worker of pytest-xdist, has a server of its own, which it has forked before
it starts any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import io
import itertools
import json
import os
import runpy
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMPILES = (
    "torch._dynamo.backends.common",  # with the next, 1.4 CPU-seconds of what compiles
    "torch._inductor.compile_fx",
    "torch._functorch._aot_autograd.subclass_codegen",  # with the next two, what each first graph imports
    "torch._higher_order_ops.passes",
    "torch.export._trace",
)
_OF_HUB = (
    "transformers.modeling_utils",  # with the next two, 1.3 CPU-seconds of many tests and of each worker
    "peft",
    "trl",  # with the next, 0.3 CPU-seconds of each worker
    "gguf",
    "torchao.float8",
    "pytorch_lightning",  # 4 CPU-seconds of each rank and worker of the plugin's tests
)
"""In addition to what ``nxdt train`` imports, unless the libraries of Hugging Face are left out."""
_TEMPLATES = "nxdt_core.data.chat.template_environment"
"""The module of the core that imports them."""
_STARTS_RANKS = ("train", "torch.distributed.run")
_DEVICES = "trainer.devices="
"""An override of a script whose trainer starts ranks."""
_SET_NAME = 15
_MAX_DESCRIPTORS = 16
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Numbers of the system call, by machine."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_GET_TID_ADDRESS = 40
_HUGE_BYTES, _COLLAPSE = 2**21, 25
_ABOVE_ALL = 512
"""No descriptor of a process that has only made imports has such a number."""
_libc = ctypes.CDLL(None)


def main() -> None:
    """Serve until the caller ends; in a forked process, be the program that it was forked for."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)  # the folder of this file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for all of its processes; the caller ends the server
    processes = _client_module()
    subprocess.Popen = processes.Popen  # type: ignore[misc]  # before torch takes it from there
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000)  # the imports make no garbage
    without_hub = processes.WITHOUT_HUB in sys.argv
    if without_hub:
        sys.modules[_TEMPLATES] = None  # type: ignore[assignment]
    importlib.import_module("nxdt_testing.processes.preload")
    for name in _COMPILES if without_hub else (*_COMPILES, *_OF_HUB):
        with contextlib.suppress(ImportError):  # of what is not installed
            importlib.import_module(name)
    gc.set_threshold(*usual)
    if without_hub:
        del sys.modules[_TEMPLATES]
        if "huggingface_hub" in sys.modules:
            raise SystemExit("fork_server: huggingface_hub is imported; forks would keep what its variables were here")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"fork_server: {threads} threads after the imports; a fork would lose all but one")
    imported = [*weakref.finalize._registry]  # type: ignore[attr-defined]
    _use_huge_pages()
    gc.freeze()  # what is imported: else each full collection writes to all of its pages, which are shared until then
    task = _serve(connection, processes)
    program, arguments = _program_of(task)
    while _needs_server(task):
        ours, theirs = socket.socketpair()
        if os.fork() != 0:
            theirs.close()
            processes.use(processes.ForkClient(lambda ours=ours: ours, task["environment"]))
            break
        ours.close()
        task = _serve(theirs, processes, streams=task["streams"])
        program, arguments = _program_of(task)
        processes.use()
    if task["keeps_server"]:  # a test runner says itself what is forked
        subprocess.Popen = processes.Popen.__base__  # type: ignore[misc]
    _take_on(task)
    if "RANK" not in task["environment"]:
        _leave_out_of_the_end(imported)
    sys.argv[:] = ["-c" if program[0] == "-c" else program[-1], *arguments]
    sys.orig_argv[:] = task["words"]
    _run(program)


def _use_huge_pages() -> None:
    """Collapse this process's memory into huge pages, where the kernel can. Forks copy and end with fewer entries of
    page tables: 15 instead of 32 CPU-milliseconds for one that does nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, *_ = line.split()
        first, last = (int(address, 16) // _HUGE_BYTES for address in addresses.split("-"))
        if access == "rw-p" and int(offset, 16) == 0 and last > first + 1:
            _libc.madvise(
                ctypes.c_void_p((first + 1) * _HUGE_BYTES), ctypes.c_size_t((last - first - 1) * _HUGE_BYTES), _COLLAPSE
            )


def _needs_server(task: dict[str, Any]) -> bool:
    program, arguments = _program_of(task)
    of_ranks = {*program, *arguments[:1]} & {*_STARTS_RANKS} or any(word.startswith(_DEVICES) for word in arguments)
    is_rank = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} & task["environment"].keys()
    return bool((of_ranks and not is_rank) or task["keeps_server"])


def _leave_out_of_the_end(finalizers: Sequence[Any]) -> None:
    """Let a fork end without undoing the imports, 0.04 of the 0.06 CPU-seconds that one takes which does nothing.

    Ranks end as an interpreter does: how they leave one another depends on what is left to do then.

    These are finalizers of libraries' registrations and temporary directories, which all forks share, and a report
    that torch writes only under ``TORCH_LOGS``, a variable that forks do without.
    """
    for finalizer in finalizers:
        finalizer.atexit = False
    if "torch._dynamo.utils" in sys.modules:
        atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)


def _run(program: tuple[str, ...]) -> None:
    """Run a program as the interpreter does. End without taking 10,000 modules apart, a third of a CPU-second."""
    try:
        if program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            _run_code(program)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _run_code(program: tuple[str, ...]) -> None:
    """Run a script or a text in a new ``__main__``, where pickle and multiprocessing look."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if program[0] == "-c":
        exec(compile(program[1], "<string>", "exec"), main.__dict__)
        return
    main.__file__ = program[0]
    with open(program[0], "rb") as file:
        exec(compile(file.read(), program[0], "exec"), main.__dict__)


def _program_of(task: dict[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Return ``-m`` and a name, ``-c`` and a text or the path of a script, and what follows."""
    words: list[str] = task["words"]
    at = 1 + len(_options_of(words))
    end = at + 1 + (words[at] in ("-m", "-c"))
    return tuple(words[at:end]), words[end:]


def _options_of(words: list[str]) -> list[str]:
    """Return the interpreter's own options, none of which takes a value."""
    return list(itertools.takewhile(lambda word: word in ("-P", "-u"), words[1:]))


def _client_module() -> Any:
    spec = importlib.util.spec_from_file_location("nxdt_tests_processes", Path(__file__).with_name("processes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _serve(connection: socket.socket, processes: Any, streams: Sequence[int] = ()) -> dict[str, Any]:
    """Answer requests until the caller ends, and then end. Returns in each process that is forked, with its task.

    Args:
        connection: to the caller.
        processes: the module :mod:`tests.processes`.
        streams: to close first: of a process that is not to hold the pipes of the one whose server it is.
    """
    for stream in streams:
        os.close(stream)
    _libc.prctl(_SET_NAME, processes.SPARE.encode(), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, received, _, _ = socket.recv_fds(connection, 4, _MAX_DESCRIPTORS)
        if len(head) < 4:
            os._exit(0)
        task: dict[str, Any] = json.loads(connection.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL))
        child = _fork_for_caller()
        if child == 0:
            connection.close()
            return {**task, "streams": received}
        for stream in received:
            os.close(stream)
        connection.sendall(struct.pack("!I", child))


def _fork_for_caller() -> int:
    """Fork a child of the caller, which is this process's parent. Returns its id here, and 0 in it.

    It is :func:`os.fork` with ``CLONE_PARENT``. What C's ``fork`` does for other threads and for streams of C is left
    out: this process has one thread and has opened no such stream.
    """
    before, parent, child = (f"PyOS_{name}" for name in ("BeforeFork", "AfterFork_Parent", "AfterFork_Child"))
    own_id = ctypes.c_void_p()
    _libc.prctl(_GET_TID_ADDRESS, ctypes.byref(own_id), 0, 0, 0)  # where C's library keeps the id of this thread
    flags = _CLONE_PARENT | signal.SIGCHLD | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if own_id else 0)
    getattr(ctypes.pythonapi, before)()
    arguments = (ctypes.c_long(_CLONE[os.uname().machine]), ctypes.c_long(flags), None, None, own_id, own_id)
    pid: int = ctypes.PyDLL(None).syscall(*arguments)  # the id is the fourth or the fifth argument, by machine
    getattr(ctypes.pythonapi, child if pid == 0 else parent)()
    if pid < 0:
        raise OSError("fork_server: the kernel makes no process with CLONE_PARENT")
    return pid


def _take_on(task: dict[str, Any]) -> None:
    """Take on what distinguishes a process of its own."""
    away = [fcntl.fcntl(each, fcntl.F_DUPFD, _ABOVE_ALL) for each in task["streams"]]
    for each in task["streams"]:
        os.close(each)
    for each, number in zip(away, (0, 1, 2, *task["inherited"]), strict=True):
        os.dup2(each, number)
        os.close(each)
    if task["session"]:
        os.setsid()
    os.chdir(task["directory"])
    os.umask(task["umask"])
    os.environ.clear()
    os.environ.update(task["environment"])
    time.tzset()
    tempfile.tempdir = None
    _libc.prctl(_SET_NAME, b"python", 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _options_of(task["words"])
    _open_streams(buffering=0 if "-u" in options or os.environ.get("PYTHONUNBUFFERED") else -1)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = _program_of(task)[0][0]
    folder = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:0] = [*([] if "-P" in options else [folder]), *paths]
    if paths:
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _open_streams(buffering: int) -> None:
    """Open the standard streams as the interpreter does."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        binary = open(number, "wb", buffering, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            binary,
            encoding="utf-8",
            errors=errors,
            newline="\n",
            line_buffering=buffering != 0 and (number == 2 or os.isatty(number)),
            write_through=buffering == 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main()
