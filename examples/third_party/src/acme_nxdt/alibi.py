"""A decoder whose heads subtract a slope times the distance (ALiBi, Press et al. 2022, arXiv:2108.12409)."""

import torch
from torch.nn import functional

from acme_nxdt.alibi_config import AlibiConfig
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import AttentionHeads, InitRule, ParallelPlan, PipelinePlan


class Slopes(torch.nn.Module):
    """One number per head. The plan shards this module, so that each rank has only the slopes of its heads."""

    values: torch.Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads  # of the whole model: a rank has fewer, and their slopes follow from all
        self.register_buffer("values", torch.empty(heads), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute what is not saved: 2⁻⁸ᐟⁿ and its powers."""
        numbers = torch.arange(1, self.heads + 1, device=self.values.device)
        self.values.copy_(torch.exp2(-8.0 * numbers / self.heads))

    def forward(self) -> torch.Tensor:
        """Return the slopes [heads]; under tensor parallelism [heads / tp]."""
        return self.values


class Attention(torch.nn.Module):
    """Causal attention. The number of heads is read from the projections: on a shard it is smaller."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.q_proj = torch.nn.Linear(width, width, bias=False)
        self.k_proj = torch.nn.Linear(width, width, bias=False)
        self.v_proj = torch.nn.Linear(width, width, bias=False)
        self.slopes = Slopes(config.num_attention_heads)
        self.o_proj = torch.nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        places = torch.arange(hidden.shape[1], device=hidden.device)
        distance = places[:, None] - places[None, :]
        seen = distance >= 0
        if document_ids is not None:
            seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        bias = -self.slopes()[:, None, None] * distance  # [heads, seq, seq]
        bias = bias.to(query.dtype).masked_fill(~seen, float("-inf"))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class FeedForward(torch.nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.down_proj = torch.nn.Linear(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        return self.down_proj(functional.gelu(self.up_proj(hidden)))


class Layer(torch.nn.Module):
    """Attention and feed-forward block, each behind a norm."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = torch.nn.LayerNorm(config.hidden_size)
        self.mlp = FeedForward(config)

    def forward(self, hidden: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), document_ids)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Alibi(torch.nn.Module):
    """The decoder. A pipeline stage has some of the layers and is fed with hidden states."""

    def __init__(self, config: AlibiConfig) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleDict({str(number): Layer(config) for number in range(config.num_layers)})
        self.norm = torch.nn.LayerNorm(config.hidden_size)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``input_ids`` [batch, seq] to logits [batch, seq, vocab]."""
        hidden = input_ids if input_ids.is_floating_point() else self.embed_tokens(input_ids)
        for layer in self.layers.values():
            hidden = layer(hidden, document_ids)
        return self.lm_head(self.norm(hidden))


class AlibiBuilder(ModelBuilder):
    """Builds :class:`Alibi` and says how it may be sharded and initialised."""

    max_sequence_length = None

    def __init__(self, config: AlibiConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size

    def build(self) -> torch.nn.Module:
        """Return the module; called on the meta device."""
        return Alibi(self.config)

    def plan(self) -> ParallelPlan:
        """Heads are sharded, and with them the slopes: style ``heads``, and an entry of ``AttentionHeads.query``."""
        attention, mlp, heads = "layers.*.attention", "layers.*.mlp", self.config.num_attention_heads
        return ParallelPlan(
            tensor={
                "embed_tokens": "vocab_embedding",
                **dict.fromkeys((f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"), "column"),
                f"{attention}.slopes": "heads",
                f"{attention}.o_proj": "row",
                f"{mlp}.up_proj": "column",
                f"{mlp}.down_proj": "row",
                "lm_head": "vocab_head",
            },
            tensor_blocks=(attention, mlp, "lm_head"),
            heads=AttentionHeads(
                query_heads=heads,
                kv_heads=heads,
                query=(f"{attention}.q_proj", f"{attention}.slopes"),
                key_value=(f"{attention}.k_proj", f"{attention}.v_proj"),
                output=(f"{attention}.o_proj",),
            ),
            pipeline=PipelinePlan(hidden_size=self.config.hidden_size),
            norms=("layers.*.attention_norm.weight", "layers.*.mlp_norm.weight", "norm.weight"),
        )

    def init_rules(self) -> list[InitRule]:
        """Scales of norms 1, biases 0, matrices normal."""
        return [
            InitRule(pattern="*norm.weight", distribution="constant", mean=1.0),
            InitRule(pattern="*.bias", distribution="constant"),
            InitRule(pattern="*", distribution="normal", std=0.02),
        ]

    def flops_per_token(self, sequence_length: int) -> float:
        """Six for each weight that a token is multiplied with, and 12 per layer, width and token of the sequence."""
        layers, width = self.config.num_layers, self.config.hidden_size
        weights = 12 * layers * width * width + width * self.config.vocab_size
        return 6.0 * weights + 12.0 * layers * width * sequence_length
