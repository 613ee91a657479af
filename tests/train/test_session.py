"""A loop of one's own over a session does what ``nxdt train`` does, on one rank and on several."""

import gc
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager
from nxdt_core.errors.checkpoints import CheckpointDamaged
from nxdt_core.run import train
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import capture_rng, restore_rng, seed_all
from tests import processes
from tests.checkpoint.saving import save_checkpoint
from tests.launch.launching import environment
from tests.train.small import SMALL

UNUSED = ("pytorch_lightning", "torchmetrics", "scipy", "transformers", "matplotlib", "botocore")
"""What no run needs on the host with the byte tokenizer."""
FEW = "data.validation_fraction=0.004"


def losses_of(session, steps):
    """Of the session's loop until ``steps`` steps are done."""
    found = []
    for batch in session.batches():
        found.append(float(session.step(batch).loss.loss))
        if session.state.step == steps:
            break
    return found


def weights_of(session):
    return {name: value.clone() for name, value in session.model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_session_equals_nxdt_train_bitwise(small_run, metric_rows, weights):
    config = small_run("trainer.max_steps=6")
    train(config)
    with TrainSession(config) as session:
        losses = losses_of(session, 6)
        assert losses == [row["loss"] for row in metric_rows(config.run_dir).values()]
        saved = weights(config)
        assert all(torch.equal(value, saved[name]) for name, value in session.model.state_dict().items())
        assert (session.state.step, session.state.consumed_samples) == (6, 48)


def test_batches_end_with_the_steps_of_the_configuration(small_run):
    with TrainSession(small_run("trainer.max_steps=3")) as session:
        assert len(losses_of(session, None)) == 3
        assert list(session.batches()) == []


def test_a_session_saves_and_resumes(small_run):
    config = small_run("trainer.max_steps=6", "exp_manager.ema.enable=true", "exp_manager.ema.decay=0.9")
    with TrainSession(config) as session:
        losses, whole, average = losses_of(session, 6), weights_of(session), session.average.state_dict()
    with TrainSession(config) as session:
        assert session.resume() is None
        first = losses_of(session, 2)
        manifest = session.save(extra={"mine": [1, 2]})
    with TrainSession(config) as session:
        assert session.load_checkpoint(build.storage(config), manifest) == {"mine": [1, 2]}
    with TrainSession(config) as session:
        assert session.resume().step == session.state.step == 2
        assert first + losses_of(session, 6) == losses
        assert equal(weights_of(session), whole)
        kept = session.average.state_dict()
        assert all(torch.equal(piece.tensor, kept[name].tensor) for name, piece in average.items())


NO_STATES = {
    "empty": {},
    "counters missing": {"train": None},
    "counters of another type": {"train": {"consumed_tokens": "many"}},
    "position of another type": {"train": {"data": [1]}},
    "generators missing": {"rng": None},
    "generator of another shape": {"rng": {"torch": torch.zeros(3)}},
    "nothing of the loop": {"extra": None},
}
"""Changes to a state; None takes a key away."""


@pytest.mark.parametrize("kind", NO_STATES)
def test_a_state_that_no_run_has_written_is_damage(small_run, kind):
    config = small_run("trainer.max_steps=1")
    with TrainSession(config) as session:
        losses_of(session, 1)
        parts = {"model": session.model.state_dict(), "optimizer": session.optimizer.state_dict()}
        state = {"train": session.state.to_dict(), "rng": capture_rng(session.engine.device), "extra": {}}
        for name, change in NO_STATES[kind].items():
            state[name] = {**state[name], **change} if change is not None else None
        state = {name: value for name, value in state.items() if value is not None and NO_STATES[kind]}
        facts = CheckpointFacts(consumed_samples=8, mesh=dict(session.engine.rank_info.mesh))
        save_checkpoint(build.storage(config), step=1, state=state, facts=facts, **parts)
    with TrainSession(config) as session, pytest.raises(CheckpointDamaged, match="its state is not that of a run"):
        session.resume()


def test_a_session_saves_while_it_trains(small_run):
    config = small_run("trainer.max_steps=6")
    with TrainSession(config) as session:
        losses, whole = losses_of(session, 6), weights_of(session)
    with TrainSession(config) as session:
        first = losses_of(session, 2)
        manager = CheckpointManager(build.storage(config), ranks=session.engine.ranks)
        assert session.save(manager, asynchronous=True)
        with torch.no_grad():
            for _, parameter in session.model.named_parameters():
                parameter.zero_()
        manager.wait()
    with TrainSession(config) as session:
        session.resume()
        assert first + losses_of(session, 6) == losses
        assert equal(weights_of(session), whole)


def test_weights_alone_leave_counters_and_optimizer(small_run):
    config = small_run("trainer.max_steps=6")
    with TrainSession(config) as session:
        losses_of(session, 2)
        manifest, trained = session.save(), weights_of(session)
    with TrainSession(config) as session:
        before = session.optimizer.state_dict()
        session.load_checkpoint(build.storage(config), manifest, weights_only=True)
        assert equal(weights_of(session), trained)
        assert (session.state.step, session.resumed) == (0, None)
        assert session.optimizer.state_dict().keys() == before.keys()


def test_validation_is_the_mean_over_loss_tokens_whatever_the_batch(small_run, metric_rows):
    found = []
    for size in (2, 8):
        with TrainSession(small_run(f"data.global_batch_size={size}", "data.micro_batch_size=2", FEW)) as session:
            (name, loss), *rest = session.evaluate().items()
            assert (name, rest) == ("", [])
            found.append(loss)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def rank_loop(overrides):
    """Losses and samples of this rank, which a launcher such as ``torchrun`` has started."""
    rows, samples = [], []
    with TrainSession.load("recipe:llama-tiny", overrides) as session:
        for batch in session.batches():
            samples += [
                str(part.input_ids[row].tolist()) for part in batch.micro_batches for row in range(part.samples)
            ]
            rows.append(float(session.step(batch).loss.loss))
        session.save()
    return rows, samples


def test_two_ranks_take_different_samples_and_train_as_the_command_line(tmp_path, metric_rows):
    run = [*SMALL, "trainer.max_steps=3", f"exp_manager.exp_dir={tmp_path}"]
    (losses, samples), (others, more_samples) = RankPool(2).run(rank_loop, [*run, "name=mine"], timeout_s=200)
    assert losses == others
    assert len(set(samples) | set(more_samples)) == 3 * 8
    command = [
        sys.executable,
        "-m",
        "nxdt_core",
        "train",
        "recipe:llama-tiny",
        *run,
        "trainer.devices=2",
        "name=theirs",
    ]
    processes.run(command, env=environment(), capture_output=True, check=True, timeout=200)
    assert losses == [row["loss"] for row in metric_rows(tmp_path / "theirs").values()]


def test_random_generators_come_back():
    import random

    import numpy as np

    seed_all(7)
    state = capture_rng(torch.device("cpu"))
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(1)))  # noqa: E731
    first = draw()
    assert draw() != first
    restore_rng(state, torch.device("cpu"))
    assert draw() == first


