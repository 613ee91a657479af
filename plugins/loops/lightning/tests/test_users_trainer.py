"""A ``Trainer`` of the user's own: every entry point in any order on one and on two ranks, monitors, arguments."""

import gc
import json
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from nxdt_plugin_lightning import NxdtDataModule, NxdtModule, NxdtStrategy
from nxdt_plugin_lightning.errors import NotOurBatch, NotOurModule, NotOurStrategy, TrainerArgumentsIgnored
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool
from pytorch_lightning import callbacks
from pytorch_lightning.demos.boring_classes import BoringModel

from nxdt_core.errors.data import SplitMissing
from nxdt_core.errors.training import NotOurCallback
from nxdt_core.run import train
from tests.sampling import slow
from tests.train.small import SMALL

PAGE = Path(__file__).parents[4] / "docs" / "lightning.md"
SHORT = ("trainer.limit_val_batches=2", "trainer.max_steps=3")


def trainer_of(config, **more):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {
        "max_steps": 3,
        "max_epochs": -1,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 2,
        "enable_checkpointing": False,
        **quiet,
    }
    return pl.Trainer(strategy=NxdtStrategy(config), accelerator="cpu", **{"devices": 1, **defaults, **more})


class Logging(callbacks.Callback):
    """Logs a value of each of at most two ranks, whose mean is 1."""

    def on_train_batch_end(self, trainer, module, *_):
        ranks = trainer.strategy.engine.ranks
        module.log("mean", 1.0 if ranks.world_size == 1 else 2.0 * ranks.rank, sync_dist=True)


