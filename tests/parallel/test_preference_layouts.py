"""DPO and ORPO follow one process in every layout, and each pair meets its own reference wherever it lands."""

from __future__ import annotations

import math
from itertools import product

import pytest

from nxdt_core.config import load
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.data.references import Referenced
from nxdt_core.training import assemble, primitives
from nxdt_core.training.reference import compute_log_probs
from nxdt_core.training.state import TrainState
from tests.sampling import of_matrix

STRATEGY = "distributed_strategy."
LAYOUTS = {
    "dp2": (),
    "dp2-zero3": (f"{STRATEGY}zero_stage=3",),
    "tp2-sp": (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true"),
    "tp2-chunked": (f"{STRATEGY}tensor_model_parallel_size=2", "model.loss_chunk_tokens=32"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
}
PAIRS, BATCH, STEPS = 7, 4, 3
SAMPLE = 3


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        cases = of_matrix(metafunc.config, product(LAYOUTS, ("dpo", "orpo")), SAMPLE)
        metafunc.parametrize(("layout", "objective"), cases)


def figures(objective, devices, overrides):
    """Loss, gradient norm and metrics of some steps on shuffled pairs, and of a validation whose last batch is not
    full."""
    config = load(
        f"recipe:llama-tiny-{objective}",
        [
            *(f"trainer.devices={devices}", "trainer.accelerator=cpu"),
            *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48"),
            *(f"data.dev_choose_samples={PAIRS}", f"data.global_batch_size={BATCH}", "data.micro_batch_size=1"),
            *overrides,
        ],
    )
    engine = assemble.engine(config)
    engine.start()
    model = primitives.initialize_parallel_model(config, engine)
    optimizer = primitives.initialize_parallel_optimizer(config, engine, model)
    dataset = assemble.dataloader(config, assemble.tokenizer(config)).split("train")
    before = compute_log_probs(dataset, config=config, engine=engine, model=model)
    dataset = Referenced(dataset, before, model="first")
    loss, schedule, state, place = assemble.objective(config), assemble.schedule(config), TrainState(), engine.rank_info
    cut = {"global_batch_size": BATCH, "micro_batch_size": config.run.data.micro_batch_size}
    cut |= {"seed": 1, "dp_rank": place.dp_rank, "dp_size": place.dp_size}
    batches, found = iter(GlobalBatchLoader(dataset, shuffle=True, **cut)), []
    for _ in range(STEPS):
        step = primitives.train_step(model, optimizer, next(batches), loss, schedule, state, dp_size=place.dp_size)
        found.append({"loss": step.loss.loss, "norm": step.grad_norm, **step.loss.metrics})
    for micro_batches in GlobalBatchLoader(dataset, shuffle=False, repeat=False, **cut):
        judged = model.run_eval(micro_batches, loss)
        found.append({"loss": judged.loss, "weight": judged.weight, **judged.metrics})
    assert state.consumed_samples == STEPS * BATCH
    engine.shutdown()
    return [{key: float(value) for key, value in row.items()} for row in found]


@pytest.fixture(scope="module")
def alone(ranks):
    one = ("data.micro_batch_size=4",)
    return {objective: ranks(1).run(figures, objective, 1, one)[0] for objective in ("dpo", "orpo")}


def test_every_layout_follows_one_process(ranks, alone, layout, objective):
    rows = alone[objective]
    assert [row.get("weight") for row in rows] == [None, None, None, 4, 3]
    for found in ranks(2).run(figures, objective, 2, LAYOUTS[layout]):
        assert found == [pytest.approx(row, abs=2e-5, rel=2e-5) for row in rows]


def test_before_the_first_step_no_pair_is_preferred_to_its_reference(alone):
    first, *later = alone["dpo"][:STEPS]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert later[-1]["rewards/margins"] > 0.01
