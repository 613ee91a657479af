"""Entry module of ``nxdt-plugin-mixtral``: declares the component; the model is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nxdt_core.api import ConfigFinding, ModelComponent, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ValidateConfigContext

_NAMES = ("mixtral", "hf_mixtral")


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the Mixtral builder."""
    return [
        ModelComponent(
            name=_NAMES[0],
            target="nxdt_plugin_mixtral.builder:MixtralBuilder",
            config="nxdt_plugin_mixtral.config:MixtralConfig",
            summary="Mixtral 8x7B, 8x22B: a Llama whose feed-forward blocks are mixtures of experts",
            aliases=_NAMES[1:],
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep", "lora"}),
            tried_before_launch=False,
            hf_architectures=("MixtralForCausalLM", "MixtralForSequenceClassification"),
            recompute_names=(
                "CoreAttention",
                "LlamaMLP",
                "ActivationMultiplyMLP",
                "MixtralRMSNorm",
                "MixtralDecoderLayer",
            ),
        )
    ]


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterable[ConfigFinding]:
    """Yield a router that needs whole micro-batches where context parallelism divides them, and a loss that needs all
    layers where backward cannot know them."""
    model, strategy = context.config["model"], context.config["distributed_strategy"]
    if model["name"] not in _NAMES:
        return
    ranks, pipeline = strategy["context_parallel_size"], strategy["pipeline_model_parallel_size"] > 1
    if model["moe"]["routing_algorithm"] == "sinkhorn" and ranks > 1:
        message = f"sinkhorn balances whole micro-batches, which context_parallel_size {ranks} divides between ranks"
        remedy = "Set it to top_k, or distributed_strategy.context_parallel_size to 1."
        yield ConfigFinding(key="model.moe.routing_algorithm", message=message, remedy=remedy)
    if not model["moe"]["pool_router_aux_loss"]:
        return
    for key, found, wanted in (
        ("model.compile", model["compile"], "false"),
        ("distributed_strategy.pipeline_schedule", pipeline and strategy["pipeline_schedule"] == "zbv", "1f1b"),
        ("parallel_engine.name", pipeline and not context.components["engine"].endswith(":torch"), "torch"),
    ):
        if found:
            message = f"backward of each layer needs the assignments of all layers, which {key} does not give it"
            remedy = f"Set it to false, or {key} to {wanted}."
            yield ConfigFinding(key="model.moe.pool_router_aux_loss", message=message, remedy=remedy)
