"""Evaluation between training steps leaves no trace, also under a caller's inference mode."""

from contextlib import nullcontext

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.models.loss import CausalLM
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.sampling import slow, slow_except

SEQ = 16
STRATEGY = "distributed_strategy."
LAYOUTS = {
    "dp2": (),
    "dp2-zero3": (f"{STRATEGY}zero_stage=3",),
    "tp2-sp": (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
}


def train(overrides, evaluations):
    """Losses of three steps, with evaluations before the first ones; each is under inference mode or not."""
    config = load(
        "recipe:llama-tiny",
        [
            "trainer.accelerator=cpu",
            "trainer.devices=2",
            "model.num_layers=2",
            "model.hidden_size=32",
            "model.ffn_hidden_size=48",
            f"data.seq_length={SEQ}",
            "data.global_batch_size=4",
            "data.micro_batch_size=1",
            *overrides,
        ],
    )
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = CausalLM(), build.schedule(config), TrainState()
    ids = torch.randint(272, (4, SEQ + 1), generator=torch.Generator().manual_seed(1))
    own = ids.chunk(engine.rank_info.dp_size)[engine.rank_info.dp_rank]
    batches = [Batch(input_ids=row[None, :-1], labels=row[None, 1:]) for row in own]
    losses = []
    evaluated = []
    for number in range(3):
        for inference_mode in evaluations[number : number + 1]:
            with torch.inference_mode() if inference_mode else nullcontext():
                evaluated.append(float(model.run_eval(batches, objective).loss))
        step = train_step(model, optimizer, batches, objective, schedule, state)
        losses.append(float(step.loss.loss))
    engine.shutdown()
    return losses, evaluated


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("dp2-zero3", "pp2")))
@pytest.mark.parametrize("evaluations", [slow((False, False, False)), slow((True, True, True)), (True, False)], ids=str)
def test_training_goes_on_as_if_nothing_had_been_evaluated(ranks, layout, evaluations):
    ((alone, _), _) = ranks(2).run(train, LAYOUTS[layout], ())
    ((losses, evaluated), _) = ranks(2).run(train, LAYOUTS[layout], evaluations)
    assert losses == alone
    assert evaluated == pytest.approx(alone[: len(evaluations)], abs=1e-5)
