"""The component ``gpt``: builds the module and says how it is initialised and exchanged; :mod:`plan` how sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.decoder_builder import decoder_flops_per_token, residual_init_rules
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.hf import exchange
from nxdt_plugin_gpt.modeling import GPT
from nxdt_plugin_gpt.plan import norms_of, plan_of

__all__ = ["GPTBuilder"]

_RESIDUAL_WRITERS = ("layers.*.attention.o_proj.weight", "layers.*.mlp.down_proj.weight")


class GPTBuilder:
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`."""

    hf_architectures: ClassVar[tuple[str, ...]] = tuple(exchange.FAMILIES)
    hf_ignored: ClassVar[tuple[str, ...]] = exchange.IGNORED

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
        """Return the whole model."""
        return GPT(self.config)

    def plan(self) -> ParallelPlan:
        """Return :func:`nxdt_plugin_gpt.plan.plan_of` of the configuration."""
        return plan_of(self.config)

    def init_rules(self) -> Sequence[InitRule]:
        """Return the rules of :func:`nxdt_core.models.decoder_builder.residual_init_rules`; a ``layernorm1p`` starts at
        zero, its difference from one."""
        c = self.config
        return residual_init_rules(
            norms=norms_of(c),
            residual_writers=_RESIDUAL_WRITERS,
            std=c.init_method_std,
            num_layers=c.num_layers,
            scaled=c.use_scaled_init_method,
            norm_weight=0.0 if c.normalization == "layernorm1p" else 1.0,
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.decoder_builder.decoder_flops_per_token` for this model."""
        c = self.config
        block = (3 if c.gated else 2) * c.hidden_size * c.ffn_size
        return decoder_flops_per_token(c, sequence_length, feed_forward=c.num_layers * block, vocab_rows=c.vocab_rows)

    def config_to_hf(self) -> dict[str, Any]:
        """Return :func:`nxdt_plugin_gpt.hf.exchange.config_to_hf` of the configuration."""
        return exchange.config_to_hf(self.config)

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return :func:`nxdt_plugin_gpt.hf.exchange.key_map` of the configuration."""
        return exchange.key_map(self.config)
