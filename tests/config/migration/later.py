"""A plugin file that stands in for plugins which are not part of this version: it declares their keys, nothing else.

With it, ``nxdt config check`` judges all of a migrated file but the parts that those plugins will bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nxdt_core.api import AdapterComponent, hookimpl


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank updates."""

    lora_rank: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.05
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    lora_verbose: bool = False
    target_modules: tuple[str, ...] = ()
    load_lora_from_ckpt: bool = False
    save_lora_base: bool = True
    merge_lora: bool = False
    save_lora_config_adapter: bool = True
    merge_sharded_lora: bool = False


def declared(kind: type, name: str, config: type) -> Any:
    return kind(name=name, target=f"{__name__}:nothing", config=f"{__name__}:{config.__name__}", summary="stands in")


@hookimpl
def nxdt_adapters():
    return [declared(AdapterComponent, "lora", LoraConfig)]
