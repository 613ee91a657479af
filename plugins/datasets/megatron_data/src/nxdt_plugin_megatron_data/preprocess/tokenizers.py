"""A tokenizer that processes pass to one another: each makes its own of it.

Apart from :mod:`.tokenizers`, which reads options: its imports take longer than all others of a worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.config.read import read_part
from nxdt_core.config.sources import COMMAND_LINE, expand_home, read_overrides
from nxdt_core.config.tree import Tree
from nxdt_core.data.tokenizers.files import holds_ranks
from nxdt_core.errors.configuration import ConfigError, ConfigProblem
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTokenizer:
    """A component of kind ``tokenizer`` and its configuration."""

    label: str
    """Name under which the user chose it."""
    component: str
    config: Any

    def build(self) -> Tokenizer:
        """Make it."""
        component = Kernel.start().registry.get("tokenizer", self.component)
        return component.load_class(Tokenizer)(self.config)


_SECTION = "data.tokenizer"
_LLAMA_3_RANKS = 128_000


def find_tokenizer(name: str, options: Sequence[str] = ()) -> NamedTokenizer:
    """Return the tokenizer of a name.

    Args:
        name: a component, such as ``byte`` (``./byte`` is a path); a path: a ``tokenizer.json``, a directory, a
            ``.model`` of SentencePiece or of Llama 3; or a name on the Hugging Face hub.
        options: ``KEY=VALUE`` of the section ``data.tokenizer``; ``library`` among them chooses the component.

    Raises:
        ConfigError: an option is wrong.
        UnknownComponent: there is no such library.
    """
    trees, problems = read_overrides(options)
    section = Tree({}, {(): COMMAND_LINE})
    for tree in trees:
        section.merge(tree)
    kernel = Kernel.start()
    library = section.get("library")
    path = expand_home(name)
    known = {alias for each in kernel.registry.all("tokenizer") for alias in (each.record.name, *each.record.aliases)}
    if library is None and name in known:
        library, named = name, {}
    else:
        library = library or _library_of(path)
        if library == "huggingface" and not path.exists():
            named = {"type": name}
        else:
            named = {"vocab_file" if library == "megatron" else "model": str(path.absolute())}
        named = {} if "vocab_file" in section else named
    for key, value in named.items():
        if key not in section:
            section.set(key, value, COMMAND_LINE)
    component = kernel.registry.get("tokenizer", str(library))
    section.remove("library")
    config = _read(component.load_config(), section, problems)
    return NamedTokenizer(label=name, component=component.qualified_name, config=config)


def _library_of(path: Path) -> str:
    """The library that reads the tokenizer at ``path``, or on the hub.

    Only Llama 3's rank file is known to match the library's default pattern for splitting text into words.
    """
    if path.suffix != ".model" or not path.is_file():
        return "huggingface"
    content = path.read_bytes()
    return "tiktoken" if holds_ranks(content) and content.count(b"\n") == _LLAMA_3_RANKS else "sentencepiece"


def _read(cls: type | None, section: Tree, problems: Sequence[ConfigProblem]) -> Any:
    if problems:
        raise ConfigError(source="--tokenizer-option", problems=tuple(problems))
    if cls is None:
        return None
    config, wrong = read_part(cls, section, _SECTION)
    if wrong:
        raise ConfigError(source="--tokenizer", problems=tuple(wrong))
    return config
