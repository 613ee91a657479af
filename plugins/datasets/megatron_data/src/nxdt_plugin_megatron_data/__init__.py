"""Entry module of ``nxdt-plugin-megatron-data``: declares the component and its commands; imports neither."""

from __future__ import annotations

from nxdt_core.api import CliCommand, DataloaderComponent, hookimpl


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare the loader of Megatron's indexed files."""
    return [
        DataloaderComponent(
            name="megatron-data",
            target="nxdt_plugin_megatron_data.loader:MegatronDataloader",
            config="nxdt_plugin_megatron_data.config:MegatronDataConfig",
            summary="Megatron's .bin/.idx files: splits, weighted blends, documents kept apart on request",
            aliases=("megatron",),
        )
    ]


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
            summary="Check a pair of .bin/.idx files and say what it holds.",
        ),
    ]
