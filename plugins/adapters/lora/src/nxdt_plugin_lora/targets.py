"""Layers of a model that a list of names selects."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_plugin_lora.config import ALL_LINEAR
from nxdt_plugin_lora.errors import TargetNotFound, TargetSavedWhole

_SEPARATE: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused matrices of NxD Training → what they are where a model keeps them apart."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of experts."""


def adaptable(module: nn.Module) -> dict[str, nn.Module]:
    """Return what can get an update, in the order of the model: paths of linear layers, embeddings and experts'
    matrices, with the module that has the weight."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if isinstance(part, SwiGLUExperts):
            found |= {f"{path}.{matrix}": part for matrix in _MATRICES}
        elif type(part).forward in (nn.Linear.forward, nn.Embedding.forward):
            found[path] = part
    return found


def chosen_targets(
    module: nn.Module, plan: ParallelPlan, names: Sequence[str], whole: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Return those of :func:`adaptable` that ``names`` mean, without those inside ``whole``, as in peft.

    Args:
        module: the model.
        plan: parallel plan of the model.
        names: names of layers.
        whole: paths of the modules that train whole.

    Raises:
        TargetNotFound: one of ``names`` means nothing.
        TargetSavedWhole: one means nothing else than what trains whole.
    """
    candidates = adaptable(module)
    heads = [pattern for pattern, style in plan.tensor.items() if style in ("vocab_head", "score_head")]
    linear = [
        path
        for path, part in candidates.items()
        if not isinstance(part, nn.Embedding) and not matches_any(heads, path) and path != "lm_head"
    ]
    wanted: set[str] = set()
    for name in names:
        meant = linear if name == ALL_LINEAR else _meant(name, candidates, "target_modules", "layer")
        left = [path for path in meant if not any(f"{path}.".startswith(f"{owner}.") for owner in whole)]
        if meant and not left:
            raise TargetSavedWhole(name=name, paths=meant)
        wanted |= set(left)
    return {path: part for path, part in candidates.items() if path in wanted}


def chosen_modules(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules with parameters that end in one of ``names``, as in peft, or match its pattern.

    Raises:
        TargetNotFound: one of ``names`` means nothing.
    """
    candidates = [path for path, part in module.named_modules() if path and any(True for _ in part.parameters())]
    return [path for name in names for path in _meant(name, candidates, "modules_to_save", "module", ending=True)]


def adaptable_names(builder: ModelBuilder) -> set[str]:
    """Return the names of the matrices of the builder's model that can get an update."""
    with torch.device("meta"):
        found = adaptable(builder.build())
    return {path if isinstance(part, SwiGLUExperts) else f"{path}.weight" for path, part in found.items()}


def tables_of(builder: ModelBuilder) -> list[str]:
    """Return the names of the weights of the builder's model that are looked up row by row."""
    with torch.device("meta"):
        module = builder.build()
    return [f"{path}.weight" for path, part in module.named_modules() if isinstance(part, nn.Embedding)]


def _meant(name: str, candidates: Iterable[str], key: str, kind: str, *, ending: bool = False) -> list[str]:
    paths = list(candidates)
    found = _matching(name, paths, ending)
    for separate in _SEPARATE.get(name, ()) if not found else ():
        found += _matching(separate, paths, ending)
    if not found:
        raise TargetNotFound(key=key, name=name, kind=kind, candidates=_nearest(name, paths))
    return found


def _matching(name: str, paths: Sequence[str], ending: bool) -> list[str]:
    """A pattern matches whole paths; a name what ends in it, or (not ``ending``) has it among its components, or has it
    within one where it is not a component anywhere."""
    if any(sign in name for sign in "*?["):
        return [path for path in paths if fnmatch.fnmatchcase(path, name)]
    if ending:
        return [path for path in paths if path.endswith(name)]
    return [path for path in paths if f".{name}." in f".{path}."] or [path for path in paths if name in path]


def _nearest(name: str, paths: Sequence[str]) -> list[str]:
    leaves = list(dict.fromkeys(part for path in paths for part in path.split(".") if not part.isdigit()))
    last = name.rpartition(".")[2].strip("*?")
    return difflib.get_close_matches(last, leaves, n=3, cutoff=0.4) or leaves[:8]
