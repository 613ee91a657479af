"""The metric ``rouge``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nxdt_plugin_evaluate.errors import EvaluationLibraryMissing
from nxdt_plugin_evaluate.rouge_words import RougeWords

__all__ = ["Rouge"]

_KINDS = ("rouge1", "rouge2", "rougeL")


class Rouge:
    """F1 of ``rouge1``, ``rouge2`` and ``rougeL`` (Lin 2004): a :class:`~nxdt_core.protocols.evaluation.Metric`.

    The library's own words are of ASCII letters and digits. Here they are of any script's, see
    :class:`~nxdt_plugin_evaluate.rouge_words.RougeWords`: of ASCII texts its figures are those of the library.

    Raises:
        EvaluationLibraryMissing: rouge-score is not installed.
    """

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise EvaluationLibraryMissing(
                needed_by="ROUGE figures", library="rouge-score", package="rouge-score", reason=str(error)
            ) from error
        self._scorer = RougeScorer(_KINDS, tokenizer=RougeWords())

    def compute(self, wanted: Sequence[str], given: Sequence[str]) -> Mapping[str, float]:
        """Return the means over the answers."""
        rows = [self._scorer.score(*pair) for pair in zip(wanted, given, strict=True)]
        return {kind: sum(row[kind].fmeasure for row in rows) / len(rows) for kind in _KINDS}
