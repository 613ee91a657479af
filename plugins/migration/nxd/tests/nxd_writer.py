"""Writes a Hugging Face model as NxD Training would: an independent account of that format, with its own arithmetic.

What :mod:`nxdt_plugin_migrate.checkpoint` reads is written from the layers' side: which rows a rank's module holds.
The sources of the layouts, below ``neuronx_distributed`` or ``neuronx_distributed_training``:

- ``trainer/checkpoint.py``: names of files, also with expert-parallel ranks, and ``save_xser``;
- ``parallel_layers/checkpointing.py``: the older ``tp_rank_xx_pp_rank_xx``;
- ``modules/qkv_linear.py``, ``parallel_layers/pad.py`` (``generate_padding_mask``): replicated keys, padded queries;
- ``modules/moe/moe_parallel_layers.py`` (``set_weight_and_bias_config``): experts [experts, in, out];
- ``models/megatron/transformer.py`` (``ParallelAttention``): fused projections, [heads, 3 · size];
- ``modules/lora/model.py`` (``_get_lora_adapter_state_dict``), ``modules/lora/tp_layer.py``: adapters.

``test_written_by_the_library.py`` reads what the library itself writes, where it is installed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad

Tensors = dict[str, torch.Tensor]


class TensorReference:
    """Stands for a tensor in a file of its own; pickled under torch-xla's name for it."""

    def __init__(self, tid: Any) -> None:
        self.tid = tid


TensorReference.__module__ = "torch_xla.utils.serialization"


