"""Sections of training: how long, on what layout, what is written. The docstrings are the YAML reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core.config.annotations import (
    DefaultsTo,
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    SourcePath,
)
from nxdt_core.config.section import Section
from nxdt_core.errors.launch import WorldDoesNotDivide
from nxdt_core.protocols.mesh import MeshSizes

__all__ = [
    "CheckpointConfig",
    "DistributedStrategyConfig",
    "EarlyStoppingParams",
    "EmaConfig",
    "ExpManagerConfig",
    "LocalStorageConfig",
    "MonitoringConfig",
    "SignSection",
    "StorageSection",
    "TrainerConfig",
]


class TrainerConfig(Section):
    """The training loop. Names are those of PyTorch Lightning's ``Trainer``."""

    max_steps: PositiveInt
    """Optimizer steps of the whole run, counted over resumes. It may be left out where ``max_epochs`` is set."""
    accelerator: str = "auto"
    """Device type as torch names it (``cpu``, ``cuda``, ``neuron``); ``auto`` takes what the machine has."""
    devices: PositiveInt = 1
    """Processes on each node, one per device."""
    num_nodes: PositiveInt = 1
    """Nodes of the run."""
    gradient_clip_val: NonNegativeFloat | None = 1.0
    """Largest global 2-norm of the gradient; larger ones are scaled down. ``null`` or 0 never clips."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does. Neither applies the update: ``stop`` ends the run with an error,
    ``skip`` drops the step, counts it and continues."""
    log_every_n_steps: PositiveInt = 10
    """Optimizer steps between two rows of metrics."""
    val_check_interval: PositiveInt | None = None
    """Optimizer steps between two validations; ``null`` never validates."""
    limit_val_batches: NonNegativeInt | Fraction | None = None
    """Global batches of one validation: an integer counts them, a number from 0.0 to 1.0 is a share of the split,
    0 switches validation off, ``null`` takes all. Of several sets, a count is dealt to them by their sizes (each
    stream takes as many by itself); a share is one of each set."""
    limit_train_batches: PositiveInt | Fraction | None = None
    """Train on the first global batches of the training split only: a count, or a share as for validation."""
    enable_progress_bar: bool | None = None
    """Progress bar; ``null`` shows one on a terminal and prints lines elsewhere."""
    callbacks: tuple[str | Mapping[str, Any], ...] = ()
    """Components of kind ``callback``: a name, or a mapping of ``name`` and the component's own keys."""
    max_epochs: Annotated[int, Range(-1)] | None = -1
    """Passes over the training data, after which the run ends even before ``max_steps``; -1 or ``null`` sets no such
    end. They are rounded down to whole steps. A learning-rate schedule that ends at ``max_steps`` then ends with the
    passes."""
    min_steps: NonNegativeInt | None = None
    """Steps before which early stopping does not stop the run."""
    min_epochs: NonNegativeInt | None = None
    """Passes over the training data before which early stopping does not stop the run."""
    max_time: Duration | None = None
    """Time after which this start of the run saves and stops, as for SIGTERM: seconds, ``days:hours:minutes:seconds``,
    or a mapping such as ``{hours: 3, minutes: 50}``. It counts from each start; leave time for a save before the job's
    limit."""
    check_val_every_n_epoch: PositiveInt | None = None
    """Passes over the training data between two validations; ``null`` counts steps by ``val_check_interval``."""
    num_sanity_val_steps: int = 0
    """Validation batches before training starts."""
    fast_dev_run: bool | NonNegativeInt = False
    """Try a configuration out: so many steps (``true``: 1), a validation of as many batches, no checkpoint and no
    loggers, in ``fast_dev_run`` below the run's directory."""
    overfit_batches: NonNegativeInt | Fraction = 0
    """Train on the first global batches alone (a count, or a share of the split), unshuffled, and validate on them:
    a model that cannot learn them by heart has a bug."""
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    """Profile of the run in ``profile`` below its directory: ``simple`` has the seconds of the functions of nxdt that
    take longest, ``advanced`` those of all functions, ``pytorch`` a trace of some steps for ``chrome://tracing``."""
    detect_anomaly: bool = False
    """Let autograd name the operation whose gradient is not finite; several times slower."""
    inference_mode: bool = True
    """Validate under ``torch.inference_mode``."""
    float32_matmul_precision: Literal["highest", "high"] = "highest"
    """Precision of matrix products of float32 tensors: ``high`` lets GPUs round their factors to 10 bits of mantissa
    (TF32). A run replaces what its process has set before. CPUs and Trainium ignore the key, and a note says so."""
    gc_interval: NonNegativeInt | None = None
    """Optimizer steps between two collections of Python's garbage collector, on all ranks after the same step; none
    runs within a step. 0 lets Python collect when it likes. ``null`` takes what suits the device: 50, and 0 on CPUs."""
    lnc: PositiveInt | None = None
    """Cores of a Trainium chip in one device (LNC): the engine ``nxd`` starts its runtime with it. With ``torch`` the
    environment says it, and a note says that the key has no effect."""
    expandable_segments: bool | None = None
    """Let the device's allocator grow its segments, so that less memory is lost between tensors of changing sizes.
    ``null`` does so on GPUs. ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF`` take precedence over this key."""


