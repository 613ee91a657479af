"""Base class of the builders of decoders with rotary positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.decoder_plan import ATTENTION, MLP, NORMS
from nxdt_core.models.flops import decoder_flops_per_token
from nxdt_core.models.huggingface import IGNORED
from nxdt_core.models.initialisation import residual_init_rules
from nxdt_core.models.rope_scaling import scaling_to_hf
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import KeyMap
from nxdt_core.protocols.plan import ParallelPlan

if TYPE_CHECKING:
    import torch

__all__ = ["RotaryDecoderBuilder"]

Config = TypeVar("Config", bound=RotaryDecoderConfig)


class RotaryDecoderBuilder(ABC, Generic[Config]):
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` and :class:`~nxdt_core.protocols.model.HFExchange`.

    A model implements :meth:`build` and :meth:`plan` and names its architecture::

        class AcmeBuilder(RotaryDecoderBuilder[AcmeConfig]):
            hf_architectures = ("AcmeForCausalLM",)

            def build(self) -> RotaryDecoder:
                return Acme(self.config)

            def plan(self) -> ParallelPlan:
                return rotary_decoder_plan(self.config, feed_forward={MLP: SWIGLU_STYLES}, recompute={"MLP": (MLP,)})
    """

    hf_architectures: ClassVar[tuple[str, ...]]
    """The first is written to ``config.json``."""
    hf_ignored: ClassVar[tuple[str, ...]] = IGNORED

    def __init__(self, config: Config) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model=config.hf_family.values.model, problems=problems)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_sequence_length: int | None = config.max_position_embeddings

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """Return the patterns of the parameters that write to the residual stream."""
        return f"{ATTENTION}.o_proj.weight", f"{MLP}.down_proj.weight"

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Build the whole model."""

    @abstractmethod
    def plan(self) -> ParallelPlan:
        """Say how the model may be sharded; see :func:`nxdt_core.models.decoder_plan.rotary_decoder_plan`."""

    def init_rules(self) -> Sequence[InitRule]:
        """Return the rules of :func:`nxdt_core.models.initialisation.residual_init_rules` for this model."""
        return residual_init_rules(
            norms=NORMS,
            residual_writers=self.residual_writers,
            std=self.config.init_method_std,
            num_layers=self.config.num_layers,
            scaled=self.config.use_scaled_init_method,
        )

    def feed_forward_weights(self) -> int:
        """Return how many weights of the feed-forward blocks of all layers a token is multiplied with."""
        return self.config.num_layers * 3 * self.config.hidden_size * self.config.ffn_hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.flops.decoder_flops_per_token` for this model."""
        return decoder_flops_per_token(
            self.config,
            sequence_length,
            feed_forward=self.feed_forward_weights(),
            vocab_rows=self.config.vocab_size,
            window=self.config.window,
        )

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``, with keys that both transformers 4 and 5 read."""
        family = self.config.hf_family
        return {
            "architectures": list(self.hf_architectures[:1]),
            "model_type": family.values.model,
            **family.values.write(self.config),
            "num_key_value_heads": self.config.kv_heads,
            "head_dim": self.config.head_size,
            "rope_theta": self.config.rope_theta,
            **({"rope_scaling": scaling_to_hf(self.config.scaling)} if family.scales_rope else {}),
        }

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry for each parameter; a tied head has no separate entry."""
        tied = self.config.share_embeddings_and_output_weights
        return tuple(key for key in self.config.hf_family.keys if not (tied and key.name == "lm_head.weight"))
