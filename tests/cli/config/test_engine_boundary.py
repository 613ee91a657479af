"""An engine of one process is asked for nothing else: ``config check``, ``plan`` and ``train`` refuse it alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import slow_except

pytest.importorskip("nxdt_plugin_llama", reason="nxdt-plugin-llama is not installed")
pytest.importorskip("nxdt_plugin_lora", reason="nxdt-plugin-lora is not installed")

PARTS = Path(__file__).parents[2] / "testing/mutants/solo_parts.py"
SOLO = ("recipe:llama-tiny", f"plugins.local=[{PARTS}]", "parallel_engine.name=solo", "trainer.accelerator=cpu")
ASKED = {
    "tp": ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2"),
    "dp": ("trainer.devices=2",),
    "precision": ("precision.type=bf16SR",),
    "adapters": ("adapter.name=lora",),
}
CASES = [(capability, verb) for capability in ASKED for verb in (("config", "check"), ("plan",), ("train",))]


@pytest.mark.parametrize(
    ("capability", "verb"),
    slow_except(CASES, [case for case in CASES if case[0] == "tp" or case[1] == ("train",)]),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_an_engine_does_not_declare_is_refused_by_every_verb(nxdt, tmp_path, verb, capability):
    light = capability == "tp" and verb == ("train",)  # the others differ in nothing that could import torch
    done = nxdt(*verb, *SOLO, *ASKED[capability], without=("torch",) if light else ())
    assert done.returncode == 2
    assert f"needs the capability '{capability}'" in done.stderr
    assert "the engine 'solo'" in done.stderr
    assert "does not declare it" in done.stderr
    assert "[NXDT-C022]" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_is_not_refused(nxdt):
    assert nxdt("config", "check", *SOLO).returncode == 0
