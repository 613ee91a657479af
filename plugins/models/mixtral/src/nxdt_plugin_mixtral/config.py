"""Section ``model`` of a Mixtral, and ``model.moe``: how tokens are routed to experts.

No torch here: ``nxdt config check`` reads this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import HFFamily
from nxdt_plugin_mixtral.hf import MIXTRAL


class MoEConfig(Section):
    """The mixture of experts of a layer; the names of the keys are NxD Training's."""

    num_experts: PositiveInt = 8
    """Experts of a layer (``num_local_experts`` of Hugging Face)."""
    top_k: PositiveInt = 2
    """Experts a token (``num_experts_per_tok`` of Hugging Face)."""
    frequency: PositiveInt = 1
    """One layer in so many has experts, the last of each group; the others have a plain feed-forward block."""
    routing_algorithm: Literal["top_k", "sinkhorn"] = "top_k"
    """``sinkhorn`` gives each token one expert, and each expert about equally many tokens of a micro-batch."""
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    """``sinkhorn``: what makes a logit the weight of its expert. ``top_k`` always takes softmax over all experts."""
    sinkhorn_iterations: PositiveInt = 30
    """``sinkhorn``: rounds of balancing."""
    sinkhorn_tol: NonNegativeFloat | None = None
    """``sinkhorn``: stop when a round moves the logits by less on the average; ``null``: do all rounds."""
    normalize_top_k_affinities: bool = True
    """Let the weights of a token's experts add up to 1."""
    capacity_factor: float | None = None
    """Drop the assignments of a micro-batch that exceed this multiple of an expert's equal share of its positions;
    ``null``, or not above 0, drops nothing. Generation drops nothing."""
    dropless: bool = False
    """State that nothing may be dropped: refuses a ``capacity_factor`` above 0."""
    output_router_logits: bool = True
    """Train with the load-balancing loss; false leaves it out with any coefficient."""
    router_aux_loss_coef: NonNegativeFloat = 0.02
    """Coefficient of the load-balancing loss: the mean over layers of transformers' formula, which is ``top_k`` where
    all experts get equally many tokens. It is added to the mean loss of the step; padding does not count."""
    pool_router_aux_loss: bool = False
    """Compute the load-balancing loss over the tokens of all layers together, as transformers does, so that layers make
    up for one another."""
    dropout: NonNegativeFloat = 0.0
    """Dropout between the matrices of each expert, and nowhere else."""
    exchange_chunks: PositiveInt = 1
    """Expert parallelism: parts in which a layer sends its tokens, so that one travels while the experts compute
    another one; 1 sends all of them before the experts compute."""
    glu_mlp: bool = True
    """Experts with a gate (SwiGLU); the only ones that are implemented."""

    @property
    def capacity(self) -> float | None:
        """``capacity_factor`` where it bounds anything."""
        return self.capacity_factor if self.capacity_factor is not None and self.capacity_factor > 0 else None

    @property
    def pooled(self) -> bool:
        """True if the load-balancing loss has a weight and pools layers."""
        return self.pool_router_aux_loss and self.balance_coefficient > 0

    @property
    def balance_coefficient(self) -> float:
        """``router_aux_loss_coef`` where it counts."""
        return self.router_aux_loss_coef if self.output_router_logits else 0.0

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        if self.top_k > self.num_experts:
            yield "top_k", f"exceeds num_experts ({self.num_experts})"
        if self.dropless and self.capacity is not None:
            yield "dropless", f"says that nothing is dropped, and capacity_factor {self.capacity:g} drops: keep one"
        if self.routing_algorithm == "sinkhorn":
            if self.top_k != 1:
                yield (
                    "top_k",
                    f"must be 1 for routing_algorithm sinkhorn, which gives a token one expert, not {self.top_k}",
                )
            if self.normalize_top_k_affinities:
                yield (
                    "normalize_top_k_affinities",
                    "must be false for routing_algorithm sinkhorn: one weight alone is 1",
                )
        if self.dropout >= 1:
            yield "dropout", f"must be below 1, not {self.dropout:g}: it is a probability, and 1 leaves nothing"
        if not self.glu_mlp:
            yield "glu_mlp", "must be true: experts without a gate are not implemented"


class MixtralConfig(RotaryDecoderConfig):
    """Architecture of a Mixtral; the names of the keys are NxD Training's."""

    hf_family: ClassVar[HFFamily] = MIXTRAL

    ffn_hidden_size: PositiveInt
    """Width of an expert (``intermediate_size`` of Hugging Face)."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence in tokens."""
    sliding_window: PositiveInt | None = None
    """Tokens that one sees, itself included; ``null``: all before it, as in the released models."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    moe: MoEConfig = Field(default_factory=MoEConfig)
    """The mixture of experts."""

    @property
    def window(self) -> int | None:
        """``sliding_window``."""
        return self.sliding_window

    @property
    def expert_layers(self) -> frozenset[int]:
        """Numbers of the layers that have experts."""
        return frozenset(n for n in range(self.num_layers) if (n + 1) % self.moe.frequency == 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a plain feed-forward block instead of experts."""
        return self.num_layers - len(self.expert_layers)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        yield from super().check()
        for key, problem in self.moe.check():
            yield f"moe.{key}", problem
        if self.moe.frequency > self.num_layers:
            yield "moe.frequency", f"leaves none of {self.num_layers} layers with experts"
