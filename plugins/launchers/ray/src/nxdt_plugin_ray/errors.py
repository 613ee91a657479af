"""Errors of runs on Ray: codes ``NXDT-P13…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

RayMissing = NxdtError.define(
    "NXDT-P130",
    "Ray is not installed.",
    "Ray cannot be imported: {reason}.",
    "Install it on all nodes of the cluster, in one version: pip install ray.",
)

NoPlaceOnCluster = NxdtError.define(
    "NXDT-P131",
    "A Ray cluster without the resources that a run reserves.",
    "Ray found no place within {timeout_s:.0f} s for {nodes} nodes with {bundle} each; the cluster has {found}.",
    "Reserve less (--cpus-per-node, --gpus-per-node, --resources), or set --strategy PACK for fewer machines.",
)
