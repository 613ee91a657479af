"""The keys of ``parallel_engine:`` that belong to ``name: nxd``: the Neuron compiler's and runtime's. No torch."""

from __future__ import annotations

from nxdt_core.config.section import Section


class NxdConfig(Section):
    """Settings of the Neuron compiler and runtime; a variable that is set in the environment takes precedence."""

    compiler_flags: str | None = None
    """Flags of the Neuron compiler."""
    async_exec_max_inflight_requests: int | None = None
    """Requests in flight."""
    bucket_size_collectives: int | None = None
    """Size of a collective's bucket in MB."""
    neuron_rt_exec_timeout: int | None = None
    """Timeout of the Neuron runtime in seconds."""
    neuron_experimental_compress_rg: bool = False
    """Write only the first replica group into the graph."""
    fuse_softmax: bool = False
    """Fused softmax of the Neuron compiler."""
