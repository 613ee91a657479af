"""The keys of ``adapter:`` that belong to ``name: lora``. No torch here: ``nxdt config check`` reads this module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from nxdt_core.config.section import Fraction, NonNegativeFloat, PositiveInt, Section, SourcePath

Biases = Literal["none", "all", "lora_only"]

ALL_LINEAR = "all-linear"
"""Name in ``target_modules`` of every linear layer and expert but the head."""


def ends_in(path: str, name: str) -> bool:
    """Return whether the last components of ``path`` are ``name``."""
    return f".{path}".endswith(f".{name}")


class LoraConfig(Section):
    """Low-rank updates of frozen weights (Hu et al. 2021, arXiv:2106.09685); the names of the keys are NxD Training's.

    A layer with the weight W gives (W + s B A) x, where A has ``lora_rank`` rows, B as many columns and starts at zero,
    and s is ``lora_alpha / lora_rank``.
    """

    enable_lora: bool = True
    """``false``: the run trains all weights, as without this section."""
    lora_rank: PositiveInt = 16
    """Rank of the update."""
    lora_alpha: NonNegativeFloat = 32.0
    """Scale of the update, divided by the rank."""
    rank_pattern: Mapping[str, PositiveInt] = {}
    """Ranks of some layers in place of ``lora_rank``, by path or its end: ``{down_proj: 64, layers.0.mlp.up_proj: 8}``.
    The first name that matches counts, as in peft; regular expressions are not read."""
    alpha_pattern: Mapping[str, NonNegativeFloat] = {}
    """Scales of some layers in place of ``lora_alpha``, named in the same way."""
    loraplus_lr_ratio: NonNegativeFloat = 1.0
    """Learning rate of B over that of A (LoRA+, Hayou et al. 2024, arXiv:2402.12354), as peft's
    ``create_loraplus_optimizer``: biases, norms and DoRA's magnitudes that train have B's rate, too. A and B of
    embeddings keep ``model.optim.lr``; rates of ``model.optim.param_groups`` take precedence."""
    lora_dropout: Fraction = 0.05
    """Dropout of what the update is given; 0 saves its memory."""
    lora_bias: Biases = "none"
    """Biases that train too: none, all of the model, or those of layers with an update."""
    bias: Biases | None = None
    """``lora_bias`` under the name that NxD Core gives it."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an update: a part of their path (``q_proj``, ``attention``, ``layers.0``), or a pattern with
    ``*`` and ``?`` for a whole path. ``all-linear``: all but embedding and head. ``qkv_proj`` and ``gate_up_proj`` mean
    the separate matrices of a model that has no fused one."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that train whole and are saved with the adapter: all whose path ends so, as in peft (``norm`` means
    ``attention_norm``, too), or a pattern; layers within them get no update."""
    use_rslora: bool = False
    """Divide ``lora_alpha`` by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the norm of each output feature's weights apart from their direction (Liu et al. 2024, arXiv:2402.09353);
    linear layers and embeddings only."""
    init_lora_weights: Literal["default", "gaussian", "pissa"] = "default"
    """Initial values of A: uniform within 1 / sqrt(inputs), or normal with the standard deviation 1 / rank; B is zero.
    ``pissa``: A and B are the largest singular values and vectors of the weight (Meng et al. 2024, arXiv:2404.02948).
    The product of their initial values is subtracted in each step, so that the base stays as it is: they are frozen,
    saved with the adapter, and exported to peft as part of an adapter of twice the rank. Linear layers only."""
    save_lora_base: bool = True
    """Checkpoints hold the frozen weights too; ``false``: what trains, alone."""
    merge_lora: bool = False
    """At the end of the run, once its last step is saved, commit the merged model next to the checkpoints: their
    address with the suffix ``-merged``, where it replaces an older one. Checkpoints stay as they are, so that the run
    can be resumed. Needs ``save_lora_base``."""
    save_lora_config_adapter: bool = True
    """Keep these options in the checkpoints alone, which always have them; ``false``: also write them into the run's
    directory, as ``lora_adapter/adapter_config.json``."""
    load_lora_from_ckpt: bool = False
    """Start from the adapter at ``lora_save_dir``."""
    lora_save_dir: SourcePath | None = None
    """A store of checkpoints of a LoRA run, or a directory that peft wrote."""
    lora_load_tag: str | int | None = None
    """The step to take at ``lora_save_dir``: ``step-00000100`` or ``100``; ``null``: the newest."""
    lora_verbose: bool = False
    """Print the layers that get an update."""

    @property
    def biases(self) -> Biases:
        """``lora_bias``, under either name."""
        return self.lora_bias if self.bias is None else self.bias

    def rank_of(self, path: str) -> int:
        """Return the rank of the update of the layer at ``path``."""
        return next((rank for name, rank in self.rank_pattern.items() if ends_in(path, name)), self.lora_rank)

    def alpha_of(self, path: str) -> float:
        """Return the scale of the update of the layer at ``path``."""
        return next((alpha for name, alpha in self.alpha_pattern.items() if ends_in(path, name)), self.lora_alpha)

    def scaling_of(self, path: str) -> float:
        """Return the factor of the product of B and A in the layer at ``path``."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.use_rslora else rank)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        if self.lora_dropout >= 1:
            yield "lora_dropout", f"must be below 1, not {self.lora_dropout:g}: 1 leaves nothing to learn from"
        if self.bias is not None and self.lora_bias not in ("none", self.bias):
            yield "bias", f"is {self.bias} and lora_bias is {self.lora_bias}: they are one key; keep one"
        if self.enable_lora and not self.target_modules:
            yield "target_modules", f"names nothing; {ALL_LINEAR!r} means every linear layer"
        if self.merge_lora and not self.enable_lora:
            yield "merge_lora", "needs enable_lora: true, since a run without updates has nothing to merge"
        elif self.merge_lora and not self.save_lora_base:
            yield "merge_lora", "needs save_lora_base: true, since a merged model holds the base's weights"
        if self.load_lora_from_ckpt and self.lora_save_dir is None:
            yield "load_lora_from_ckpt", "is true, and lora_save_dir does not say from where"
        if self.lora_load_tag is not None and self.lora_save_dir is None:
            yield "lora_load_tag", "is given without lora_save_dir, in which it would be looked for"
