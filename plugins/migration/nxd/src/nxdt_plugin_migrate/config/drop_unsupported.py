"""Checks a document as ``nxdt config check`` does, and drops the keys that it reports as unknown or not supported."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from nxdt_core.config.load import check
from nxdt_core.config.sources import expand_home
from nxdt_core.config.tree import parse_yaml, to_plain
from nxdt_core.errors.configuration import ConfigProblem, UnknownKey
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.migration import Verdict
from nxdt_plugin_migrate.config.detect import FRAMEWORKS
from nxdt_plugin_migrate.config.document import Document
from nxdt_plugin_migrate.config.renamed_keys import NEUTRAL
from nxdt_plugin_migrate.config.render import TO_SET, render

__all__ = ["drop_unsupported", "unset_paths"]

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
        problems = check(to_plain(tree), extra, kernel=kernel)
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
    """Whether a value names a file on this machine; a tokenizer may be named by the id of a hub, too."""
    return "://" not in text and (not key.endswith("tokenizer.type") or text.startswith(("/", ".", "~", "$")))


def _is_missing(text: str, directory: Path) -> bool:
    """Whether a path leads nowhere; a prefix of files counts as there where a file begins with it."""
    path = directory / expand_home(text)
    return not path.exists() and not any(path.parent.glob(f"{glob.escape(path.name)}*"))
