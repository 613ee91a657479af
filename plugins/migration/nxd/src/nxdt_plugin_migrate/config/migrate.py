"""From a file of NxD Training, NeMo or neuronx-nemo-megatron to one of this schema, with a report of every key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nxdt_core.config.schema import RunConfig
from nxdt_core.config.section import section_paths
from nxdt_core.config.sources import read_source
from nxdt_core.config.tree import Node, describe_value, to_plain
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, WrongValue
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.migration import MigratedConfig
from nxdt_plugin_migrate.config.architectures import require_decoder
from nxdt_plugin_migrate.config.comments import read_comments
from nxdt_plugin_migrate.config.detect import FRAMEWORKS, refuse_others, require
from nxdt_plugin_migrate.config.document import Document, read_document
from nxdt_plugin_migrate.config.drop_unsupported import drop_unsupported, unset_paths
from nxdt_plugin_migrate.config.nemo import from_nemo, from_nnm
from nxdt_plugin_migrate.config.nxdt import from_nxdt
from nxdt_plugin_migrate.config.render import render

__all__ = ["migrate"]

_READERS: Mapping[str, Callable[[Document, Kernel], None]] = {"nxdt": from_nxdt, "nemo": from_nemo, "nnm": from_nnm}


_SECTIONS = (*section_paths(RunConfig), "model.moe", "model.data", "model.tokenizer", "model.data.tokenizer")
"""Where only a mapping, or nothing, can be migrated."""


def migrate(source: Path, target: Path, framework: str, kernel: Kernel) -> MigratedConfig:
    """Read a file of NxD Training (``nxdt``), NeMo 1.x (``nemo``) or neuronx-nemo-megatron (``nnm``) for this schema.

    Args:
        source: The file.
        target: Where the caller will write the text.
        framework: One of the three.
        kernel: Its plugins say what can be kept.

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
    if wrong := tuple(_no_sections(read.tree)):
        raise ConfigError(source=str(source), problems=wrong)
    document = read_document(read.tree, read_comments(source.read_text(encoding="utf-8-sig")))
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


def _no_sections(tree: Node) -> Iterator[ConfigProblem]:
    """Sections that are something else."""
    for path in _SECTIONS:
        node = tree.find(path)
        if node is not None and not isinstance(node.value, (dict, type(None))):
            yield WrongValue(**node.origin.at(path), found=describe_value(to_plain(node)), allowed="a mapping")


def _remaining(problems: tuple[ConfigProblem, ...], known: set[str]) -> list[tuple[str, str]]:
    return [
        (problem.key, f"{problem.what()} {problem.do()}".strip()) for problem in problems if problem.key not in known
    ]


def _head(source: Path, framework: str) -> tuple[str, ...]:
    return (f"From {source.name} of {FRAMEWORKS[framework]}, by nxdt config migrate.",)


def _tail(document: Document) -> tuple[str, ...]:
    """What was lost, where the reader of the YAML sees it."""
    lost = [row for row in document.report() if row.verdict == "unsupported"]
    lines = [f"  {row.key}: {row.value}  (line {row.line}: {row.reason})" for row in lost]
    return ("Not carried over:", *lines) if lines else ()