def everything(directory, overrides):
    """Figures of each entry point, called one after the other on one model, in one trainer and in a second one."""
    from nxdt_core.config import load

    text = Path(directory) / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 40)
    files = (f"data.validation_files=[{text}]", f"data.test_files=[{text}]", "data.validation_fraction=0")
    config = load(
        "recipe:llama-tiny", [*SMALL, *SHORT, f"exp_manager.exp_dir={directory}", "name=run", *files, *overrides]
    )
    module, data, trainer = NxdtModule(config), NxdtDataModule(config), trainer_of(config, callbacks=[Logging()])
    found = {}
    trainer.fit(module, data)
    found["fit"] = float(trainer.callback_metrics["loss"])
    found["mean"] = float(trainer.callback_metrics["mean"])
    (figures,) = trainer.validate(module, data)
    found["validate"] = figures["val_loss"]
    (figures,) = trainer.test(module, data)
    found["test"] = figures["test_loss"]
    found["predict"] = [float(each["loss"]) for each in trainer.predict(module, data)]
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, data)
    found["more"] = float(trainer.callback_metrics["loss"])
    found["steps"] = module.session.state.step
    again = trainer_of(config)
    (figures,) = again.validate(module, data)
    found["other trainer"] = figures["val_loss"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (found,) = RankPool(1, lasting=True).run(everything, str(tmp_path_factory.mktemp("alone")), (), timeout_s=240)
    return found


def test_every_entry_point_works_after_every_other(alone):
    assert alone["steps"] == 5
    assert alone["mean"] == 1
    assert alone["validate"] == alone["test"] == pytest.approx(sum(alone["predict"]) / len(alone["predict"]), rel=1e-5)
    assert alone["more"] < alone["fit"]
    assert alone["other trainer"] < alone["validate"]


def losses_of_texts(directory, overrides):
    """The test loss of a model that was not trained, of two texts, and the error without a test split."""
    from nxdt_core.config import load

    found = []
    for text in ("In the beginning God created the heaven and the earth. ", "zyxwvutsrqponmlkjihgfedcba!", None):
        path = Path(directory) / f"{len(found)}.txt"
        path.write_text((text or "") * 80)
        files = () if text is None else (f"data.test_files=[{path}]",)
        config = load("recipe:llama-tiny", [*SMALL, *SHORT, f"exp_manager.exp_dir={directory}", *files, *overrides])
        trainer, module, data = trainer_of(config), NxdtModule(config), NxdtDataModule(config)
        if text is None:
            with raises(SplitMissing, match="names no test data"):
                trainer.test(module, data)
            continue
        found.append(trainer.test(module, data)[0]["test_loss"])
        judged = load(
            "recipe:llama-tiny", [*SMALL, *SHORT, "data.validation_fraction=0", f"data.validation_files=[{path}]"]
        )
        found.append(trainer_of(judged).validate(NxdtModule(judged), NxdtDataModule(judged))[0]["val_loss"])
    return found


def test_a_test_reads_the_test_split(tmp_path):
    ((first, same, second, also_same),) = RankPool(1, lasting=True).run(
        losses_of_texts, str(tmp_path), (), timeout_s=240
    )
    assert (first, second) == (same, also_same)
    assert first != second


@pytest.mark.parametrize(
    "layout",
    [slow(()), slow(("distributed_strategy.tensor_model_parallel_size=2",)), ("distributed_strategy.zero_stage=3",)],
    ids=["data parallel", "tensor parallel", "sharded"],
)
def test_two_ranks_find_what_one_finds(alone, tmp_path, layout):
    found = RankPool(2, lasting=True).run(everything, str(tmp_path), ("trainer.devices=2", *layout), timeout_s=240)
    assert found[0] == found[1]
    for name, value in alone.items():
        assert found[0][name] == pytest.approx(value, rel=1e-4), name


def programs():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def focal(directory, overrides):
    from nxdt_core.config import load

    config = load("recipe:llama-tiny", [*SMALL, *SHORT, f"exp_manager.exp_dir={directory}", "name=run", *overrides])
    namespace = {"NxdtModule": NxdtModule}
    exec(programs()[1], namespace)
    module, trainer = namespace["FocalModule"](config), trainer_of(config)
    trainer.fit(module, NxdtDataModule(config))
    return float(trainer.callback_metrics["loss"])


def test_the_loss_of_the_page_is_the_same_with_a_sharded_vocabulary(alone, tmp_path):
    (one,) = RankPool(1, lasting=True).run(focal, str(tmp_path / "1"), (), timeout_s=240)
    layout = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    two = RankPool(2, lasting=True).run(focal, str(tmp_path / "2"), layout, timeout_s=240)
    assert two == pytest.approx([one, one], rel=1e-4)
    assert one < alone["fit"]


def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = f"[*{SMALL!r}, 'trainer.max_steps=3', 'data.validation_fraction=0.002']"
    namespace = {}
    exec(
        programs()[0].replace('"recipe:llama-tiny"', f'"recipe:llama-tiny", {small}').replace("=10,", "=2,"), namespace
    )
    assert namespace["trainer"].global_step == 3
    assert "val_loss" in namespace["trainer"].callback_metrics


def test_figures_can_be_monitored(small_run, tmp_path):
    config = small_run(*SHORT, "data.seq_length=16")
    stop = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    best = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "pl", monitor="val_loss", save_top_k=1)
    logger = pl.loggers.CSVLogger(tmp_path, name="csv")
    trainer = trainer_of(
        config,
        max_steps=8,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        callbacks=[stop, best],
        enable_checkpointing=True,
        logger=logger,
    )
    trainer.fit(NxdtModule(config), NxdtDataModule(config))
    assert trainer.global_step == 2, "no validation was better by 100: the second one stops"
    assert best.best_model_score == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=0.1)
    assert {"loss", "grad_norm", "lr", "val_loss", "val_perplexity"} <= set(trainer.callback_metrics)
    header = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"loss", "grad_norm", "lr", "val_loss"} <= set(header)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"precision": "bf16-mixed"}, ("precision='bf16-mixed'", "precision.type")),
        ({"gradient_clip_val": 0.5}, ("gradient_clip_val=0.5", "trainer.gradient_clip_val")),
        ({"accumulate_grad_batches": 4}, ("accumulate_grad_batches=4", "data.global_batch_size")),
        ({"devices": 2}, ("devices=2", "the 1 processes that run")),
        ({"num_nodes": 2}, ("num_nodes=2", "the 1 processes that run")),
        ({"sync_batchnorm": True}, ("sync_batchnorm=True", "no batch norm")),
    ],
    ids=["precision", "clipping", "accumulation", "devices", "nodes", "batch norm"],
)
def test_arguments_that_would_do_nothing_are_refused(small_run, arguments, named):
    config = small_run(*SHORT)
    with raises(TrainerArgumentsIgnored) as caught:
        trainer_of(config, **arguments).fit(NxdtModule(config), NxdtDataModule(config))
    assert all(part in str(caught.value) for part in named)


def test_epochs_of_the_configuration_are_refused(small_run):
    config = small_run(*SHORT, "trainer.max_epochs=1")
    with raises(TrainerArgumentsIgnored, match=r"(?s)trainer\.max_epochs=1.*trainer\.max_steps"):
        trainer_of(config).fit(NxdtModule(config), NxdtDataModule(config))


