"""A model without a mistake, as small as one with attention, a plan and a Hugging Face form can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxdt_core.config.section import Section as BaseSection
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import AttentionHeads, InitRule, ParallelPlan, PipelinePlan

HEADS, WIDTH, ROWS, PLACES = 2, 16, 32, 64
PARTS = ("tokens", "places", "layers.*.norm", "layers.*.attention.qkv", "layers.*.attention.out", "norm", "head")


class Attention(nn.Module):
    def __init__(self, core: CausalAttention) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core = core
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
        heads = self.heads(self.qkv(hidden)).transpose(1, 2)
        attended = self.core(*heads.chunk(3, -1), document_ids)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return output

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, 3 * WIDTH // HEADS))


class Layer(nn.Module):
    core_type: type[CausalAttention] = CausalAttention
    attention_type: type[Attention] = Attention
    share: torch.Tensor

    def __init__(self, masks: DocumentMasks) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = self.attention_type(self.core_type(masks))
        self.register_buffer("share", torch.tensor(float("nan")), persistent=False)

    def reset_buffers(self) -> None:
        """Compute what the constructor leaves out, as the protocol allows."""
        self.share.fill_(1.0)

    def forward(self, hidden: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
        attended: torch.Tensor = self.attention(self.norm(hidden), document_ids)
        return hidden + attended * self.share


class Small(nn.Module):
    layer_type: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        masks = DocumentMasks()
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.layers = nn.ModuleDict({str(number): self.layer_type(masks) for number in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = input_ids
        if not hidden.is_floating_point():
            places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
            hidden = self.tokens(input_ids) + self.places(places)
        for layer in self.layers.values():
            hidden = layer(hidden, document_ids)
        return self.head(self.norm(hidden))


class SmallConfig(BaseSection):
    eps: float = 1e-5

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"eps": hf["eps"]}


class SmallBuilder(ModelBuilder):
    model: type[nn.Module] = Small
    config_type: type = SmallConfig
    mutant = "SmallBuilder"
    capabilities: frozenset[str] | None = None
    vocab_size = ROWS
    max_sequence_length: int | None = PLACES
    hf_architectures: tuple[str, ...] = ("SmallForCausalLM",)
    hf_ignored: tuple[str, ...] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config or self.config_type(eps=1e-3)

    def build(self) -> nn.Module:
        made = self.model()
        made.norm.eps = self.config.eps
        return made

    def plan(self) -> ParallelPlan:
        return ParallelPlan(
            tensor={
                "tokens": "vocab_embedding",
                "places": "replicate",
                "layers.*.attention.qkv": "column",
                "layers.*.attention.out": "row",
                "head": "vocab_head",
            },
            tensor_blocks=("layers.*.attention", "head"),
            heads=AttentionHeads(
                query_heads=HEADS, kv_heads=HEADS, query=("layers.*.attention.qkv",), output=("layers.*.attention.out",)
            ),
            pipeline=PipelinePlan(hidden_size=WIDTH, first=("tokens", "places"), last=("norm", "head")),
            attention_cores=("layers.*.attention.core",),
            recompute={"Core": ("layers.*.attention.core",)},
            norms=("layers.*.norm.weight", "norm.weight"),
        )

    def init_rules(self) -> list[InitRule]:
        return [
            InitRule(pattern="*norm.weight", distribution="constant", mean=1.0),
            InitRule(pattern="*.bias", distribution="constant"),
            InitRule(pattern="*", distribution="normal"),
        ]

    def flops_per_token(self, sequence_length: int) -> float:
        return 6.0 * (2 * 4 * WIDTH * WIDTH + WIDTH * ROWS) + 12.0 * 2 * WIDTH * sequence_length

    def config_to_hf(self) -> dict[str, Any]:
        return {"architectures": ["SmallForCausalLM"], "eps": self.config.eps}

    def hf_key_map(self) -> list[KeyMap]:
        names = [f"{part}.{kind}" for part in PARTS for kind in ("weight", "bias")]
        return [KeyMap(name=name, hf_names=(f"small.{name}",)) for name in names]
