"""Optimizers, curves and parameter groups in the YAML: old names, values that cannot work, and what a note says."""

from __future__ import annotations

import pytest

from nxdt_core.builtins.optimizers.records import OPTIMIZERS
from nxdt_core.builtins.schedules.records import SCHEDULES

OPTIMIZERS_THERE = """
adamw adamw_fp32OptState sgd adam adadelta adamax adagrad rmsprop rprop novograd adafactor
"""
CURVES_THERE = """
LinearAnnealingWithWarmUp CosineAnnealing WarmupPolicy WarmupHoldPolicy SquareAnnealing NoamAnnealing WarmupAnnealing
StepLR ExponentialLR
"""
REQUIRED = {"NoamAnnealing": "d_model: 8", "NoamHoldAnnealing": "warmup_steps: 3", "StepLR": "step_size: 5"}
REQUIRED |= {"ExponentialLR": "gamma: 0.9"}


@pytest.mark.parametrize("name", OPTIMIZERS_THERE.split())
def test_optimizers_of_nxd_training_have_their_names(load, good, name):
    assert load(good, f"model.optim.name={name}").selected("optimizer").component.record.name == name


@pytest.mark.parametrize("name", CURVES_THERE.split())
def test_curves_of_nxd_training_have_their_names(load, good, name):
    section = ", ".join([f"name: {name}", *([REQUIRED[name]] if name in REQUIRED else [])])
    record = load(good, f"model.optim.sched={{{section}}}").selected("lr_scheduler").component.record
    assert name in (record.name, *record.aliases)


@pytest.mark.parametrize("record", [*OPTIMIZERS, *SCHEDULES], ids=lambda record: record.name)
def test_targets_and_sections_exist(load, good, record):
    key = "model.optim" if record in OPTIMIZERS else "model.optim.sched"
    slot = "optimizer" if record in OPTIMIZERS else "lr_scheduler"
    extra = [f"{key}.{REQUIRED[record.name].replace(': ', '=')}"] if record.name in REQUIRED else []
    selected = load(good, f"{key}.name={record.name}", *extra).selected(slot)
    assert callable(selected.component.load_target())
    assert type(selected.config).__name__ == record.config.rpartition(":")[2]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.optim.betas=[0.9,1.0]"], "model.optim.betas"),
        (["model.optim.eps=0"], "model.optim.eps"),
        (["model.optim.weight_decay=-1"], "model.optim.weight_decay"),
        (["model.optim.name=rprop", "model.optim.weight_decay=0.1"], "model.optim.weight_decay"),
        (["model.optim.name=rprop", "model.optim.etas=[1.5,1.2]"], "model.optim.etas"),
        (["model.optim.name=sgd", "model.optim.nesterov=true"], "model.optim.nesterov"),
        (["model.optim.name=sgd", "model.optim.betas=[0.9,0.95]"], "model.optim.betas"),
        (["model.optim.name=muon", "model.optim.adjust_lr=most"], "model.optim.adjust_lr"),
        (["model.optim.sched.warmup_steps=-1"], "model.optim.sched.warmup_steps"),
        (["model.optim.sched={name: CosineAnnealing, constant_steps: -1}"], "model.optim.sched.constant_steps"),
        (["model.optim.sched={name: WSD, decay_steps: 0}"], "model.optim.sched.decay_steps"),
        (["model.optim.sched={name: linear, min_lr: 2e-3}"], "model.optim.sched.min_lr"),
        (["model.optim.sched={name: StepLR, step_size: 5, warmup_steps: 9}"], "model.optim.sched.warmup_steps"),
        (["model.optim.sched={name: NoamAnnealing}"], "model.optim.sched.d_model"),
        (["model.optim.param_groups=[{lr: 1.0}]"], "model.optim.param_groups[0]"),
        (["model.optim.param_groups=[{params: a, rate: 1.0}]"], "model.optim.param_groups[0]"),
        (["model.optim.param_groups=[{params: a, lr: -1.0}]"], "model.optim.param_groups[0]"),
    ],
)
def test_a_value_that_cannot_work_is_named(report, good, overrides, key):
    (row,) = report(good, *overrides)
    assert row.split(": ")[1].startswith(key.partition("[")[0])


def test_a_curve_longer_than_the_run_is_told(load, good):
    told = (
        "model.optim.sched.max_steps: the curve ends at step 101, and the run before that, as trainer.max_steps is 100"
    )
    assert told in load(good, "model.optim.sched.max_steps=101").notes
    for steps in (100, 99):
        assert not [note for note in load(good, f"model.optim.sched.max_steps={steps}").notes if "curve" in note]


def test_parameter_groups_are_read_in_their_order(load, good):
    resolved = load(good, "model.optim.param_groups=[{params: '*.router.*', lr: 0.1}, {params: a, weight_decay: 0}]")
    first, second = resolved.run.model.optim.param_groups
    assert (first.params, first.lr, first.weight_decay) == ("*.router.*", 0.1, None)
    assert (second.params, second.lr, second.weight_decay) == ("a", None, 0.0)
