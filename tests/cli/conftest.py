"""Runs the real command, and builds distributions for it to find."""

import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest

from tests import processes
from tests.distributions import write_distribution
from tests.terminal import on_terminal

Run = Callable[..., subprocess.CompletedProcess[str]]

_MISSING = """
import sys
for name in {names!r}:
    for imported in [name, *(each for each in sys.modules if each.startswith(name + "."))]:
        sys.modules[imported] = None
"""
_UNINSTALLED = """
from importlib import metadata
installed = metadata.Distribution.discover
metadata.Distribution.discover = lambda **at: (each for each in installed(**at) if each.name not in {dists!r})
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory on the path of the commands that ``nxdt`` runs."""
    directory = tmp_path / "site"
    directory.mkdir()
    return directory


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty directory to run commands in."""
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


@pytest.fixture
def nxdt(work: Path, site: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``nxdt ARGS`` in an empty directory; ``without`` names modules that cannot be imported, and ``uninstalled``
    distributions that are not there.

    By default this process runs it, a fork where ``site`` has distributions, and a new interpreter, which has imported
    nothing yet, where modules cannot be imported. ``fork`` chooses a fork or a new interpreter. A fork has modules
    already that the preload imports; it shows what a command does that looks for one while it works."""

    def here(args: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        from nxdt_core.cli import main

        capfd.readouterr()
        variables = mock.patch.dict(os.environ, environment, clear=True)
        with chdir(work), variables, mock.patch.object(logging.root, "handlers", []):
            try:
                status = main(args)
            except Exception:
                traceback.print_exc()
                status = 1
        return subprocess.CompletedProcess(args, status, *capfd.readouterr())

    def run(
        *args: str,
        without: tuple[str, ...] = (),
        uninstalled: tuple[str, ...] = (),
        fork: bool | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        if fork is None and not (without or uninstalled or any(site.iterdir())):
            return here(args, {**_environment(site), **environment})
        (site / "usercustomize.py").write_text("")
        hidden = _UNINSTALLED.format(dists=uninstalled) if uninstalled else ""
        (site / "sitecustomize.py").write_text(_MISSING.format(names=without) + hidden)
        forks = not without if fork is None else fork
        run_it = processes.run if forks else subprocess.run
        return run_it(
            [sys.executable, "-m", "nxdt_core", *args],
            cwd=work,
            env={**_environment(site), **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


_ONE_BY_ONE = """
from nxdt_core.cli import main
for words in {commands!r}:
    if status := main(words):
        sys.exit(f"{{words}}: exit status {{status}}")
"""


@pytest.fixture
def nxdt_without(work: Path, site: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command after the other in a new interpreter in which ``modules`` cannot be imported, until one fails:
    ``nxdt_without(modules, [words, …])``."""

    def run(modules: Sequence[str], commands: Sequence[Sequence[str]]) -> subprocess.CompletedProcess[str]:
        program = _MISSING.format(names=modules) + _ONE_BY_ONE.format(commands=[[*words] for words in commands])
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=work,
            env=_environment(site),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def nxdt_on_terminal(work: Path, site: Path) -> Callable[..., tuple[int, str]]:
    """Run ``nxdt ARGS`` there on a terminal of ``columns``: its exit status, and what the terminal gets."""

    def run(*args: str, columns: int = 100, **environment: str) -> tuple[int, str]:
        env = {name: value for name, value in _environment(site).items() if name != "COLUMNS"}
        words = [sys.executable, "-m", "nxdt_core", *args]
        return on_terminal(words, cwd=work, env={**env, **environment}, popen=processes.Popen, columns=columns)

    return run


def _environment(site: Path) -> dict[str, str]:
    return {"PATH": "", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}


@pytest.fixture
def dist(site: Path) -> Callable[..., None]:
    """Put a distribution with one plugin on the path: ``dist("acme", "source of its entry module")``."""

    def make(name: str, source: str, *, requires: str = "nxdt-core>=0.1,<0.2", **modules: str) -> None:
        files = {f"{module}.py": text for module, text in {name: source, **modules}.items()}
        write_distribution(site, name, plugins={name: name}, files=files, requires=(requires,))

    return make


@pytest.fixture(scope="session")
def saved_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What :func:`store` is a copy of."""
    import torch

    from nxdt_core.checkpoint import CheckpointFacts, open_storage
    from tests.checkpoint.saving import save_checkpoint

    uri = str(tmp_path_factory.mktemp("saved") / "store")
    storage = open_storage(uri)
    for step in (10, 20, 30):
        save_checkpoint(
            storage,
            step=step,
            model={"weight": torch.arange(1000.0), "bias": torch.zeros(2, 3).bfloat16()},
            optimizer={"weight/exp_avg": torch.zeros(1000)},
            state={"step": step},
            facts=CheckpointFacts(
                consumed_samples=step,
                consumed_tokens=10 * step,
                config={"trainer": {"max_steps": step}},
                mesh={"pp": 1, "dp": 2},
                metrics={"loss": 1.5},
                versions={"torch": "2"},
                plugin_fingerprint="f00d",
            ),
        )
    shard = _shard_of(uri, 20)
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    (Path(uri) / "step-00000030" / "manifest.json").unlink()
    return Path(uri)


@pytest.fixture
def store(saved_store: Path, tmp_path: Path) -> str:
    """Address of a store: step 10 is good, 20 has a flipped byte in a tensor, 30 has no manifest."""
    return str(shutil.copytree(saved_store, tmp_path / "store"))


@pytest.fixture
def shard_of() -> Callable[[str, int], Path]:
    """``shard_of(uri, step)`` is the file that holds the model's tensors."""
    return _shard_of


def _shard_of(uri: str, step: int) -> Path:
    return next((Path(uri) / f"step-{step:08d}").rglob("model/*.safetensors"))
