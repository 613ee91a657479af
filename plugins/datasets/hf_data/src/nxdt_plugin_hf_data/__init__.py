"""Entry module of ``nxdt-plugin-hf-data``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import DataloaderComponent, hookimpl


@hookimpl
def nxdt_dataloaders() -> list[DataloaderComponent]:
    """Declare the loader of datasets' directories and of file streams."""
    return [
        DataloaderComponent(
            name="hf-data",
            target="nxdt_plugin_hf_data.loader:HfDataloader",
            config="nxdt_plugin_hf_data.config:HfDataConfig",
            summary="Arrow directories of the datasets library, or streams of Parquet, JSONL and Arrow files; mixtures",
            aliases=("hf",),
        )
    ]
