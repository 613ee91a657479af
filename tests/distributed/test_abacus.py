"""A run on a device type that is neither the host nor one that the core describes: an out-of-tree device of torch.

Nothing asks it for ``cuda``, and no step reads one of its values.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from nxdt_plugin_lightning import NxdtDataModule, NxdtModule, NxdtStrategy
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import load_model, read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config import load
from nxdt_core.train import TrainSession
from tests import processes
from tests.calls import Call, run_in_turn
from tests.distributed.building import CACHE
from tests.sampling import asked, slow, slow_except

PLUGIN = f"plugins.local=[{Path(__file__).with_name('abacus_plugin.py')}]"
ROOT = Path(__file__).parents[2]
SMALL = ("data.seq_length=32", "model.num_layers=2", "trainer.max_steps=4", "exp_manager.exp_dir=null")
COMPILE = "model.compile=true"
MODELS = {
    "llama": ("recipe:llama-tiny",),
    "compiled": ("recipe:llama-tiny", COMPILE),
    "gpt with dropout": ("recipe:gpt-tiny", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    "experts": ("recipe:mixtral-tiny", "model.moe.capacity_factor=1.25"),
    "adapter": ("recipe:llama-tiny", "adapter.name=lora"),
    "rounded": ("recipe:llama-tiny", "precision.type=bf16SR"),
    "novograd": ("recipe:llama-tiny", "model.optim.name=novograd"),
    "lion": ("recipe:llama-tiny", "model.optim.name=lion"),
}


ADAMW = "adamw"
"""The optimizer of the recipe."""


def session(recipe: str, *overrides: str, accelerator: str = "abacus") -> TrainSession:
    """A started session of a small run on the device."""
    sys.path.append(str(ROOT))
    return TrainSession.load(
        recipe, [PLUGIN, f"trainer.accelerator={accelerator}", "checkpoint.uri=unused", *SMALL, *overrides]
    ).start()


def steps(run: TrainSession) -> tuple[list[float], list[int]]:
    """Losses, and how often each step read a value of the device. The first one compares the weight that the objective
    reports."""
    from tests.distributed.abacus import waits

    losses, waited = [], []
    for batch in run.batches():
        before = waits()
        result = run.step(batch)
        waited.append(waits() - before)
        losses.append(float(result.loss.loss))
    return losses, waited


def train_on_both(recipe: str, *overrides: str) -> dict[str, Any]:
    """Train the same run on the device and, unless it is compiled, on the host."""
    own = session(recipe, *overrides)
    host = None if COMPILE in overrides else session(recipe, *overrides, accelerator="cpu")
    from tests.distributed.abacus import COMPILED

    COMPILED.clear()
    losses, waited = steps(own)
    types = {parameter.device.type for _, parameter in own.model.named_parameters()}
    compiled = [*COMPILED]
    on_host = steps(host)[0] if host else None
    return {"losses": losses, "host": on_host, "waited": waited, "types": types, "compiled": compiled}


@pytest.fixture(scope="module")
def returned(
    request: pytest.FixtureRequest, abacus_cache: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What functions return that the tests of this run ask for, all in one process; others compare with ``llama``."""
    calls = {
        "llama": Call(1, train_on_both, MODELS["llama"]),
        "resumed": Call(1, resume_with, (str(tmp_path_factory.mktemp("resumed")),)),
        "dropless": Call(1, refuse_dropless, ()),
        "fitted": Call(1, fit_with_lightning, ()),
    }
    calls |= {model: Call(1, train_on_both, MODELS[model]) for model in asked(request, "model")}
    calls |= {f"{optimizer} rejects": Call(1, reject_steps, (optimizer,)) for optimizer in asked(request, "optimizer")}
    plain = {layout: single(layout) for layout in asked(request, "layout")}
    calls |= {layout: Call(1, train_on_host, words) for layout, words in plain.items() if words != MODELS["llama"]}
    found = run_in_turn(calls, environment={CACHE: abacus_cache}, timeout_s=40 * len(calls))
    return {name: result for name, (result,) in found.items()}


