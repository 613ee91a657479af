"""What neuronx-distributed itself writes is read: ``make test-nxd``. One process takes the part of every rank.

Its writers run as they are: ``scripts/checkpoint_converter.py``, ``trainer/checkpoint.py`` (``save_checkpoint``),
``parallel_layers/checkpointing.py`` (``save``), ``modules/lora/model.py`` (the state dict of a ``LoraModel``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.config import load
from nxdt_core.hf.directory import save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.train import build
from plugins.migration.nxd.tests.nxd_writer import Written
from tests.checkpoint.poison import installed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("neuronx_distributed") is None,
    reason="needs a source tree of neuronx-distributed: make test-nxd NXD=FOLDER (torch 2.9, minutes)",
)
LAYERS = 2


def builder_of(heads: int, kv_heads: int, *more: str, recipe: str = "llama-tiny") -> ModelBuilder:
    sizes = (f"model.num_layers={LAYERS}", f"model.num_attention_heads={heads}", f"model.num_kv_heads={kv_heads}")
    return build.model_builder(load(f"recipe:{recipe}", [*sizes, "model.hidden_size=48", *more]))


def random_state(builder: ModelBuilder) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = [tensor for source in sources(builder) for tensor in source.tensors()]
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in tensors}


def see_the_same(
    directory: Path, builder: ModelBuilder, state: dict[str, torch.Tensor], near: float = 0.0, base: Path | None = None
) -> None:
    _, found = open_checkpoint(directory, installed())
    if base is not None:
        found.base = lambda: open_checkpoint(base, installed())[1]
    listing = found.listing(builder, weights_only=True)
    tensors = {name: tensor for (_, name), tensor in zip(listing, found.read(list(listing)), strict=True)}
    for source in sources(builder):
        expected = source.read(lambda name: state[name])
        torch.testing.assert_close(tensors[source.name], expected, rtol=near, atol=near)


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """``convert(builder, state, tp_size=2, …)``: the directory that the library's converter writes."""
    from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase

    def run(builder: ModelBuilder, state: dict[str, torch.Tensor], **asked: Any) -> Path:
        torch.save(state, tmp_path / "full.pt")
        hf = builder.config_to_hf()  # type: ignore[attr-defined]
        (tmp_path / "config.json").write_text(json.dumps(hf))
        converter = CheckpointConverterBase()
        arguments = {
            "input_dir": str(tmp_path / "full.pt"),
            "output_dir": str(tmp_path / "written"),
            "config": str(tmp_path / "config.json"),
            "convert_from_full_state": True,
            "n_layers": LAYERS,
            **asked,
        }
        defaults = converter.get_arg_parser().parse_args(["--output_dir", "", "--hw_backend", "trn1"])
        converter.run(Namespace(**{**vars(defaults), **arguments}))
        return tmp_path / "written"

    return run


@pytest.mark.parametrize(
    "asked",
    [
        {"tp_size": 2, "kv_size_multiplier": 1, "qkv_linear": True, "fuse_qkv": True, "pp_size": 2},
        {"tp_size": 4, "kv_size_multiplier": 2, "qkv_linear": True, "save_xser": True},
        {"tp_size": 2, "model_style": "megatron", "qkv_linear": True},
    ],
    ids=str,
)
def test_its_converters_files(convert: Callable[..., Path], asked: dict[str, Any]) -> None:
    builder = builder_of(8, 2)
    state = random_state(builder)
    see_the_same(convert(builder, state, **asked), builder, state)


