"""Initial magnitudes of DoRA (arXiv:2402.09353): the norms of the base's weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.placement import is_dtensor, piece_of
from nxdt_core.models.updates import Update
from nxdt_core.protocols.adapter import Adapter, SavedAdapter
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.train import build
from nxdt_plugin_lora.adaptation import EmbeddingUpdate, ExpertsUpdate, LowRankUpdate, adapt
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import BaseIsNoReference
from nxdt_plugin_lora.loading import check_options, load_adapter
from nxdt_plugin_lora.merging import merge_last, write_options
from nxdt_plugin_lora.peft_files import is_peft, read_config
from nxdt_plugin_lora.peft_section import section_for

_MAGNITUDE = "lora_magnitude"


@torch.no_grad()
def init_magnitudes(model: ParallelModel) -> None:
    """Set each magnitude to the norm of its output feature's weights, so that the update starts as the identity.

    Collective: each rank gathers every weight in full, one at a time.
    """
    parameters = dict(model.named_parameters())
    updates = {
        path: (part, module.get_parameter(f"{path.removesuffix('.update')}.weight"))
        for module in model.local_modules()
        for path, part in module.named_modules()
        if isinstance(part, Update) and hasattr(part, _MAGNITUDE)
    }
    for path, (update, weight) in updates.items():
        magnitude = parameters[f"{path}.{_MAGNITUDE}"]
        whole = weight.full_tensor() if is_dtensor(weight) else weight
        wide = torch.promote_types(whole.dtype, torch.float32)
        norms = torch.linalg.vector_norm(whole, dim=update.inputs, dtype=wide)
        piece = piece_of(magnitude)
        piece.tensor.copy_(norms[piece.box.within(piece_of(norms).box)])


def check_reference(model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Let a model pass whose updates are zero, or whose objective does not ask the base at every step. Collective.

    Raises:
        BaseIsNoReference: it does, and they are not.
    """
    if build.objective(config).traits.reference == "step" and changes_base(model, ranks):
        raise BaseIsNoReference(objective=config.run.objective.name)


def changes_base(model: ParallelModel, ranks: RankAgreement) -> bool:
    """Return whether an update of ``model`` has left its start. Collective."""
    grown = {
        f"{path}.{part.grows}"
        for module in model.local_modules()
        for path, part in module.named_modules()
        if isinstance(part, (LowRankUpdate, EmbeddingUpdate, ExpertsUpdate))
    }
    own = any(bool(piece_of(p).tensor.any()) for name, p in model.named_parameters() if name in grown)
    return ranks.any_rank(own)


_log = logging.getLogger(__name__)


class LoraAdapter(Adapter):
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
