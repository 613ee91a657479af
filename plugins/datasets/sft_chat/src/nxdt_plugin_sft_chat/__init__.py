"""Entry module of ``nxdt-plugin-sft-chat``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import Component, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ConfigDefaultsContext


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of conversations."""
    return [
        Component(
            name="sft-chat",
            target="nxdt_plugin_sft_chat.loader:ChatData",
            config="nxdt_plugin_sft_chat.config:ChatConfig",
            summary="conversations through a chat template, the loss on the answers, packed or padded",
        )
    ]


@hookimpl
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Give the weights of a model that is named the learning rate of TRL's SFT."""
    if context.find("model.optim.name") not in (None, "adam", "adamw"):
        return {}
    whole_model = context.find("data.name") == "sft-chat" and context.find("adapter.name") is None
    tuned = whole_model and context.find("checkpoint.weight_init_only")
    return {"model": {"optim": {"lr": 2e-5}}} if tuned else {}
