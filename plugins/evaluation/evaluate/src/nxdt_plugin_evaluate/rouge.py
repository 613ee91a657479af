"""Words for ROUGE, in any script; the library's own tokenizer knows ASCII letters and digits alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from nxdt_core.protocols.evaluation import Metric
from nxdt_plugin_evaluate.errors import EvaluationLibraryMissing

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"  # Han
)
"""Letters of scripts that put no spaces between words."""


_KINDS = ("rouge1", "rouge2", "rougeL")


class RougeWords:
    """A tokenizer as rouge-score takes one: runs of letters and digits in lower case. In scripts without spaces each
    letter is a word, as is usual for Chinese and Japanese. Signs that combine stay with their letter."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of ``text`` in their order."""
        words: list[str] = []
        grows = False
        for sign in unicodedata.normalize("NFC", text.lower()):
            kind = unicodedata.category(sign)[0]
            alone = _UNSPACED.match(sign) is not None
            if kind == "M" and words and (grows or alone):
                words[-1] += sign
                continue
            if kind in "LN" and grows and not alone:
                words[-1] += sign
            elif kind in "LN":
                words.append(sign)
            grows = kind in "LN" and not alone
        return words


class Rouge(Metric):
    """F1 of ``rouge1``, ``rouge2`` and ``rougeL`` (Lin 2004): a :class:`~nxdt_core.protocols.evaluation.Metric`.

    The library's own words are of ASCII letters and digits. Here they are of any script's, see
    :class:`~nxdt_plugin_evaluate.rouge.RougeWords`: of ASCII texts its figures are those of the library.

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