class DistributedStrategyConfig(Section):
    """Sizes of the dimensions; what is left of the world is data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Devices that share the stack of layers (PP)."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = 1
    """Chunks of layers on each pipeline device (VPP); ``null`` means 1."""
    context_parallel_size: PositiveInt = 1
    """Devices that share each sequence (CP)."""
    context_parallel_method: Literal["ring", "gather"] | None = None
    """How they see each other's keys and values: ``ring`` passes them round, so that none holds a whole sequence of
    them; ``gather`` collects them in every layer. ``null`` takes what suits the device."""
    expert_model_parallel_size: PositiveInt = 1
    """Devices that share the experts (EP), borrowed from data and context parallelism."""
    dp_replicate: PositiveInt = 1
    """Groups of data parallel devices that each shard among themselves (hybrid sharding); a divisor of DP."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel layers along the sequence; has no effect with TP 1."""
    async_tensor_parallel: bool = False
    """Split the collectives of tensor parallel layers and their matrix products into parts, so that one part travels
    while another one is computed; needs ``sequence_parallel``, ``model.compile`` and a device with symmetric memory."""
    sequence_parallel_regather: bool = False
    """With ``sequence_parallel``: keep the rank's part of each tensor block's input for backward, and gather it again
    there. Needs 1/TP of the memory of those inputs, and sends them once more."""
    zero1: bool = True
    """Shard optimizer state and master weights over data parallel ranks."""
    zero_stage: Literal[1, 2, 3] | None = None
    """1 shards optimizer state, 2 gradients too, 3 weights too; ``null`` follows ``zero1``."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zbv"] | None = None
    """Order of micro-batches in the pipeline; ``null`` takes ``interleaved`` with VPP above 1, else ``1f1b``."""
    kv_replicator: PositiveInt = 1
    """Copies of each key and value head, where TP exceeds their number; 1 makes as many as are needed."""
    pad_heads: bool = False
    """Add heads that stay zero, where TP does not divide the query heads; otherwise such a TP is refused."""
    timeout_s: PositiveInt = 1800
    """Seconds without progress after which a run of several ranks counts as hung: a rank sends no heartbeats, or no
    rank computes, compiles, reads or writes. The run then ends, names the rank and writes all stacks. A rank that
    computes while the others wait for it in a collective may take three times as long."""
    token_shuffle_group_size: PositiveInt = 1
    """Neighbouring data parallel ranks that mix their tokens before experts and sort them out behind, while training;
    where experts have a bounded capacity, a rank with very similar tokens then drops fewer. A divisor of the ranks
    that shard parameters (DP / ``dp_replicate``)."""

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """Return the size of every dimension for so many processes.

        Raises:
            WorldDoesNotDivide: they do not fill whole copies of the model.
        """
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp, ep, replicas = self.context_parallel_size, self.expert_model_parallel_size, self.dp_replicate
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or not dp or dp % replicas or (dp // replicas * cp) % ep:
            raise WorldDoesNotDivide(world_size=world_size, tp=tp, pp=pp, cp=cp, dp_replicate=replicas, ep=ep)
        vpp, schedule = self.virtual_pipeline_model_parallel_size or 1, self.pipeline_schedule
        if pp == 1:
            vpp, schedule = 1, "1f1b"
        return MeshSizes(
            pp=pp,
            dp_replicate=replicas,
            dp_shard=dp // replicas,
            cp=cp,
            tp=tp,
            ep=ep,
            schedule=schedule or ("interleaved" if vpp > 1 else "1f1b"),
            vpp=2 if schedule == "zbv" else vpp,
            zero_stage=self.zero_stage if self.zero_stage is not None else (1 if self.zero1 else 0),
        )


class MonitoringConfig(Section):
    """The state of a run for other programs: files and a port of rank 0. Nothing is written by default."""

    health_file: str | None = None
    """JSON file with the state of the run, such as ``health.json``. Relative paths start at the run's directory."""
    metrics_file: str | None = None
    """File of metrics in Prometheus' text format, for the textfile collector of node_exporter. Its name ends with
    ``.prom``. Relative paths start at the run's directory."""
    port: Annotated[int, Range(0, 65535)] | None = None
    """Port that serves the metrics at ``/metrics`` and the state at ``/health``; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address of that port; ``0.0.0.0`` lets other machines read the metrics, without a password."""
    interval_s: NonNegativeFloat = 10.0
    """Seconds between two updates while the run is in one state. Another state is written at once."""


