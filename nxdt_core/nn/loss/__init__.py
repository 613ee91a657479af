"""Cross-entropy over the vocabulary in bounded memory."""

from nxdt_core.nn.loss.cross_entropy import (
    VocabularyLoss,
    cross_entropies,
    cross_entropy_sum,
    log_partition,
    log_probs,
)

__all__ = ["VocabularyLoss", "cross_entropies", "cross_entropy_sum", "log_partition", "log_probs"]
