"""Checks of a configuration that build its model, without memory, or its tokenizer; and values that a user sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxdt_core.config.annotations import Written
from nxdt_core.config.section import is_model, keys_of
from nxdt_core.config.tree import dotted
from nxdt_core.errors.configuration import ValuesNotSet
from nxdt_core.errors.models import VocabularyTooSmall
from nxdt_core.protocols.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig


def check_layout(config: ResolvedConfig) -> None:
    """Build the model on the meta device, and send shapes through every shard and the objective.

    It does nothing, and imports no torch, for a model whose record sets ``tried_before_launch`` to False, or leaves it
    out where the run does not shard the model. An objective of a plugin is tried where logits are not whole: it may
    compute with them in another way than the functions of :mod:`nxdt_core.models.loss`.

    Raises:
        NxdtError: the model cannot be built, or not in this layout, or the objective does not take its logits.
    """
    from nxdt_core.api import ModelComponent
    from nxdt_core.kernel.plugin import BUILTIN

    record, run = config.selected("model").component.record, config.run
    world_size = run.trainer.devices * run.trainer.num_nodes
    sizes = run.distributed_strategy.mesh_sizes(world_size)
    wanted = record.tried_before_launch if isinstance(record, ModelComponent) else False
    if wanted is None:
        wanted = max(sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1
    whole = sizes.tp == 1 and run.model.loss_chunk_tokens is None
    tries_objective = not whole and config.selected("objective").component.plugin != BUILTIN
    if not (wanted or tries_objective):
        return
    from nxdt_core.errors.launch import EngineWithoutEstimate
    from nxdt_core.errors.models import ModelReadsValues
    from nxdt_core.train import build
    from nxdt_core.train.plan import plan

    build.model_builder(config).plan()
    if world_size == 1 and not tries_objective:
        return
    try:
        plan(config)
    except (EngineWithoutEstimate, ModelReadsValues):  # it cannot be tried like this, and may train well
        return


_ENDS = {"eos": "end-of-text", "pad": "padding"}


def data_notes(config: ResolvedConfig) -> list[str]:
    """Return a note for each path of the training data that leads to no file, be it a pattern or without an ending."""
    section = config.selected("dataset").config
    cls: Any = type(section)
    return [
        f"data.{name}: {path} is not on this machine"
        for name, key in (keys_of(cls) if section is not None else {}).items()
        if not any(isinstance(mark, Written) for mark in key.marks)
        for path in _paths(getattr(section, name))
        if not (is_placeholder(path) or path.exists() or glob(str(path)) or glob(f"{path}.*"))
    ]


def _paths(value: Any) -> Iterator[Path]:
    """Yield the paths in the value of a key, or in those of a section."""
    if isinstance(value, Path):
        yield value
        return
    cls: Any = type(value)
    if is_model(cls):
        value = {key.name: getattr(value, key.attribute) for key in keys_of(cls).values()}
    parts = value.values() if isinstance(value, Mapping) else value
    for each in parts if not isinstance(parts, str) and isinstance(parts, Iterable) else ():
        yield from _paths(each)


def vocabulary_notes(config: ResolvedConfig) -> list[str]:
    """Return notes for the user about a tokenizer that is built from files; none for one that needs no files.

    Raises:
        VocabularyTooSmall: it has ids that the model has no row for.
        NxdtError: its files are invalid.
    """
    selected = config.components["tokenizer"]
    if selected is None or selected.config is None:
        return []
    paths = [*_paths(selected.config)]
    if not paths:
        return []
    if any(map(is_placeholder, paths)):
        return []  # it is reported as a value to set
    if absent := [path for path in paths if not path.exists()]:
        return [f"data.tokenizer: {absent[0]} is not on this machine; its vocabulary is not compared with the model's"]
    tokenizer = selected.component.load_class(Tokenizer)(selected.config)
    rows = _rows(config.selected("model").config)
    if rows is not None and tokenizer.vocab_size > rows:
        added = bool(getattr(selected.config, "added_tokens", ()))
        raise VocabularyTooSmall(tokenizer=tokenizer.vocab_size, model=rows, added=added)
    missing = [key for key in _ENDS if getattr(tokenizer, f"{key}_id") is None]
    return [f"data.tokenizer: it has no {_ENDS[key]} token; {key}_token names one" for key in missing]


def _rows(model: Any) -> int | None:
    """Rows of the vocabulary, padding included; None where the model's section does not say."""
    rows: int | None = getattr(model, "vocab_rows", None) or getattr(model, "vocab_size", None)
    return rows


def is_placeholder(value: Any) -> bool:
    """Return whether ``value``, or a part of it, stands for one that the user sets, which a recipe cannot know."""
    if isinstance(value, (dict, list, tuple)):
        return any(map(is_placeholder, value.values() if isinstance(value, dict) else value))
    return str(value).startswith("/path/to/")


def values_to_set(config: ResolvedConfig) -> tuple[str, ...]:
    """Return the keys that were written with placeholders, in the order of the schema."""
    tree = config.tree
    return tuple(
        dotted(path) for path, value in tree.leaves() if tree.origins[path].kind != "default" and is_placeholder(value)
    )


def require_set(config: ResolvedConfig) -> None:
    """See that no value is a placeholder.

    Raises:
        ValuesNotSet: some are.
    """
    if keys := values_to_set(config):
        raise ValuesNotSet(source=config.source, keys=keys)
