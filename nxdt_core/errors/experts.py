"""Errors of expert parallelism: codes ``NXDT-P05…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["ExpertsDoNotDivide", "ModelWithoutExperts"]


class ModelWithoutExperts(NxdtError):
    """Expert parallelism of a model that has nothing to share out."""

    code = "NXDT-P050"
    happened = "distributed_strategy.expert_model_parallel_size is {ep}, and the model's plan names no experts."
    remedy = "Set it to 1, or train a model with experts."
    ep: int


class ExpertsDoNotDivide(NxdtError):
    """Experts that do not fall into equal parts."""

    code = "NXDT-P051"
    happened = "'{module}' has {experts} experts, which {ep} expert parallel ranks cannot share in equal parts."
    remedy = "Set distributed_strategy.expert_model_parallel_size to a size that divides {experts}."
    module: str
    experts: int
    ep: int
