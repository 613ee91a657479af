"""Names of modules to recompute, compared with those that the selected model has."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from nxdt_core.api import ModelComponent
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors.configuration import ConfigProblem, WrongValue

__all__ = ["find_unknown_recompute"]



def find_unknown_recompute(checked: Checked, composition: Composition) -> Iterator[ConfigProblem]:
    """Report names that the model lacks, where its record lists the names that it has."""
    model = composition.components.get("model")
    known = model.record.recompute_names if model is not None and isinstance(model.record, ModelComponent) else None
    if known is None or model is None or checked.values.get(_GRANULARITY) != "selective":
        return
    for name in checked.values.get(_RECOMPUTE) or ():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            yield WrongValue(
                **checked.place(_RECOMPUTE),
                found=f"{name!r}, which model {model.record.name!r} does not have",
                allowed=", ".join(known),
                hint=f"Did you mean {near[0]!r}?" if near else "",
            )
