"""A model's section as ``model.model_config`` fills it, for tests of models that are exchanged with Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

from nxdt_core.config import ReadsHFConfig
from nxdt_core.config.resolve.bind import read_part
from nxdt_core.config.resolve.path_values import Locator
from nxdt_core.config.sources.node import Node, Origin, from_plain

__all__ = ["config_from_hf"]


def config_from_hf(cls: type[ReadsHFConfig], hf: Mapping[str, Any]) -> Any:
    """Return the instance of ``cls`` that a run gets from a ``config.json`` alone.

    Raises:
        ValueError: values that the dataclass does not take.
    """
    origin = Origin(kind="hf", where="config.json")
    tree = Node({"model": Node({}, origin)}, origin)
    for key, value in cls.from_hf(hf).items():
        tree = tree.set(f"model.{key}", from_plain(value, origin))
    run = make_dataclass("Run", [("model", cls)])  # keys of the section may be aliases of `model.<key>`
    read, problems = read_part(run, tree, "", Locator(origin.where))
    if problems:
        raise ValueError("; ".join(str(problem) for problem in problems))
    return read.model
