"""The typed schema, one file per section. Keys, types, defaults and the YAML reference all come from here."""

from nxdt_core.config.schema.checkpoint import CheckpointConfig
from nxdt_core.config.schema.data import DataConfig, TokenizerSection
from nxdt_core.config.schema.exp_manager import ExpManagerConfig
from nxdt_core.config.schema.model import ModelConfig, OptimConfig, SchedConfig
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.schema.selectors import PluginsConfig
from nxdt_core.config.schema.strategy import DistributedStrategyConfig
from nxdt_core.config.schema.trainer import TrainerConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DistributedStrategyConfig",
    "ExpManagerConfig",
    "ModelConfig",
    "OptimConfig",
    "PluginsConfig",
    "RunConfig",
    "SchedConfig",
    "TokenizerSection",
    "TrainerConfig",
]
