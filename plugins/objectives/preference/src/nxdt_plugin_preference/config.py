"""The keys of ``objective:`` and ``data:`` that belong to this plugin. Importing this costs nothing: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.errors import NxdtError

RewardLoss = Literal["nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"]
"""Forms in which the rewards of the two answers count separately."""
PairLoss = Literal["sigmoid", "hinge", "ipo", "robust", "exo_pair", RewardLoss, "sft"]
TruncationMode = Literal["refuse", "keep_start", "keep_end"]


class DpoConfig(Section):
    """``objective: {name: dpo}``: answers become likelier or less so than under the model that the run began with."""

    kl_beta: NonNegativeFloat = 0.01
    """β of the paper: how dearly the model pays for leaving the reference. τ of IPO."""
    loss_type: PairLoss | tuple[PairLoss, ...] = "sigmoid"
    """Form of the loss of a pair, by TRL's names, or a list of several. With Δ, the log-ratio of the chosen answer less
    that of the rejected one: ``sigmoid`` −log σ(β · Δ), ``hinge`` max(0, 1 − β · Δ), ``ipo`` (Δ of ratios per token
    − 1 / (2 · β))², ``robust`` the first without the bias of ``label_smoothing``. The how-to on DPO has the others;
    ``sft`` is the chosen answers' cross-entropy."""
    loss_weights: tuple[NonNegativeFloat, ...] | None = None
    """Weight of each form of ``loss_type``, where that is a list; ``null``: 1 each."""
    label_smoothing: NonNegativeFloat = 0.0
    """Share of pairs whose preference is assumed to be wrong, below 0.5. ``sigmoid`` is then conservative DPO,
    ``robust`` corrects its bias, and ``exo_pair`` needs it; the other forms have none."""
    discopop_tau: NonNegativeFloat = 0.05
    """Temperature of ``discopop``: how sharply it changes from its logistic to its exponential part."""
    precompute_ref_log_probs: bool = True
    """Compute the reference's log-probabilities once, from the weights that the run begins with, and keep them in the
    run's directory. ``false`` computes them at every step from the frozen base of an adapter, which must be there."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        forms = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        if len(set(forms)) != len(forms) or set(forms) <= {"sft"}:
            yield "loss_type", "must have each form once, and one that compares answers"
        if self.loss_weights is not None and len(self.loss_weights) != len(forms):
            yield "loss_weights", f"has {len(self.loss_weights)} weights for {len(forms)} forms of loss_type"
        if not self.discopop_tau:
            yield "discopop_tau", "must be above 0"
        yield from _problems(forms, self.label_smoothing, "kl_beta", self.kl_beta)

    def weighted(self) -> Iterator[tuple[str, float]]:
        """Yield each form of the loss with its weight."""
        forms = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        return zip(forms, self.loss_weights or (1.0,) * len(forms), strict=True)


class CpoConfig(Section):
    """``objective: {name: cpo}``: a preference between log-probabilities and fine-tuning on the chosen answer; no
    reference. ``loss_type: simpo`` with ``cpo_alpha: 0`` is SimPO."""

    beta: NonNegativeFloat = 0.1
    """Factor of the log-probabilities. ``simpo`` averages them over an answer's tokens, and its paper has 2 to 10."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """Form of the loss of a pair, by TRL's names, as of ``dpo`` with log-probabilities in place of log-ratios.
    ``simpo``: −log σ(β · Δ per token − ``simpo_gamma``)."""
    label_smoothing: NonNegativeFloat = 0.0
    """Share of pairs whose preference is assumed to be wrong, below 0.5; of ``sigmoid`` and ``simpo``."""
    cpo_alpha: NonNegativeFloat = 1.0
    """Weight of the chosen answers' cross-entropy, a mean over their tokens."""
    simpo_gamma: NonNegativeFloat = 0.5
    """Margin between the two rewards that ``simpo`` aims at."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        return _problems((self.loss_type,), self.label_smoothing, "beta", self.beta)


def _problems(forms: Sequence[str], smoothing: float, key: str, beta: float) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the forms of a loss on pairs, whose β is ``key``."""
    dividing = {"ipo", "simpo", "sppo_hard"}.intersection(forms)
    if dividing and not beta:
        yield key, f"must be above 0: loss_type {min(dividing)} divides by it"
    if smoothing >= 0.5:
        yield "label_smoothing", "must be below 0.5: more wrong preferences than right ones teach the opposite"
    if smoothing and not {"sigmoid", "robust", "exo_pair", "simpo"}.intersection(forms):
        yield "label_smoothing", f"must be 0: loss_type {', '.join(forms)} does not smooth"
    if not smoothing and "exo_pair" in forms:
        yield "label_smoothing", "must be above 0: loss_type exo_pair takes its logarithm; its paper has 0.001"


