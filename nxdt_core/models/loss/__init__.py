"""Cross-entropy over the vocabulary in bounded memory."""

from nxdt_core.models.loss.cross_entropy import (
    cross_entropies,
    cross_entropy_sum,
    log_partition,
    log_probs,
)

__all__ = ["cross_entropies", "cross_entropy_sum", "log_partition", "log_probs"]
