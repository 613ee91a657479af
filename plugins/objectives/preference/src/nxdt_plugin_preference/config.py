"""The keys of ``objective:`` and ``data:`` that belong to this plugin. Importing this costs nothing: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxdt_core.config.marks import Fraction, NonNegativeFloat, PositiveInt
from nxdt_core.protocols.dataloader import SplitName

__all__ = ["DpoConfig", "OrpoConfig", "PreferenceConfig", "TruncationMode"]

TruncationMode = Literal["keep_start", "keep_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """``objective: {name: dpo}``: answers become likelier or less so than under the model that the run began with."""

    kl_beta: NonNegativeFloat = 0.01
    """β of the paper: how dearly the model pays for leaving the reference."""
    loss_type: Literal["sigmoid"] = "sigmoid"
    """Form of the loss: −log σ(β · difference of the two log-ratios)."""
    precompute_ref_log_probs: bool = True
    """Compute the reference's log-probabilities once, from the weights that the run begins with, and keep them in the
    run's directory. ``false`` computes them at every step from the frozen base of an adapter, which must be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpoConfig:
    """``objective: {name: orpo}``: fine-tuning on the chosen answer and a preference for it in one; no reference."""

    beta: NonNegativeFloat = 0.1
    """λ of the paper: weight of the odds-ratio term."""
    prompt_in_nll: bool = True
    """Whether the fine-tuning term counts the prompt's tokens too, as TRL does; ``false``: those of the answer alone,
    as in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """``data: {name: preference}``: records with ``chosen`` and ``rejected``, and mostly ``prompt``.

    Files have a JSON object a line and may be compressed (``.gz``). A path may be a pattern. Texts are taken as they
    stand; messages go through a chat template.
    """

    train_files: tuple[Path, ...] = ()
    """Files to train on, in this order."""
    validation_files: tuple[Path, ...] = ()
    """Files to validate on."""
    test_files: tuple[Path, ...] = ()
    """Files to test on."""
    train_dir: Path | None = None
    """``train_files`` with one path, as NxD Training calls it."""
    val_dir: Path | None = None
    """``validation_files`` with one path, as NxD Training calls it."""
    test_dir: Path | None = None
    """``test_files`` with one path, as NxD Training calls it."""
    validation_fraction: Fraction = 0.0
    """Share of the training records to validate on instead of files, drawn by ``split_seed``; 0 takes none."""
    split_seed: int = 0
    """Decides which records validate. It is not the run's seed, so that another run trains on the same records."""
    dev_choose_samples: PositiveInt | None = None
    """Use only so many records of each split, the first ones; ``null`` uses all."""
    chat_template_file: Path | None = None
    """A Jinja file with the template of messages; ``null`` takes the tokenizer's own."""
    special_tokens_in_text: bool = False
    """Let a message's text spell special tokens, which then are those tokens; otherwise such a record is refused."""
    max_prompt_length: PositiveInt | None = None
    """Tokens that a prompt is cut to where it and the longer answer do not fit into ``data.seq_length`` together;
    ``null``: half of that length. Answers are then cut at their end to what is left."""
    truncation_mode: TruncationMode = "keep_start"
    """Which end of such a prompt stays."""

    def files(self, split: SplitName) -> tuple[Path, ...]:
        """The paths of a split, by either spelling."""
        named, single = {
            "train": (self.train_files, self.train_dir),
            "validation": (self.validation_files, self.val_dir),
            "test": (self.test_files, self.test_dir),
        }[split]
        return named if single is None else (single,)

    def check(self) -> Iterator[tuple[str, str]]:
        """What cannot work whatever the files hold, as (key, message)."""
        spellings = (("train_files", "train_dir"), ("validation_files", "val_dir"), ("test_files", "test_dir"))
        for named, single in spellings:
            if getattr(self, named) and getattr(self, single) is not None:
                yield single, f"{named} is given too; keep one of the two"
        if not any(getattr(self, key) for spelling in spellings for key in spelling):
            yield "train_files", "no files are named; give at least one path or pattern"
        if self.validation_fraction >= 1:
            yield "validation_fraction", f"{self.validation_fraction} leaves nothing to train on"
        if self.validation_fraction and self.files("validation"):
            yield "validation_fraction", "files to validate on are named too; set one of the two"
