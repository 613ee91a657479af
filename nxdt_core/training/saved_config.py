"""The configuration that a checkpoint keeps, read back on one process, whatever layout its run had."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from nxdt_core.checkpoint import Manifest
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.data.chat_keys import ChatKeys
from nxdt_core.data.record_files import RecordFiles
from nxdt_core.errors import ConfigError, SavedConfigUnusable

__all__ = ["saved_chat_keys", "saved_config"]

_ONE_PROCESS = (
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "model.pipeline_cuts=null",
    *(
        f"distributed_strategy.{key}=1"
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "dp_replicate",
        )
    ),
    "distributed_strategy.pipeline_schedule=null",
)
"""The layout of a checkpoint's run matters to that run alone: any process can load any."""


_OF_DATA = ("seq_length", "tokenizer")


def saved_config(manifest: Manifest, *, where: str) -> ResolvedConfig:
    """The run that wrote the checkpoint, as it would be on one process, without what only training needs.

    Data, callbacks, optimizer and store are left out: their plugins and files need not be here.

    Args:
        manifest: of the checkpoint.
        where: its address, for messages.

    Raises:
        SavedConfigUnusable: the model or the tokenizer cannot be had here; a missing plugin is named.
    """
    saved = manifest.facts.config
    given = {
        **saved,
        "trainer": {**saved.get("trainer", {}), "callbacks": []},
        "data": {
            **{key: value for key, value in saved.get("data", {}).items() if key in _OF_DATA},
            "name": "none",
            "micro_batch_size": 1,
            "global_batch_size": 1,
        },
        "model": {**saved.get("model", {}), "optim": {"lr": 0.0}},
        "checkpoint": {},
    }
    try:
        return load(given, _ONE_PROCESS)
    except ConfigError as error:
        problems = [f"{problem.key}: {problem.what()} {problem.do()}".strip() for problem in error.problems]
        raise SavedConfigUnusable(where=where, problems=problems) from error


def saved_chat_keys(manifest: Manifest) -> ChatKeys:
    """How the data of the run that wrote the checkpoint made text of messages; the defaults where they held none."""
    data = manifest.facts.config.get("data", {})
    names = {each.name for each in fields(ChatKeys)} - {each.name for each in fields(RecordFiles)}
    found = {name: data[name] for name in names if data.get(name) is not None}
    if "chat_template_file" in found:
        found["chat_template_file"] = Path(found["chat_template_file"])
    return ChatKeys(**found)
