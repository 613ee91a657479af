"""One context a micro-batch: an engine makes it, and every layer and the objective get that one as their argument."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build

RECIPES = ("llama-tiny", "mixtral-tiny", "gpt-tiny")
OUTSIDE = step_of(None)
SEED, STEP = 7, 3


class Noting(CausalLM):
    """Notes the labels and the context of each micro-batch."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __call__(self, logits, batch, step):
        self.noted.append((batch.labels, step))
        return super().__call__(logits, batch, step)


def model_of(recipe):
    config = load(f"recipe:{recipe}", [f"seed={SEED}"])
    engine = build.engine(config)
    engine.start()
    policy = build.precision(config)
    return engine.initialize_model(build.model_builder(config), precision=policy, seed=config.run.seed)


def micro_batches():
    ids = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(1))
    parts = (ids[:2], ids[2:])
    return [Batch(input_ids=part[:, :-1].contiguous(), labels=part[:, 1:].contiguous()) for part in parts]


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_and_objective_get_one_context_for_each_micro_batch_and_nothing_at_the_border(recipe):
    model, objective, seen, borders = model_of(recipe), Noting(), [], set()

    def note(layer, args, kwargs):
        seen.append(kwargs["step"])
        borders.add(step_of(None) is OUTSIDE)

    for layer in model.module.layers.values():
        layer.register_forward_pre_hook(note, with_kwargs=True)
    model.begin_step(STEP)
    model.run_train(micro_batches(), objective)
    layers = len(model.module.layers)
    assert borders == {True}
    assert [id(step) for step in seen] == [id(step) for _, step in objective.noted for _ in range(layers)]
    for row, (labels, step) in zip((0, 2), objective.noted, strict=True):
        assert step.labels is labels
        assert step.numbers.tolist() == [SEED, STEP, row]
        assert float(step.aux_loss_scale) == pytest.approx(1 / 64)


def test_each_dropout_of_a_native_model_gets_the_context_as_an_argument():
    model, objective, given = model_of("gpt-tiny"), Noting(), []
    for part in model.module.modules():
        if isinstance(part, Dropout):
            part.register_forward_pre_hook(lambda _, args: given.append(args[1]))
    model.run_train(micro_batches()[:1], objective)
    assert given
    assert {id(step) for step in given} == {id(objective.noted[0][1])}


def test_logits_are_what_a_forward_for_no_loss_gives():
    model, labels = model_of("llama-tiny"), []
    model.module.register_forward_pre_hook(
        lambda _, args, kwargs: labels.append(kwargs["step"].labels), with_kwargs=True
    )
    model.forward(micro_batches()[0].input_ids)
    assert labels == [None]
