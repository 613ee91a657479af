"""The component ``lora``: adapts the model of a run, starts its updates, and merges them at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.adapter import SavedAdapter
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_lora.adaptation import adapt
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.dora_magnitudes import init_magnitudes
from nxdt_plugin_lora.loading import check_options, load_adapter
from nxdt_plugin_lora.peft.files import is_peft, read_config
from nxdt_plugin_lora.peft.section import section_for
from nxdt_plugin_lora.reference import changes_base, check_reference
from nxdt_plugin_lora.run_files import merge_last, write_options

__all__ = ["LoraAdapter"]

_log = logging.getLogger(__name__)


class LoraAdapter:
    """An :class:`~nxdt_core.protocols.adapter.Adapter`, which opens directories of peft."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self._rules: Sequence[InitRule] = ()

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze ``module`` and add updates, in place.

        Raises:
            TargetNotFound: a name in the configuration means nothing.
            TargetSavedWhole: a target trains whole already.
            LayerNotAdaptable: an option does not fit a layer.
        """
        if not self.config.enable_lora:
            return plan
        adapted = adapt(module, plan, self.config)
        self._rules = adapted.rules
        if self.config.lora_verbose:
            targets = adapted.targets
            _log.warning("LoRA of rank %d on %d layers: %s", self.config.lora_rank, len(targets), ", ".join(targets))
        return adapted.plan

    @staticmethod
    def saved_at(path: Path) -> SavedAdapter | None:
        """Return the adapter that peft wrote into ``path``."""
        if not is_peft(path):
            return None
        return SavedAdapter(
            section=lambda builder: section_for(path, builder),
            base=read_config(path).get("base_model_name_or_path"),
        )

    @property
    def saves_base(self) -> bool:
        """``save_lora_base``."""
        return self.config.save_lora_base or not self.config.enable_lora

    def begin(self, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
        """Load the adapter that the run starts from, or set DoRA's norms to those of the weights.

        Raises:
            BaseIsNoReference: that adapter changes the base, which the objective takes for the model of the beginning.
        """
        if not self.config.save_lora_config_adapter:
            ranks.on_rank_zero(lambda: write_options(self.config, config.run_dir))
        if not self.config.enable_lora:
            return
        if self.config.use_dora and not changes_base(model, ranks):  # else the norms came with the updates
            init_magnitudes(model)
        if self.config.load_lora_from_ckpt:
            load_adapter(self.config, model, config, ranks)
        check_reference(model, config, ranks)

    def check_resume(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuse other scales and forms of the updates, as the protocol says."""
        if self.config.enable_lora and saved.get("name") == "lora" and saved.get("enable_lora"):
            check_options(self.config, saved, where)

    def finish(self, checkpoint: str | None, config: ResolvedConfig, ranks: RankAgreement) -> None:
        """Merge the last checkpoint, where ``merge_lora`` asks for it."""
        if not self.config.merge_lora:
            return
        if checkpoint is None:
            _log.warning("merge_lora: the run has saved no checkpoint, so nothing is merged")
            return
        merge_last(checkpoint, config, ranks)

    def init_rules(self) -> Sequence[InitRule]:
        """Return rules for the parameters that :meth:`apply` has added: an update starts at zero. DoRA's norms are the
        weights' own, and are set once those are there."""
        return self._rules