class Average(pl.Callback):
    """An average of the weights, as callbacks for Lightning compute it."""

    def __init__(self):
        self.weights, self.gradients = {}, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(sum(p.grad is not None for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, weight in pl_module.named_parameters():
            self.weights[name] = 0.5 * self.weights.get(name, 0) + 0.5 * weight.detach().clone()


def test_callbacks_have_weights_and_gradients(small_run):
    config, average = small_run(*SHORT), Average()
    module = NxdtModule(config)
    trainer_of(config, callbacks=[average]).fit(module, NxdtDataModule(config))
    weights = dict(module.model.named_parameters())
    assert average.weights.keys() == weights.keys()
    assert average.gradients == [len(weights)] * 3
    assert not any(torch.equal(average.weights[name], weight) for name, weight in weights.items() if weight.ndim > 1)


class Unheard(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        """Lightning's own loop would call it."""


class UnheardModule(NxdtModule):
    def on_before_zero_grad(self, optimizer):
        """Lightning's own loop would call it."""


def test_hooks_that_nothing_calls_are_refused(small_run):
    config = small_run(*SHORT)
    with raises(TrainerArgumentsIgnored, match=r"(?s)Unheard\.on_after_backward.*on_before_optimizer_step"):
        trainer_of(config, callbacks=[Average(), Unheard()]).fit(NxdtModule(config), NxdtDataModule(config))
    with raises(TrainerArgumentsIgnored, match=r"UnheardModule\.on_before_zero_grad"):
        trainer_of(config).fit(UnheardModule(config), NxdtDataModule(config))


class Thaw(callbacks.BaseFinetuning):
    """At the time that Lightning calls it there are no weights: it would freeze nothing."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module)


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (lambda: callbacks.EMAWeightAveraging(), r"exp_manager\.ema"),
        (lambda: callbacks.StochasticWeightAveraging(1e-4), r"exp_manager\.ema"),
        (lambda: callbacks.GradientAccumulationScheduler({0: 2}), r"data\.global_batch_size"),
        (lambda: callbacks.BatchSizeFinder(), r"data\.micro_batch_size"),
        (lambda: callbacks.LearningRateFinder(), r"model\.optim\.lr"),
        (lambda: Thaw(), r"an adapter"),
        (lambda: callbacks.ModelPruning("l1_unstructured"), r"on_train_batch_end"),
    ],
    ids=["ema", "swa", "accumulation", "batch size", "learning rate", "finetuning", "pruning"],
)
def test_callbacks_of_lightning_that_cannot_work_are_refused(small_run, callback, instead):
    """Most ended with a traceback of Lightning; one that freezes weights froze none, and said nothing."""
    config, made = small_run(*SHORT), callback()
    with raises(TrainerArgumentsIgnored, match=rf"(?s){type(made).__name__}.*{instead}"):
        trainer_of(config, callbacks=[made]).fit(NxdtModule(config), NxdtDataModule(config))


def test_a_run_refuses_callbacks_of_lightning_and_says_what_replaces_them(small_run, tmp_path):
    """A Trainer of the user's own takes them."""
    (tmp_path / "savers.py").write_text(
        "from nxdt_core.api import Component, hookimpl\n"
        "from pytorch_lightning.callbacks import ModelCheckpoint\n"
        "class Saver(ModelCheckpoint):\n"
        "    def on_train_batch_end(self, trainer, *_): ...\n"
        "def saver(config, run_dir): return Saver(dirpath=run_dir)\n"
        "@hookimpl\n"
        "def nxdt_callbacks(): return [Component(name='saver', target=f'{__name__}:saver')]\n"
    )
    config = small_run(*SHORT, f"plugins.local=[{tmp_path}/savers.py]", "trainer.callbacks=[saver]")
    with raises(NotOurCallback, match=r"(?s)Saver.*on_train_batch_end → on_step_end.*nxdt-plugin-lightning"):
        train(config)


def test_another_module_and_other_data_are_named(small_run):
    config = small_run(*SHORT)
    with raises(NotOurModule, match="BoringModel"):
        trainer_of(config).fit(BoringModel())
    plain = torch.utils.data.DataLoader(torch.zeros(4, 8, dtype=torch.int64), batch_size=2)
    with raises(NotOurBatch, match="Tensor"):
        trainer_of(config, limit_val_batches=0).fit(NxdtModule(config), plain)


def test_another_strategy_is_named(small_run, tmp_path):
    config = small_run(*SHORT)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, default_root_dir=tmp_path)
    with raises(NotOurStrategy, match="SingleDeviceStrategy"):
        trainer.fit(NxdtModule(config), NxdtDataModule(config))


def test_the_figures_of_a_run_of_nxdt_train_are_not_logged_twice(small_run):
    from nxdt_core.run import train

    config = small_run("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=1")
    train(config)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.session.state.step == 3:
            raise ValueError("callback")


@pytest.mark.parametrize("fails", [slow(False), True])
def test_garbage_is_collected_between_steps_in_a_users_trainer(small_run, fails):
    enabled, found = gc.isenabled(), []
    config = small_run("trainer.gc_interval=2")
    module, trainer = NxdtModule(config), trainer_of(config, max_steps=5, callbacks=[Fails()] if fails else [])

    def collected(phase, info):
        if phase == "start" and not gc.isenabled():
            found.append((module.session.state.step, info["generation"]))

    gc.callbacks.append(collected)
    try:
        trainer.fit(module, NxdtDataModule(config))
    except ValueError:
        assert fails
    finally:
        gc.callbacks.remove(collected)
        trainer.strategy.close()
    assert found == [(1, 2), (2, 2)] if fails else [(1, 2), (2, 2), (4, 2)]
    assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
