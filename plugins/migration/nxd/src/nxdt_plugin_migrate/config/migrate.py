"""Checks a document as ``nxdt config check`` does, and drops the keys that it reports as unknown or not supported."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nxdt_core.config import check, read_file
from nxdt_core.errors.configuration import ConfigProblem, UnknownKey
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.migration import MigratedConfig, Verdict
from nxdt_plugin_migrate.config.detect import FRAMEWORKS, refuse_others, require
from nxdt_plugin_migrate.config.document import TO_SET, Document, entries, plain, read_document, render
from nxdt_plugin_migrate.config.nemo import from_nemo, from_nnm
from nxdt_plugin_migrate.config.nxdt import from_nxdt
from nxdt_plugin_migrate.config.renamed_keys import NEUTRAL, has_key
from nxdt_plugin_migrate.errors import NoDecoder

_MODEL_CONFIG = "model.model_config"

_PATHS = (
    *(_MODEL_CONFIG, "data.train_dir", "data.val_dir", "data.test_dir", "data.data_prefix"),
    *(f"data.tokenizer.{name}" for name in ("type", "model", "vocab_file", "merge_file")),
    "checkpoint.resume_from",
)
"""Keys whose files must exist before a run starts."""


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
_READERS: Mapping[str, Callable[[Document, Kernel], None]] = {"nxdt": from_nxdt, "nemo": from_nemo, "nnm": from_nnm}
_SECTIONS = (
    *("trainer", "exp_manager", "exp_manager.monitoring", "exp_manager.ema"),
    *("exp_manager.early_stopping_callback_params", "distributed_strategy", "data", "data.tokenizer", "model"),
    *("model.optim", "model.optim.sched", "precision", "checkpoint", "checkpoint.sign", "checkpoint.storage"),
    *("objective", "adapter", "parallel_engine", "plugins"),
    *("model.moe", "model.data", "model.tokenizer", "model.data.tokenizer"),
)
"""Sections that can be migrated only if they are a mapping or empty."""


def drop_unsupported(document: Document, framework: str, kernel: Kernel, directory: Path) -> tuple[ConfigProblem, ...]:
    """Drop keys that cannot be kept, and return the remaining problems.

    Keys of an architecture are kept even if the model does not read them: without one, it would be another model.
    ``directory`` is the directory of the new file; its relative paths start there.
    """
    file = document.value(_MODEL_CONFIG)
    extra = [f"{_MODEL_CONFIG}={directory.absolute() / file}"] if isinstance(file, str) and file != TO_SET else []
    while True:
        problems = check(plain(document), extra, kernel=kernel)
        refused = [
            problem
            for problem in problems
            if isinstance(problem, UnknownKey)
            and document.has(problem.key)
            and (problem.key not in NEUTRAL or NEUTRAL[problem.key][1])  # else it is of an architecture
        ]
        if not refused:
            return problems
        for problem in refused:
            near = f"; the nearest is {problem.candidates[0]}" if problem.candidates else ""
            if framework == "nxdt":
                document.drop(problem.key, "ignored", f"{FRAMEWORKS[framework]} has no such key either{near}")
            else:
                verdict: Verdict = "unsupported" if document.asks(problem.key) else "off"
                document.drop(problem.key, verdict, f"nxdt has no such key{near}")


def migrate(
    source: Path, target: Path, framework: str, kernel: Kernel, overrides: Mapping[str, Any] | None = None
) -> MigratedConfig:
    """Read a file of NxD Training (``nxdt``), NeMo 1.x (``nemo``) or neuronx-nemo-megatron (``nnm``) for this schema.

    Args:
        source: The file.
        target: Where the caller will write the text; relative paths start there.
        framework: ``nxdt``, ``nemo`` or ``nnm``.
        kernel: Its plugins say what can be kept.
        overrides: Key path → value of the command line; keys of nxdt alone are not looked at.

    Raises:
        ConfigError: the file cannot be read, or is not valid YAML.
        MigrationRefused: it is of another framework.
        NoDecoder: it is of a model that nothing here can stand for.
    """
    written = read_file(source).written
    refuse_others(written, framework, source)
    values = dict(entries(written))
    for name, marks in () if framework == "nxdt" else _OTHERS:
        for mark in marks:
            # Sections of data and tokenizers are below ``model`` in most files.
            places = [(key,) if key.startswith("model.") else (f"model.{key}", key) for key in mark.split(" and ")]
            keys = [next((key for key in place if values.get(key) is not None), "") for place in places]
            if all(keys):
                models = sorted(component.record.name for component in kernel.registry.all("model"))
                raise NoDecoder(source=str(source), model=name, keys=keys, models=models)
    require(written, framework, source)
    written_keys = {path for path, value in values.items() if not isinstance(value, Mapping)}
    taken = {key: value for key, value in (overrides or {}).items() if key in written_keys or has_key(framework, key)}
    document = read_document(read_file(source, taken, _SECTIONS), overrides or ())
    for path in _SECTIONS:
        if path in document.settings:
            document.drop(path, "unneeded", "it is empty")
    _READERS[framework](document, kernel)
    refused = drop_unsupported(document, framework, kernel, target.parent)

    # What must be set before training: missing values, and paths that do not exist.
    to_set = {
        (path, "; ".join(setting.reasons) or "it has no value yet"): None
        for path, setting in document.settings.items()
        if setting.value == TO_SET
    }
    for path in [path for section in _PATHS for path in document.below(section)]:
        value = document.value(path)
        for text in value if isinstance(value, list) else [value]:
            # A tokenizer may also be named by the id of a hub.
            hub = path.endswith("tokenizer.type") and not str(text).startswith(("/", ".", "~", "$"))
            if not isinstance(text, str) or text == TO_SET or "://" in text or hub:
                continue
            file = target.parent / os.path.expanduser(text)  # raises nothing for an unknown user
            if not file.exists() and not any(file.parent.glob(f"{glob.escape(file.name)}*")):  # some are prefixes
                to_set[path, f"there is no {text} here"] = None

    lost = [row for row in document.report() if row.verdict == "unsupported"]
    lines = [f"  {row.key}: {row.value}  (line {row.line}: {row.reason})" for row in lost]
    head = f"From {source.name} of {FRAMEWORKS[framework]}, by nxdt config migrate."
    unset = {path for path, _ in to_set}
    return MigratedConfig(
        source=source,
        target=target,
        program=FRAMEWORKS[framework],
        text=render(document, (head,), ("Not carried over:", *lines) if lines else ()),
        keys=tuple(document.report()),
        to_set=tuple(to_set),
        remaining=tuple((row.key, f"{row.what()} {row.do()}".strip()) for row in refused if row.key not in unset),
    )
