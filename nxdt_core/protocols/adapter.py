"""Kind ``adapter``: changes a model before it is sharded, such as LoRA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan

if TYPE_CHECKING:
    import torch

    from nxdt_core.protocols.parallel_model import ParallelModel
    from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["Adapter", "SavedAdapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter in a directory of another program."""

    section: Callable[[ModelBuilder], Mapping[str, Any]]
    """Returns the section ``adapter`` of a run of this model that begins with it."""
    base: str | None
    """Base model that the adapter names: a path, or the name of a model on a hub. None: it names none."""


class Adapter(ABC):
    """The target of the kind, called as ``Target(config)`` with the section ``adapter``."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @staticmethod
    def saved_at(path: Path) -> SavedAdapter | None:
        """Return the adapter in the directory ``path``, as ``nxdt generate`` takes one; None where it is none that is
        known.

        Raises:
            NxdtError: it cannot be used.
        """
        return None

    @property
    def saves_base(self) -> bool:
        """True if checkpoints hold the frozen weights. Otherwise a resumed run reads them from where the first run read
        them."""
        return True

    @abstractmethod
    def apply(self, module: torch.nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Change ``module`` in place, on the meta device; freeze what is not trained with
        ``requires_grad_(False)``. Returns the plan of the changed module."""

    def init_rules(self) -> Sequence[InitRule]:
        """Return rules for the parameters that it added; they precede the model's own. Default: none."""
        return ()

    def begin(self, model: ParallelModel, config: Any, ranks: RankAgreement) -> None:
        """Set what depends on the base's weights, or load what was trained before. Collective; called once the base has
        its weights, in a run that does not resume from its own checkpoint. ``config`` is the whole resolved
        configuration."""

    def check_resume(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuse to resume from the checkpoint at the address ``where`` if its weights would compute something else
        here. ``saved`` is the section ``adapter`` of the run that wrote it, with the keys that its version knew. Called
        on all ranks, before the model is built; what it raises fails the run."""

    def finish(self, checkpoint: str | None, config: Any, ranks: RankAgreement) -> None:
        """Write the run's additional files next to its last checkpoint, at this address; None: it has saved none.
        ``config`` is the whole resolved configuration. Collective; called at the end of a run that ended in order, or
        that had nothing left to do. What it raises fails the run, whose checkpoints stay."""
