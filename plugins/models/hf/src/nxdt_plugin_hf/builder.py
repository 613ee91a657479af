"""The component ``hf``: builds a model of transformers and says how it may be sharded, initialised and exchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from nxdt_core.config.huggingface import older_rope
from nxdt_core.errors.models import BadModelConfig
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_plugin_hf.architecture import Architecture, read_architecture
from nxdt_plugin_hf.config import HFModelConfig
from nxdt_plugin_hf.exchange import key_map
from nxdt_plugin_hf.facts import ModelFacts
from nxdt_plugin_hf.modeling import CausalLM, build_model, pass_hidden_by_position
from nxdt_plugin_hf.sharding.tracing import pattern_of

__all__ = ["HFBuilder"]

_facts: dict[tuple[type[Any], str], ModelFacts] = {}
"""By class and configuration."""


class HFBuilder:
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`.

    Names of parameters are those of transformers, but for those of experts
    (:class:`nxdt_plugin_hf.moe.experts.RoutedExperts`).
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ("*ForCausalLM", "*LMHeadModel")
    hf_ignored: ClassVar[tuple[str, ...]] = ("*.rotary_emb.inv_freq", "lm_head.weight")

    def __init__(self, config: HFModelConfig) -> None:
        """Read the architecture; imports transformers.

        Raises:
            BadModelConfig: values that cannot work together.
            NxdtError: transformers has no such causal language model, or a package is missing.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="hf", problems=problems)
        self.config = config
        self.architecture: Architecture = read_architecture(config.values)
        self.vocab_size: int = self.architecture.config.vocab_size
        self.max_sequence_length: int | None = getattr(self.architecture.config, "max_position_embeddings", None)

    def build(self) -> CausalLM:
        """Return the whole model, of transformers' class.

        Raises:
            UnsupportedArchitecture, NotACausalLM: it does what cannot be trained here.
        """
        model = build_model(self.architecture, self.facts.calls)
        for path, module in model.named_modules():
            if pattern_of(path) in self.facts.tensor.blocks and path != model.head_path:
                pass_hidden_by_position(module)
        return model

    @cached_property
    def facts(self) -> ModelFacts:
        """What was seen of the model. Builders of the same model share it: a run makes several."""
        key = (self.architecture.model_class, self.architecture.config.to_json_string(use_diff=False))
        if key not in _facts:
            _facts[key] = ModelFacts.of(self.architecture)
        return _facts[key]

    def plan(self) -> ParallelPlan:
        """Return the capabilities by transformers' own plans, as far as they were seen to work."""
        return self.facts.plan()

    def init_rules(self) -> Sequence[InitRule]:
        """Return :func:`nxdt_plugin_hf.initialisation.init_rules` of the model."""
        return self.facts.init_rules

    def flops_per_token(self, sequence_length: int) -> float:
        """Return :meth:`nxdt_plugin_hf.facts.ModelFacts.flops_per_token`."""
        return self.facts.flops_per_token(sequence_length)

    def config_to_hf(self) -> dict[str, Any]:
        """Return what transformers would write, with keys that transformers 4 calls otherwise under both names."""
        written: dict[str, Any] = json.loads(self.architecture.config.to_json_string(use_diff=True))
        written.pop("dtype", None)  # of the weights that were read; who writes some says theirs
        written["architectures"] = [self.architecture.name]
        if self.architecture.config.attribute_map.get("num_experts") in written:
            written["num_experts"] = self.architecture.config.num_experts
        if self.architecture.config.model_type.startswith("gpt_neox"):
            rope = older_rope(written)
            written |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
        return written

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return :func:`nxdt_plugin_hf.exchange.key_map` of the model."""
        experts = self.facts.experts
        return key_map(self.architecture, {n: experts.get(n.rpartition(".")[0]) for n in self.facts.parameters})
