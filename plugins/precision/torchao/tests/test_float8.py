"""``precision.type: float8``: torchao's product in the layers of a model's plan, in every layout, close to bfloat16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from nxdt_plugin_torchao.config import Float8Config, float8
from nxdt_plugin_torchao.errors import Float8SizesDoNotDivide, NoFloat8Here
from nxdt_plugin_torchao.product import Float8Product
from nxdt_testing.errors import raises
from nxdt_testing.precision_contract import PrecisionContract
from torch import nn
from torch._inductor.compile_fx import compile_fx

from nxdt_core.config import load
from nxdt_core.distributed.devices import PROFILES
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.calls import Call, run_in_turn
from tests.graph_counts import GraphCounts
from tests.sampling import asked, slow_except

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS, ROWS, SEQ = 8, 4, 16
STRATEGY = "distributed_strategy."
LORA = "adapter={name: lora, lora_rank: 4, target_modules: [all-linear]}"
ALL = {
    f"layers.{layer}.{part}"
    for layer in range(2)
    for part in (
        *(f"attention.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
}
LAYOUTS = {
    "one": (1, ()),
    "autocast": (1, ("precision.rest=autocast",)),
    "compiled": (1, ("model.compile=true",)),
    "recomputed": (1, ("model.activations_checkpoint_granularity=full",)),
    "lora": (1, (LORA,)),
    "zero3": (2, (f"{STRATEGY}zero_stage=3",)),
    "autocast-zero3": (2, ("precision.rest=autocast", f"{STRATEGY}zero_stage=3")),
    "tp2": (2, (f"{STRATEGY}tensor_model_parallel_size=2",)),
    "tp2-sp": (2, (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true")),
    "pp2": (2, (f"{STRATEGY}pipeline_model_parallel_size=2",)),
}


class TestFloat8(PrecisionContract):
    @pytest.fixture
    def factory(self):
        return float8

    @pytest.fixture
    def section(self):
        return Float8Config()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_and_gradients_are_those_of_torchaos_layer(scaling):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    generator = torch.Generator().manual_seed(0)
    hidden, weight, gradient = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in [(2, 16, 32), (48, 32), (2, 16, 48)]
    )
    recipe = Float8LinearConfig.from_recipe_name(scaling)
    object.__setattr__(recipe, "emulate", True)
    theirs = nn.Sequential(nn.Linear(32, 48, bias=False, dtype=torch.bfloat16))
    theirs[0].weight.data = weight.clone()
    convert_to_float8_training(theirs, config=recipe)

    def run(product, factor):
        inputs = hidden.clone().requires_grad_()
        outputs = product(inputs)
        outputs.backward(gradient)
        return outputs, inputs.grad, factor.grad

    ours = weight.clone().requires_grad_()
    product = Float8Product(scaling, (), "cpu")
    found = run(lambda inputs: product(inputs, ours), ours)
    expected = run(theirs, theirs[0].weight)
    for tensor, other in zip(found, expected, strict=True):
        assert torch.equal(tensor, other)
    assert not torch.equal(found[0], nn.functional.linear(hidden, weight))


def test_largest_elements_are_found_once_for_all_products_of_an_input_and_their_backward():
    """Of the input and both weights in forward, and of both gradients in backward."""
    found = []

    def counting(graph, inputs, **options):
        found.append(sum(node.target is torch.ops.aten.max.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    product = Float8Product("tensorwise", (), "cpu")

    @torch.compile(backend=partial(compile_fx, inner_compile=counting), fullgraph=True)  # inductor's passes, no kernels
    def both(inputs, first, second):
        return product(inputs, first) * product(inputs, second)

    tensors = [torch.randn(shape, requires_grad=True) for shape in [(2, 16, 32), (48, 32), (48, 32)]]
    both(*tensors).sum().backward()
    assert found == [3, 2]


def train(overrides):
    """Losses by step, and the layers of this rank that are multiplied in float8."""
    config = load(
        "recipe:llama-tiny",
        [
            *("trainer.accelerator=cpu", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64"),
            *("model.optim.lr=1e-2", "model.optim.sched.name=constant"),
            *(f"data.seq_length={SEQ}", f"data.global_batch_size={ROWS}", "data.micro_batch_size=2"),
            *overrides,
        ],
    )
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    ids = torch.randint(272, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    own = ROWS // engine.rank_info.dp_size
    starts = range(engine.rank_info.dp_rank * own, (engine.rank_info.dp_rank + 1) * own, 2)
    batches = [Batch(input_ids=ids[row : row + 2, :-1], labels=ids[row : row + 2, 1:]) for row in starts]
    losses = [
        float(train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0).loss.loss)
        for _ in range(STEPS)
    ]
    chosen = {
        name
        for stage in model.local_modules()
        for name, module in stage.named_modules()
        if isinstance(getattr(module, "product", None), Float8Product)
    }
    engine.shutdown()
    return losses, chosen


@pytest.fixture(scope="module")
def in_bfloat16():
    """``in_bfloat16(*overrides)``: losses of one process without float8."""
    return cache(lambda *overrides: train(("precision.type=mixed_precision", *overrides))[0])


@pytest.fixture(scope="module")
def in_float8(request):
    """By layout: what each rank gives. Layouts of as many ranks share their processes, which have imported torchao."""
    calls = {}
    for layout in asked(request, "layout"):
        world, overrides = LAYOUTS[layout]
        calls[layout] = Call(world, train, ((f"trainer.devices={world}", "precision.type=float8", *overrides),))
    return run_in_turn(calls, timeout_s=600)


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("lora", "autocast-zero3", "tp2-sp")))
def test_every_layout_follows_bfloat16_within_one_percent(in_float8, in_bfloat16, layout):
    overrides = LAYOUTS[layout][1]
    expected = in_bfloat16(*(each for each in overrides if each == LORA))
    assert layout == "lora" or expected[-1] < expected[0] - 0.5
    found = in_float8[layout]
    for losses, _ in found:
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
        assert losses != expected, "nothing was computed in float8"
    assert set().union(*(chosen for _, chosen in found)) == ALL


COMPILED = {
    "tensorwise": ("precision.scaling=tensorwise",),
    "tensorwise-autocast": ("precision.scaling=tensorwise", "precision.rest=autocast"),
    "rowwise": ("precision.scaling=rowwise",),
    "rowwise-recomputed": ("precision.scaling=rowwise", "model.activations_checkpoint_granularity=full"),
    "rowwise_with_gw_hp-lora": ("precision.scaling=rowwise_with_gw_hp", LORA),
}


def graphs_of(overrides):
    """Graphs and breaks of a run with compiled layers. Inductor would take minutes, and counts the same."""
    torch._dynamo.reset()
    profile = replace(PROFILES["cpu"], compile_backend="eager")
    with patch.dict(PROFILES, {"cpu": profile}), GraphCounts() as counts:
        losses, _ = train(("precision.type=float8", "model.compile=true", *overrides))
    return losses, counts.graphs, counts.breaks


@pytest.mark.parametrize("case", slow_except(COMPILED, ("tensorwise-autocast", "rowwise")))
def test_layers_share_one_graph_without_a_break(case):
    losses, graphs, breaks = graphs_of(COMPILED[case])
    assert (graphs, breaks) == (3 + ("lora" in case), 0)  # one of a layer and two of the loss
    assert losses == pytest.approx(train(("precision.type=float8", *COMPILED[case]))[0], rel=0.01)


def test_layers_that_are_skipped_stay_in_bfloat16(in_bfloat16):
    _, chosen = train(("precision={type: float8, skip: ['layers.*.mlp.*', '*.q_proj']}",))
    assert chosen == {name for name in ALL if "mlp" not in name and "q_proj" not in name}
    losses, chosen = train(("precision={type: float8, skip: ['*']}",))
    assert (losses, chosen) == (in_bfloat16(), set())


def test_sizes_that_a_gpu_cannot_multiply_are_refused():
    on_gpu = Float8Product("rowwise", (), "cuda")
    assert on_gpu.covers("layers.0.mlp.up_proj", 48, 32)
    with raises(Float8SizesDoNotDivide, match=r"has 32 inputs and 56 outputs on each rank"):
        on_gpu.covers("layers.0.mlp.up_proj", 56, 32)
    assert not Float8Product("rowwise", ("*.up_proj",), "cuda").covers("layers.0.mlp.up_proj", 56, 32)


def test_other_accelerators_are_refused():
    with raises(NoFloat8Here, match="neuron has no float8"):
        Float8Product("rowwise", (), "neuron")


def test_an_engine_that_does_not_apply_products_is_refused():
    with pytest.raises(ConfigError, match="leaves products of linear layers"):
        load("recipe:llama-tiny", ["precision.type=float8", "parallel_engine.name=nxd"])
