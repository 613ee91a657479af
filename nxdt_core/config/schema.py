"""The sections of the configuration: of training, of components, and their root; and what a load of them returns.

The docstrings of sections are the YAML reference. A bare name may stand for a section that does nothing but select:
``parallel_engine: torch``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.errors import PydanticUserError

from nxdt_core.config.section import (
    DefaultsTo,
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    Section,
    SourcePath,
)
from nxdt_core.config.tree import Origin, Tree, dotted, plain
from nxdt_core.errors.configuration import BadComponentConfig, Place
from nxdt_core.errors.launch import WorldDoesNotDivide
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.protocols.mesh import MeshSizes

_GOOD_SMALL = re.compile(r"(val_)?(\w+_)?(loss|perplexity)(/.*)?")
_GOOD_LARGE = re.compile(
    r"step|consumed_(samples|tokens)|(val_)?(reward|rewards/(?!chosen|rejected).+|(\w+_)?(accuracy|agreement))(/.*)?"
)


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
    """One checkpoint to start from: its directory or URI. A local Hugging Face directory, or a model of the hub
    (``hf:owner/name`` or ``hf:owner/name@revision``), also gives the run ``model.name``, the keys of the architecture,
    ``data.tokenizer`` and ``weight_init_only``, and defaults of ``data.seq_length``, ``data.global_batch_size`` and
    ``model.optim.lr``, where these are not set."""
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


class PrecisionSection(Section):
    """Selects the dtypes of the run; the keys of the policy are next to ``type``."""

    type: str = "fp32"
    """Component of kind ``precision``. (NxD Training's default is ``mixed_precision``; here it is named in the
    file, since it changes results.)"""


class ObjectiveSection(Section):
    """Selects the loss; its keys are next to ``name``."""

    name: str = "causal_lm"
    """Component of kind ``objective``."""


class AdapterSection(Section):
    """Selects a change to the model; its keys are next to ``name``."""

    name: str | None = None
    """Component of kind ``adapter``; ``null`` for none."""
    base_dtype: Literal["nf4", "int8"] | None = None
    """What the frozen weights of linear layers are kept in: 4 bits (QLoRA) or 8; ``null``: the dtype that products
    compute in. Embeddings, norms, experts and the head keep theirs. Checkpoints then leave out what is frozen."""


class EngineSection(Section):
    """Selects the runtime; its keys are next to ``name``."""

    name: str = "torch"
    """Component of kind ``engine``."""


class PluginsConfig(Section):
    """Which plugins a run may use. Entries are names of entry points or of distributions."""

    allow: tuple[str, ...] | None = None
    """Only these; ``null`` allows all that are installed."""
    block: tuple[str, ...] = ()
    """Never these; they are not even imported."""
    schemes: tuple[str, ...] | None = None
    """Schemes of addresses that checkpoints may be at, such as ``[file, s3]``; ``null`` allows those of all plugins."""
    prefer: tuple[str, ...] = ()
    """Order in which plugins win where two offer the same name."""
    local: tuple[Path, ...] = ()
    """Plugin files (``.py``) that are not installed."""
    lock: Path | None = None
    """Lock file that the installed plugins must agree with."""
    on_resume: Literal["warn", "refuse"] = "warn"
    """What a resume does where the plugin of the model or the optimizer has another version than the one that wrote the
    checkpoint."""


class TokenizerSection(Section):
    """Selects a tokenizer; the keys of the tokenizer are next to ``library``."""

    library: str | None = None
    """Component of kind ``tokenizer``; ``huggingface`` where ``type`` or ``model`` is given."""


class DataConfig(Section):
    """Selects a dataloader; the keys of the dataloader are next to ``name``."""

    name: str
    """Component of kind ``dataset``; ``hf-data`` where it is not set."""
    global_batch_size: PositiveInt
    """Sequences of one optimizer step, over all devices."""
    micro_batch_size: PositiveInt = 1
    """Sequences that one device takes at a time."""
    seq_length: PositiveInt
    """Tokens of a sequence."""
    shuffle: bool = True
    """Draw training samples in random order, each once a pass."""
    num_workers: NonNegativeInt = 0
    """Threads that prepare batches ahead; 0 prepares them between steps."""
    pin_memory: bool | None = None
    """Copy batches to the device out of pinned memory of the host, while kernels of the device run. ``null`` does so
    on GPUs."""
    tokenizer: TokenizerSection | None = None
    """Tokenizer of the data; ``null`` for data that is tokenised already."""


class SchedConfig(Section):
    """Selects the learning-rate schedule; the keys of the schedule are next to ``name``."""

    name: str = "constant"
    """Component of kind ``schedule``."""
    max_steps: Annotated[PositiveInt, DefaultsTo("trainer.max_steps")]
    """Steps after which the schedule has ended; ``trainer.max_steps`` where it is not set."""


class ParamGroupConfig(Section):
    """Parameters that learn otherwise than the rest."""

    params: str
    """Path pattern of parameters, or of modules with all that they contain: a leading ``*`` stands for any depth, any
    other for one component, as in ``*.router.weight`` or ``layers.0``."""
    lr: NonNegativeFloat | None = None
    """Their peak learning rate; the schedule scales it as it does ``model.optim.lr``. ``null``: that."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor on their peak learning rate, such as 0.5 for half of ``model.optim.lr``."""
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
    config_json: Path | None = Field(default=None, alias="model_config")
    """Hugging Face ``config.json``, or its directory. Keys given next to it take precedence."""
    optim: OptimConfig
    """Optimizer and learning rate."""
    trainable: tuple[str, ...] | None = None
    """Path patterns of the parameters that train, and of modules whose parameters all do, as in
    ``model.optim.param_groups``: ``[lm_head, layers.31]``. All others are frozen, without gradients or optimizer state;
    checkpoints have all. ``null``: all train, or what ``adapter`` says."""
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


