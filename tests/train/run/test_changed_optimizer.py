"""A resume with another optimizer or other settings than the checkpoint has."""

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.errors.training import OptimizerChanged
from nxdt_core.run import train
from nxdt_core.train import TrainSession, build

STEPS = 2


def states(config):
    """Names of the optimizer state in a run's newest checkpoint."""
    store = build.storage(config)
    manifest = checkpoint.latest(store, warn=print)
    return {key.rpartition("/")[2] for key in manifest.tensors["optim"]}


def resumed(small_run, optim, *more, steps=STEPS + 1):
    return small_run(f"trainer.max_steps={steps}", f"model.optim={optim}", *more)


def section(name, *more):
    keys = ", ".join((f"name: {name}", "lr: 1.0e-3", "sched: {name: CosineAnnealing, max_steps: 40}", *more))
    return f"{{{keys}}}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (section("adamw"), section("sgd")),
        (section("sgd"), section("adamw")),
        (section("sgd", "momentum: 0.9"), section("sgd")),
        (section("sgd", "momentum: 0.9"), section("muon")),
    ],
    ids=["adamw-sgd", "sgd-adamw", "momentum-none", "sgd-muon"],
)
def test_another_optimizer_does_not_continue_with_saved_state(small_run, before, after):
    train(resumed(small_run, before, steps=STEPS))
    changed = resumed(small_run, after)
    with raises(OptimizerChanged, match=r"step-0+2 has the state of .*\s.*optimizer_on_change=reset"):
        train(changed)
    with TrainSession(changed) as session, raises(OptimizerChanged):
        session.resume()


def test_a_reset_keeps_weights_and_position_and_drops_the_state(small_run):
    first = resumed(small_run, section("adamw"), "exp_manager.ema.enable=true", steps=STEPS)
    train(first)
    changed = resumed(small_run, section("sgd"), "exp_manager.ema.enable=true", "checkpoint.optimizer_on_change=reset")
    with TrainSession(first) as before, TrainSession(changed) as after:
        before.resume()
        after.resume()
        held = after.model.state_dict()
        assert all(torch.equal(value, held[name]) for name, value in before.model.state_dict().items())
        assert after.state == before.state
        assert after.average
        assert not after.optimizer.state_dict()
    train(changed)
    assert states(changed) == {"ema"}


def test_keys_that_decide_no_state_may_change(small_run, capsys):
    train(small_run(f"trainer.max_steps={STEPS}"))
    train(small_run(f"trainer.max_steps={STEPS + 1}", "model.optim.lr=0.5", "model.optim.betas=[0.5,0.9]"))
    said = capsys.readouterr().err
    assert "model.optim.lr is now 0.5; the checkpoint was trained with " in said
    assert said.count("the checkpoint was trained with") == 2


def test_a_resume_names_settings_and_plugins_that_differ(small_run, tmp_path, capsys):
    plugin = tmp_path / "mine.py"
    plugin.write_text('"""Nothing yet."""\n')
    local = f"plugins.local=[{plugin}]"
    train(small_run(f"trainer.max_steps={STEPS}", local))
    train(small_run(f"trainer.max_steps={STEPS + 1}", local))
    said = capsys.readouterr().err
    assert "the checkpoint was trained with" not in said
    assert "plugins that differ" not in said
    plugin.write_text('"""Something."""\n')
    more = ("data.global_batch_size=4", "precision.type=autocast")
    train(small_run(f"trainer.max_steps={STEPS + 2}", local, *more))
    said = capsys.readouterr().err
    assert "data.global_batch_size is now 4; the checkpoint was trained with 8" in said
    assert "precision.type is now autocast" in said
    assert "plugins that differ from those of the checkpoint: mine (other code)" in said
