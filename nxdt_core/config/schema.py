"""The root of the configuration, the sections that select components, and what a load of them returns.

The docstrings of sections are the YAML reference. A bare name may stand for a section that does nothing but select:
``parallel_engine: torch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core.config.annotations import DefaultsTo, NonNegativeFloat, NonNegativeInt, PositiveInt
from nxdt_core.config.section import Section, keys_of
from nxdt_core.config.training_schema import (
    CheckpointConfig,
    DistributedStrategyConfig,
    ExpManagerConfig,
    TrainerConfig,
)
from nxdt_core.config.tree import Origin, Tree, dotted, join, plain
from nxdt_core.kernel import Kernel, RegisteredComponent

__all__ = [
    "SLOTS",
    "AdapterSection",
    "Composition",
    "DataConfig",
    "EngineSection",
    "ModelConfig",
    "ObjectiveSection",
    "OptimConfig",
    "ParamGroupConfig",
    "PluginsConfig",
    "PrecisionSection",
    "ResolvedConfig",
    "RunConfig",
    "SchedConfig",
    "Selected",
    "Slot",
    "TokenizerSection",
    "core_class",
]


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


def core_class(section: str) -> type | None:
    """Return the class with the keys that the core declares in a section; None where it declares no such section."""
    cls: type | None = RunConfig
    for name in section.split(".") if section else ():
        key = keys_of(cls).get(name) if cls is not None else None
        cls = key.section if key is not None else None
    return cls


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one component. Its keys are in ``section``, next to the key that names it."""

    kind: str
    section: str
    selector: str = "name"

    @property
    def key(self) -> str:
        """Path of the key that names the component."""
        return join(self.section, self.selector)


SLOTS: tuple[Slot, ...] = (
    Slot("model", "model"),
    Slot("dataset", "data"),
    Slot("tokenizer", "data.tokenizer", "library"),
    Slot("optimizer", "model.optim"),
    Slot("schedule", "model.optim.sched"),
    Slot("precision", "precision", "type"),
    Slot("store", "checkpoint.storage"),
    Slot("objective", "objective"),
    Slot("adapter", "adapter"),
    Slot("engine", "parallel_engine"),
)
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the selected components add to the core's schema."""

    components: dict[str, RegisteredComponent | None] = field(default_factory=dict)
    """By kind; one whose component is unavailable is absent."""
    classes: dict[str, type] = field(default_factory=dict)
    """By path of the section: the class that the component declares."""
    open: set[str] = field(default_factory=set)
    """Sections whose component is unknown, so that their keys are unknown too."""
    unfilled: dict[str, type] = field(default_factory=dict)
    """Sections whose keys would have come from a file that cannot be read, with the class of these keys: that they are
    missing is reported at the file."""
    notes: list[str] = field(default_factory=list)
    """Lines on choices that follow from rules."""


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
        found = self.components[slot]
        if found is None:
            raise KeyError(slot)
        return found

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the key path and plain value of every leaf, in the order of the schema."""
        return ((dotted(path), plain(value)) for path, value in self.tree.leaves())

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree that :func:`nxdt_core.config.load` reads back to an equal configuration.

        It can be written: what comes from the environment is the reference to it (``${oc.env:NAME}``), and secrets
        are masked. A configuration with a masked secret does not load.
        """
        shown: dict[str, Any] = self.tree.as_shown()
        return shown

    def to_values(self) -> dict[str, Any]:
        """Return the same tree with every value resolved, secrets included; it is never written or printed."""
        values: dict[str, Any] = plain(self.tree.data)
        return values
