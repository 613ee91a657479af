"""Which files of NeMo are of models that no decoder stands for, by keys that files of decoders lack."""

from __future__ import annotations

from pathlib import Path

from nxdt_core.config.tree import Node
from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.errors import NoDecoder

__all__ = ["require_decoder"]

_T5_TUNING = ("src_file_name", "max_src_seq_length", "task_name")

_OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("RETRO", ("model.retro", "model.enc_num_layers", "model.enc_cross_attention", "data.knn_index")),
    ("Hyena", ("model.hyena",)),
    ("Mamba", ("model.hybrid_override_pattern", "model.ngroups_mamba")),
    ("Griffin", ("model.logits_soft_cap and data.masked_lm_prob",)),
    ("T5, BART or UL2", ("data.dataset_type", "tokenizer.num_sentinel_tokens", "model.encoder_arch")),
    ("T5", (*(f"data.train_ds.{key}" for key in _T5_TUNING), "data.decoder_starts_with_pad")),
    ("NeMo's older transformers (TransformerLM, BERT)", ("model.language_model", "model.encoder.library")),
    ("an encoder with a decoder", ("model.encoder", "model.decoder", "data.seq_length_dec")),
    ("BERT", ("model.bert_binary_head", "data.masked_lm_prob")),
)
"""Model → keys, any one of which shows it; ``and`` joins such as must be there together. The order matters: files of
RETRO, Mamba and Griffin have keys of BERT, too."""


def require_decoder(tree: Node, source: Path, kernel: Kernel) -> None:
    """See that the model of a file of NeMo or neuronx-nemo-megatron can be meant by a decoder.

    Raises:
        NoDecoder: it is another kind of model, which would be trained as what it is not.
    """
    for name, marks in _OTHERS:
        for mark in marks:
            keys = [_found(tree, key) for key in mark.split(" and ")]
            if all(keys):
                models = sorted(found.record.name for found in kernel.registry.all("model"))
                raise NoDecoder(source=str(source), model=name, keys=keys, models=models)


def _found(tree: Node, key: str) -> str:
    """Path of the key: sections of data and tokenizers are below ``model`` in most files."""
    places = (key,) if key.startswith("model.") else (f"model.{key}", key)
    return next((place for place in places if tree.plain(place) is not None), "")
