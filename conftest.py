"""The environment of all tests, the fixtures that tests of the core and of plugins share, and the seed of samples.

``make test``, plain ``pytest PATH`` and the workers of pytest-xdist all load this file first, so all run with the same
settings: one thread per process, unless the caller sets ``OMP_NUM_THREADS``, text in UTF-8, and compiled files of
Python kept.
"""

import gc
import itertools
import locale
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.rewriting import rewrite_tests
from tests.sampling import DEFAULT, takes_all

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch; child processes inherit it
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the hundreds of processes compiles the package once more
sys.dont_write_bytecode = False
os.environ["LC_ALL"] = "C.UTF-8"  # for what tests read from pipes; tests/cli/terminal/test_encodings.py tries others
locale.setlocale(locale.LC_ALL, "")

_RANK_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
} - os.environ.keys()
"""By which a process knows that it is a rank; tests that a rank runs keep its own."""
pytest_plugins = ["nxdt_testing.samples", "tests.s3_server"]


def pytest_configure(config: pytest.Config) -> None:
    """Let garbage be collected rarely, and fork the processes of :mod:`tests.processes`, unless all cases are taken.

    A run within a run, as of a contract over mutants, keeps the server: another one would make all imports again.

    GPUs are hidden from this process and its children, since a test has more ranks than a workstation has GPUs, and
    compares bits and seconds of the CPU. Tests of an accelerator run by themselves.
    """
    config.option.samples = config.option.samples or DEFAULT
    if config.option.markexpr != "accelerator":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if takes_all(config):
        return
    gc.set_threshold(100_000)
    if processes.enabled():
        return
    processes.use(processes.inherited_server() or processes.new_server(), processes.new_server(without_hub=True))
    processes.fork_rank_pools()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Fork the workers of pytest-xdist from a process that has made the imports, which each would make thrice."""
    if not processes.enabled() or hasattr(session.config, "workerinput"):
        return (yield)
    with processes.fork_workers():
        rewrite_tests(session.config)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``slow``, unless all cases are taken or it is named on the command line."""
    if takes_all(config):
        return
    named = tuple(argument.partition("::")[2] for argument in config.args if "::" in argument)
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = {item for item in slow if not item.nodeid.partition("::")[2].startswith(named)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through what the imports left, 3 % of a run's CPU time.

    There is next to no garbage yet, and a search for it takes 0.4 CPU-seconds in each worker.
    """
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect garbage, which may have something to report, once: pytest collects five times at its end, which would go
    through all objects again, 3 CPU-seconds in a worker."""
    gc.collect()
    gc.freeze()


_directories = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new directory, whose number is the next one of this process.

    pytest's own fixture lists all directories of earlier tests for a free number: 1.2 CPU-milliseconds with 2,000.
    """
    path = tmp_path_factory.getbasetemp() / f"{next(_directories)}-{request.node.name.partition('[')[0][:25]}"
    path.mkdir(mode=0o700)
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``accelerator`` where there is none; ``make accelerator`` runs it by this mark."""
    if item.get_closest_marker("accelerator") is None:
        return
    import torch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        pytest.skip("torch finds no accelerator; `-m accelerator` shows it those of this machine")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Fail a test that leaves a process group or the variables of a rank behind, and remove them: later tests would
    fail in its place."""
    if nextitem is not None and nextitem.path == item.path:  # a fixture of the module may hold them
        return
    if nextitem is not None and "nxdt_testing.ranks" in sys.modules:  # what ranks keep depends on no other module
        sys.modules["nxdt_testing.ranks"].end_lasting_ranks()
    left = _RANK_VARIABLES & os.environ.keys()
    for name in left:
        del os.environ[name]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        left.add("a torch process group")
    if left:
        pytest.fail(f"{item.path.name} leaves {', '.join(sorted(left))} behind: close the engine or use monkeypatch")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the option that gives the same sample again."""
    terminalreporter.write_line(f"samples: --samples={terminalreporter.config.getoption('samples')}")
    if not takes_all(terminalreporter.config):
        terminalreporter.write_line("left out: cases beyond the samples and slow tests; `make test-full` runs all")
