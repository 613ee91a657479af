"""A run with an average of its weights, on every rank of a pool."""

from nxdt_core.config import load
from nxdt_core.run import train
from tests.train.small import SMALL


def averaged_run(where, *overrides):
    """Train in this rank's process; returns what the run's last row says of the loss."""
    config = load("recipe:llama-tiny", [*SMALL, f"exp_manager.exp_dir={where}", "name=run", *overrides])
    return train(config).loss
