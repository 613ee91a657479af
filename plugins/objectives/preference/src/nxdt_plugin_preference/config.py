"""The keys of ``objective:`` and ``data:`` that belong to this plugin. Importing this costs nothing: no torch."""

from __future__ import annotations

from typing import Literal

from nxdt_core.config.annotations import NonNegativeFloat, PositiveInt
from nxdt_core.config.section import Section
from nxdt_core.data.chat.templates import ChatKeys

TruncationMode = Literal["keep_start", "keep_end"]


class DpoConfig(Section):
    """``objective: {name: dpo}``: answers become likelier or less so than under the model that the run began with."""

    kl_beta: NonNegativeFloat = 0.01
    """β of the paper: how dearly the model pays for leaving the reference."""
    loss_type: Literal["sigmoid"] = "sigmoid"
    """Form of the loss: −log σ(β · difference of the two log-ratios)."""
    precompute_ref_log_probs: bool = True
    """Compute the reference's log-probabilities once, from the weights that the run begins with, and keep them in the
    run's directory. ``false`` computes them at every step from the frozen base of an adapter, which must be there."""


class OrpoConfig(Section):
    """``objective: {name: orpo}``: fine-tuning on the chosen answer and a preference for it in one; no reference."""

    beta: NonNegativeFloat = 0.1
    """λ of the paper: weight of the odds-ratio term."""
    prompt_in_nll: bool = True
    """Whether the fine-tuning term counts the prompt's tokens too, as TRL does; ``false``: those of the answer alone,
    as in the paper."""


class PreferenceConfig(ChatKeys):
    """``data: {name: preference}``: records with ``chosen`` and ``rejected``, and mostly ``prompt``.

    Files are JSONL, JSON with a list, CSV, TSV, Arrow or Parquet, or directories of one of these; all may be compressed
    (``.gz``, ``.zst``). A path may be a pattern. Texts are used unchanged; a chat template renders messages.
    """

    packing: bool = False
    """Put several pairs into one sample, apart from each other: their chosen answers into one sequence, the rejected
    ones into another; otherwise each pair is padded to two sequences. Batch sizes count samples."""
    space_after_turns: bool = False
    """Let answers of messages end with the space that the template writes after a turn, such as ChatML's newline, as
    TRL does. Otherwise they end with the token that ends the turn, as in generation."""
    max_prompt_length: PositiveInt | None = None
    """Tokens that a prompt is cut to where it and the longer answer do not fit into ``data.seq_length`` together;
    ``null``: half of that length. Answers are then cut at their end to what is left."""
    truncation_mode: TruncationMode = "keep_start"
    """Which end of such a prompt stays."""
