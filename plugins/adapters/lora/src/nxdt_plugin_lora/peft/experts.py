"""What peft makes of a model's experts: it holds two matrices of theirs as one, and finds them by their last names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nxdt_core.checkpoint.hf.key_map import Source
from nxdt_plugin_lora.errors import NoPeftForm

__all__ = ["check_pairs", "taken_for_experts"]

_PAIR = ("gate_proj", "up_proj")


def check_pairs(updated: Collection[str]) -> None:
    """See that experts have an update of both matrices of a pair, or of none.

    Args:
        updated: names of the experts' matrices with an update.

    Raises:
        NoPeftForm: one has one alone.
    """
    for name in sorted(updated):
        owner, _, matrix = name.rpartition(".")
        if matrix in _PAIR and not all(f"{owner}.{other}" in updated for other in _PAIR):
            reason = "peft holds gate_proj and up_proj of an expert as one, and has no update of one alone"
            raise NoPeftForm(parameter=name, reason=reason)


def taken_for_experts(sources: Iterable[Source]) -> set[str]:
    """Return the modules of transformers that are not experts and end in the name of an expert's matrix."""
    found = list(sources)
    matrices = {_last(each) for each in found if each.transform == "stack"}
    layers = [each for each in found if each.transform != "stack" and _last(each) in matrices]
    return {name.removesuffix(".weight") for each in layers for name in each.hf_names}


def _last(source: Source) -> str:
    return source.hf_names[0].removesuffix(".weight").rpartition(".")[2]
