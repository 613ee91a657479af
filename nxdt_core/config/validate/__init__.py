"""Rules over values that are each right: what cannot work together, what has no effect."""

from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.combinations import find_impossible
from nxdt_core.config.validate.durations import find_wrong_durations
from nxdt_core.config.validate.effects import find_notes
from nxdt_core.config.validate.recompute import find_unknown_recompute
from nxdt_core.config.validate.schedule_phases import find_overfull_curve

__all__ = [
    "Checked",
    "find_impossible",
    "find_notes",
    "find_overfull_curve",
    "find_unknown_recompute",
    "find_wrong_durations",
]
