"""Rules of the installed torch: what its version cannot do. Read from its metadata, without an import."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from nxdt_core.config.validate.sizes import EP, TP, mesh_sizes
from nxdt_core.errors.configuration import ImpossibleCombination
from nxdt_core.kernel.metadata import admits
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["TORCH_RULES"]

_SCHEDULE, _KV_HEADS = "distributed_strategy.pipeline_schedule", "model.num_kv_heads"
_CHUNKS, _COMPILE = "model.moe.exchange_chunks", "model.compile"
_NEEDED = "torch>=2.10"


def torch_runs_zbv(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield ZBV on torch 2.9, whose schedule has a rank send to itself between two consecutive stages."""
    sizes = mesh_sizes(settings)
    if sizes is not None and sizes.schedule == "zbv" and sizes.pp > 1 and (installed := _older()):
        yield ImpossibleCombination(
            **settings.place(_SCHEDULE),
            reason=f"the schedule zbv needs {_NEEDED}, and torch {installed} is installed",
            advice="Choose 1f1b or interleaved, or install a newer torch.",
        )


def torch_shards_copied_heads(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield layouts that torch 2.9 cannot run: a mesh cannot be split, and FSDP2 takes only parameters whose mesh has
    the same root as FSDP2's mesh."""
    numbers = settings.numbers(_KV_HEADS, TP)
    if numbers is not None and numbers[0] < numbers[1] and (installed := _older()):
        heads, tp = numbers
        yield ImpossibleCombination(
            **settings.place(_KV_HEADS, TP),
            reason=f"{heads} key and value heads over tensor_model_parallel_size {tp} are copied, which needs"
            f" {_NEEDED}, and torch {installed} is installed",
            advice=f"Choose a tensor parallel size of at most {heads}, or install a newer torch.",
        )


def torch_shards_experts_of_tensor_ranks(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield expert with tensor parallelism on torch 2.9, where the meshes of both have different roots for FSDP2."""
    numbers = settings.numbers(EP, TP)
    if numbers is not None and min(numbers) > 1 and (installed := _older()):
        ep, tp = numbers
        yield ImpossibleCombination(
            **settings.place(EP, TP),
            reason=f"expert_model_parallel_size {ep} with tensor_model_parallel_size {tp} needs {_NEEDED}, and torch"
            f" {installed} is installed",
            advice="Set one of the two to 1, or install a newer torch.",
        )


def torch_compiles_exchanges_in_chunks(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield compiled exchanges in chunks on torch 2.9 and 2.10, whose backward fails on the sizes of dropless rows."""
    numbers = settings.numbers(EP, _CHUNKS) if settings.values.get(_COMPILE) else None
    if numbers is not None and min(numbers) > 1 and (installed := _older(needed := "torch>=2.11")):
        yield ImpossibleCombination(
            **settings.place(_CHUNKS, _COMPILE),
            reason=f"{numbers[1]} exchange_chunks in compiled layers need {needed}, and torch {installed} is installed",
            advice=f"Set {_CHUNKS}=1 or {_COMPILE}=false, or install a newer torch.",
        )


def _older(needed: str = _NEEDED) -> str | None:
    """The version of torch that is installed, if it is older than ``needed``."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    return None if admits(needed, installed) else installed


TORCH_RULES = (
    torch_runs_zbv,
    torch_shards_copied_heads,
    torch_shards_experts_of_tensor_ranks,
    torch_compiles_exchanges_in_chunks,
)
"""In the order in which they are tried."""
