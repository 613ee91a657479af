"""Modules keep the class of their author in every layout, in copies and in pickles."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from importlib.resources import files

import pytest
import torch
from nxdt_plugin_gpt.builder import GPTBuilder
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_hf.builder import HFBuilder
from nxdt_plugin_hf.config import HFModelConfig
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from nxdt_plugin_lora.adapter import LoraAdapter
from nxdt_plugin_lora.config import LoraConfig
from nxdt_testing.ranks import RankPool
from nxdt_testing.runs.run import Run, built, global_batch, run_config, small_decoder
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.step_boundary import accept_step
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.step_context import StepContext

SIZES = {"num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 80, "num_attention_heads": 4, "vocab_size": 96}


def llama() -> ModelBuilder:
    return LlamaBuilder(LlamaConfig(**SIZES, num_kv_heads=2))


def gpt() -> ModelBuilder:
    return GPTBuilder(GPTConfig(**SIZES, max_position_embeddings=64))


def qwen3() -> ModelBuilder:
    return HFBuilder(HFModelConfig(hf_config=json.loads(_hf_config("qwen3"))))


def olmoe() -> ModelBuilder:
    return HFBuilder(HFModelConfig(hf_config=json.loads(_hf_config("olmoe"))))


def _hf_config(family: str) -> str:
    return files("nxdt_plugin_hf").joinpath("configs", f"{family}-tiny", "config.json").read_text()


MODELS = {"llama": llama, "gpt": gpt, "mixture": small_decoder, "qwen3": qwen3, "olmoe": olmoe}
SPLIT = "distributed_strategy"
FULL, PARTS = (f"model.activations_checkpoint_granularity={each}" for each in ("full", "selective"))
TP, SP = f"{SPLIT}.tensor_model_parallel_size=2", f"{SPLIT}.sequence_parallel=true"
LAYOUTS = {
    "recomputed": ("trainer.devices=1", FULL),
    "compiled": ("trainer.devices=1", PARTS, "model.compile=true"),
    "tp": ("trainer.devices=2", TP, SP, f"{SPLIT}.sequence_parallel_regather=true", PARTS),
    "pp": ("trainer.devices=2", f"{SPLIT}.pipeline_model_parallel_size=2", FULL),
    "cp": ("trainer.devices=2", f"{SPLIT}.context_parallel_size=2", PARTS),
    "zero3": ("trainer.devices=2", f"{SPLIT}.zero_stage=3", FULL),
    "lora": ("trainer.devices=1",),
}
LACKS = {"cp": ("olmoe",), "pp": ("olmoe",), "tp": ("olmoe",)}
"""Models that do not allow a layout."""


def foreign_classes(model: Callable[[], ModelBuilder], layout: str) -> list[str]:
    """Names of classes of this rank's modules that cannot be imported."""
    builder, settings = model(), LAYOUTS[layout]
    names = [name for name in builder.plan().recompute if PARTS in settings]
    recompute = [f"model.activations_checkpoint_recompute=[{','.join(names)}]"] if names else []
    adapters = [LoraAdapter(LoraConfig(lora_rank=2))] if layout == "lora" else []
    with Run(run_config(*settings, *recompute), builder=builder, adapters=adapters) as run:
        run.steps(global_batch(builder.vocab_size), 0 if "model.compile=true" in settings else 1)
        return [name for stage in run.model._layout.modules for name in not_importable(stage)]


def not_importable(module: nn.Module) -> list[str]:
    kinds = dict.fromkeys(type(part) for part in module.modules())
    own = [kind.__bases__[1] if issubclass(kind, FSDPModule) else kind for kind in kinds]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in own if found(kind) is not kind]


def found(kind: type) -> object:
    """What is to be imported under the name of a class."""
    value: object = sys.modules[kind.__module__]
    for name in kind.__qualname__.split("."):
        value = getattr(value, name, None)
    return value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_classes_of_modules_are_those_that_their_authors_wrote(model, layout):
    if model in LACKS.get(layout, ()):
        pytest.skip("the model does not allow the layout")
    ranks = int(LAYOUTS[layout][0][-1])
    assert RankPool(ranks, lasting=True).run(foreign_classes, MODELS[model], layout) == [[]] * ranks


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_copies_and_pickles_compute_the_same(model, granularity):
    builder = MODELS[model]()
    plan = builder.plan()
    module = built(builder)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    accept_step(module)
    apply_recompute(module, plan, granularity=granularity, names=tuple(plan.recompute))
    kinds = [type(part) for part in module.modules()]
    ids = torch.arange(16).view(2, 8)
    wanted = module(ids, step=StepContext())
    wanted.sum().backward()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert [type(part) for part in other.modules()] == kinds
        assert other.state_dict().keys() == module.state_dict().keys()
        with torch.no_grad():
            next(module.parameters()).add_(1)  # it has parameters of its own
        found = other(ids, step=StepContext())
        assert torch.equal(found, wanted)
        other.zero_grad()
        found.sum().backward()
        gradients = (parameter.grad for parameter in module.parameters())
        for gradient, parameter in zip(gradients, other.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad)
        with torch.no_grad():
            next(module.parameters()).sub_(1)
