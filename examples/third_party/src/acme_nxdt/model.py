"""A bigram model: the next token from this one alone."""

from typing import Any

import torch

from acme_nxdt.config import BigramConfig
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan


class Bigram(torch.nn.Module):
    """Embedding and output projection."""

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``input_ids`` [batch, seq] to logits [batch, seq, vocab]."""
        return self.lm_head(self.embed_tokens(input_ids))


class BigramBuilder(ModelBuilder):
    """Builds :class:`Bigram` and says how it may be sharded and initialised."""

    def build(self) -> torch.nn.Module:
        """Return the module; called on the meta device."""
        return Bigram(self.config)

    def plan(self) -> ParallelPlan:
        """Both matrices can be cut along the vocabulary."""
        return ParallelPlan(
            tensor={"embed_tokens": "vocab_embedding", "lm_head": "vocab_head"}, tensor_blocks=("lm_head",)
        )

    def init_rules(self) -> list[InitRule]:
        """Everything normal."""
        return [InitRule(pattern="*", distribution="normal", std=0.02)]

    def flops_per_token(self, sequence_length: int) -> float:
        """Six for each weight of the output projection: two forward, four backward."""
        return 6.0 * self.config.hidden_size * self.config.vocab_size

    # Hugging Face directories: optional

    hf_architectures = ("BigramForCausalLM",)

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``: the inverse of ``BigramConfig.from_hf``."""
        return {"architectures": ["BigramForCausalLM"], "model_type": "bigram", **self.config.model_dump()}

    def hf_key_map(self) -> list[KeyMap]:
        """Return the names of the tensors in Hugging Face files."""
        names = ("embed_tokens.weight", "lm_head.weight")
        return [KeyMap(name=name, hf_names=(f"bigram.{name}",)) for name in names]
