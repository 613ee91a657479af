"""Files that run a command when they are unpickled, in every form that loaders of tensors meet, and shared fixtures."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.model import ModelBuilder

__all__ = [
    "DRESSES",
    "HF_CONFIG",
    "Payload",
    "builder",
    "dressed",
    "import_all",
    "installed",
    "little_memory",
    "marker",
    "packed",
    "weights",
]

MEMORY_BYTES = 2 * 2**30
"""More than any of these tests needs, and less than any forgery asks for."""

HF_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 16,
}
"""Content of a ``config.json``."""


class Payload:
    """Makes a file ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def _saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def packed(archive: bytes) -> bytes:
    """The same archive, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as plain, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    return buffer.getvalue()


class _Legacy(Payload):
    """What ``torch.save`` wrote before version 1.6: pickles one after the other."""

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(Payload(self.marker), buffer, _use_new_zipfile_serialization=False)
        return buffer.getvalue()


DRESSES: Mapping[str, Callable[[Payload], bytes]] = {
    "pickle-0": lambda payload: pickle.dumps(payload, 0),
    "pickle-2": lambda payload: pickle.dumps(payload, 2),
    "pickle-5": lambda payload: pickle.dumps(payload, 5),
    "torch": _saved,
    "torch-beside-tensors": lambda payload: _saved({"model.norm.weight": torch.ones(2), "more": payload}),
    "torch-packed": lambda payload: packed(_saved(payload)),
    "torch-legacy": lambda payload: _Legacy(payload.marker).save(),
}
"""Bytes of a payload, by the name of the format."""


def dressed(dress: str, marker: Path) -> bytes:
    """The bytes of a file in one of the formats."""
    return DRESSES[dress](Payload(marker))


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that only a payload makes."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Address space of what is in use and :data:`MEMORY_BYTES` more: who takes memory before looking fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def builder() -> ModelBuilder:
    """Of the model that :func:`weights` are of."""
    llama = pytest.importorskip("nxdt_plugin_llama.builder", reason="nxdt-plugin-llama is not installed")
    config = pytest.importorskip("nxdt_plugin_llama.config", reason="nxdt-plugin-llama is not installed")
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4, "num_kv_heads": 2}
    built: ModelBuilder = llama.LlamaBuilder(config.LlamaConfig(**sizes, vocab_size=8, max_position_embeddings=16))
    return built


def weights() -> dict[str, torch.Tensor]:
    """Of a Llama of two layers, under Hugging Face's names."""
    blocks = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape)
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (16, 8),
            "mlp.up_proj": (16, 8),
            "mlp.down_proj": (8, 16),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }.items()
    }
    ends = {"model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,), "lm_head.weight": (8, 8)}
    return blocks | {name: torch.randn(shape) for name, shape in ends.items()}


@cache
def installed() -> Kernel:
    """All plugins that are installed, found once."""
    return Kernel.start()


def import_all(directory: Path, builder: ModelBuilder) -> list[torch.Tensor]:
    """Read all that a checkpoint of another program offers."""
    _, found = open_checkpoint(directory, installed())
    found.model_config()
    return list(found.read(list(found.listing(builder))))