class OrpoConfig(Section):
    """``objective: {name: orpo}``: fine-tuning on the chosen answer and a preference for it in one; no reference."""

    beta: NonNegativeFloat = 0.1
    """λ of the paper: weight of the odds-ratio term."""
    prompt_in_nll: bool = True
    """Count the prompt's tokens in the fine-tuning term, as TRL does; ``false`` counts the answer's alone, as in the
    paper."""


class KtoConfig(Section):
    """``objective: {name: kto}``: desirable answers become likelier than under the model that the run began with, and
    others less likely; no pairs."""

    beta: NonNegativeFloat = 0.1
    """β of the paper: how dearly the model pays for leaving the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """Factor of the loss of desirable answers. The paper keeps its product with their number at 1 to 4/3 times that of
    undesirable ones."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Factor of the loss of undesirable answers."""
    precompute_ref_log_probs: bool = True
    """Compute the reference's log-probabilities once, before the first step; see the same key of ``dpo``."""


class RewardConfig(Section):
    """``objective: {name: reward}``: a model with ``model.score_head`` gives chosen answers greater scores."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps their mean near 0 (Eisenstein et al. 2023,
    arXiv:2312.09244, which has 0.01)."""


class UnpairedConfig(ChatKeys):
    """``data: {name: unpaired-preference}``: records with ``prompt``, ``completion`` and ``label``, true or false.

    Files and messages are read as ``preference`` reads them. A record with ``chosen`` and ``rejected`` is two.
    """

    packing: bool = False
    """Put several pairs into one sample, apart from each other: their chosen answers into one sequence, the rejected
    ones into another; otherwise each pair is padded to two sequences. Batch sizes count samples."""
    space_after_turns: bool = False
    """Let answers of messages end with the space that the template writes after a turn, such as ChatML's newline, as
    TRL does. Otherwise they end with the token that ends the turn, as in generation."""
    truncation_mode: TruncationMode = "refuse"
    """Treatment of a prompt that does not fit into ``data.seq_length`` with the longer answer: ``refuse`` reports its
    place as an error, ``keep_start`` cuts off the end of the user's last message, ``keep_end`` the prompt's start."""
    max_prompt_length: PositiveInt | None = None
    """Tokens that a prompt keeps at least where it is cut; ``null``: half of ``data.seq_length``. If this does not
    suffice, answers are cut at their end."""

    def check(self) -> Iterator[tuple[str, str | NxdtError]]:
        """Yield what cannot work with any files, as (key, message)."""
        yield from ChatKeys.check(self)
        if self.max_prompt_length is not None and self.truncation_mode == "refuse":
            yield "max_prompt_length", "it cuts prompts; set truncation_mode to keep_start or keep_end too"


class PreferenceConfig(UnpairedConfig):
    """``data: {name: preference}``: records with ``chosen`` and ``rejected``, and mostly ``prompt``.

    Files are JSONL, JSON with a list, CSV, TSV, Arrow or Parquet, or directories of one of these; all may be compressed
    (``.gz``, ``.zst``). A path may be a pattern. Texts are used unchanged; a chat template renders messages.
    """

    margins: bool = False
    """Read the number ``margin`` of each pair, by which ``reward`` wants the scores of its answers to differ."""
