"""Entry module of ``nxdt-plugin-hf-data``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


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
