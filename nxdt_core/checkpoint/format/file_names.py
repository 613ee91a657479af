"""Paths of the files of a checkpoint below the root of its store: names only.

::

    step-00000100/manifest.json
    step-00000100/<attempt>/model/shard-00000-00000.safetensors         <rank>-<number>
    step-00000100/<attempt>/model/shard-00000-00000.safetensors.digests
    step-00000100/<attempt>/state/rank-00000.json
    step-00000100/<attempt>/manifest.sig                                of a signed checkpoint
    step-00000100/<attempt>/hf/config.json                              in some saves, next to its weights
"""

from __future__ import annotations

import re

__all__ = ["SECTIONS", "step_of"]

SECTIONS = ("model", "optim", "state")
"""Directories of an attempt, and families of tensors in a manifest."""

MASTER_WEIGHT = "master_weight"
"""Optimizer state ``<parameter name>/master_weight``: the weight that one in bfloat16 was rounded from."""

_STATE = re.compile(r"state/rank-[0-9]{5,}\.json")
_STEP = re.compile(r"step-([0-9]{8,15})")


def step_name(step: int) -> str:
    """Return the directory of a step: ``step-00000100``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name means, or None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_prefix(step: int) -> str:
    """Return what the keys of all objects of a step begin with."""
    return f"{step_name(step)}/"


def manifest_key(step: int) -> str:
    """Return the object whose existence commits a step."""
    return f"{step_name(step)}/manifest.json"


def signature_key(step: int, attempt: str) -> str:
    """Return the signature of the manifest that commits ``attempt``."""
    return f"{attempt_prefix(step, attempt)}manifest.sig"


def attempt_prefix(step: int, attempt: str) -> str:
    """Return what the keys of the files of one attempt begin with; names in a manifest are relative to it."""
    return f"{step_name(step)}/{attempt}/"


def shard_name(section: str, rank: int, number: int) -> str:
    """Return the ``number``-th file of tensors of ``section`` that ``rank`` writes."""
    return f"{section}/shard-{rank:05d}-{number:05d}.safetensors"


def state_name(rank: int) -> str:
    """Return the JSON state of ``rank``."""
    return f"state/rank-{rank:05d}.json"


def is_state_name(name: str) -> bool:
    """Return whether a file is the JSON state of a rank."""
    return _STATE.fullmatch(name) is not None


def hf_name(file: str) -> str:
    """Return a file of the Hugging Face form that a save may carry."""
    return f"hf/{file}"


def digests_name(name: str) -> str:
    """Return the name of the file of block digests for the file ``name``."""
    return f"{name}.digests"
