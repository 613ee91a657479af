"""Section ``checkpoint``: all of saving and resuming. The docstrings are the YAML reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nxdt_core.config.annotations import NonNegativeInt, PositiveInt, Range, SourcePath
from nxdt_core.config.fields.duration import Duration
from nxdt_core.config.section import Section

__all__ = ["CheckpointConfig", "SignSection", "StorageSection"]


class StorageSection(Section):
    """Storage backend of the checkpoints; its keys are next to ``name``."""

    name: str | None = None
    """Component of kind ``store``; ``null`` takes the one that serves the scheme of ``checkpoint.uri``."""


class SignSection(Section):
    """Signatures of checkpoints, for stores that others can write to. Needs ``pip install 'nxdt-core[sign]'``."""

    key: SourcePath | None = None
    """PEM file of the Ed25519 private key that signs each checkpoint of the run; ``null`` does not sign. Only the first
    rank reads it. ``${oc.env:NXDT_SIGNING_KEY,null}`` takes the path from an environment variable."""
    trusted: tuple[SourcePath, ...] = ()
    """PEM files of Ed25519 public keys. Where any are named, the run refuses to resume from or load a checkpoint that
    none of them has signed, and checkpoints of other programs."""


class CheckpointConfig(Section):
    """When checkpoints are saved, where, which are kept, and what a run starts from."""

    enabled: bool = True
    """Save at all."""
    uri: str | None = None
    """Location of checkpoints: a path or ``scheme://…``; ``null`` means ``<run directory>/checkpoints``."""
    every_n_train_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints; ``null`` saves at the end of the run only."""
    every_n_epochs: NonNegativeInt | None = None
    """Passes over the training data between two checkpoints, as steps; ``null`` or 0 counts ``every_n_train_steps``."""
    train_time_interval: Duration | None = None
    """Time between two checkpoints: seconds, ``days:hours:minutes:seconds``, or a mapping such as ``{minutes: 30}``."""
    permanent_every_n_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints that are never deleted."""
    ephemeral_every_n_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints that are kept only until a newer one is committed."""
    save_last: bool = True
    """Save at the end of the run too. (A run that is asked to stop always saves.)"""
    save_top_k: Annotated[int, Range(-1)] = 3
    """Checkpoints that are kept, best first by ``monitor``; -1 keeps all, 0 none. The newest is always kept."""
    keep_last: PositiveInt | None = None
    """Number of the newest checkpoints that are always kept, independent of ``monitor``."""
    monitor: str = "step"
    """Metric that ranks checkpoints, such as ``val_loss``; ``step`` keeps the newest. Those without it rank last."""
    mode: Literal["min", "max"] = "max"
    """Whether a small or a large metric is good."""
    async_save: bool = True
    """Continue training while a checkpoint is written; host memory holds a copy of it meanwhile."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What happens to a checkpoint that is due while another is being written: training waits, or it is skipped."""
    deadline_s: Annotated[float, Range(1)] = 1800.0
    """Seconds that one checkpoint may take until the run stops with an error."""
    refuse_same_weights: bool = True
    """Stop with an error where a checkpoint would hold the same weights as the previous one in spite of updates."""
    save_bf16: bool = False
    """Save weights that are float32 as the model in bfloat16, rounded to the nearest. Where there is an optimizer, its
    state then holds them in float32, and a resume is as exact; a reader of only the model gets bfloat16."""
    use_master_weights_in_ckpt: bool = False
    """Insist on float32 as the model's weights, as is the way unless ``save_bf16`` says otherwise: ``true`` refuses
    that key, and a precision that keeps no float32 weights."""
    hf_every_n_saves: PositiveInt | None = None
    """Every n-th checkpoint also contains its model as a Hugging Face directory; ``null``: none does."""
    resume_if_exists: bool = False
    """Resume from the newest good checkpoint at ``uri``."""
    resume_ignore_no_checkpoint: bool = False
    """With ``resume_if_exists``: start from scratch where there is none, instead of an error."""
    resume_from: SourcePath | None = None
    """One checkpoint to start from: its directory or URI."""
    weight_init_only: bool = False
    """Take only the weights from ``resume_from``: optimizer, step and data position start from zero."""
    strict: bool = True
    """Refuse a checkpoint that lacks parameters of the model or has others. ``false`` keeps the initial values of
    missing parameters, ignores the others, and reports both; shapes must still agree."""
    optimizer_on_change: Literal["error", "reset"] = "error"
    """What happens where ``model.optim`` is another optimizer than that of the resumed run, or one that keeps other
    state: the run ends with an error, or its optimizer begins without state. Weights, counters and the position in the
    data are those of the checkpoint in any case."""
    sign: SignSection = Field(default_factory=SignSection)
    """Signatures."""
    storage: StorageSection = Field(default_factory=StorageSection)
    """The store."""
