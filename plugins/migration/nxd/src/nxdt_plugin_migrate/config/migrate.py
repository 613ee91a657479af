"""Checks a document as ``nxdt config check`` does, and drops the keys that it reports as unknown or not supported."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxdt_core.config.load import check
from nxdt_core.config.schema import RunConfig
from nxdt_core.config.section import section_paths
from nxdt_core.config.sources import COMMAND_LINE, expand_home, read_source
from nxdt_core.config.tree import Tree, parse_yaml
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
        refused = [each for each in problems if _can_go(each) and document.has(each.key)]
        if not refused:
            return problems
        for problem in refused:
            verdict, reason = _judgement(problem, framework)
            if verdict == "unsupported" and not document.asks(problem.key):
                verdict = "off"
            document.drop(problem.key, verdict, reason)


def _can_go(problem: ConfigProblem) -> bool:
    architecture = problem.key in NEUTRAL and not NEUTRAL[problem.key][1]
    return isinstance(problem, UnknownKey) and not architecture


def _judgement(problem: ConfigProblem, framework: str) -> tuple[Verdict, str]:
    assert isinstance(problem, UnknownKey)
    near = f"; the nearest is {problem.candidates[0]}" if problem.candidates else ""
    if framework == "nxdt":
        return "ignored", f"{FRAMEWORKS[framework]} has no such key either{near}"
    return "unsupported", f"nxdt has no such key{near}"


def unset_paths(document: Document, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for what must be set before training: missing values, and paths that do not exist.

    ``directory`` is the directory of the new file; its relative paths start there.
    """
    for path, setting in document.settings.items():
        if setting.value == TO_SET:
            yield path, "; ".join(setting.reasons) or "it has no value yet"
    for section in _PATHS:
        for path in document.below(section):
            value = document.value(path)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and text != TO_SET and _is_path(path, text) and _is_missing(text, directory):
                    yield path, f"there is no {text} here"


def _is_path(key: str, text: str) -> bool:
    """Return whether a value names a file on this machine; a tokenizer may also be named by the id of a hub."""
    return "://" not in text and (not key.endswith("tokenizer.type") or text.startswith(("/", ".", "~", "$")))


def _is_missing(text: str, directory: Path) -> bool:
    """Return whether a path does not exist; a prefix exists if some file begins with it."""
    path = directory / expand_home(text)
    return not path.exists() and not any(path.parent.glob(f"{glob.escape(path.name)}*"))


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


def require_decoder(tree: Tree, source: Path, kernel: Kernel) -> None:
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


def _found(tree: Tree, key: str) -> str:
    """Path of the key: sections of data and tokenizers are below ``model`` in most files."""
    places = (key,) if key.startswith("model.") else (f"model.{key}", key)
    return next((place for place in places if tree.get(place) is not None), "")


_READERS: Mapping[str, Callable[[Document, Kernel], None]] = {"nxdt": from_nxdt, "nemo": from_nemo, "nnm": from_nnm}


_SECTIONS = (*section_paths(RunConfig), "model.moe", "model.data", "model.tokenizer", "model.data.tokenizer")
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
    if framework != "nxdt":
        require_decoder(read.tree, source, kernel)
    require(read.tree, framework, source)
    for key, value in (overrides or {}).items():
        if (key in read.tree and not isinstance(read.tree.get(key), dict)) or has_key(framework, key):
            line = read.tree.origin(key).line if key in read.tree else 0
            read.tree.set(key, value, replace(COMMAND_LINE, line=line))
    if wrong := tuple(_no_sections(read.tree)):
        raise ConfigError(source=str(source), problems=wrong)
    document = read_document(read.tree, read_comments(source.read_text(encoding="utf-8-sig")), overrides or ())
    for path in _SECTIONS:
        if path in document.settings:
            document.drop(path, "unneeded", "it is empty")
    _READERS[framework](document, kernel)
    problems = drop_unsupported(document, framework, kernel, target.parent)
    to_set = tuple(dict.fromkeys(unset_paths(document, target.parent)))
    return MigratedConfig(
        source=source,
        target=target,
        program=FRAMEWORKS[framework],
        text=render(document, _head(source, framework), _tail(document)),
        keys=tuple(document.report()),
        to_set=to_set,
        remaining=tuple(_remaining(problems, {key for key, _ in to_set})),
    )


def _no_sections(tree: Tree) -> Iterator[ConfigProblem]:
    """Sections that are something else."""
    for path in _SECTIONS:
        if not isinstance(tree.get(path), (dict, type(None))):
            yield WrongValue(**tree.origin(path).at(path), found=tree.describe(path), allowed="a mapping")


def _remaining(problems: tuple[ConfigProblem, ...], known: set[str]) -> list[tuple[str, str]]:
    return [
        (problem.key, f"{problem.what()} {problem.do()}".strip()) for problem in problems if problem.key not in known
    ]


def _head(source: Path, framework: str) -> tuple[str, ...]:
    return (f"From {source.name} of {FRAMEWORKS[framework]}, by nxdt config migrate.",)


def _tail(document: Document) -> tuple[str, ...]:
    """Return comments that list what was lost, for the reader of the YAML."""
    lost = [row for row in document.report() if row.verdict == "unsupported"]
    lines = [f"  {row.key}: {row.value}  (line {row.line}: {row.reason})" for row in lost]
    return ("Not carried over:", *lines) if lines else ()
