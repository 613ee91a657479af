"""The root of the configuration. The docstrings are the YAML reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nxdt_core.config.annotations import PositiveInt, XlaOnly
from nxdt_core.config.schema.alignment import AlignmentConfig
from nxdt_core.config.schema.checkpoint import CheckpointConfig
from nxdt_core.config.schema.data import DataConfig
from nxdt_core.config.schema.exp_manager import ExpManagerConfig
from nxdt_core.config.schema.model import ModelConfig
from nxdt_core.config.schema.selectors import (
    AdapterSection,
    EngineSection,
    ObjectiveSection,
    PluginsConfig,
    PrecisionSection,
)
from nxdt_core.config.schema.strategy import DistributedStrategyConfig
from nxdt_core.config.schema.trainer import TrainerConfig

__all__ = ["RunConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run."""

    base: str | None = None
    """A YAML file or ``recipe:NAME`` that supplies the keys that this file does not set, so that a file may set only
    what differs. Relative paths start at the file that names them. Read from files, not from the command line."""
    name: str
    """Name of the run and of its directory; by default the name of its YAML file or recipe without ``.yaml``. A recipe
    sets none, so a file that is made from one or based on one is a run with its own directory."""
    model_source: Literal["hf", "megatron"] = "hf"
    """Which defaults apply where ``model.name`` or ``data.name`` is not set."""
    seed: PositiveInt = 1234
    """Seed of weights, data order and dropout."""
    trainer: TrainerConfig
    """How long, how often, on how many devices."""
    exp_manager: ExpManagerConfig
    """Where the run writes and what it logs."""
    distributed_strategy: DistributedStrategyConfig = field(default_factory=DistributedStrategyConfig)
    """The layout over devices."""
    data: DataConfig
    """Batches and the source of samples."""
    model: ModelConfig
    """The model, its optimizer and its initial weights."""
    model_alignment_strategy: AlignmentConfig | None = None
    """Fine-tuning, as NxD Training writes it."""
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    """Dtypes."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    """The loss."""
    adapter: AdapterSection = field(default_factory=AdapterSection)
    """A change to the model, such as LoRA."""
    parallel_engine: EngineSection = field(default_factory=EngineSection)
    """The runtime."""
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    """Which plugins the run may use."""
    compiler_flags: Annotated[str | None, XlaOnly()] = None
    """Flags of the Neuron compiler."""
    compiler_cache_url: str | None = None
    """Where compiled graphs are kept for later runs: a folder; engines of the XLA runtime also take ``s3://…``. By
    default that of the compiler."""
    aync_exec_max_inflight_requests: Annotated[int | None, XlaOnly()] = None
    """Requests in flight (the spelling is the incumbent's)."""
    bucket_size_collectives: Annotated[int | None, XlaOnly()] = None
    """Size of a collective's bucket in MB."""
    neuron_rt_exec_timeout: Annotated[int | None, XlaOnly()] = None
    """Timeout of the Neuron runtime in seconds."""
    neuron_experimental_compress_rg: Annotated[bool, XlaOnly()] = False
    """Write only the first replica group into the graph."""

    @property
    def context_parallel_method(self) -> Literal["ring", "gather"] | None:
        """``distributed_strategy.context_parallel_method``, by either spelling; None leaves it to the device."""
        return "ring" if self.model.fusions.ring_attention else self.distributed_strategy.context_parallel_method
