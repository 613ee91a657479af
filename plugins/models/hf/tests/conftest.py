"""Tiny models of transformers' families, from the configurations that the plugin ships."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import pytest
import torch
from nxdt_plugin_hf.builder import HFBuilder
from nxdt_plugin_hf.config import HFModelConfig
from nxdt_plugin_hf.modeling import CausalLM

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.random.init import initialize
from tests.sampling import slow_except

SPARSE = ("qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "deepseek-v2", "deepseek-v3", "granitemoe", "gpt-oss")
BALANCED = ("qwen2-moe", "qwen3-moe", "olmoe", "granitemoe", "gpt-oss")
STORED = ("gemma3", "olmo2", "qwen3-moe", "glm4-moe", "gpt-oss")
"""With a tied head, with one of its own, and with experts: ``test_builder.py`` shows for all families that their names
in files are those of transformers, but for experts."""
FAMILIES = ("qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "cohere", *SPARSE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``family``: each of those with a configuration that the plugin ships; ``balanced``: each to
    whose routers transformers adds a loss; ``written``: each that has a form in directories; ``stored``: each of these,
    by default those whose directories differ in kind."""
    written = list(FAMILIES)
    stored = slow_except(written, STORED)
    for name, families in {"family": FAMILIES, "written": written, "stored": stored, "balanced": BALANCED}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, families)


@pytest.fixture
def builder() -> Callable[..., HFBuilder]:
    """``builder(family, **changes)``: of ``<family>-tiny``, whose fresh weights are wide enough to tell differences."""

    def of(family: str, **changes: Any) -> HFBuilder:
        text = files("nxdt_plugin_hf").joinpath("configs", f"{family}-tiny", "config.json").read_text()
        return HFBuilder(HFModelConfig(hf_config={**json.loads(text), "initializer_range": 0.1, **changes}))

    return of


@pytest.fixture
def materialised() -> Callable[[HFBuilder], CausalLM]:
    """``materialised(builder)``: its model with fresh weights, vectors among them no longer all alike."""

    def of(builder: HFBuilder) -> CausalLM:
        with torch.device("meta"):
            model = builder.build()
        model.to_empty(device=HOST)
        for owner, user in builder.plan().tied:
            path, _, leaf = user.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(owner))
        model.reset_buffers()
        initialize(model.named_parameters(), builder.init_rules(), seed=1)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(2)
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or "norm" in name or name.endswith("_bias"):
                    parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
        return model

    return of


@pytest.fixture
def theirs() -> Callable[[HFBuilder, CausalLM], Any]:
    """``theirs(builder, model)``: transformers' own model with the weights of ``model``, and eager attention."""

    def of(builder: HFBuilder, model: CausalLM) -> Any:
        import copy

        config = copy.deepcopy(builder.architecture.config)
        config._attn_implementation = "eager"
        own = builder.architecture.model_class(config)
        own.load_state_dict(_fused(model.state_dict()))
        return own

    return of


@pytest.fixture
def fused() -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """``fused(tensors)``: by transformers' names; what is gate and up here is one matrix of each expert there."""
    return _fused


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {}
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".stack.")
        side, _, leaf = kind.partition("_")
        alternating = f"{path}.stack.gate_proj_bias" in tensors  # gpt-oss, whose matrices are [in, out]
        if not path:
            named[name.removesuffix(".weight") if name.endswith(".sinks.weight") else name] = tensor
            continue
        if side == "gate":
            pair = (tensor, tensors[f"{path}.stack.up_{leaf}"])
            tensor, side = torch.stack(pair, 2).flatten(1, 2) if alternating else torch.cat(pair, dim=1), "gate_up"
        if side != "up":
            named[f"{path}.{side}_{leaf}"] = tensor.mT if alternating and leaf == "proj" else tensor
    return named
