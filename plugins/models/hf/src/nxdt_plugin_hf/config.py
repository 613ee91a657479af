"""Section ``model`` of a model of transformers. Neither torch nor transformers here: ``nxdt config check`` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nxdt_core.config.section import PositiveInt, Section
from nxdt_core.models.huggingface import score_head_from_hf


class HFModelConfig(Section):
    """Model of transformers; ``model_config`` names its ``config.json``, or its directory."""

    hf_config: dict[str, Any]
    """Content of ``config.json``. A key given here wins over that of the file, as in
    ``model.hf_config.num_hidden_layers=4``."""
    num_layers: PositiveInt | None = None
    """``num_hidden_layers`` of ``hf_config``, in NxD Training's words; ``null``: as there."""
    hidden_size: PositiveInt | None = None
    """``hidden_size`` of ``hf_config``; ``null``: as there."""
    max_position_embeddings: PositiveInt | None = None
    """``max_position_embeddings`` of ``hf_config``; ``null``: as there."""

    vocab_size: PositiveInt | None = None
    """``vocab_size`` of ``hf_config``; ``null``: as there."""

    score_head: bool = False
    """One score per token in place of logits, for the objective ``reward``: transformers'
    ``AutoModelForSequenceClassification`` with one label."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section from a ``config.json``, each unchanged."""
        return {f"hf_config.{key}": value for key, value in hf.items()} | score_head_from_hf(hf, model="hf")

    @property
    def values(self) -> dict[str, Any]:
        """``hf_config`` with what the other keys change."""
        changed = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
        }
        return dict(self.hf_config) | {key: value for key, value in changed.items() if value is not None}

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for what shows without transformers."""
        if not isinstance(self.hf_config.get("model_type"), str):
            yield "hf_config.model_type", "is missing: name a config.json with model.model_config"
        heads, kv_heads = self.hf_config.get("num_attention_heads"), self.hf_config.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
            yield "hf_config.num_key_value_heads", f"must divide num_attention_heads ({heads}), and is {kv_heads}"
        if isinstance(heads, int) and "head_dim" not in self.hf_config:
            width = self.values.get("hidden_size")
            if isinstance(width, int) and heads > 0 and width % heads:
                yield "hf_config.hidden_size", f"must be a multiple of num_attention_heads ({heads}), and is {width}"