@pytest.mark.parametrize("same", [True, False])
def test_random_generators_come_back_in_the_same_layout_only(small_run, same):
    config = small_run("trainer.max_steps=2")
    with TrainSession(config) as session:
        torch.manual_seed(11)
        saved, manifest = torch.get_rng_state(), session.save()
    if not same:
        manifest = replace(manifest, facts=replace(manifest.facts, mesh={**manifest.facts.mesh, "dp": 2}))
    with TrainSession(config) as session:
        torch.manual_seed(22)
        before = torch.get_rng_state()
        session.load_checkpoint(build.storage(config), manifest)
        assert torch.equal(torch.get_rng_state(), saved if same else before)


IMPORTS = """
import inspect, json, sys
called = set()

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename != "<string>":  # of dataclasses
        called.add(f"{frame.f_globals.get('__name__')}.{code.co_name}")

from nxdt_core.cli import main
sys.setprofile(profile)
assert main([*sys.argv[1:], "name=unsaved", "checkpoint.enabled=false"]) == 0
sys.setprofile(None)
unsaved = list(sys.modules)
assert main(sys.argv[1:]) == 0
print(json.dumps({"called": sorted(called), "unsaved": unsaved, "saved": list(sys.modules)}))
"""
OFF = (
    *(f"nxdt_core.checkpoint.{name}" for name in ("commit", "foreign", "ownership", "read", "signing", "storage")),
    *("nxdt_core.checkpoint.stores", "nxdt_core.checkpoint.write", "nxdt_core.hf", "nxdt_core.train.weights.export"),
    *(f"nxdt_core.run.callbacks.{name}" for name in ("checkpoints", "monitor", "profiler", "prometheus")),
    *("http.server", "nxdt_core.system.http_server"),
)
"""Modules of what a run leaves out that saves nothing and has neither a monitor nor a profiler."""


def test_a_run_imports_and_calls_only_what_it_uses(tmp_path):
    words = ["train", "recipe:llama-tiny", *SMALL, "trainer.max_steps=1", f"exp_manager.exp_dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *words], check=True, capture_output=True, text=True)
    names = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in UNUSED if name in names["saved"]] == []
    assert [name for name in names["unsaved"] if name.startswith(OFF)] == []
    at_import = ("<dictcomp>", "__getattr__")  # of tables of names
    calls = [
        name for name in names["called"] if name.startswith("nxdt_core.checkpoint") and not name.endswith(at_import)
    ]
    assert calls == []
    assert any(name.startswith("nxdt_core.train.step.") for name in names["called"])
    assert any(name.startswith("nxdt_core.checkpoint.write") for name in names["saved"])


def test_a_session_collects_garbage_between_steps_and_leaves_the_collector_as_it_was(small_run):
    enabled, found = gc.isenabled(), []

    def collected(phase, info):
        if phase == "start":
            found.append((session.state.step, gc.isenabled(), info["generation"]))

    with TrainSession(small_run("trainer.max_steps=5", "trainer.gc_interval=2")) as session:
        gc.callbacks.append(collected)
        try:
            losses_of(session, None)
        finally:
            gc.callbacks.remove(collected)
    assert [each for each in found if not each[1]] == [(1, False, 2), (2, False, 2), (4, False, 2)]
    assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
