"""A run warns, once, of components with state that no checkpoint keeps."""

from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest

from nxdt_core.config import load
from nxdt_core.config.section import REQUIRED, keys_of
from nxdt_core.run import train
from nxdt_core.train import TrainSession, build
from nxdt_core.train.hidden_state import check_schedule, watch_optimizer
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

PARTS = Path(__file__).with_name("hidden_parts.py")
SHORT = ("trainer.max_steps=4", "data.global_batch_size=4", "checkpoint.enabled=false")
OPTIMIZERS = {
    "Counting": "'taken'",
    "Slow": "'copies.weights[0]'",
    "InGroups": "param_groups[0]['k']",
    "UnderAName": "state['all']",
    "OwnGenerator": "'generator'",
}


@pytest.fixture
def own_run(small_run):
    """The small run with sections of its own in place of the recipe's, and the components of ``hidden_parts.py``."""

    small = small_run(*SHORT).to_dict()

    def make(*, optim=None, sched=None, objective=None):
        values = deepcopy(small)
        values["plugins"] = {"local": [str(PARTS)]}
        values["model"]["optim"] = {"name": "sgd", "lr": 1e-3, "sched": sched or {"name": "constant"}} | (optim or {})
        values["objective"] = objective or values["objective"]
        return load(values)

    return make


def take_steps(config):
    """Train without a trainer, whose share is shown by the objective's test."""
    with TrainSession(config) as session:
        for batch in session.batches():
            session.step(batch)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "nxdt_core.train.hidden_state"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_state_elsewhere_is_told_once(own_run, caplog, name):
    take_steps(own_run(optim={"name": name}))
    (found,) = warnings(caplog)
    assert found.startswith(f"[NXDT-T022] Optimizer '{name}' (local) changes ")
    assert OPTIMIZERS[name] in found


@pytest.mark.parametrize("name", ["counted", "timed", "drawn"])
def test_a_schedule_that_depends_on_more_than_the_step_is_told_once(own_run, caplog, name):
    take_steps(own_run(sched={"name": name}))
    (found,) = warnings(caplog)
    assert found.startswith(f"[NXDT-T023] Learning-rate schedule '{name}' (local) gives step 0 the factor ")


def test_an_objective_that_changes_is_told_once(own_run, caplog):
    train(own_run(objective={"name": "tracking"}))
    (found,) = warnings(caplog)
    assert found.startswith("[NXDT-T024] Objective 'tracking' (local) changes 'mean'")


def test_nothing_is_said_of_what_is_saved_or_constant(own_run, caplog):
    take_steps(own_run(optim={"name": "Plain"}, sched={"name": "pure"}))
    assert warnings(caplog) == []


def test_only_the_first_steps_are_looked_at(own_run):
    config = own_run(optim={"name": "Looked"})
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    dataset = build.dataset(config, build.tokenizer(config)).split("train")
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    looks = []
    for micro_batches in islice(build.batches(config, engine, dataset), 5):
        train_step(model, optimizer, micro_batches, objective, schedule, state)
        looks.append(optimizer.inner.looked_at.count)
    assert looks == [1, 2, 3, 3, 3]


def builtin(kind, own_run):
    """Name of each built-in component, and values for the keys that its section must have."""
    for component in own_run().kernel.registry.all(kind):
        if component.plugin == "builtin":
            declared = keys_of(component.load_config())
            needed = {name for name, key in declared.items() if key.default is REQUIRED}
            needed |= {"warmup_steps"} & declared.keys()
            yield {"name": component.record.name, **dict.fromkeys(needed, 2)}


def test_no_built_in_optimizer_or_schedule_is_suspected(own_run, caplog):
    for optim in builtin("optimizer", own_run):
        config = own_run(optim=optim)
        with TrainSession(config) as session:
            watch_optimizer(session.optimizer.inner, config.selected("optimizer").component)
            for batch in session.batches():
                session.step(batch)
    for sched in builtin("schedule", own_run):
        config = own_run(sched=sched)
        schedule, last = build.schedule(config), config.run.model.optim.sched.max_steps
        check_schedule(schedule, config.selected("schedule").component, max_steps=last)
    assert warnings(caplog) == []
