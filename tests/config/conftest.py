from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.kernel import Kernel, PluginPolicy

GOOD = """\
name: run
trainer:
  max_steps: 100
data:
  name: lines
  global_batch_size: 8
  seq_length: 64
model:
  name: tiny
  hidden_size: 32
  optim:
    lr: 1e-3
"""


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    """The built-ins and the components of ``parts.py``; installed plugins are left out."""
    return Kernel.start(PluginPolicy(allow=(), local=(Path(__file__).parent / "parts.py",)))


@pytest.fixture
def good() -> str:
    """The smallest configuration that loads."""
    return GOOD


@pytest.fixture
def load(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedConfig]:
    """``load(text, *overrides)`` of a file ``run.yaml`` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def loaded(text: str, *overrides: str) -> ResolvedConfig:
        Path("run.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
        return config.load("run.yaml", overrides, kernel=kernel)

    return loaded


@pytest.fixture
def report(load: Callable[..., ResolvedConfig]) -> Callable[..., Sequence[str]]:
    """``report(text, *overrides)``: the rows of the error, none where the configuration loads."""

    def rows(text: str, *overrides: str) -> Sequence[str]:
        try:
            load(text, *overrides)
        except ConfigError as error:
            return [problem.row() for problem in error.problems]
        return []

    return rows
