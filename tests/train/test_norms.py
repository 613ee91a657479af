"""The logged norms are those of all weights and of all gradients; the matrix of layouts holds them in each layout."""

import pytest
import torch

from nxdt_core import checkpoint
from nxdt_core.run.training import train
from nxdt_core.train import build


def saved(config, step):
    storage = build.storage(config)
    return checkpoint.load_model(storage, checkpoint.read_manifest(storage, step))


def norm_of(tensors):
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("precision", ["fp32", "mixed_precision"])
def test_the_norm_of_the_weights_is_logged_on_request(small_run, metric_rows, precision):
    config = small_run("trainer.max_steps=2", "exp_manager.log_parameter_norm=true", f"precision.type={precision}")
    train(config)
    rows = metric_rows(config.run_dir)
    assert rows[2]["parameter_norm"] == pytest.approx(norm_of(saved(config, 2).values()), rel=1e-6)
    assert rows[1]["parameter_norm"] != rows[2]["parameter_norm"]


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_norm_of_the_gradient_is_that_of_what_moves_the_weights_before_it_is_clipped(small_run, metric_rows, clip):
    """Plain gradient descent moves by the rate times the gradient."""
    config = small_run(
        "trainer.max_steps=2",
        "checkpoint.every_n_train_steps=1",
        f"trainer.gradient_clip_val={clip}",
        "model.optim={name: sgd, lr: 1.0, betas: null, weight_decay: 0.0}",
    )
    train(config)
    first, second = saved(config, 1), saved(config, 2)
    row = metric_rows(config.run_dir)[2]
    assert row["grad_norm"] > 0.1
    moved = norm_of([second[name] - first[name] for name in first])
    assert moved == pytest.approx(row["lr"] * (clip or row["grad_norm"]), rel=1e-4)
