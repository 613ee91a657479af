"""Ranks that a launcher started: they join by its variables, agree before the first step, and go down together.

Each rank calls the command line's ``main``, as ``torchrun -m nxdt_core`` and ``srun nxdt`` make processes do.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from nxdt_testing.ranks import RankPool, RanksFailed

from nxdt_core.cli import main
from tests.sampling import slow
from tests.train.small import SMALL

ARGUMENTS = (*SMALL, "checkpoint.enabled=false", "trainer.devices=2", "trainer.max_steps=4")

FAULTY = """
import os, signal, time
from nxdt_core.api import Callback, Component, hookimpl

class Slow(Exception):
    def __str__(self):
        time.sleep(1.5)
        return "a made-up bug"

class Faulty(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if (run.rank, run.step) == ({rank}, 1):
            run.session.step = lambda *_, **__: self.fail()

    def fail(self):
        {fault}

@hookimpl
def nxdt_callbacks():
    return [Component(name="faulty", target="faulty:Faulty", summary="Fails where a test wants it.")]
"""


def command(where, *more):
    return ["train", "recipe:llama-tiny", *ARGUMENTS, f"exp_manager.exp_dir={where}", *more]


def rank():
    return int(os.environ["RANK"])


def train(arguments):
    return main(arguments)


def train_with_plugin(directory, arguments):
    sys.path.insert(0, directory)
    return main(arguments)


def train_by_rank(arguments):
    return main(arguments[rank()])


def train_with_another_python(arguments):
    import platform

    if rank() == 1:
        platform.python_version = lambda: "3.99.0"
    return main(arguments)


def train_under_slurm(arguments):
    """As a task of ``srun``, which sets no other variables."""
    port, number = os.environ["MASTER_PORT"], os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(
        SLURM_PROCID=number,
        SLURM_NTASKS="2",
        SLURM_LOCALID=number,
        SLURM_JOB_NODELIST="127.0.0.[1-2]",
        SLURM_JOB_ID="4711",
        SLURM_STEP_ID="0",
        MASTER_PORT=port,
    )
    return main(arguments)


def train_or_stay_away(arguments):
    os.environ["NXDT_JOIN_TIMEOUT_S"] = "3"
    if rank() == 1:
        time.sleep(30)
    return main(arguments)


def train_with_signal_on_one_rank(arguments, metrics):
    """SIGTERM to rank 1 alone, once two steps are logged."""
    import threading

    def send():
        while not os.path.exists(metrics) or Path(metrics).read_text().count("\n") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank() == 1:
        threading.Thread(target=send, daemon=True).start()
    return main(arguments)


def fit_in_a_users_trainer(arguments):
    """Losses of four steps in a Trainer of one's own."""
    import pytorch_lightning as pl
    import torch
    from nxdt_plugin_lightning import NxdtDataModule, NxdtModule, NxdtStrategy

    from nxdt_core.config import load

    class Losses(pl.Callback):
        def __init__(self):
            self.seen, self.mean_rank = [], None

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(float(pl_module.last.loss.loss))
            if "BREAKS" in os.environ:
                raise ZeroDivisionError
            self.mean_rank = float(trainer.strategy.reduce(torch.tensor(float(trainer.global_rank))))
            self.ranks = pl_module.all_gather(torch.tensor(trainer.global_rank)).tolist()

    config, losses = load(arguments[1], arguments[2:]), Losses()
    trainer = pl.Trainer(
        strategy=NxdtStrategy(config),
        accelerator="cpu",
        devices=1,
        max_steps=4,
        max_epochs=-1,
        callbacks=[losses],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(NxdtModule(config), NxdtDataModule(config))
    return losses.seen, losses.mean_rank, losses.ranks, trainer.is_global_zero


def break_in_a_users_trainer(arguments):
    """Whether a rank is still in its process group after an error."""
    import torch.distributed as dist

    os.environ["BREAKS"] = "yes"
    with pytest.raises(ZeroDivisionError):
        fit_in_a_users_trainer(arguments)
    return dist.is_initialized()


@pytest.fixture(scope="module")
def pool():
    return RankPool(2)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, metric_rows):
    from nxdt_core.config import load
    from nxdt_core.run import train as train_here

    config = load("recipe:llama-tiny", command(tmp_path_factory.mktemp("one"), "trainer.devices=1")[2:])
    train_here(config)
    return {step: row["loss"] for step, row in metric_rows(config.run_dir).items()}


def failing(pool, function, *arguments):
    """What the ranks wrote, and their exit codes."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(function, *arguments, timeout_s=90)
    accounts = failed.value.accounts
    codes = {rank: text.partition("exit code ")[2].partition("\n")[0] for rank, text in accounts.items()}
    return "".join(accounts.values()), codes


@pytest.mark.parametrize("function", [slow(train), train_under_slurm])
def test_joined_ranks_train_as_one_process_does(pool, function, tmp_path, metric_rows, one_process):
    assert pool.run(function, command(tmp_path, "name=joined"), timeout_s=90) == [0, 0]
    losses = {step: row["loss"] for step, row in metric_rows(tmp_path / "joined").items()}
    assert losses == pytest.approx(one_process, abs=1e-5)
    assert len((tmp_path / "joined" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_users_own_trainer_on_two_ranks(pool, tmp_path, one_process):
    found = pool.run(fit_in_a_users_trainer, command(tmp_path), timeout_s=90)
    for seen, mean_rank, ranks, _ in found:
        assert seen == pytest.approx(list(one_process.values()), abs=1e-5)
        assert mean_rank == 0.5
        assert ranks == [0, 1]
    assert [first for *_, first in found] == [True, False]


def test_a_rank_that_breaks_stays_in_the_process_group(pool, tmp_path):
    """Leaving would wait for ranks that are stuck there, or fail them before the error is told."""
    assert pool.run(break_in_a_users_trainer, command(tmp_path), timeout_s=90) == [True, True]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_at_one_step(pool, tmp_path, metric_rows):
    """By default ``test_launch.py`` sends the signal to one rank of a launcher."""
    arguments = command(tmp_path, "name=stopped", "trainer.max_steps=100000")
    metrics = str(tmp_path / "stopped" / "metrics.jsonl")
    statuses = pool.run(train_with_signal_on_one_rank, arguments, metrics, timeout_s=90)
    assert statuses == [128 + signal.SIGTERM] * 2


def test_another_number_of_processes_than_configured_is_refused_once(pool, tmp_path):
    written, codes = failing(pool, train, command(tmp_path, "trainer.devices=4", "data.micro_batch_size=2"))
    assert codes == {0: "2", 1: "2"}
    assert written.count("[NXDT-P042] The environment started 2 processes") == 1
    assert "Rank " not in written


def test_a_wrong_configuration_is_told_once(pool, tmp_path):
    written, codes = failing(pool, train, command(tmp_path, "model.hidden=3"))
    assert codes == {0: "2", 1: "2"}
    assert written.count("[NXDT-C001]") == 1


def test_different_configurations_are_refused_by_key_rank_and_host(pool, tmp_path):
    arguments = [command(tmp_path, "model.optim.lr=0.1"), command(tmp_path, "model.optim.lr=0.2", "data.num_workers=1")]
    written, codes = failing(pool, train_by_rank, arguments)
    assert codes == {0: "2", 1: "2"}
    host = os.uname().nodename
    assert written.count("[NXDT-P047]") == 1
    assert f"do not run the same: model.optim.lr is 0.1 on rank 0 ({host}) and 0.2 on rank 1 ({host})." in written


def test_different_versions_are_refused_by_name(pool, tmp_path):
    written, codes = failing(pool, train_with_another_python, command(tmp_path))
    assert codes == {0: "2", 1: "2"}
    assert written.count("[NXDT-P047]") == 1
    assert "version of Python is " in written
    assert f"3.99.0 on rank 1 ({os.uname().nodename})" in written


def test_different_plugins_are_refused_by_name(pool, tmp_path):
    arguments = []
    for number in range(2):
        plugin = tmp_path / str(number) / "extra.py"
        plugin.parent.mkdir()
        plugin.write_text(f"# version {number}\n")
        arguments.append(command(tmp_path, f"plugins.local=[{plugin}]"))
    written, _ = failing(pool, train_by_rank, arguments)
    assert "[NXDT-P047]" in written
    assert "plugin extra is local" in written


def break_one(pool, where, rank, fault):
    (where / "faulty.py").write_text(FAULTY.format(rank=rank, fault=fault))
    arguments = command(where, f"plugins.local=[{where / 'faulty.py'}]", "trainer.callbacks=[faulty]")
    return failing(pool, train_with_plugin, str(where), arguments)


@pytest.mark.parametrize("broken", [0, slow(1)])
def test_a_rank_that_is_killed_takes_the_other_down_and_is_told_once(pool, tmp_path, broken):
    written, codes = break_one(pool, tmp_path, broken, "os.kill(os.getpid(), signal.SIGKILL)")
    assert codes == {broken: str(-signal.SIGKILL), 1 - broken: "1"}
    assert written.count(f"Rank {broken} on {os.uname().nodename} died") == 1
    assert "Traceback" not in written


@pytest.mark.parametrize("broken", [0, slow(1)])
def test_a_bug_of_one_rank_takes_the_other_down_and_is_told_once(pool, tmp_path, broken):
    """However long the broken rank takes to say so: the other waits in a collective and must not see it leave."""
    written, codes = break_one(pool, tmp_path, broken, "raise Slow")
    assert codes == {0: "1", 1: "1"}
    assert (
        written.count(f"Rank {broken} on {os.uname().nodename} failed:\nTraceback") == written.count("Traceback") == 1
    )
    assert written.count("Slow: a made-up bug") == 1


def test_a_rank_that_never_comes_is_named(pool, tmp_path, monkeypatch):
    monkeypatch.setattr("nxdt_testing.ranks._GRACE_S", 1.0)  # it sleeps for longer than anybody waits
    with pytest.raises(RanksFailed) as failed:
        pool.run(train_or_stay_away, command(tmp_path), timeout_s=20)
    assert "Of 2 ranks, 1 did not come within 3 s: rank 1." in failed.value.accounts[0]