@contextmanager
def references_can_be_pickled() -> Iterator[None]:
    """pickle looks a class up by the name that it writes."""
    module = types.ModuleType(TensorReference.__module__)
    module.TensorReference = TensorReference  # type: ignore[attr-defined]
    packages = {name: types.ModuleType(name) for name in ("torch_xla", "torch_xla.utils")}
    with patch.dict(sys.modules, {**packages, TensorReference.__module__: module}):
        yield


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a checkpoint was cut."""

    heads: int
    kv_heads: int
    tp: int = 1
    pp: int = 1
    copies: int = 1
    adjacent: bool = False
    qkv: str = "fused"
    """``fused`` (weight_qkv), ``linear`` (weight_q, _k, _v), ``coalesced`` (weight) or ``plain`` (three modules)."""
    xser: bool = False
    dp: int = 2
    weights: torch.dtype = torch.float32
    masters: bool = True
    decay_norms: bool = False
    markers: tuple[str, ...] = ("checkpoint", "done")
    shares: int | None = None
    """Data-parallel ranks whose share is written; None for all."""
    padded: int = 0
    """Query heads with those that fill up ranks; 0 for none."""
    megatron: bool = False
    """Whether the model is one of ``model_source: megatron``."""
    ep: int = 1
    older: str = ""
    """``pt`` or ``xser``: the layout of ``parallel_layers/checkpointing.py``."""
    lora_scaling: float = 0.0
    """Not 0: projections have an adapter of rank 2, so scaled, and ``state`` is that of the merged model."""

    def write(self, directory: Path, state: Mapping[str, torch.Tensor], layers: int) -> Path:
        """Write ``state``, in Hugging Face's names."""
        if self.older:
            return self.write_older(directory, state, layers)
        for folder in ("model", "optim"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        for marker in self.markers:
            (directory / marker).write_text("1")
        for pp in range(self.pp):
            for tp in range(self.tp):
                own = self.rank(state, layers, tp, pp)
                for ep in range(self.ep):
                    expert_rank = f"_ep_rank_{ep:02d}" if self.ep > 1 else ""
                    name = f"model/dp_rank_00{expert_rank}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
                    model = self.model(own, ep)
                    self.save(model, directory / name)
                    for number, tensor in enumerate(model if ep and self.xser else ()):
                        if "expert_mlps" not in tensor:  # the first rank alone stores what is not of experts
                            (directory / f"{name}.tensors/tensor_{number}.pt").unlink()
                for dp in range(self.dp if self.shares is None else self.shares):
                    path = directory / f"optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
                    self.save(self.zero(own, dp), path)
        torch.save({"global_step": 7, "loops": {}, "hyper_parameters": {"cfg": {}}}, directory / "user_content.pt")
        return directory

    def model(self, own: Tensors, ep: int) -> dict[str, Any]:
        """What is saved of a rank, with its share of the experts."""
        local = {
            name: tensor.chunk(self.ep)[ep].clone() if "expert_mlps" in name else tensor for name, tensor in own.items()
        }
        model: dict[str, Any] = {name: tensor.to(self.weights) for name, tensor in local.items()}
        return with_adapters(model, self.lora_scaling) if self.lora_scaling else model

    def write_older(self, directory: Path, state: Mapping[str, torch.Tensor], layers: int) -> Path:
        """Write ``state`` as ``parallel_layers/checkpointing.py`` does."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                rank = directory / f"tp_rank_{tp:02d}_pp_rank_{pp:02d}"
                path = rank if self.older == "xser" else rank / "checkpoint.pt"
                path.parent.mkdir(parents=True, exist_ok=True)
                content = {"model": self.model(self.rank(state, layers, tp, pp), 0), "global_step": 7, "epoch": 0}
                replace(self, xser=self.older == "xser").save(content, path)
                path.with_name(f"{path.name}.info.pt").unlink(missing_ok=True)
        return directory

    def save(self, content: Any, path: Path) -> None:
        """One rank's file."""
        if not self.xser:
            torch.save(content, path)
            return
        folder = path.with_name(f"{path.name}.tensors")
        folder.mkdir()
        info: dict[int, Any] = {}

        def referred(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: referred(each) for key, each in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            number = len(info)
            torch.save(value.clone(), folder / f"tensor_{number}.pt")
            info[number] = {"dtype": value.dtype, "shape": value.shape, "expert_model_parallel": False}
            return TensorReference(number)

        with references_can_be_pickled():
            torch.save(referred(content), path)
        torch.save(info, path.with_name(f"{path.name}.info.pt"))

    def rank(self, state: Mapping[str, torch.Tensor], layers: int, tp: int, pp: int) -> Tensors:
        """What one rank's modules hold, in the order of its modules."""
        own: Tensors = {}
        if pp == 0:
            own["model.embed_tokens.weight"] = self.share(state["model.embed_tokens.weight"], tp)
        for layer in range(layers * pp // self.pp, layers * (pp + 1) // self.pp):
            name = f"model.layers.{layer}."
            block = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
            own |= {f"{name}{key}": value for key, value in self.layer(block, tp).items()}
        if pp == self.pp - 1:
            own["model.norm.weight"] = state["model.norm.weight"]
            own["lm_head.weight"] = self.share(state["lm_head.weight"], tp)
        names = megatron_names(own) if self.megatron else own
        return {name: tensor.clone() for name, tensor in names.items()}

    def share(self, tensor: torch.Tensor, tp: int, dimension: int = 0) -> torch.Tensor:
        """The share of ``tp`` along ``dimension``."""
        return tensor.chunk(self.tp, dimension)[tp]

    def layer(self, block: Tensors, tp: int) -> Tensors:
        """The modules of one layer."""
        hidden = block["self_attn.o_proj.weight"].shape[0]
        size = block["self_attn.q_proj.weight"].shape[0] // self.heads
        slots = [slot // self.copies if self.adjacent else slot % self.kv_heads for slot in range(self.slots)]
        mine = range(tp * self.slots // self.tp, (tp + 1) * self.slots // self.tp)
        each, group = (self.padded or self.heads) // self.slots, self.heads // self.kv_heads
        queries = []
        for slot in mine:  # the n-th slot of a key head takes the n-th lot of the query heads that attend to it
            first = slots[:slot].count(slots[slot]) * each
            lot = (slots[slot] * group + at if at < group else self.heads for at in range(first, first + each))
            queries += lot  # number ``heads`` is of zeros
        keys = [slots[slot] for slot in mine]

        def heads(name: str, chosen: list[int]) -> torch.Tensor:
            whole = block[f"self_attn.{name}_proj.weight"].view(-1, size, hidden)
            return torch.cat([whole, torch.zeros_like(whole[:1])])[chosen].reshape(-1, hidden)

        q, k, v = heads("q", queries), heads("k", keys), heads("v", keys)
        columns = pad(block["self_attn.o_proj.weight"].view(hidden, self.heads, size), (0, 0, 0, 1))
        columns = columns[:, queries].reshape(hidden, -1)
        attention = {
            "fused": {"qkv_proj.weight_qkv": torch.cat([q, k, v])},
            "linear": {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v},
            "coalesced": {"qkv_proj.weight": torch.cat([q, k, v])},
            "plain": {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v},
        }[self.qkv]
        if self.megatron:
            shared = self.kv_heads < self.heads
            separate = {"q_proj.weight": q, "kv_proj.weight": by_head(size, k, v)}
            attention = separate if shared else {"qkv_proj.weight": by_head(size, q, k, v)}
        return {
            **{f"self_attn.{name}": tensor for name, tensor in attention.items()},
            "self_attn.o_proj.weight": columns,
            **(self.experts(block, tp) if "block_sparse_moe.gate.weight" in block else self.dense(block, tp)),
            "input_layernorm.weight": block["input_layernorm.weight"],
            "post_attention_layernorm.weight": block["post_attention_layernorm.weight"],
        }

    def dense(self, block: Tensors, tp: int) -> Tensors:
        """The feed-forward block of one layer."""
        gate_up = [self.share(block[f"mlp.{name}_proj.weight"], tp) for name in ("gate", "up")]
        down = self.share(block["mlp.down_proj.weight"], tp, 1)
        return {"mlp.gate_up_proj.weight": torch.cat(gate_up), "mlp.down_proj.weight": down}

    def experts(self, block: Tensors, tp: int) -> Tensors:
        """The mixture of experts of one layer, whose matrices are [experts, in, out]."""
        count = sum(name.endswith(".w1.weight") for name in block)
        ranks = [
            [self.share(block[f"block_sparse_moe.experts.{n}.{name}.weight"], tp, at) for name, at in cuts]
            for n in range(count)
            for cuts in [(("w1", 0), ("w3", 0), ("w2", 1))]
        ]
        return {
            "mlp.router.linear_router.weight": block["block_sparse_moe.gate.weight"],
            "mlp.expert_mlps.mlp_op.gate_up_proj.weight": torch.stack([torch.cat(own[:2]).t() for own in ranks]),
            "mlp.expert_mlps.mlp_op.down_proj.weight": torch.stack([own[2].t() for own in ranks]),
        }

    @property
    def slots(self) -> int:
        """Places of key heads on all ranks."""
        return self.kv_heads * self.copies

    def zero(self, own: Tensors, dp: int) -> dict[str, Any]:
        """ZeRO-1's state of a rank: first moments are half the weights, second ones their squares."""
        exempt = [name for name in own if not self.decay_norms and "norm" in name]
        groups = [[name for name in own if name not in exempt], exempt]
        names = [name for group in groups for name in group]
        shares = {name: self.zero_share(own[name].float(), dp) for name in names}
        state = {
            number: {"step": torch.tensor(7.0), "exp_avg": shares[name] / 2, "exp_avg_sq": shares[name] ** 2}
            for number, name in enumerate(names)
        }
        numbers = iter(range(len(names)))
        content = {
            "state": {},
            "param_groups": [{"lr": 0.1, "params": [next(numbers) for _ in group]} for group in groups],
            "base_state": state,
            "shape_info": {number: own[name].shape for number, name in enumerate(names)},
        }
        masters = {"sharded_master_weights": {number: shares[name].clone() for number, name in enumerate(names)}}
        return {**content, **(masters if self.masters else {})}

    def zero_share(self, tensor: torch.Tensor, dp: int) -> torch.Tensor:
        """A share of rows, of which the last ranks' are padded."""
        surplus = -tensor.shape[0] % self.dp
        return pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, surplus]).chunk(self.dp)[dp].clone()


def by_head(size: int, *kinds: torch.Tensor) -> torch.Tensor:
    """The rows of all kinds of a head, head after head."""
    heads = [kind.split(size) for kind in kinds]
    return torch.cat([head[at] for at in range(len(heads[0])) for head in heads])


def megatron_names(own: Tensors) -> Tensors:
    """``own`` under the names of Megatron's modules."""
    inside = {
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.q_proj": "self_attention.query",
        "self_attn.kv_proj": "self_attention.key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "mlp.router": "mlp.moe.router",
        "mlp.expert_mlps": "mlp.moe.expert_mlps",
    }
    found: Tensors = {}
    for name, tensor in own.items():
        module, _, kind = name.rpartition(".")
        if name.startswith("model.layers."):
            layer, part = module.split(".")[2], module.split(".", 3)[3]
            part = next((part.replace(ours, theirs) for ours, theirs in inside.items() if part.startswith(ours)), part)
            found[f"language_model.encoder.layers.{layer}.{part}.{kind}"] = tensor
        else:
            outside = {
                "model.embed_tokens": "embedding.word_embeddings",
                "model.norm": "encoder.final_layernorm",
                "lm_head": "output_layer",
            }
            found[f"language_model.{outside[module]}.{kind}"] = tensor
    return found


def with_adapters(model: Tensors, scaling: float) -> dict[str, Any]:
    """A rank's tensors before an adapter of its attention was merged: what merging adds is taken from the weights."""
    found: dict[str, Any] = {}
    for name, tensor in model.items():
        path, _, kind = name.rpartition(".")
        if not path.endswith(("qkv_proj", "o_proj", "gate_up_proj")):
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        seed = torch.Generator().manual_seed(7)  # what a rank shares with others must be equal there
        a, b = torch.randn(2, columns, generator=seed), torch.randn(rows, 2, generator=seed)
        found[f"{path}.base_layer.{kind}"] = (tensor.double() - scaling * b.double() @ a.double()).to(tensor.dtype)
        found |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.{kind}": b}
    found["lora_config"] = {
        "lora_alpha": scaling * 2,
        "lora_rank": 2,
        "use_rslora": False,
        "target_modules": ["o_proj"],
    }
    return found