@pytest.mark.parametrize("model", slow_except(MODELS, ("llama", "compiled", "rounded")))
def test_it_trains_as_on_the_host_and_no_step_but_the_first_waits(returned: dict[str, Any], model: str) -> None:
    found = returned[model]
    assert found["types"] == {"abacus"}
    assert found["waited"] == [1, 0, 0, 0]
    if model != "gpt with dropout":  # the host draws the masks of its attention in its kernel
        host = found["host"] or returned["llama"]["host"]
        assert found["losses"] == pytest.approx(host, rel=1e-5 if model != "rounded" else 2e-3)
    assert found["losses"][-1] < found["losses"][0]
    assert bool(found["compiled"]) == (model == "compiled")


def wait_where_shapes_may_change() -> list[int]:
    """The waits of a run under a profile without fixed shapes, which reads a value so that no copy is needed."""
    sys.path.append(str(ROOT))
    from tests.distributed import abacus

    abacus.PROFILE = replace(abacus.PROFILE, static_shapes=False)
    return steps(session("recipe:llama-tiny"))[1]


def test_waits_are_seen(abacus_cache: str) -> None:
    assert RankPool(1).run(wait_where_shapes_may_change, environment={CACHE: abacus_cache}) == [[2, 1, 1, 1]]


def resume_with(root: str) -> tuple[list[float], list[int]]:
    """Losses and waits of a run that was saved and resumed."""
    uri = f"checkpoint.uri={root}"
    first = session("recipe:llama-tiny", uri, "trainer.max_steps=2")
    steps(first)
    first.save()
    again = session("recipe:llama-tiny", uri)
    again.resume()
    return steps(again)


def test_a_run_that_is_resumed_does_not_wait_either(returned: dict[str, Any]) -> None:
    """Step counters of the optimizer are loaded to the host, where its kernels read them."""
    resumed, waited = returned["resumed"]
    assert resumed == returned["llama"]["losses"][2:]
    assert waited == [1, 0]


def fit_with_lightning() -> set[str]:
    """Device types of the optimizer's state after a run of Lightning's trainer."""
    sys.path.append(str(ROOT))
    accelerator, unsaved = "trainer.accelerator=abacus", "checkpoint.uri=unused"
    config = load("recipe:llama-tiny", [PLUGIN, accelerator, unsaved, *SMALL])
    strategy, module = NxdtStrategy(config), NxdtModule(config)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=strategy.lightning_accelerator,
        max_steps=1,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, NxdtDataModule(config))
    states = module.optimizer.inner.state.values()
    return {value.device.type for state in states for value in state.values() if value.dim()}


def test_the_optimizer_stays_on_the_device_at_the_end_of_a_run(returned: dict[str, Any]) -> None:
    """Moments of 8B weights take seconds to copy, and the host may not have the memory."""
    assert returned["fitted"] == {"abacus"}


def reject_steps(optimizer: str) -> tuple[bool, bool, int, list[float], list[float] | None]:
    """Whether a step that is not finite leaves the weights and the state; the losses of a run with one and, unless the
    optimizer is that of ``llama``, without."""
    losses, plain = [], session("recipe:llama-tiny", f"model.optim.name={optimizer}") if optimizer != ADAMW else None
    run = session("recipe:llama-tiny", f"model.optim.name={optimizer}")
    same_weights = same_state = False
    for number, batch in enumerate(run.batches()):
        if number == 2:
            before = {name: value.clone() for name, value in run.model.state_dict().items()}
            state = {name: value.clone() for name, value in run.optimizer.state_dict().items()}
            run.model.run_train(batch.micro_batches, run.objective)
            norm = run.optimizer.clip_grad_norm(None)
            run.optimizer.reject_unless_finite(torch.full_like(norm, float("nan")), norm)
            run.optimizer.step()
            same_weights = all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
            after = run.optimizer.state_dict()
            same_state = after.keys() == state.keys() and all(torch.equal(after[name], state[name]) for name in state)
        losses.append(float(run.step(batch).loss.loss))
    return same_weights, same_state, int(run.optimizer.skipped_steps), losses, steps(plain)[0] if plain else None


