"""Entry module of ``nxdt-plugin-megatron-data``: declares the component and its commands; imports neither."""

from __future__ import annotations

from nxdt_core.api import CliCommand, Component, hookimpl


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
def nxdt_cli() -> list[CliCommand]:
    """Declare the commands that make indexed files and look at them."""
    summaries = {
        "preprocess": "Tokenise JSONL or text into Megatron's .bin/.idx files.",
        "merge": "Join pairs of .bin/.idx files into one.",
        "inspect": "Check a pair of .bin/.idx files and show its contents.",
    }
    return [
        CliCommand(name=f"data {verb}", target=f"nxdt_plugin_megatron_data.commands:{verb}", summary=summary)
        for verb, summary in summaries.items()
    ]
