"""Files of NxD Training: every key is known; what this version lacks is said in words, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.kernel import Kernel, PluginPolicy

EXAMPLES = Path(__file__).parent / "nxdt"

EXPECTED = {
    "llama3_8b_pretrain": {"data.name", "model.name", "model.optim.name", "precision.type"},
    "mixtral_8x7b_pretrain": {"data.name", "model.name", "precision.type"},
    # As shipped, data.seq_length and model.encoder_seq_length differ.
    "llama3_8b_sft": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "precision.type"},
    "llama3_8b_lora": {"data.name", "model.name", "model.encoder_seq_length", "model.optim.name", "adapter.name"},
}


@pytest.fixture(scope="module")
def builtins() -> Kernel:
    return Kernel.start(PluginPolicy(allow=()))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_names_what_is_not_supported_and_nothing_else(builtins, name):
    problems = config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)
    assert {problem.key for problem in problems} - EXPECTED[name] == set()
    codes = {problem.row()[-10:-1] for problem in problems}
    assert codes <= {"NXDT-C014", "NXDT-C015", "NXDT-K002"}
    assert not [problem for problem in problems if problem.code in ("NXDT-C010", "NXDT-C011", "NXDT-C012")]


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_that_was_expected_to_be_refused_is_taken(builtins, name):
    keys = {problem.key for problem in config.check(EXAMPLES / f"{name}.yaml", kernel=builtins)}
    aliases = {"adamw_fp32OptState", "mixed_precision"}
    known = {alias for kind in ("optimizer", "precision") for alias in _spellings(builtins, kind)} & aliases
    taken = {"model.optim.name" if alias.startswith("adamw") else "precision.type" for alias in known}
    assert EXPECTED[name] - keys <= taken


def _spellings(kernel, kind):
    return {text for found in kernel.registry.all(kind) for text in (found.record.name, *found.record.aliases)}
