"""Section ``model``: what the core itself reads of it. The docstrings are the YAML reference.

The architecture's own keys (layers, heads, …) are those of the selected model's section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from nxdt_core.config.annotations import DefaultsTo, NonNegativeFloat, PositiveInt
from nxdt_core.config.section import Section

__all__ = ["ModelConfig", "OptimConfig", "ParamGroupConfig", "SchedConfig"]


class SchedConfig(Section):
    """Selects the learning-rate schedule; the keys of the schedule are next to ``name``."""

    name: str = "constant"
    """Component of kind ``schedule``."""
    max_steps: Annotated[PositiveInt, DefaultsTo("trainer.max_steps")]
    """Steps after which the schedule has ended; ``trainer.max_steps`` where it is not set."""


class ParamGroupConfig(Section):
    """Parameters that learn otherwise than the rest."""

    params: str
    """Path pattern: a leading ``*`` stands for any depth, any other for one component, as in ``*.router.weight``."""
    lr: NonNegativeFloat | None = None
    """Their peak learning rate; the schedule scales it as it does ``model.optim.lr``. ``null``: that."""
    weight_decay: NonNegativeFloat | None = None
    """Their decay, also of norms and biases among them. ``null``: as the model's plan and ``model.optim`` say."""


class OptimConfig(Section):
    """Selects the optimizer; the keys of the optimizer are next to ``name``."""

    name: str = "adamw"
    """Component of kind ``optimizer``."""
    lr: NonNegativeFloat
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of the weights that the model's plan lets decay."""
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Rates and decays by pattern; the last entry that matches a parameter counts, and each must match some."""
    sched: SchedConfig
    """The learning-rate schedule."""


class ModelConfig(Section):
    """Selects a model; the keys of the architecture are next to ``name``."""

    name: str
    """Component of kind ``model``. Where it is not set: the one that reads the architecture of
    ``model_config``, else ``llama``. A note says which."""
    hf_config: Path | None = Field(default=None, alias="model_config")
    """Hugging Face ``config.json``, or its directory. Keys given next to it take precedence."""
    optim: OptimConfig
    """Optimizer and learning rate."""
    do_layer_norm_weight_decay: bool = False
    """Let the weights of normalisation layers decay too."""
    pipeline_cuts: tuple[str, ...] | None = None
    """Modules that end a pipeline stage (PP × VPP - 1 names). ``null``: the engine ``torch`` chooses cuts that balance
    layers, embedding and head; ``nxd`` cuts evenly."""
    activations_checkpoint_granularity: Literal["selective", "full"] | None = None
    """Recompute in backward: whole layers, the modules of ``activations_checkpoint_recompute``, or nothing."""
    activations_checkpoint_recompute: tuple[str, ...] | None = None
    """What to recompute under ``selective``: names that the model's plan gives to modules, such as
    ``CoreAttention``."""
    loss_chunk_tokens: PositiveInt | None = None
    """Compute logits and their losses for so many tokens of a micro-batch at a time, and again in backward, so that
    memory does not grow with tokens times vocabulary. The head's work grows by a third. ``null``: all at once."""
    compile: bool = False
    """Compile each layer with ``torch.compile``. The first step takes longer; its compile time is logged apart."""
