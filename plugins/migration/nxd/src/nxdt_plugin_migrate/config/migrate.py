"""Checks a document as ``nxdt config check`` does, and drops the keys that it reports as unknown or not supported."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxdt_core.config.load import check
from nxdt_core.config.schema import RunConfig
from nxdt_core.config.section import sections_of
from nxdt_core.config.sources import COMMAND_LINE, read_source
from nxdt_core.config.tree import parse_yaml
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, UnknownKey, WrongValue
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.migration import MigratedConfig, Verdict
from nxdt_plugin_migrate.config.detect import FRAMEWORKS, refuse_others, require
from nxdt_plugin_migrate.config.document import Document, read_comments, read_document
from nxdt_plugin_migrate.config.nemo import from_nemo, from_nnm
from nxdt_plugin_migrate.config.nxdt import from_nxdt
from nxdt_plugin_migrate.config.renamed_keys import NEUTRAL, has_key
from nxdt_plugin_migrate.config.render import TO_SET, render
from nxdt_plugin_migrate.errors import NoDecoder

_MODEL_CONFIG = "model.model_config"

_PATHS = (
    _MODEL_CONFIG,
    "data.train_dir",
    "data.val_dir",
    "data.test_dir",
    "data.data_prefix",
    "data.tokenizer.type",
    "data.tokenizer.model",
    "data.tokenizer.vocab_file",
    "data.tokenizer.merge_file",
    "checkpoint.resume_from",
)
"""Keys whose files must exist before a run starts."""


def drop_unsupported(document: Document, framework: str, kernel: Kernel, directory: Path) -> tuple[ConfigProblem, ...]:
    """Drop keys that cannot be kept, and return the remaining problems.

    Keys of an architecture are kept even if the model does not read them: without one, it would be another model.
    ``directory`` is the directory of the new file; its relative paths start there.
    """
    given = document.value(_MODEL_CONFIG)
    extra = [f"{_MODEL_CONFIG}={directory.absolute() / given}"] if isinstance(given, str) and given != TO_SET else []
    while True:
        tree, _ = parse_yaml(render(document, (), ()), "")
        problems = check(tree.data, extra, kernel=kernel)
        refused = [
            each
            for each in problems
            if isinstance(each, UnknownKey)
            and document.has(each.key)
            and (each.key not in NEUTRAL or NEUTRAL[each.key][1])  # else it is of an architecture
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
    *filter(None, sections_of(RunConfig)),
    "model.moe",
    "model.data",
    "model.tokenizer",
    "model.data.tokenizer",
)
"""Sections that can be migrated only if they are a mapping or empty."""


def migrate(
    source: Path, target: Path, framework: str, kernel: Kernel, overrides: Mapping[str, Any] | None = None
) -> MigratedConfig:
    """Read a file of NxD Training (``nxdt``), NeMo 1.x (``nemo``) or neuronx-nemo-megatron (``nnm``) for this schema.

    Args:
        source: The file.
        target: Where the caller will write the text.
        framework: One of the three.
        kernel: Its plugins say what can be kept.
        overrides: Key path → value of the command line; keys of nxdt alone are not looked at.

    Raises:
        ConfigError: the file cannot be read, or is not valid YAML.
        MigrationRefused: it is of another framework.
        NoDecoder: it is of a model that nothing here can stand for.
    """
    read = read_source(source, lambda: kernel)
    if read.problems:
        raise ConfigError(source=str(source), problems=read.problems)
    refuse_others(read.tree, framework, source)
    for name, marks in () if framework == "nxdt" else _OTHERS:
        for mark in marks:
            # Sections of data and tokenizers are below ``model`` in most files.
            places = [(key,) if key.startswith("model.") else (f"model.{key}", key) for key in mark.split(" and ")]
            keys = [next((each for each in place if read.tree.get(each) is not None), "") for place in places]
            if all(keys):
                models = sorted(component.record.name for component in kernel.registry.all("model"))
                raise NoDecoder(source=str(source), model=name, keys=keys, models=models)
    require(read.tree, framework, source)
    for key, value in (overrides or {}).items():
        if (key in read.tree and not isinstance(read.tree.get(key), dict)) or has_key(framework, key):
            line = read.tree.origin(key).line if key in read.tree else 0
            read.tree.set(key, value, replace(COMMAND_LINE, line=line))
    wrong = [path for path in _SECTIONS if not isinstance(read.tree.get(path), (dict, type(None)))]
    if wrong:
        problems = [
            WrongValue(**read.tree.origin(path).at(path), found=read.tree.describe(path), allowed="a mapping")
            for path in wrong
        ]
        raise ConfigError(source=str(source), problems=tuple(problems))
    document = read_document(read.tree, read_comments(source.read_text(encoding="utf-8-sig")), overrides or ())
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
    known = {path for path, _ in to_set}
    return MigratedConfig(
        source=source,
        target=target,
        program=FRAMEWORKS[framework],
        text=render(document, (head,), ("Not carried over:", *lines) if lines else ()),
        keys=tuple(document.report()),
        to_set=tuple(to_set),
        remaining=tuple((each.key, f"{each.what()} {each.do()}".strip()) for each in refused if each.key not in known),
    )
