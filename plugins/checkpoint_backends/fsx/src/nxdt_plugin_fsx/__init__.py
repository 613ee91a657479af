"""Entry module of ``nxdt-plugin-fsx``: declares the component."""

from __future__ import annotations

from nxdt_core.api import StoreComponent, hookimpl


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare the store of ``fsx://`` addresses."""
    return [
        StoreComponent(
            name="fsx",
            target="nxdt_plugin_fsx.storage:FsxStorage",
            config="nxdt_plugin_fsx.config:FsxStorageConfig",
            summary="FSx for Lustre: a directory whose shards are striped, and exported to S3 after each commit",
            uri_schemes=("fsx",),
        )
    ]
