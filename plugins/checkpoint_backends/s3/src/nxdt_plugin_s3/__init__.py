"""Entry module of ``nxdt-plugin-s3``: declares the component; the SDK is imported when a run asks for it."""

from __future__ import annotations

from nxdt_core.api import StoreComponent, hookimpl


@hookimpl
def nxdt_stores() -> list[StoreComponent]:
    """Declare the store of ``s3://`` addresses."""
    return [
        StoreComponent(
            name="s3",
            target="nxdt_plugin_s3.storage:S3Storage",
            config="nxdt_plugin_s3.config:S3StorageConfig",
            summary="S3 and stores that speak its protocol; parallel multipart transfers with checksums",
            uri_schemes=("s3",),
        )
    ]
