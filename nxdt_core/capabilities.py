"""Capabilities: the words in which records say what an engine, a model or an optimizer does. Data alone, no imports.

A record declares capabilities (``Component.capabilities``) or asks for them (``Component.requires``). The configuration
is checked against them before anything is launched (:mod:`nxdt_core.config.capabilities`): a layout, schedule,
precision or adapter that the selected components do not declare is an error, never silently ignored.

Nothing needs to be declared for one process in float32 without adapters. Names follow the configuration: ``pp:zbv`` is
``pipeline_schedule: zbv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CAPABILITIES"]

_ENGINE = {
    "dp": "trains on several data parallel ranks, which read different samples",
    "dp_replicate": "shards within groups of data parallel ranks only",
    "zero1": "shards optimizer state over data parallel ranks",
    "zero2": "shards optimizer state and gradients over data parallel ranks",
    "zero3": "shards optimizer state, gradients and weights over data parallel ranks",
    "tp": "shards the matrices of layers over ranks",
    "sp": "shards activations between tensor parallel layers along the sequence",
    "sp:regather": "keeps shards of what tensor parallel layers read, and gathers them again in backward",
    "pad_heads": "adds attention heads of zeros where tensor parallelism does not divide them",
    "pp": "distributes layers over pipeline stages on several ranks",
    "vpp": "puts several pipeline stages on each rank",
    "pp:1f1b": "runs the pipeline schedule 1F1B",
    "pp:interleaved": "runs the interleaved pipeline schedule",
    "pp:zbv": "runs the zero-bubble pipeline schedule ZBV",
    "cp": "shards sequences over ranks",
    "cp:ring": "passes keys and values around a ring of context parallel ranks",
    "cp:gather": "gathers keys and values over context parallel ranks",
    "ep": "distributes experts over ranks",
    "token_shuffle": "mixes the tokens of data parallel ranks before experts",
    "adapters": "applies adapters to the model before it is laid out, and trains what they added",
    "quantised_base": "keeps the frozen weights of linear layers in 4 or 8 bits",
    "frozen_model": "runs a second model, which does not train, next to the one that does",
    "recompute": "recomputes activations in backward",
    "compile": "compiles the model with torch.compile",
    "param_groups": "applies model.optim.param_groups",
    "dtype:float64": "computes with float64 parameters",
    "dtype:bfloat16": "computes with bfloat16 parameters",
    "dtype:float16": "computes with float16 parameters",
    "autocast": "runs forward under torch.autocast",
    "master_weights": "keeps float32 copies of the parameters for the optimizer",
    "gradient_dtype": "sums gradients in another dtype than the parameters",
    "optimizer_dtype": "keeps optimizer state in another dtype than the weights that the optimizer updates",
    "stochastic_rounding": "rounds weights stochastically",
    "linear_product": "lets a precision policy compute the products of linear layers",
    "xla": "reads the settings of the XLA runtime",
}

_MODEL = {
    "tp": "its plan shards the matrices of layers",
    "sp": "its plan shards activations between tensor parallel layers along the sequence",
    "pp": "its plan cuts the model into pipeline stages",
    "cp": "its attention runs on shards of a sequence",
    "ep": "it has experts that its plan distributes over ranks",
    "lora": "its linear layers, embeddings and experts take low-rank updates",
}

_OPTIMIZER = {
    "sharded": "updates parameters that are sharded over ranks: element by element, or by ParameterShard",
}

CAPABILITIES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "engine": MappingProxyType(_ENGINE),
        "model": MappingProxyType(_MODEL),
        "optimizer": MappingProxyType(_OPTIMIZER),
    }
)
"""Kind → capability → what a component that declares it does. Components of other kinds declare none."""
