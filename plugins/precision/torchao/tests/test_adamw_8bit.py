"""``model.optim.name: adamw_8bit``: a quarter of AdamW's state, its losses, and checkpoints that fit any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from nxdt_plugin_torchao.adamw_8bit import AdamW8bit
from nxdt_plugin_torchao.config import AdamW8bitConfig
from nxdt_plugin_torchao.errors import No8bitStateHere
from nxdt_testing.errors import raises
from nxdt_testing.optimizer_contract import OptimizerContract
from nxdt_testing.ranks import RankPool
from torch import nn

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.estimate.memory import optimizer_state
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import TrainSession, build
from nxdt_core.train.optimizers.config import AdamWConfig
from nxdt_core.train.optimizers.elementwise import adamw
from nxdt_core.train.plan import plan
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.sampling import shortened, slow_except, takes_all

STRATEGY = "distributed_strategy."
ROWS, SEQ, STEPS = 4, 16, 10
SMALL_BLOCKS = ("model.optim.block_size=8",)
"""Tensor parallel ranks cut rows of 32 and 64 elements between them."""
LAYOUTS = {
    "one": (1, ()),
    "zero1": (2, (f"{STRATEGY}zero_stage=1",)),
    "zero2": (2, (f"{STRATEGY}zero_stage=2",)),
    "zero3": (2, (f"{STRATEGY}zero_stage=3",)),
    "unsharded": (2, (f"{STRATEGY}zero1=false",)),
    "tp2": (2, (f"{STRATEGY}tensor_model_parallel_size=2", *SMALL_BLOCKS)),
    "tp2-within-blocks": (2, (f"{STRATEGY}tensor_model_parallel_size=2", "model.optim.block_size=24")),
    "tp2-zero3": (4, (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}zero_stage=3", *SMALL_BLOCKS)),
    "padded-heads": (
        2,
        (
            f"{STRATEGY}tensor_model_parallel_size=2",
            f"{STRATEGY}pad_heads=true",
            "model.num_attention_heads=3",
            "model.num_kv_heads=3",
            "model.head_dim=8",
            *SMALL_BLOCKS,
        ),
    ),
    "pp2": (2, (f"{STRATEGY}pipeline_model_parallel_size=2",)),
    "ep2": (2, (f"{STRATEGY}expert_model_parallel_size=2", "model.name=mixtral", "model.moe={num_experts: 4}")),
    "masters": (2, ("precision.type=mixed_precision", f"{STRATEGY}zero_stage=3")),
    "rounded": (1, ("precision.type=bf16SR",)),
    "rounded-bfloat16": (1, ("precision.type=bf16SR", "precision.optimizer_state=bfloat16")),
    "rounded-zero1": (2, ("precision.type=bf16SR", f"{STRATEGY}zero_stage=1")),
}


class TestAdamW8bit(OptimizerContract):
    """With 8 bits for all matrices, in blocks that no tensor parallel rank cuts. The defaults give them float32."""

    sharded = True

    def tries(self, layout, config):
        """The moves between layouts below show nearly the same."""
        return takes_all(config)

    @pytest.fixture
    def factory(self):
        return AdamW8bit

    @pytest.fixture
    def section(self):
        return AdamW8bitConfig(lr=0.01, weight_decay=0.1, block_size=2, min_8bit_size=0)


def test_rows_that_are_shorter_than_a_block_have_float32_state():
    parameters = {width: nn.Parameter(torch.ones(256, width)) for width in (255, 256)}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW8bit([_group(parameter) for parameter in parameters.values()], AdamW8bitConfig())
    optimizer.step()
    dtypes = {width: optimizer.state[parameter]["exp_avg"].dtype for width, parameter in parameters.items()}
    assert dtypes == {255: torch.float32, 256: torch.uint8}


def test_bytes_of_state_are_two_per_element_and_the_scales():
    parameter = nn.Parameter(torch.ones(64, 1024))
    parameter.grad = torch.ones_like(parameter)
    groups = [{"params": [parameter], "names": ["weight"], "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = AdamW8bit(groups, AdamW8bitConfig())
    optimizer.step()
    size = sum(value.nbytes for value in optimizer.state[parameter].values() if value.dim())
    assert size / parameter.numel() == 2 + 2 * 4 / 256
    estimated = optimizer_state(AdamW8bit, AdamW8bitConfig(), torch.float32)((64, 1024), True)
    assert (estimated.held, estimated.saved) == (size, 8 * parameter.numel())
    assert optimizer_state(adamw, AdamWConfig(), torch.float32)((64, 1024), True).held == 8 * parameter.numel()


def test_a_plan_counts_the_smaller_state():
    small = ("trainer.accelerator=cpu", "data.global_batch_size=2", "data.micro_batch_size=1")
    keys = ("model.optim.name=adamw",), ("model.optim.name=adamw_8bit", "model.optim.block_size=64")
    configs = [load("recipe:llama-tiny", [*small, *own]) for own in keys]
    wide, narrow = (plan(config).estimate for config in configs)
    with TrainSession(configs[1]) as session:
        session.step(next(session.batches()))
        held = [value for state in session.optimizer.inner.state.values() for value in state.values()]
    assert narrow.ranks[0].memory.optimizer == sum(value.nbytes for value in held if value.dim())
    assert narrow.ranks[0].memory.optimizer < wide.ranks[0].memory.optimizer / 3
    assert narrow.checkpoint_bytes == wide.checkpoint_bytes


def test_updates_are_near_those_of_adamw():
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(32, 512, generator=draw)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    made = (
        AdamW8bit([_group(weights[0])], AdamW8bitConfig()),
        adamw([_group(weights[1])], AdamWConfig()),
    )
    for _ in range(20):
        gradient = torch.randn(start.shape, generator=draw)
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved, expected = (weight.detach() - start for weight in weights)
    assert (moved - expected).norm() < 0.03 * expected.norm()


def _group(parameter):
    return {"params": [parameter], "names": ["weight"], "lr": 1e-3, "weight_decay": 0.1}


def test_other_devices_are_refused():
    with raises(No8bitStateHere, match="this device is xla"):
        AdamW8bit.check_device(torch.device("xla"))


STOCK = "model.optim.name=adamw"


def configured(directory: Path, *overrides: str):
    small = ("model.optim.min_8bit_size=1024", "model.optim.block_size=16")
    own = () if STOCK in overrides else ("model.optim.name=adamw_8bit", *small)
    return load(
        "recipe:llama-tiny",
        [
            *("trainer.accelerator=cpu", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64"),
            *("model.num_attention_heads=4", "model.num_kv_heads=2", "precision.type=fp32"),
            *("model.optim.lr=1e-2", "model.optim.sched.name=constant"),
            *(f"data.seq_length={SEQ}", f"data.global_batch_size={ROWS}", "data.micro_batch_size=1"),
            f"exp_manager.exp_dir={directory}",
            *own,
            *overrides,
        ],
    )


class _Run:
    """A model and an optimizer on one repeated batch."""

    def __init__(self, config, engine) -> None:
        self.config, self.engine, self.state = config, engine, TrainState()
        self.model = initialize_parallel_model(config, engine)
        self.optimizer = initialize_parallel_optimizer(config, engine, self.model)
        ids = torch.randint(272, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))
        place = engine.rank_info
        rows = [row for row in range(ROWS) if row * place.dp_size // ROWS == place.dp_rank]
        self.batches = [Batch(input_ids=ids[row : row + 1, :-1], labels=ids[row : row + 1, 1:]) for row in rows]
        self.objective, self.schedule = build.objective(config), build.schedule(config)

    @property
    def session(self) -> TrainSession:
        return TrainSession(
            self.config, engine=self.engine, model=self.model, optimizer=self.optimizer, state=self.state
        )

    def steps(self, count: int) -> list[float]:
        parts = (self.model, self.optimizer, self.batches, self.objective, self.schedule, self.state)
        return [float(train_step(*parts, max_norm=1.0).loss.loss) for _ in range(count)]

    def load(self) -> None:
        store = build.storage(self.config)
        self.session.load_checkpoint(store, checkpoint.latest(store, warn=print))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: local_of(parameter).detach().clone() for name, parameter in self.model.named_parameters()}


def stopped_and_not(directory: Path, steps: int, *overrides: str) -> tuple[list[float], list[float], bool]:
    """Losses behind ``steps`` steps without a stop and after a resume, and whether weights are bitwise the same."""
    config = configured(directory, *overrides)
    engine = build.engine(config)
    engine.start()
    run = _Run(config, engine)
    run.steps(steps)
    run.session.save(build.storage(config))
    expected = run.steps(steps)
    again = _Run(config, engine)
    again.load()
    losses = again.steps(steps)
    one, other = run.weights(), again.weights()
    engine.shutdown()
    return expected, losses, all(torch.equal(one[name], other[name]) for name in one)


def loaded_and_saved(source: Path, target: Path, steps: int, *overrides: str) -> list[float]:
    """Load the checkpoint of ``source`` in a layout, save it at once in ``target``, and train."""
    config, to = configured(source, *overrides), configured(target, *overrides)
    engine = build.engine(config)
    engine.start()
    run = _Run(config, engine)
    run.load()
    run.session.save(build.storage(to))
    losses = run.steps(steps)
    engine.shutdown()
    return losses


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, whole."""
    store = build.storage(configured(directory))
    manifest = checkpoint.latest(store, warn=print)
    state = {f"state/{key}": value for key, value in checkpoint.load_optimizer(store, manifest).items()}
    return {**checkpoint.load_model(store, manifest), **state}


