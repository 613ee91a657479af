"""Entry module of ``nxdt-plugin-distill``: declares the loss, which is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nxdt_core.api import Component, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ValidateConfigContext


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare the loss."""
    return [
        Component(
            name="distill",
            target="nxdt_plugin_distill.objective:Distill",
            config="nxdt_plugin_distill.config:DistillConfig",
            requires=frozenset({"frozen_model"}),
            summary="distillation from a teacher: forward or reverse KL, generalized JSD (Agarwal et al. 2024, "
            "arXiv:2306.13649)",
        )
    ]


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report a head that would leave no logits to compare."""
    chosen, chunks = context.config["objective"]["name"], context.config["model"].get("loss_chunk_tokens")
    if chosen in ("distill", "distill:distill") and chunks is not None:
        yield ConfigFinding(
            key="model.loss_chunk_tokens",
            message="the head would compute cross-entropies, and distillation compares logits",
            remedy="Leave it out. A smaller data.micro_batch_size needs less memory, too.",
        )
