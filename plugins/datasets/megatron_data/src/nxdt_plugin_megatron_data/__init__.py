"""Entry module of ``nxdt-plugin-megatron-data``: declares the component and its commands; imports neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import CliCommand, Component, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.contexts import ConfigDefaultsContext, ValidateConfigContext

_SHUFFLES = {"single": False, "cyclic": True}
"""Value of ``data.dataloader_type`` → the value of ``data.shuffle`` that it stands for."""


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of Megatron's indexed files."""
    return [
        Component(
            name="megatron-data",
            target="nxdt_plugin_megatron_data.loader:MegatronData",
            config="nxdt_plugin_megatron_data.config:MegatronDataConfig",
            summary="Megatron's .bin/.idx files: splits, weighted blends, documents kept apart on request",
            aliases=("megatron",),
        )
    ]


@hookimpl
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Return the ``data.shuffle`` that ``data.dataloader_type`` stands for."""
    data = context.config.get("data")
    order = data.get("dataloader_type") if isinstance(data, Mapping) else None
    return {"data": {"shuffle": _SHUFFLES[order]}} if isinstance(order, str) and order in _SHUFFLES else {}


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report a ``data.dataloader_type`` that contradicts ``data.shuffle``."""
    data = context.config["data"]
    order, shuffle = data.get("dataloader_type"), data["shuffle"]
    if order in _SHUFFLES and shuffle != _SHUFFLES[order]:
        meant, given = (str(value).lower() for value in (_SHUFFLES[order], shuffle))
        message = f"{order!r} stands for data.shuffle: {meant}, but data.shuffle is {given}"
        yield ConfigFinding(key="data.dataloader_type", message=message, remedy="Keep one of the two keys.")


@hookimpl
def nxdt_cli() -> list[CliCommand]:
    """Declare the commands that make indexed files and look at them."""
    return [
        CliCommand(
            name="data preprocess",
            target="nxdt_plugin_megatron_data.preprocess.command:preprocess",
            summary="Tokenise JSONL or text into Megatron's .bin/.idx files.",
        ),
        CliCommand(
            name="data inspect",
            target="nxdt_plugin_megatron_data.inspect:inspect",
            summary="Check a pair of .bin/.idx files and show its contents.",
        ),
    ]
