"""The root of the configuration. The docstrings are the YAML reference."""

from __future__ import annotations

from pydantic import Field

from nxdt_core.config.annotations import PositiveInt
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
from nxdt_core.config.section import Section

__all__ = ["RunConfig"]


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