@pytest.mark.parametrize("fused", [False, True])
def test_its_converters_padded_heads(convert: Callable[..., Path], fused: bool) -> None:
    builder = builder_of(12, 2)
    state = random_state(builder)
    padded = {"tp_size": 8, "kv_size_multiplier": 4, "qkv_linear": True, "pad_attn_heads": True, "fuse_qkv": fused}
    see_the_same(convert(builder, state, **padded), builder, state)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """``as_rank(tp=1, ep=0, …)``: the library's functions that save believe to be this rank of a run."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    saving = importlib.import_module("neuronx_distributed.trainer.checkpoint")
    older = importlib.import_module("neuronx_distributed.parallel_layers.checkpointing")

    def become(tp: int = 0, pp: int = 0, ep: int = 0, ep_size: int = 1) -> None:
        told = {
            "get_tensor_model_parallel_rank": tp,
            "get_pipeline_model_parallel_rank": pp,
            "get_expert_model_parallel_rank": ep,
            "get_expert_model_parallel_size": ep_size,
            "get_expert_data_parallel_rank": 0,
            "get_expert_data_parallel_size": 1,
            "get_data_parallel_rank": 0,
            "get_data_parallel_replica_groups": [[0]],
            "get_expert_data_parallel_replica_groups": [[0]],
            "get_expert_model_parallel_replica_groups": [[0]],
            "get_local_world_size": 1,
            "get_tensor_model_parallel_size": 1,
            "get_pipeline_model_parallel_size": 1,
            "get_data_parallel_size": 1,
        }
        for module in (saving, older):
            for name, value in told.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda value=value: value)
        monkeypatch.setattr(older, "get_tensor_model_parallel_size", lambda: tp + 1)
        monkeypatch.setattr(older, "get_pipeline_model_parallel_size", lambda: pp + 1)

    yield become
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("xser", [False, True])
def test_files_of_expert_ranks(as_rank: Callable[..., None], tmp_path: Path, xser: bool) -> None:
    from neuronx_distributed.trainer.checkpoint import save_checkpoint

    builder = builder_of(4, 2, recipe="mixtral-tiny")
    state = random_state(builder)
    cut = Written(heads=4, kv_heads=2, tp=2, ep=2)
    for tp in range(2):
        own = cut.rank(state, LAYERS, tp, 0)
        for ep in range(2):
            as_rank(tp=tp, ep=ep, ep_size=2)
            model = cut.model(own, ep)
            for name, tensor in model.items():
                tensor.expert_model_parallel = "expert_mlps" in name
            save_checkpoint(str(tmp_path), "tag", model=model, use_xser=xser)
    see_the_same(tmp_path / "tag", builder, state)


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("megatron", [False, True])
def test_the_older_files(as_rank: Callable[..., None], tmp_path: Path, xser: bool, megatron: bool) -> None:
    from neuronx_distributed.parallel_layers.checkpointing import save

    builder = builder_of(4, 4)
    state = random_state(builder)
    cut = Written(heads=4, kv_heads=4, tp=2, pp=2, megatron=megatron, qkv="plain")
    for pp in range(2):
        for tp in range(2):
            as_rank(tp=tp, pp=pp)
            content = {"model": cut.rank(state, LAYERS, tp, pp), "global_step": 3, "epoch": 0, "scheduler": {}}
            save(content, str(tmp_path / "tag"), save_xser=xser)
    see_the_same(tmp_path / "tag", builder, state)


@pytest.mark.parametrize("form", ["with its base", "merged", "alone"])
def test_a_lora_model(as_rank: Callable[..., None], tmp_path: Path, form: str) -> None:
    """Its own merging is what the import is compared with."""
    from neuronx_distributed.modules.lora.config import LoraConfig
    from neuronx_distributed.modules.lora.model import LoraModel
    from neuronx_distributed.trainer.checkpoint import save_checkpoint

    builder = builder_of(4, 2)
    state = random_state(builder)
    own = Written(heads=4, kv_heads=2, qkv="plain").rank(state, LAYERS, 0, 0)
    model = torch.nn.Module()
    for name, tensor in own.items():
        *path, leaf, _ = name.split(".")
        module = model
        for part in path:
            module.add_module(part, getattr(module, part, torch.nn.Module()))
            module = getattr(module, part)
        layer = torch.nn.Linear(*tensor.shape[::-1], bias=False) if leaf.endswith("_proj") else torch.nn.Module()
        layer.weight = torch.nn.Parameter(tensor)
        module.add_module(leaf, layer)
    config = LoraConfig(
        lora_rank=2,
        lora_alpha=5,
        target_modules=["q_proj", "o_proj", "gate_up_proj"],
        save_lora_base=form != "alone",
        merge_lora=form == "merged",
        save_lora_config_adapter=True,
        merge_sharded_lora=form == "alone",
    )
    lora = LoraModel(model, config)
    torch.manual_seed(5)
    for name, parameter in lora.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    as_rank()
    saved = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in lora.state_dict().items()}
    assert any("lora_" in name and name != "lora_config" for name in saved) == (form != "merged")
    save_checkpoint(str(tmp_path), "tag", model=saved)
    save_hf(tmp_path / "base", builder, {source.name: source.read(state.__getitem__) for source in sources(builder)})
    if form != "merged":
        lora.merge_lora()
    expected = {name.replace(".base_layer", ""): each.detach().cpu() for name, each in lora.module.state_dict().items()}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        gate_up = expected[f"{mlp}.gate_up_proj.weight"].chunk(2)
        expected |= {f"{mlp}.{half}_proj.weight": each for half, each in zip(("gate", "up"), gate_up, strict=True)}
    see_the_same(tmp_path / "tag", builder, expected, near=1e-5, base=tmp_path / "base")


def test_its_layer_of_experts_computes_what_the_imported_matrices_do(as_rank: Callable[..., None]) -> None:
    """Which half is the gate, and which dimension the inputs, is what the layer itself makes of its parameters."""
    from neuronx_distributed.modules.moe.experts import Experts
    from neuronx_distributed.parallel_layers import parallel_state
    from nxdt_plugin_migrate.checkpoint.rank_tensors import renamed
    from nxdt_plugin_migrate.checkpoint.unpickle import RankFile

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    torch.manual_seed(3)
    sizes = {"num_experts": 4, "hidden_size": 8, "intermediate_size": 6}
    layer = Experts(
        **sizes, glu=True, activation_fn=torch.nn.functional.silu, dtype=torch.float32, device=torch.device("cpu")
    )
    file = RankFile(Path("a"))
    own = {f"model.layers.0.mlp.expert_mlps.mlp_op.{name}": each for name, each in layer.state_dict().items()}
    found = renamed({name: file.leaf(name, each) for name, each in own.items()}, ["a.mlp.gate_proj.weight"])
    inputs = torch.randn(4, 5, 8)
    with torch.no_grad():
        expected = layer(inputs)
        for expert in range(4):
            stem = f"model.layers.0.block_sparse_moe.experts.{expert}"
            gate, up = found[f"{stem}.gate_up_proj.weight"].read().chunk(2)
            hidden = torch.nn.functional.silu(inputs[expert] @ gate.t()) * (inputs[expert] @ up.t())
            torch.testing.assert_close(hidden @ found[f"{stem}.down_proj.weight"].read().t(), expected[expert])
    parallel_state.destroy_model_parallel()
