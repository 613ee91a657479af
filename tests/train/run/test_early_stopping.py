"""Early stopping: the validation that ends a run, the same on all ranks, and what a later start makes of it."""

import math
from types import SimpleNamespace

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.config.schema import EarlyStoppingParams, mode_of
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.training import MetricNotLogged
from nxdt_core.run import train
from nxdt_core.run.callbacks.stopping import EarlyStop
from nxdt_core.train import build
from tests.train.ema_run import averaged_run

PARAMS = "exp_manager.early_stopping_callback_params"
ON = ("exp_manager.create_early_stopping_callback=true", "trainer.val_check_interval=1", "trainer.limit_val_batches=1")
EVERY_OTHER = "trainer.val_check_interval=2"
HOPELESS = (*ON, f"{PARAMS}.patience=2", f"{PARAMS}.min_delta=100")
"""No validation after the first is better by that much: the third one ends the run."""


def test_it_stops_saved_once_nothing_has_improved_for_long_enough(small_run, capsys):
    config = small_run("trainer.max_steps=20", *HOPELESS, EVERY_OTHER)
    summary = train(config)
    assert (summary.step, summary.exit_status) == (6, 0)
    assert "step 6: early stopping. val_loss has not improved in 2 validations (best: " in capsys.readouterr().err
    assert checkpoint.latest(build.storage(config), warn=print).step == 6


def test_a_run_that_learns_goes_on(small_run):
    assert train(small_run("trainer.max_steps=4", *ON, f"{PARAMS}.patience=1")).step == 4


def test_it_goes_on_counting_after_a_resume(small_run):
    assert train(small_run("trainer.max_steps=2", *HOPELESS)).step == 2
    assert train(small_run("trainer.max_steps=20", *HOPELESS)).step == 3


def test_a_stopped_run_stays_stopped_until_it_may_wait_longer(small_run, capsys):
    train(small_run("trainer.max_steps=20", *HOPELESS))
    assert train(small_run("trainer.max_steps=20", *HOPELESS)).step == 3
    assert "early stopping: val_loss had not improved in 2 validations" in capsys.readouterr().err
    assert train(small_run("trainer.max_steps=20", *HOPELESS, f"{PARAMS}.patience=3")).step == 4


def test_min_steps_holds_it(small_run):
    assert train(small_run("trainer.max_steps=20", *HOPELESS, EVERY_OTHER, "trainer.min_steps=7")).step == 8


def test_it_judges_a_metric_of_the_training(small_run):
    better = ("model.optim.lr=0", "model.optim.sched.min_lr=0", f"{PARAMS}.monitor=grad_norm", f"{PARAMS}.mode=max")
    assert train(small_run("trainer.max_steps=20", *HOPELESS, *better)).step == 3


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *((name, "min") for name in ("val_loss", "loss", "val_perplexity/books", "val_kd_loss", "nll_loss")),
        *((name, "max") for name in ("step", "consumed_tokens", "reward", "val_reward", "rewards/match")),
        *((name, "max") for name in ("val_rewards/margins", "rewards/accuracies", "val_accuracy/books")),
        *((name, "max") for name in ("top1_agreement",)),
        *((name, None) for name in ("grad_norm", "reward_std", "rewards/rejected", "kl", "lossless", "tokens_per_s")),
    ],
)
def test_whether_a_small_value_is_good_follows_the_metrics_name(small_run, metric, mode):
    for params, switch in ((PARAMS, ON), ("checkpoint", ())):
        given = (*switch, f"{params}.monitor={metric}")
        assert mode_of(metric) == mode
        if mode is None:
            with pytest.raises(
                ConfigError, match=rf"{metric}.*does not say whether(.|\n)*Set {params}.mode to min or max"
            ):
                small_run("trainer.max_steps=4", *given)
            assert small_run("trainer.max_steps=4", *given, f"{params}.mode=min")


def test_a_reward_that_rises_does_not_stop_the_run():
    judge = EarlyStop(EarlyStoppingParams(monitor="reward", patience=1))
    ranks = SimpleNamespace(any_rank=lambda flag: flag)
    session = SimpleNamespace(engine=SimpleNamespace(ranks=ranks))
    run = SimpleNamespace(step=1, stopping=False, say=print, session=session)
    for value, stops in ((0.1, False), (0.2, False), (0.15, True)):
        run.metrics = {"reward": value}
        judge.on_validation_end(run)
        assert run.stopping is stops


def test_a_first_figure_that_is_no_number_is_not_taken_for_the_best():
    judge = EarlyStop(EarlyStoppingParams(check_finite=False, patience=3))
    ranks = SimpleNamespace(any_rank=lambda flag: flag)
    run = SimpleNamespace(
        step=1, stopping=False, say=print, session=SimpleNamespace(engine=SimpleNamespace(ranks=ranks))
    )
    for value in (math.nan, math.nan, 2.0, 1.0):
        run.metrics = {"val_loss": value}
        judge.on_validation_end(run)
        assert not run.stopping
    assert (judge.state_dict()["best"], judge.state_dict()["waited"]) == (1.0, 0)


def test_a_threshold_stops_at_once(small_run):
    assert train(small_run("trainer.max_steps=20", *ON, f"{PARAMS}.stopping_threshold=100.0")).step == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_metric_that_nobody_logs_is_named_with_those_that_exist(small_run, strict):
    config = small_run("trainer.max_steps=2", *ON, f"{PARAMS}.monitor=accuracy", f"{PARAMS}.strict={strict}")
    if not strict:
        assert train(config).step == 2
        return
    with raises(MetricNotLogged, match=r"'accuracy'.*'val_loss'"):
        train(config)


def test_a_run_without_validation_is_refused(small_run):
    with pytest.raises(ConfigError, match="early stopping judges after each validation, and the run has none"):
        small_run("trainer.max_steps=4", "exp_manager.create_early_stopping_callback=true")


def test_options_without_the_switch_are_noted(small_run):
    notes = small_run("trainer.max_steps=4", f"{PARAMS}.patience=2").notes
    assert f"{PARAMS}.patience: no effect, since exp_manager.create_early_stopping_callback is not set" in notes


@pytest.mark.slow  # launch/test_launch.py stops ranks
def test_all_ranks_stop_at_one_step(tmp_path, small_run):
    more = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "trainer.max_steps=20")
    steps = RankPool(2).run(averaged_run, str(tmp_path), *more, *HOPELESS, timeout_s=120)
    assert steps[0] == steps[1]
    assert checkpoint.latest(build.storage(small_run("trainer.max_steps=20")), warn=print).step == 3
