"""Small models for tests of tensor parallelism: Llama, and one with all that Llama lacks."""

import torch
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from torch import nn
from torch.nn import functional

from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.models.norm import RMSNorm
from nxdt_core.protocols.plan import AttentionHeads, ParallelPlan

VOCAB, HIDDEN, SEQ, HEAD = 48, 32, 16, 8


class Attention(nn.Module):
    """Grouped heads with biases, and a norm of each head: its scale is replicated, its gradient partial."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, heads * HEAD)
        self.key = nn.Linear(HIDDEN, kv_heads * HEAD)
        self.value = nn.Linear(HIDDEN, kv_heads * HEAD)
        self.head_norm = RMSNorm(HEAD)
        self.core = CausalAttention()
        self.out = nn.Linear(heads * HEAD, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(hidden).unflatten(-1, (-1, HEAD)) for p in (self.query, self.key, self.value))
        q, k = self.head_norm(q), self.head_norm(k)
        return self.out(self.core(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """With biases, and a side path of low rank: ``wide`` comes after the sum over ranks that ``narrow`` ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.narrow = nn.Linear(2 * HIDDEN, 4, bias=False)
        self.wide = nn.Linear(4, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.up(hidden))
        return self.down(wide) + self.wide(self.narrow(wide))


class Biased(nn.Module):
    """What Llama lacks: biases everywhere, learned positions, a padding id, norms of heads, a side path."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN, padding_idx=VOCAB - 1)
        self.positions = nn.Embedding(SEQ, HIDDEN)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.attention = Attention(heads, kv_heads)
        self.mlp = FeedForward()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]).expand_as(ids))
        hidden = hidden + self.attention(self.norm_1(hidden))
        hidden = hidden + self.mlp(self.norm_2(hidden))
        return self.head(self.norm_3(hidden))


def biased_plan(heads: int, kv_heads: int) -> ParallelPlan:
    return ParallelPlan(
        tensor={
            "tokens": "vocab_embedding",
            "positions": "replicate",
            "attention.query": "column",
            "attention.key": "column",
            "attention.value": "column",
            "attention.out": "row",
            "mlp.up": "column",
            "mlp.down": "row",
            "mlp.narrow": "row",
            "mlp.wide": "replicate",
            "head": "vocab_head",
        },
        tensor_blocks=("attention", "mlp", "head"),
        heads=AttentionHeads(
            query_heads=heads,
            kv_heads=kv_heads,
            query=("attention.query",),
            key_value=("attention.key", "attention.value"),
            output=("attention.out",),
        ),
    )


def llama(heads: int, kv_heads: int, *, tied: bool) -> LlamaBuilder:
    return LlamaBuilder(
        LlamaConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            ffn_hidden_size=2 * HIDDEN,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=HEAD,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            share_embeddings_and_output_weights=tied,
        )
    )
