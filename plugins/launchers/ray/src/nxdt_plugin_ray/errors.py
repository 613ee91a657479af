"""Errors of runs on Ray: codes ``NXDT-P13…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["NoPlaceOnCluster", "RayMissing"]


class RayMissing(NxdtError):
    """Ray is not installed."""

    code = "NXDT-P130"
    happened = "Ray cannot be imported: {reason}."
    remedy = "Install it on all nodes of the cluster, in one version: pip install ray."
    reason: str


class NoPlaceOnCluster(NxdtError):
    """A Ray cluster without the resources that a run reserves."""

    code = "NXDT-P131"
    happened = (
        "Ray found no place within {timeout_s:.0f} s for {nodes} nodes with {bundle} each; the cluster has {found}."
    )
    remedy = "Reserve less (--cpus-per-node, --gpus-per-node, --resources), or set --strategy PACK for fewer machines."
    timeout_s: float
    nodes: int
    bundle: str
    found: str
