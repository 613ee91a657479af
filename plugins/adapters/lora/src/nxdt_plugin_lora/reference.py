"""The frozen base as an objective's reference: whether it is the model that a run begins with."""

from __future__ import annotations

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.placement import piece_of
from nxdt_core.protocols.objective import traits_of
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.train import build
from nxdt_plugin_lora.errors import BaseIsNoReference
from nxdt_plugin_lora.updates import EmbeddingUpdate, ExpertsUpdate, LowRankUpdate

__all__ = ["changes_base", "check_reference"]


def check_reference(model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Let a model pass whose updates are zero, or whose objective does not ask the base at every step. Collective.

    Raises:
        BaseIsNoReference: it does, and they are not.
    """
    if traits_of(build.objective(config)).reference == "step" and changes_base(model, ranks):
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