class EmaConfig(Section):
    """Exponential moving average of the weights, in float32: 4 bytes for each weight that a rank holds and trains.

    It is saved with the optimizer's state; ``nxdt checkpoint export --ema`` writes it.
    """

    enable: bool = False
    """Keep one."""
    decay: Fraction = 0.999
    """Share of the average that an update keeps; the rest comes from the weights."""
    apply_ema_every_n_steps: PositiveInt = 1
    """Optimizer steps between two updates."""
    start_step: NonNegativeInt = 0
    """No update before this step. The average begins as the weights after the first update."""
    evaluate_ema_weights_instead: bool = False
    """Validate the average instead of the weights."""


_GOOD_SMALL = re.compile(r"(val_)?(\w+_)?(loss|perplexity)(/.*)?")
_GOOD_LARGE = re.compile(
    r"step|consumed_(samples|tokens)|(val_)?(reward|rewards/(?!chosen|rejected).+|(\w+_)?(accuracy|agreement))(/.*)?"
)


def mode_of(metric: str, mode: Literal["min", "max"] | None = None) -> Literal["min", "max"] | None:
    """Return whether a small or a large value of a metric is good: ``mode``, else what its name says; None where the
    name does not say it."""
    return mode or ("min" if _GOOD_SMALL.fullmatch(metric) else "max" if _GOOD_LARGE.fullmatch(metric) else None)


class EarlyStoppingParams(Section):
    """Early stopping: judged after each validation, with the same result on all ranks."""

    monitor: str = "val_loss"
    """Metric that is judged: ``val_loss``, or one of ``metrics.jsonl``."""
    mode: Literal["min", "max"] | None = None
    """Whether a small or a large one is good. ``null`` follows the metric's name, as ``checkpoint.mode``."""
    min_delta: NonNegativeFloat = 0.001
    """Smallest change that counts as an improvement."""
    patience: PositiveInt = 10
    """Validations in a row without an improvement that end the run."""
    check_finite: bool = True
    """Stop once the metric is infinite or not a number."""
    stopping_threshold: float | None = None
    """Stop once the metric is better than this."""
    divergence_threshold: float | None = None
    """Stop once the metric is worse than this."""
    strict: bool = True
    """A metric that is not logged is an error; with ``false`` the run then continues."""


