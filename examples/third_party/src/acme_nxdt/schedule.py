"""The curve of "Attention Is All You Need" (arXiv:1706.03762): linear warm-up, then one over the square root."""

from acme_nxdt.config import InverseSqrtConfig
from nxdt_core.protocols.schedule import LRSchedule, ScheduleHorizon


def inverse_sqrt(config: InverseSqrtConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Return the factor on the peak learning rate, a pure function of the step."""
    warmup = max(1, config.warmup_steps)
    return lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
