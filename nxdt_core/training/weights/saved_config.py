"""The configuration that a checkpoint keeps, read back on one process, for a run in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nxdt_core.checkpoint import Manifest
from nxdt_core.config import Origin, ResolvedConfig, load
from nxdt_core.config.huggingface.bounds import oversized
from nxdt_core.config.resolve.interpolation import has_interpolation, interpolate
from nxdt_core.config.sources.node import from_plain, to_plain
from nxdt_core.data.chat.keys import ChatKeys
from nxdt_core.data.files.keys import RecordFiles
from nxdt_core.errors.configuration import ConfigError, ConfigProblem
from nxdt_core.errors.exchange import SavedConfigUnusable

__all__ = ["saved_chat_keys", "saved_config", "saved_values"]

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
_OF_START = ("weight_init_only",)
"""Keys of the model that say what a run begins with, which is named in sections that are left out."""
_NEEDED = (
    "model",
    "data.seq_length",
    "data.tokenizer",
    "precision",
    "objective",
    "adapter",
    "parallel_engine",
    "distributed_strategy",
    "model_alignment_strategy",
    "plugins",
)
"""Keys whose references to the environment are resolved; the variables of others need not be set here."""


def saved_config(manifest: Manifest, *, where: str) -> ResolvedConfig:
    """Return the run that wrote the checkpoint, as it would be on one process, without what only training needs.

    Data, callbacks, loggers, optimizer and store are left out: their plugins, files and variables need not be here.
    References to the environment are resolved, so this configuration is not to be written.

    Args:
        manifest: of the checkpoint.
        where: its address, for messages.

    Raises:
        SavedConfigUnusable: the model or the tokenizer cannot be had here; a missing plugin is named.
    """
    saved = saved_values(manifest, _NEEDED, where=where)
    name = saved.get("name")
    given = {
        **saved,
        "name": "saved" if has_interpolation(name) else name,
        "exp_manager": {},
        "trainer": {**saved.get("trainer", {}), "callbacks": []},
        "data": {
            **{key: value for key, value in saved.get("data", {}).items() if key in _OF_DATA},
            "name": "none",
            "micro_batch_size": 1,
            "global_batch_size": 1,
        },
        "model": {
            **{key: value for key, value in saved.get("model", {}).items() if key not in _OF_START},
            "optim": {"lr": 0.0},
        },
        "checkpoint": {},
    }
    tensors = sum(map(len, manifest.tensors.values()))
    reason = oversized(given["model"], tensors=tensors, size_bytes=manifest.size_bytes)
    if reason is not None:
        raise SavedConfigUnusable(where=where, problems=[f"model.{reason}"])
    try:
        return load(given, _ONE_PROCESS)
    except ConfigError as error:
        raise _unusable(error.problems, where) from error


def saved_values(manifest: Manifest, wanted: Sequence[str], *, where: str) -> dict[str, Any]:
    """Return the saved configuration with the references to the environment of the keys ``wanted`` resolved.

    Args:
        manifest: of the checkpoint.
        wanted: key paths; of others, a reference stays as it is written.
        where: address of the checkpoint, for messages.

    Raises:
        SavedConfigUnusable: a variable is not set; names the key and the variable.
    """
    origin = Origin(kind="file", where=where)
    tree, problems = interpolate(from_plain(manifest.facts.config, origin), wanted=wanted)
    if problems:
        raise _unusable(problems, where)
    values: dict[str, Any] = to_plain(tree)
    return values


def _unusable(problems: Sequence[ConfigProblem], where: str) -> SavedConfigUnusable:
    lines = [f"{problem.key}: {problem.what()} {problem.do()}".strip() for problem in problems]
    return SavedConfigUnusable(where=where, problems=lines)


def saved_chat_keys(manifest: Manifest) -> ChatKeys:
    """Return how the data of the run that wrote the checkpoint made text of messages; the defaults where they held
    none."""
    names = {each.name for each in fields(ChatKeys)} - {each.name for each in fields(RecordFiles)}
    wanted = [f"data.{name}" for name in sorted(names)]
    data = saved_values(manifest, wanted, where=f"step {manifest.step}").get("data", {})
    found = {name: data[name] for name in names if data.get(name) is not None}
    if "chat_template_file" in found:
        found["chat_template_file"] = Path(found["chat_template_file"])
    return ChatKeys(**found)
