"""``nxdt plan`` against what runs on one H200 held at their peaks (docs/reference/h200-2026-11-27.md)."""

from __future__ import annotations

from typing import Any

import pytest

from nxdt_core.config import load
from nxdt_core.train.plan import plan

ONE_B = {"num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192}
HALF_8B = {"num_layers": 16, "hidden_size": 4096, "ffn_hidden_size": 14336}
FLOAT8 = {"type": "float8", "scaling": "tensorwise"}


@pytest.mark.parametrize(
    ("model", "micro_batch", "precision", "measured_gib"),
    [
        (ONE_B, 4, {"type": "autocast"}, 46.67),
        (ONE_B, 4, {**FLOAT8, "rest": "autocast"}, 38.86),
        (HALF_8B, 2, FLOAT8, 77.16),
    ],
)
def test_the_plan_is_within_a_twentieth_of_the_peak(
    model: dict[str, int], micro_batch: int, precision: dict[str, Any], measured_gib: float
) -> None:
    run = {
        "name": "planned",
        "trainer": {"max_steps": 1, "gradient_clip_val": 1.0},
        "data": {
            "name": "none",
            "seq_length": 4096,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch,
            "tokenizer": {"library": "byte"},
        },
        "model": {
            "name": "llama",
            **model,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 4096,
            "compile": True,
            "optim": {"name": "adamw", "lr": 1e-4},
        },
        "precision": precision,
    }
    memory = plan(load(run), memory_bytes=0).estimate.fullest.memory
    assert memory.total / 2**30 == pytest.approx(measured_gib, rel=0.05)
