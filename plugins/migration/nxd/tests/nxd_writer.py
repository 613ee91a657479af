"""Writes a Hugging Face Llama as NxD Training would: an independent account of that format, with its own arithmetic.

What :mod:`nxdt_plugin_migrate.checkpoint` reads is written from the layers' side: which rows a rank's module holds.
The same directories, made by NxD Core 0.18 itself, were read with equal results; they cannot be made in this test.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

    def write(self, directory: Path, state: Mapping[str, torch.Tensor], layers: int) -> Path:
        """Write ``state``, in Hugging Face's names."""
        for folder in ("model", "optim"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        for marker in self.markers:
            (directory / marker).write_text("1")
        for pp in range(self.pp):
            for tp in range(self.tp):
                own = self.rank(state, layers, tp, pp)
                model = {name: tensor.to(self.weights) for name, tensor in own.items()}
                self.save(model, directory / f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt")
                for dp in range(self.dp if self.shares is None else self.shares):
                    path = directory / f"optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
                    self.save(self.zero(own, dp), path)
        torch.save({"global_step": 7, "loops": {}, "hyper_parameters": {"cfg": {}}}, directory / "user_content.pt")
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
        return {name: tensor.clone() for name, tensor in own.items()}

    def share(self, tensor: torch.Tensor, tp: int, dimension: int = 0) -> torch.Tensor:
        """The share of ``tp`` along ``dimension``."""
        return tensor.chunk(self.tp, dimension)[tp]

    def layer(self, block: Tensors, tp: int) -> Tensors:
        """The modules of one layer."""
        hidden = block["self_attn.o_proj.weight"].shape[0]
        size = block["self_attn.q_proj.weight"].shape[0] // self.heads
        slots = [slot // self.copies if self.adjacent else slot % self.kv_heads for slot in range(self.slots)]
        mine = range(tp * self.slots // self.tp, (tp + 1) * self.slots // self.tp)
        each = self.heads // self.slots
        queries = []
        for slot in mine:  # the n-th slot of a key head takes the n-th lot of the query heads that attend to it
            first = slots[slot] * self.heads // self.kv_heads + slots[:slot].count(slots[slot]) * each
            queries += range(first, first + each)
        keys = [slots[slot] for slot in mine]

        def heads(name: str, chosen: list[int]) -> torch.Tensor:
            return block[f"self_attn.{name}_proj.weight"].view(-1, size, hidden)[chosen].reshape(-1, hidden)

        q, k, v = heads("q", queries), heads("k", keys), heads("v", keys)
        columns = block["self_attn.o_proj.weight"].view(hidden, self.heads, size)[:, queries].reshape(hidden, -1)
        attention = {
            "fused": {"qkv_proj.weight_qkv": torch.cat([q, k, v])},
            "linear": {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v},
            "coalesced": {"qkv_proj.weight": torch.cat([q, k, v])},
            "plain": {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v},
        }[self.qkv]
        gate_up = [self.share(block[f"mlp.{name}_proj.weight"], tp) for name in ("gate", "up")]
        return {
            **{f"self_attn.{name}": tensor for name, tensor in attention.items()},
            "self_attn.o_proj.weight": columns,
            "mlp.gate_up_proj.weight": torch.cat(gate_up),
            "mlp.down_proj.weight": self.share(block["mlp.down_proj.weight"], tp, 1),
            "input_layernorm.weight": block["input_layernorm.weight"],
            "post_attention_layernorm.weight": block["post_attention_layernorm.weight"],
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
