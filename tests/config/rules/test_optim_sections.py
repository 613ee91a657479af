"""Optimizers, curves and parameter groups in the YAML: old names, values that cannot work, and what a note says."""

from __future__ import annotations

import pytest

from nxdt_core.builtins import nxdt_optimizers, nxdt_schedules
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.protocols.schedule import ScheduleHorizon

OPTIMIZERS_THERE = """
adamw adamw_fp32OptState sgd adam adadelta adamax adagrad rmsprop rprop novograd adafactor
"""
CURVES_THERE = """
LinearAnnealingWithWarmUp CosineAnnealing WarmupPolicy WarmupHoldPolicy SquareAnnealing NoamAnnealing WarmupAnnealing
StepLR ExponentialLR
"""
REQUIRED = {"NoamAnnealing": "d_model: 8", "NoamHoldAnnealing": "warmup_steps: 3", "StepLR": "step_size: 5"}
REQUIRED |= {"ExponentialLR": "gamma: 0.9"}
ENDLESS = ("constant", "NoamAnnealing", "StepLR", "ExponentialLR")


@pytest.mark.parametrize("name", OPTIMIZERS_THERE.split())
def test_optimizers_of_nxd_training_have_their_names(load, good, name):
    assert load(good, f"model.optim.name={name}").selected("optimizer").component.record.name == name


@pytest.mark.parametrize("name", CURVES_THERE.split())
def test_curves_of_nxd_training_have_their_names(load, good, name):
    section = ", ".join([f"name: {name}", *([REQUIRED[name]] if name in REQUIRED else [])])
    record = load(good, f"model.optim.sched={{{section}}}").selected("schedule").component.record
    assert name in (record.name, *record.aliases)


@pytest.mark.parametrize("record", [*nxdt_optimizers(), *nxdt_schedules()], ids=lambda record: record.name)
def test_targets_and_sections_exist(load, good, record):
    key = "model.optim" if record in nxdt_optimizers() else "model.optim.sched"
    slot = "optimizer" if record in nxdt_optimizers() else "schedule"
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


@pytest.mark.parametrize("record", nxdt_schedules(), ids=lambda record: record.name)
def test_a_curve_longer_than_the_run_is_told(load, good, record):
    told = (
        "model.optim.sched.max_steps: the schedule ends at step 101, but the run ends earlier: trainer.max_steps is 100"
    )
    extra = f", {REQUIRED[record.name]}" if record.name in REQUIRED else ""

    def notes(steps):
        return load(good, f"model.optim.sched={{name: {record.name}, max_steps: {steps}{extra}}}").notes

    ends = record.name not in ENDLESS
    idle = f"model.optim.sched.max_steps: no effect, since the schedule {record.name} does not read it"
    assert (told in notes(101)) == ends
    assert (idle in notes(101)) == (idle in notes(99)) == (not ends)
    assert not [note for note in notes(100) if "max_steps" in note]


@pytest.mark.parametrize(
    "record", [each for each in nxdt_schedules() if each.name not in ENDLESS], ids=lambda each: each.name
)
def test_a_schedule_shorter_than_the_run_is_noted_with_the_rate_that_remains(load, good, record):
    extra = f", {REQUIRED[record.name]}" if record.name in REQUIRED else ""
    config = load(good, f"model.optim.sched={{name: {record.name}, max_steps: 60, min_lr: 1e-4{extra}}}")
    noted = (
        "model.optim.sched.max_steps: the schedule ends at step 60, but the run ends later: trainer.max_steps is 100; "
        "the learning rate then stays at min_lr, 0.0001"
    )
    assert noted in config.notes
    section = config.selected("schedule")
    factor = section.component.load_target()(section.config, ScheduleHorizon(max_steps=60, lr=1e-3))
    assert [factor(step) for step in range(61, 100)] == pytest.approx([0.1] * 39)


@pytest.mark.parametrize("name", REQUIRED)
def test_what_a_schedule_cannot_do_without_is_required(load, good, name):
    key = REQUIRED[name].partition(":")[0]
    with pytest.raises(ConfigError, match=rf"model\.optim\.sched\.{key}: required key is missing"):
        load(good, f"model.optim.sched={{name: {name}, max_steps: 60}}")


def test_a_warmup_longer_than_a_run_that_ends_before_its_schedule_is_noted(load, good):
    notes = load(good, "model.optim.sched={name: CosineAnnealing, warmup_steps: 150, max_steps: 200}").notes
    assert notes[0] == (
        "model.optim.sched.warmup_steps: the rate only rises, since trainer.max_steps is 100"
        " and warm-up takes 150 steps"
    )


def test_a_schedule_without_an_end_warms_up_beyond_max_steps_of_the_schedule(load, good):
    (note,) = load(good, "model.optim.sched={name: constant, warmup_steps: 50, max_steps: 40}").notes
    assert note.startswith("model.optim.sched.max_steps: no effect")


PARTS = [
    ("name: CosineAnnealing, constant_steps: {}", 0),
    ("name: CosineAnnealing, warmup_steps: 30, constant_steps: {}", 30),
    ("name: PolynomialDecayAnnealing, warmup_steps: 30, hold_steps: {}", 30),
    ("name: WarmupHoldPolicy, warmup_steps: 30, hold_steps: {}", 30),
    ("name: NoamHoldAnnealing, warmup_steps: 30, hold_steps: {}", 30),
    ("name: WSD, decay_steps: {}", 0),
    ("name: WSD, warmup_steps: 30, decay_steps: {}", 30),
]


@pytest.mark.parametrize(("section", "warmup"), PARTS)
def test_parts_that_are_more_than_their_curve_are_refused(load, good, report, section, warmup):
    key = section.rpartition(", ")[2].partition(":")[0]
    fits = f"model.optim.sched={{{section.format(40 - warmup)}, max_steps: 40}}"
    assert load(good, fits).run.model.optim.sched.max_steps == 40
    (row,) = report(good, f"model.optim.sched={{{section.format(41 - warmup)}, max_steps: 40}}")
    assert row.startswith(f"command line: model.optim.sched.{key}: ")
    assert f"{key} {41 - warmup}" in row
    assert ("warmup_steps 30 and " in row) == bool(warmup)
    assert "more than the 40 steps of the schedule" in row
    assert "set model.optim.sched.max_steps to at least 41" in row
    assert row.endswith("[NXDT-C016]")


def test_a_run_that_is_cut_short_keeps_a_curve_with_steps_of_its_own(load, good, report):
    curve = "model.optim.sched={name: WSD, warmup_steps: 5, decay_steps: 20, max_steps: 100}"
    assert load(good, curve, "trainer.max_steps=10").run.model.optim.sched.max_steps == 100
    followed = "model.optim.sched={name: WSD, warmup_steps: 5, decay_steps: 20}"
    assert len(report(good, followed, "trainer.max_steps=10")) == 1
    warmup = "model.optim.sched={name: CosineAnnealing, warmup_steps: 50}"
    (note,) = load(good, warmup, "trainer.max_steps=10").notes
    assert "the rate only rises" in note


def test_parameter_groups_are_read_in_their_order(load, good):
    resolved = load(good, "model.optim.param_groups=[{params: '*.router.*', lr: 0.1}, {params: a, weight_decay: 0}]")
    first, second = resolved.run.model.optim.param_groups
    assert (first.params, first.lr, first.weight_decay) == ("*.router.*", 0.1, None)
    assert (second.params, second.lr, second.weight_decay) == ("a", None, 0.0)
