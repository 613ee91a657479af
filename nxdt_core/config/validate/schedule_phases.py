"""Phases of a learning-rate schedule that do not fit into its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nxdt_core.config.annotations import PartOf
from nxdt_core.config.fields.keys import keys_of
from nxdt_core.config.sources.node import join
from nxdt_core.config.validate.checked import Checked
from nxdt_core.errors.configuration import ImpossibleCombination

__all__ = ["find_overfull_curve"]

_SECTION = "model.optim.sched"
_WARMUP, _HORIZON = f"{_SECTION}.warmup_steps", f"{_SECTION}.max_steps"


def find_overfull_curve(checked: Checked, instances: Mapping[str, object]) -> Iterator[ImpossibleCombination]:
    """Yield the steps at a constant rate or of decay that begin before the warm-up is done, or even before the first
    step.

    The rate would jump, or fall from less than its peak. A warm-up alone may be longer: such a run is the beginning
    of a longer one, and a note says so.
    """
    if _SECTION not in instances:
        return
    cls: type = type(instances[_SECTION])
    keys = keys_of(cls)
    marked = [join(_SECTION, name) for name, key in keys.items() if _part(key.mark(PartOf))]
    parts = {path: count for path in marked if (count := checked.values.get(path))}
    horizon = checked.numbers(_HORIZON)
    if not parts or horizon is None:
        return
    if warmup := checked.values.get(_WARMUP):
        parts = {_WARMUP: warmup, **parts}
    total = sum(parts.values())
    if total > horizon[0]:
        said = " and ".join(f"{path.rpartition('.')[2]} {count}" for path, count in parts.items())
        yield ImpossibleCombination(
            **checked.place(*reversed(parts), _HORIZON),
            reason=f"{said} {'are' if len(parts) > 1 else 'is'} more than the {horizon[0]} steps of the schedule",
            advice=f"Shorten them, or set {_HORIZON} to at least {total}: a run may end before its schedule does.",
        )


def _part(mark: PartOf | None) -> bool:
    return mark is not None and mark.key == _HORIZON
