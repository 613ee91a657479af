"""Errors of a user's own ``Trainer``: codes ``NXDT-T040`` to ``NXDT-T043``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

NotOurModule = NxdtError.define(
    "NXDT-T040",
    "A Lightning module that the strategy cannot train.",
    "NxdtStrategy drives an NxdtModule, and trainer.fit was given a {found}.",
    "Pass NxdtModule(config) or a subclass of it. A custom loss is an objective plugin, or the attribute "
    "objective of a subclass; a custom model is a model plugin.",
)

NotOurStrategy = NxdtError.define(
    "NXDT-T043",
    "A Lightning strategy that cannot train the module.",
    "An NxdtModule runs on the engine of an NxdtStrategy, and the Trainer has a {found}.",
    "Construct the trainer as Trainer(strategy=NxdtStrategy(config), …).",
)

NotOurBatch = NxdtError.define(
    "NXDT-T041",
    "A batch that comes from another dataloader than the data module's.",
    "A training or validation step was given a {found} instead of the micro-batches of a global batch.",
    "Pass NxdtDataModule(config) to the trainer, or a dataloader that yields "
    "nxdt_core.train.data.StepInput. Custom data come from a dataloader plugin.",
)


TrainerArgumentsIgnored = NxdtError.define(
    "NXDT-T042",
    "Arguments of a Trainer, callbacks or hooks of them, that would have no effect.",
    "The Trainer has arguments, callbacks or hooks that NxdtStrategy does not carry out: {found}.",
    "Leave them out, and use instead: {instead}.",
    also=lambda error: {
        "found": "; ".join(argument for argument, _ in error.arguments),
        "instead": "; ".join(instead for _, instead in error.arguments),
    },
)
