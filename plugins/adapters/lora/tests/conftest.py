"""Tiny models with an adapter, as a run builds them on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_plugin_lora.adaptation import tables_of
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.peft_files import PeftTensor, base_of, peft_tensors

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.hf.directory import save_hf
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model

_SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "init_method_std": 0.2,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SIZES, "name": "llama", "num_kv_heads": 2, "ffn_hidden_size": 40},
    "tied": {
        **_SIZES,
        "name": "llama",
        "num_kv_heads": 2,
        "ffn_hidden_size": 40,
        "share_embeddings_and_output_weights": True,
    },
    "wide": {**_SIZES, "name": "llama", "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 128},
    "odd": {**_SIZES, "name": "llama", "num_kv_heads": 2, "hidden_size": 48, "ffn_hidden_size": 104},
    "planned": {**_SIZES, "name": "llama", "num_kv_heads": 2, "hidden_size": 256, "ffn_hidden_size": 512},
    "gpt2": {**_SIZES, "name": "gpt", "ffn_hidden_size": 64, "activation": "gelu_tanh", "hidden_dropout": 0.0},
    "mixtral": {**_SIZES, "name": "mixtral", "num_kv_heads": 2, "ffn_hidden_size": 48, "moe": {"num_experts": 4}},
    "hf": {"name": "hf", "model_config": "package://nxdt_plugin_hf/configs/qwen2-tiny"},
    "hf-mixture": {"name": "hf", "model_config": "package://nxdt_plugin_hf/configs/qwen3-moe-tiny"},
    "hf-shared": {"name": "hf", "model_config": "package://nxdt_plugin_hf/configs/glm4-moe-tiny"},
    "hf-sinks": {"name": "hf", "model_config": "package://nxdt_plugin_hf/configs/gpt-oss-tiny"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has not taken a step."""

    config: ResolvedConfig
    engine: ParallelEngine
    model: ParallelModel

    @property
    def module(self) -> torch.nn.Module:
        """The whole model."""
        return self.model.local_modules()[0]

    @property
    def builder(self) -> ModelBuilder:
        """Of the base."""
        return build.model_builder(self.config)

    @property
    def lora(self) -> LoraConfig:
        """Its section."""
        found: LoraConfig = self.config.selected("adapter").config
        return found

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What trains, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def saved(self) -> dict[str, torch.nn.Parameter]:
        """What trains and what it starts from, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad or base_of(name)}

    @property
    def peft_tensors(self) -> dict[str, PeftTensor]:
        """How peft keeps that."""
        shapes = {name: tuple(p.shape) for name, p in self.trained.items()}
        return peft_tensors(self.builder, shapes, tables_of(self.builder))

    def shake(self) -> None:
        """Give what trains values that a run of many steps could have."""
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(parameter + noise if name.endswith("magnitude") else noise)

    def save_base(self, directory: Path) -> Path:
        """The frozen weights, and what trains whole, as a Hugging Face directory."""
        added = self.model.added
        weights = {name: w for name, w in self.model.state_dict().items() if name not in added}
        save_hf(directory, self.builder, weights)  # type: ignore[arg-type]
        return directory


@pytest.fixture
def start():
    """``start(model, adapter)``: a :class:`Run` of one of ``MODELS``; ``more`` are further sections."""
    with _starting() as begun:
        yield begun


@pytest.fixture(scope="module")
def start_once():
    """The same for runs that the tests of a module share."""
    with _starting() as begun:
        yield begun


@contextmanager
def _starting() -> Iterator[Callable[..., Run]]:
    engines: list[ParallelEngine] = []

    def begun(model: str, adapter: Mapping[str, Any], precision: str = "fp32", **more: Any) -> Run:
        section = {"name": "lora", "lora_rank": 4, "lora_dropout": 0.0, **adapter}
        config = load(
            {
                "name": "lora-test",
                "trainer": {"max_steps": 4, "accelerator": "cpu"},
                "data": {"name": "none", "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 2},
                "model": {**MODELS[model], "optim": {"name": "adamw", "lr": 1e-2}},
                "precision": {"type": precision},
                "adapter": section,
                **more,
            }
        )
        engine = build.engine(config)
        engines.append(engine)
        engine.start()
        built = initialize_parallel_model(config, engine)
        for adapter_ in build.adapters(config):
            adapter_.begin(built, config, engine.ranks)
        return Run(config=config, engine=engine, model=built)

    yield begun
    for engine in engines:
        engine.shutdown()
