"""What each rank does in the tests of preferences: some steps on shuffled samples, and a validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxdt_core.config import load
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from nxdt_core.train.weights.reference import DatasetWithReference, check_base_frozen, compute_log_probs, with_base
from tests.engine.matrix.training import whole

STRATEGY = "distributed_strategy."
BATCH, STEPS = 4, 3
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48")
FLOAT64 = (
    f"plugins.local=[{Path(__file__).parents[1] / 'matrix' / 'components.py'}]",
    "precision.type=float64",
)

OBJECTIVES = {
    "dpo": ("dpo",),
    "orpo": ("orpo",),
    "ipo": ("dpo", "objective.loss_type=ipo"),
    "simpo": ("orpo", "objective={name: cpo, beta: 2, loss_type: simpo, label_smoothing: 0.1, cpo_alpha: 0.5}"),
    "kto": ("kto",),
    "reward": ("reward",),
}
"""Recipe and overrides of each."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a rank saw; a row of figures for each step, then for each batch of the validation."""

    rows: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    """Of the first step, of the parameters that this rank holds; each whole."""
    samples: int
    """In the data."""


def follow(
    objective: str, devices: int, overrides: Iterable[str] = (), model: Mapping[str, Any] | None = None
) -> Followed:
    """Train on this rank in a layout of ``devices``; ``model`` is another architecture than a small Llama."""
    name, *options = OBJECTIVES[objective]
    recipe: dict[str, Any] = {"base": f"recipe:llama-tiny-{name}"}
    config = load(
        recipe if model is None else {**recipe, "model": model},
        [
            *(f"trainer.devices={devices}", "trainer.accelerator=cpu"),
            *(SMALL if model is None else ()),
            *(f"data.global_batch_size={BATCH}", "data.micro_batch_size=1", *overrides, *options),
        ],
    )
    engine = build.engine(config)
    engine.start()
    model_ = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model_)
    loss, schedule, state, place = build.objective(config), build.schedule(config), TrainState(), engine.rank_info
    dataset = build.dataset(config, build.tokenizer(config)).split("train")
    reference = loss.traits.reference
    if reference == "before":
        before = compute_log_probs(dataset, config=config, engine=engine, model=model_)
        dataset = DatasetWithReference(dataset, before, model="first")
    elif reference == "step":
        check_base_frozen(model_, objective)
    data = config.run.data
    cut = {"global_batch_size": data.global_batch_size, "micro_batch_size": data.micro_batch_size}
    cut |= {"seed": 1, "dp_rank": place.dp_rank, "dp_size": place.dp_size}
    gradients: dict[str, torch.Tensor] = {}
    found = []

    def look_and_apply() -> None:
        if not state.step:
            held = ((name, parameter.grad) for name, parameter in model_.named_parameters())
            gradients.update((name, whole(gradient)) for name, gradient in held if gradient is not None)
        optimizer.step()

    batches = iter(GlobalBatchLoader(dataset, shuffle=True, **cut))
    for _ in range(STEPS):
        taken = with_base(next(batches), model_) if reference == "step" else next(batches)
        prepared, taken = loss.prepare(taken, model_)
        step = train_step(model_, optimizer, taken, prepared, schedule, state, apply=look_and_apply)
        found.append({"loss": step.loss.loss, "norm": step.grad_norm, **step.loss.metrics})
    for taken in GlobalBatchLoader(dataset, shuffle=False, repeat=False, **cut):
        prepared, taken = loss.prepare(with_base(taken, model_) if reference == "step" else taken, model_)
        judged = model_.run_eval(taken, prepared)
        found.append({"loss": judged.loss, "weight": judged.weight, **judged.metrics})
    assert state.consumed_samples == STEPS * data.global_batch_size
    engine.shutdown()
    rows = [{key: float(value) for key, value in row.items()} for row in found]
    return Followed(rows=rows, gradients=gradients, samples=len(dataset))


def differences(ranks: Iterable[Followed], alone: Followed, *, close: float) -> list[str]:
    """What the ranks of a layout saw otherwise than one process, and gradients that none of them has."""
    told, seen = [], set()
    for number, found in enumerate(ranks):
        for place, (row, wanted) in enumerate(zip(found.rows, alone.rows, strict=True)):
            if row.keys() != wanted.keys():
                told.append(f"rank {number}, row {place}: {sorted(row)} instead of {sorted(wanted)}")
            for name in row.keys() & wanted.keys():
                if not abs(row[name] - wanted[name]) <= close * (1 + abs(wanted[name])):
                    told.append(f"rank {number}, row {place}: {name} is {row[name]}, not {wanted[name]}")
        for name, gradient in found.gradients.items():
            worst = float((gradient - alone.gradients[name]).abs().max())
            if not worst <= close:
                told.append(f"rank {number}: the gradient of {name} is off by {worst}")
        seen |= found.gradients.keys()
    return told + [f"no rank has a gradient of {name}" for name in sorted(alone.gradients.keys() - seen)]