class RunConfig(Section):
    """One training run."""

    base: str | None = None
    """A YAML file or ``recipe:NAME`` that supplies the keys that this file does not set, so that a file may set only
    what differs. Relative paths start at the file that names them. Read from files, not from the command line."""
    name: str
    """Name of the run and of its directory; by default the name of its YAML file or recipe without ``.yaml``. A recipe
    sets none, so a file that is made from one or based on one is a run with its own directory."""
    seed: PositiveInt = 1234
    """Seed of weights, data order and dropout."""
    trainer: TrainerConfig
    """How long, how often, on how many devices."""
    exp_manager: ExpManagerConfig
    """Where the run writes and what it logs."""
    distributed_strategy: DistributedStrategyConfig = Field(default_factory=DistributedStrategyConfig)
    """The layout over devices."""
    data: DataConfig
    """Batches and the source of samples."""
    model: ModelConfig
    """The model, its optimizer and its initial weights."""
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Dtypes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    """The loss."""
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    """A change to the model, such as LoRA."""
    parallel_engine: EngineSection = Field(default_factory=EngineSection)
    """The runtime."""
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    """Which plugins the run may use."""
    compiler_cache_url: str | None = None
    """Where compiled graphs are kept for later runs: a folder; engines of the XLA runtime also take ``s3://…``. By
    default that of the compiler."""

    def mesh_sizes(self) -> MeshSizes:
        """Return the size of every dimension for the processes that ``trainer`` names; see
        :meth:`DistributedStrategyConfig.mesh_sizes`."""
        return self.distributed_strategy.mesh_sizes(self.trainer.devices * self.trainer.num_nodes)


class Slot(NamedTuple):
    """A place for one component. Its keys are in ``section``, next to the key that names it."""

    kind: str
    section: str
    key: str
    """Path of the key that names the component."""

    @property
    def selector(self) -> str:
        """Name of that key."""
        return self.key.rpartition(".")[2]


SLOTS: tuple[Slot, ...] = (
    Slot("model", "model", "model.name"),
    Slot("dataset", "data", "data.name"),
    Slot("tokenizer", "data.tokenizer", "data.tokenizer.library"),
    Slot("optimizer", "model.optim", "model.optim.name"),
    Slot("schedule", "model.optim.sched", "model.optim.sched.name"),
    Slot("precision", "precision", "precision.type"),
    Slot("store", "checkpoint.storage", "checkpoint.storage.name"),
    Slot("objective", "objective", "objective.name"),
    Slot("adapter", "adapter", "adapter.name"),
    Slot("engine", "parallel_engine", "parallel_engine.name"),
)
"""In the order in which they are shown."""


def usable_class(component: RegisteredComponent, place: Place | None = None) -> type | None:
    """Return the class of the component's section.

    Args:
        component: Any.
        place: That of the key that selects it; by default its distribution.

    Raises:
        NxdtError: it cannot be imported.
        BadComponentConfig: a field has a type that no YAML value can have.
    """
    if (cls := component.load_config()) is None:
        return None
    try:
        cls.model_rebuild()  # type: ignore[attr-defined]
    except PydanticUserError as error:
        place = place or Place(place=component.dist, line=0, key="")
        named = re.search(r"<class '(?:.*\.)?(\w+)'>", error.message)
        kind = f": {named[1]}" if named else ""
        reason = f"a key of {cls.__name__} has a type that no YAML value can be read into{kind}"
        name, dist = component.qualified_name, component.dist
        raise BadComponentConfig(**place, component=name, dist=dist, reason=reason) from error
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A component and its own section, as an instance of the class that it declares."""

    component: RegisteredComponent
    config: Any
    """None where the component declares none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration in which every value is known, typed and checked."""

    run: RunConfig
    """The core's own keys."""
    kernel: Kernel = field(compare=False)
    components: Mapping[str, Selected | None]
    """By kind: ``model``, ``dataset``, ``tokenizer``, ``optimizer``, ``schedule``, ``precision``,
    ``store``, ``objective``, ``adapter``, ``engine``. None: the run uses none."""
    loggers: tuple[Selected, ...]
    callbacks: tuple[Selected, ...]
    source: str = field(compare=False)
    """What the user named: a path or ``recipe:NAME``."""
    run_dir: Path
    checkpoint_uri: str
    overrides: tuple[str, ...] = field(compare=False)
    """What the user gave in addition to the source, as written."""
    notes: tuple[str, ...] = field(compare=False)
    """Lines to print: settings that are accepted and have no effect."""
    tree: Tree = field(compare=False, repr=False)
    """All values with their origins."""

    @property
    def origins(self) -> dict[str, Origin]:
        """Return the origin of each value by key path."""
        return {dotted(path): self.tree.origins[path] for path, _ in self.tree.leaves()}

    def selected(self, slot: str) -> Selected:
        """Return the component of a slot that is never empty."""
        selected = self.components[slot]
        if selected is None:
            raise KeyError(slot)
        return selected

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the key path and plain value of every leaf, in the order of the schema."""
        return ((dotted(path), plain(value)) for path, value in self.tree.leaves())

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree that :func:`nxdt_core.config.load` reads back to an equal configuration.

        It can be written: what comes from the environment is the reference to it (``${oc.env:NAME}``), and secrets
        are masked. A configuration with a masked secret does not load.
        """
        shown: dict[str, Any] = self.tree.as_displayed()
        return shown

    def to_values(self) -> dict[str, Any]:
        """Return the same tree with every value resolved, secrets included; it is never written or printed."""
        values: dict[str, Any] = plain(self.tree.data)
        return values