class ExpManagerConfig(Section):
    """The run's directory, resuming, loggers."""

    exp_dir: str = "./nxdt_experiments"
    """Parent of the directories of runs."""
    name: Annotated[str, DefaultsTo("name")]
    """Directory of the run below ``exp_dir``; ``name`` of the top level where it is not set."""
    version: str | int | None = None
    """Directory below the run's name, for runs kept apart."""
    use_datetime_version: bool = False
    """Name that directory after the time of the start, where ``version`` is not set and the run does not resume."""
    explicit_log_dir: str | None = None
    """The run's directory itself; ``exp_dir``, ``name`` and ``version`` are then not used."""
    loggers: tuple[str | Mapping[str, Any], ...] | None = None
    """Components of kind ``logger``: a name, or a mapping of ``name`` and the component's own keys. The loggers
    that ``create_*_logger`` keys switch on come after them. (``metrics.jsonl`` is always written.)"""
    create_tensorboard_logger: bool | None = None
    """Logger ``tensorboard``; ``null`` means: where ``loggers`` is not set."""
    summary_writer_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``tensorboard``."""
    create_wandb_logger: bool | None = None
    """Logger ``wandb``."""
    wandb_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``wandb``."""
    create_mlflow_logger: bool | None = None
    """Logger ``mlflow``."""
    mlflow_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``mlflow``."""
    log_parameter_norm: bool = False
    """Log the 2-norm of all weights, of masters where there are some, as ``parameter_norm``."""
    log_local_rank_0_only: bool = False
    """Only the first rank of each node keeps a log file below ``logs`` of the run's directory. (What ends the run goes
    to ``logs/errors.txt`` from every rank.)"""
    log_global_rank_0_only: bool = False
    """Only the first rank of the run does; not together with ``log_local_rank_0_only``."""
    log_format: Literal["text", "json"] = "text"
    """Lines of these files and of standard error; ``json`` writes one object per line and draws no bar."""
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    """State of the run for other programs."""
    ema: EmaConfig = Field(default_factory=EmaConfig)
    """Exponential moving average of the weights."""
    files_to_copy: tuple[SourcePath, ...] | None = None
    """Files to copy to ``files`` below the run's directory at each start."""
    create_early_stopping_callback: bool = False
    """Stop, saved, when a metric no longer improves; a later start with ``resume_if_exists`` stops again at once."""
    early_stopping_callback_params: EarlyStoppingParams = Field(default_factory=EarlyStoppingParams)
    """Its options."""

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        if self.explicit_log_dir:
            return Path(self.explicit_log_dir)
        named = Path(self.exp_dir) / self.name
        return named if self.version is None else named / str(self.version)


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


class LocalStorageConfig(Section):
    """Settings for writing files to a directory."""

    fsync: bool = True
    """Flush files and directories to the disk before a checkpoint counts as committed. Without it a power failure can
    damage the newest checkpoint (which is then detected, and skipped)."""


class CausalLMConfig(Section):
    """``objective: {name: causal_lm}``: cross-entropy of the next token."""

    label_smoothing: Fraction = 0.0
    """Share of each label's probability that is spread evenly over the vocabulary (Szegedy et al. 2016,
    arXiv:1512.00567), as of torch's ``cross_entropy``. It needs logits: not with ``model.loss_chunk_tokens``."""


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
    mode: Literal["min", "max"] | None = None
    """Whether a small or a large metric is good. ``null`` follows its name: losses and perplexities are good when
    small; steps, rewards, margins and accuracies when large. Of other metrics the mode must be set."""
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
    """One checkpoint to start from: its directory or URI. A local Hugging Face directory also gives the run
    ``model.name``, the keys of the architecture, ``data.tokenizer`` and ``weight_init_only``, and defaults of
    ``data.seq_length``, ``data.global_batch_size`` and ``model.optim.lr``, where these are not set."""
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
