"""The component ``gpt``: builds the module and says how it is initialised and exchanged; :mod:`plan` how sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_gpt import hf, hf_export
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.modeling import GPT
from nxdt_plugin_gpt.plan import norms_of, plan_of

__all__ = ["GPTBuilder"]

_RESIDUAL_WRITERS = ("layers.*.attention.o_proj.weight", "layers.*.mlp.down_proj.weight")


class GPTBuilder:
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`."""

    hf_architectures: ClassVar[tuple[str, ...]] = tuple(hf.FAMILIES)
    hf_ignored: ClassVar[tuple[str, ...]] = hf.IGNORED

    def __init__(self, config: GPTConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="gpt", problems=problems)
        self.config = config
        self.vocab_size = config.vocab_rows
        self.max_sequence_length: int | None = config.max_position_embeddings

    def build(self) -> GPT:
        """The whole model."""
        return GPT(self.config)

    def plan(self) -> ParallelPlan:
        """As :func:`nxdt_plugin_gpt.plan.plan_of`."""
        return plan_of(self.config)

    def init_rules(self) -> Sequence[InitRule]:
        """Identities for norms, zeros for biases, normal for matrices; narrower for those that write to the residual
        stream, of which each adds its variance (Radford et al. 2019, section 2.3)."""
        c = self.config
        std = c.init_method_std
        scaled = std / math.sqrt(2 * c.num_layers) if c.use_scaled_init_method else std
        one = 0.0 if c.normalization == "layernorm1p" else 1.0
        return (
            *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=one) for norm in norms_of(c)),
            InitRule(pattern="*.bias", distribution="constant"),
            *(InitRule(pattern=path, distribution="normal", std=scaled) for path in _RESIDUAL_WRITERS),
            InitRule(pattern="*", distribution="normal", std=std),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """6 for each weight that a token is multiplied with (embeddings are looked up, not multiplied), and 12 for
        each layer, query channel and position: PaLM's convention (arXiv:2204.02311, appendix B)."""
        c = self.config
        query_width, kv_width = c.num_attention_heads * c.head_size, c.kv_heads * c.head_size
        layer = c.hidden_size * (2 * query_width + 2 * kv_width + (3 if c.gated else 2) * c.ffn_size)
        weights = c.num_layers * layer + c.vocab_rows * c.hidden_size
        return 6.0 * weights + 12.0 * c.num_layers * query_width * sequence_length

    def config_to_hf(self) -> dict[str, Any]:
        """As :func:`nxdt_plugin_gpt.hf_export.config_to_hf`."""
        return hf_export.config_to_hf(self.config)

    def hf_key_map(self) -> Sequence[KeyMap]:
        """As :func:`nxdt_plugin_gpt.hf_export.key_map`."""
        return hf_export.key_map(self.config)
