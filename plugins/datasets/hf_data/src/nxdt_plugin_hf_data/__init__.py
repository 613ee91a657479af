"""Entry module of ``nxdt-plugin-hf-data``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nxdt_core.api import Component, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ValidateConfigContext


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of datasets' directories and of file streams."""
    return [
        Component(
            name="hf-data",
            target="nxdt_plugin_hf_data.loader:HfData",
            config="nxdt_plugin_hf_data.config:HfDataConfig",
            summary="Arrow directories of the datasets library, or streams of Parquet, JSONL and Arrow files; mixtures",
            aliases=("hf",),
        )
    ]


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report settings that count passes over a stream, or shares of it."""
    if context.components["dataset"] != "hf_data:hf-data" or not context.config["data"]["streaming"]:
        return
    trainer, checkpoint = context.config["trainer"], context.config["checkpoint"]
    for key, counts in (
        *((f"trainer.{name}", (trainer[name] or 0) > 0) for name in ("max_epochs", "min_epochs", "overfit_batches")),
        ("trainer.check_val_every_n_epoch", bool(trainer["check_val_every_n_epoch"])),
        ("trainer.limit_train_batches", trainer["limit_train_batches"] not in (None, 1.0)),
        ("checkpoint.every_n_epochs", bool(checkpoint["every_n_epochs"])),
    ):
        if counts:
            message = "it needs to know how many samples the training data have, and data.streaming reads a stream"
            remedy = "Count steps instead, as trainer.max_steps does, or set data.streaming to false."
            yield ConfigFinding(key=key, message=message, remedy=remedy)
