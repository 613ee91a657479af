"""What can be wrong with a user's own ``Trainer``: codes ``NXDT-T040`` to ``NXDT-T043``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError

__all__ = ["NotOurBatch", "NotOurModule", "NotOurStrategy", "TrainerArgumentsIgnored"]


class NotOurModule(NxdtError):
    """A Lightning module that the strategy cannot train."""

    code = "NXDT-T040"
    happened = "NxdtStrategy drives an NxdtModule, and trainer.fit was given a {found}."
    remedy = (
        "Pass NxdtModule(config) or a subclass of it. A custom loss is an objective plugin, or the attribute "
        "objective of a subclass; a custom model is a model plugin."
    )
    found: str


class NotOurStrategy(NxdtError):
    """A Lightning strategy that cannot train the module."""

    code = "NXDT-T043"
    happened = "An NxdtModule runs on the engine of an NxdtStrategy, and the Trainer has a {found}."
    remedy = "Construct the trainer as Trainer(strategy=NxdtStrategy(config), …)."
    found: str


class NotOurBatch(NxdtError):
    """A batch that comes from another dataloader than the data module's."""

    code = "NXDT-T041"
    happened = "A training or validation step was given a {found} instead of the micro-batches of a global batch."
    remedy = (
        "Pass NxdtDataModule(config) to the trainer, or a dataloader that yields "
        "nxdt_core.training.data.StepInput. Custom data come from a dataloader plugin."
    )
    found: str


class TrainerArgumentsIgnored(NxdtError):
    """Arguments of a Trainer, callbacks or hooks of them, that would have no effect."""

    code = "NXDT-T042"
    happened = "The Trainer has arguments, callbacks or hooks that NxdtStrategy does not carry out: {found}."
    remedy = "Leave them out, and use instead: {instead}."
    arguments: tuple[tuple[str, str], ...]
    """Argument, and what does its work."""

    def _view(self) -> dict[str, Any]:
        found, instead = zip(*self.arguments, strict=True)
        return {**super()._view(), "found": "; ".join(found), "instead": "; ".join(instead)}