@pytest.fixture(scope="module")
def ranks():
    """``ranks(n)``: a pool of that many processes, which stay for the tests of a module."""
    return partial(RankPool, lasting=True)


@pytest.fixture
def steps(pytestconfig):
    return shortened(pytestconfig, STEPS)


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("zero3",)))
def test_a_resumed_run_is_bitwise_the_one_that_was_not_stopped(ranks, tmp_path, layout, steps):
    world, overrides = LAYOUTS[layout]
    words = (f"trainer.devices={world}", *overrides)
    for expected, losses, same in ranks(world).run(stopped_and_not, tmp_path, steps, *words, timeout_s=240):
        assert losses == expected
        assert same
    state = {key: value for key, value in saved(tmp_path).items() if key.endswith("/exp_avg")}
    assert state
    small = torch.bfloat16 if layout == "rounded-bfloat16" else torch.float32
    assert all(value.dtype == (torch.float32 if value.numel() >= 1024 else small) for value in state.values())


@pytest.mark.parametrize(
    "layout", slow_except(("zero3", "tp2", "tp2-zero3", "pp2", "ep2", "tp2-within-blocks"), ("tp2",))
)
def test_state_moves_to_other_layouts(ranks, tmp_path, layout, steps):
    """Bitwise where no rank cuts a block; elsewhere blocks at the cut are quantised again."""
    world, overrides = LAYOUTS[layout]
    first, then = tmp_path / "first", tmp_path / "then"
    sizes = [each for each in overrides if each.startswith("model.")]
    expected, _, _ = stopped_and_not(first, steps, *sizes)
    words = (f"trainer.devices={world}", *overrides)
    for losses in ranks(world).run(loaded_and_saved, first, then, steps, *words, timeout_s=240):
        assert losses == pytest.approx(expected, rel=1e-3)
    whole, moved = saved(first), saved(then)
    differ = {name for name, value in whole.items() if not torch.equal(value, moved[name])}
    if layout != "tp2-within-blocks":
        assert not differ
    for name in differ:
        assert name.split("/")[-1] in ("exp_avg", "exp_avg_sq")
        assert (moved[name] - whole[name]).norm() < 0.02 * whole[name].norm()


