"""Log-probabilities of labels are those of one process in every layout, each at its own token."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model

SEQ = 16
STRATEGY = "distributed_strategy."
LAYOUTS = {
    "tp2": (f"{STRATEGY}tensor_model_parallel_size=2", "model.loss_chunk_tokens=8"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
}


def micro_batches() -> list[Batch]:
    ids = torch.randint(256, (2, 2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    ids[:, :, 4] = -100
    return [Batch(input_ids=part[:, :-1].clamp(min=0), labels=part[:, 1:]) for part in ids]


def log_probs(overrides: tuple[str, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Those of the model, and its logits."""
    small = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", f"data.seq_length={SEQ}")
    batch = ("data.global_batch_size=4", "data.micro_batch_size=2", "trainer.accelerator=cpu", "trainer.devices=2")
    engine = build.engine(config := load("recipe:llama-tiny", [*small, *batch, *overrides]))
    engine.start()
    model = initialize_parallel_model(config, engine)
    found = model.log_probs(micro_batches())
    logits = model.forward(torch.cat([batch.input_ids for batch in micro_batches()]))
    engine.shutdown()
    return found, logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_those_of_the_logits_on_every_rank(ranks, layout):
    for found, logits in ranks(2).run(log_probs, LAYOUTS[layout]):
        labels = torch.cat([batch.labels for batch in micro_batches()])
        wanted = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(torch.cat(found), wanted.masked_fill(labels < 0, 0), rtol=0, atol=1e-5)
        assert len(found) == 2