@pytest.mark.parametrize("optimizer", [ADAMW, slow("novograd"), slow("muon")])
def test_a_step_that_is_not_finite_leaves_weights_and_state(returned: dict[str, Any], optimizer: str) -> None:
    """The device alone knows that it is not."""
    found = returned[f"{optimizer} rejects"]
    assert found[:3] == (True, True, 1)
    assert found[3] == (found[4] or returned["llama"]["losses"])


LAYOUTS = {
    "dp2": ("recipe:llama-tiny",),
    "dp2, zero 3": ("recipe:llama-tiny", "distributed_strategy.zero_stage=3"),
    "tp2": (
        "recipe:llama-tiny",
        "distributed_strategy.tensor_model_parallel_size=2",
        "distributed_strategy.sequence_parallel=true",
    ),
    "cp2": ("recipe:llama-tiny", "distributed_strategy.context_parallel_size=2"),
    "ep2": (
        "recipe:mixtral-tiny",
        "model.moe.capacity_factor=2",
        "distributed_strategy.expert_model_parallel_size=2",
    ),
}


def train_on_rank(recipe: str, *overrides: str) -> tuple[list[float], str, str]:
    """Losses, device and backend of this rank."""
    run = session(recipe, *overrides)
    losses, _ = steps(run)
    used = torch.distributed.get_backend()
    run.close()
    return losses, str(run.engine.device), used


def train_on_host(recipe: str, *overrides: str) -> list[float]:
    """Losses of one process on the host."""
    return steps(session(recipe, *overrides, accelerator="cpu"))[0]


def single(layout: str) -> tuple[str, ...]:
    """The recipe and the overrides of the run of one process that a layout is compared with."""
    return tuple(word for word in LAYOUTS[layout] if not word.startswith("distributed_strategy"))


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("tp2",)))
def test_two_ranks_train_as_one_process_does(abacus_cache: str, returned: dict[str, Any], layout: str) -> None:
    """Each on a device of its own, with collectives of the device alone: no all-to-all, no sends."""
    found = RankPool(2).run(train_on_rank, *LAYOUTS[layout], environment={CACHE: abacus_cache})
    for rank, (losses, device, backend) in enumerate(found):
        alone = returned["llama"]["host"] if single(layout) == MODELS["llama"] else returned[layout]
        assert losses == pytest.approx(alone, rel=1e-5)
        assert (device, backend) == (f"abacus:{rank}", "abacus")


def refuse_dropless() -> str:
    """The error of experts that drop nothing."""
    try:
        session("recipe:mixtral-tiny", "model.moe.capacity_factor=null")
    except Exception as error:
        return str(error)
    return ""


def test_experts_without_a_capacity_are_refused_where_shapes_are_fixed(returned: dict[str, Any]) -> None:
    said = returned["dropless"]
    assert re.search(r"(?s)NXDT-P037.*'layers\.0\.moe\.router'.*2 has room for every token", said)


def command(*overrides: str) -> list[str]:
    run = [PLUGIN, "trainer.accelerator=abacus", *SMALL[:2], *overrides]
    return [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *run]


def test_nxdt_train_runs_validates_saves_and_resumes_on_it(abacus_cache: str, tmp_path: Path) -> None:
    """The run's memory is not known, its peak is that of the profile."""
    common = (f"exp_manager.exp_dir={tmp_path}", "trainer.val_check_interval=2", "trainer.limit_val_batches=1")
    for last in (2, 4):
        done = processes.run(
            command(*common, f"trainer.max_steps={last}"),
            env={**os.environ, CACHE: abacus_cache},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    trained = [row for row in rows if "mfu" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert all(row["mfu"] > 0 for row in trained)
    store = LocalStorage(str(next(tmp_path.rglob("checkpoints"))))
    manifest = read_manifest(store, 4)
    assert sum(value.numel() for value in load_model(store, manifest).values()) == manifest.facts.elements