@pytest.mark.slow
def test_a_run_changes_to_adamw_and_back(ranks, tmp_path):
    ((expected, _, _),) = ranks(1).run(stopped_and_not, tmp_path, STEPS, timeout_s=240)
    (losses,) = ranks(1).run(loaded_and_saved, tmp_path, tmp_path / "adamw", STEPS, STOCK, timeout_s=240)
    assert losses == pytest.approx(expected, rel=0.02)
    whole, moved = saved(tmp_path), saved(tmp_path / "adamw")
    assert whole.keys() == moved.keys()
    assert all(torch.equal(value, moved[name]) for name, value in whole.items())
    (back,) = ranks(1).run(loaded_and_saved, tmp_path / "adamw", tmp_path / "back", STEPS, timeout_s=240)
    assert back == expected


def losses_on_text(name: str, steps: int, *overrides: str) -> list[float]:
    words = ["trainer.accelerator=cpu", "trainer.devices=1", f"model.optim.name={name}", f"trainer.max_steps={steps}"]
    with TrainSession.load("recipe:llama-tiny", [*words, *overrides]) as session:
        session.start()
        return [float(session.step(batch).loss.loss) for batch, _ in zip(session.batches(), range(steps), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [60, 300])
def test_losses_on_text_are_within_one_percent_of_adamw(steps):
    """By default ``test_updates_are_near_those_of_adamw`` and the tests of blocks hold the updates to theirs."""
    sizes = ("data.seq_length=32", "data.global_batch_size=4", "data.micro_batch_size=4", "model.num_layers=2")
    expected, losses = (losses_on_text(name, steps, *sizes) for name in ("adamw", "adamw_8bit"))
    last = steps // 6
    assert sum(expected[-last:]) / last < expected[0] - 1
    assert sum(losses[-last:]) == pytest.approx(sum(expected[-last:]), rel=0.01)
    assert losses != expected
