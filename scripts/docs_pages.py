"""Pages of the documentation that are written from the code while the site is built, so that they are never old.

A hook of mkdocs (``hooks:`` in ``mkdocs.yml``); each function that gives a page can be called on its own.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import click

from nxdt_core.errors import NxdtError

PAGES: dict[str, Callable[[], str]] = {}
"""Path below ``docs/`` → function that gives the page's Markdown."""


def page(path: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register the function that writes a page."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        PAGES[path] = function
        return function

    return register


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs when it has listed ``docs/``: add the generated pages."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files


@page("reference/yaml.md")
def yaml_page() -> str:
    """Every key of the core and of the plugins of this repository, from the dataclasses that read it."""
    from nxdt_core.config import reference_markdown
    from nxdt_core.kernel import Kernel

    return reference_markdown(Kernel.start())


@page("reference/schema.md")
def schema_page() -> str:
    """Return the page that lists the treatment of every key of NxD Training."""
    from nxdt_plugin_migrate.config.table import schema_page

    from nxdt_core.kernel import Kernel

    return schema_page(Kernel.start())


@page("reference/hooks.md")
def hooks_page() -> str:
    """Every hook, from its specification."""
    from nxdt_core.kernel.hookspecs import PHASES

    lines = [
        "# All hooks",
        "",
        "A plugin implements a hook by a function of the same name, marked with `@hookimpl` from `nxdt_core.api`. It",
        "takes the argument `context` or none. `nxdt plugins hooks` shows who implements what.",
        "",
    ]
    for phase in PHASES:
        lines += [f"## {phase.__name__.rpartition('.')[2].capitalize()}", "", _phase_text(phase), ""]
        for name in (name for name in vars(phase) if name in phase.__all__):
            lines += _hook(name, getattr(phase, name))
    lines += ["## Arguments of hooks", "", *_contexts()]
    return "\n".join(lines)


@page("reference/cli.md")
def cli_page() -> str:
    """Every command's help text."""
    from nxdt_core.cli.app import COMMANDS, root

    lines = ["# Command line", "", *_help(("nxdt",), root)]
    for name, entry in COMMANDS.items():
        lines += _commands(("nxdt", name), entry.load())
    return "\n".join(lines)


@page("reference/errors.md")
def errors_page() -> str:
    """Every error code, what it stands for, and the sentence that says what to do."""
    lines = [
        "# Error codes",
        "",
        "An error that you can fix is reported in two sentences with a code, without a traceback.",
        "The exit status is 2.",
        "Words in braces are filled in with what was found; where this column is empty, the message itself says it.",
        "",
        "| code | meaning | what to do |",
        "|---|---|---|",
    ]
    for code, kind in sorted((kind.code, kind) for kind in error_kinds()):
        remedy = "" if re.fullmatch(r"{\w+}", kind.remedy) else kind.remedy
        remedy = remedy.replace("|", "\\|").replace("{{", "{").replace("}}", "}")
        lines.append(f"| `{code}` | {_markup((inspect.getdoc(kind) or '').partition(chr(10))[0])} | {remedy} |")
    return "\n".join(lines)


def error_kinds() -> list[type[NxdtError]]:
    """Every error with a sentence, of the core and of the plugins that are installed."""
    from nxdt_core import errors
    from nxdt_core.kernel import Kernel

    families = [f"{errors.__name__}.{module.name}" for module in pkgutil.iter_modules(errors.__path__)]
    families += [f"{plugin.module}.errors" for plugin in Kernel.start().plugins if plugin.module]
    modules = [import_module(name) for name in families if find_spec(name) is not None]
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return [kind for kind in found if issubclass(kind, NxdtError) and hasattr(kind, "happened")]


def _phase_text(phase: ModuleType) -> str:
    """The docstring of a phase without its first word, which is the heading."""
    text = (inspect.getdoc(phase) or "").partition(": ")[2]
    return _markup(text[:1].upper() + text[1:])


def _hook(name: str, specification: Callable[..., Any]) -> Iterator[str]:
    text, _, example = (inspect.getdoc(specification) or "").partition("\nExample::\n")
    signature = str(inspect.signature(specification)).replace("'", "")
    yield from (f"### `{name}`", "", f"`{name}{signature}`", "", _markup(text.strip()), "")
    yield from ("```python", textwrap.dedent(example).strip("\n"), "```", "")


def _contexts() -> Iterator[str]:
    """A table of fields for each context class, from the class body: docstrings are below the fields."""
    from nxdt_core.kernel import contexts

    for name in contexts.__all__:
        source = textwrap.dedent(inspect.getsource(getattr(contexts, name)))
        yield from (f"### `{name}`", "", "```python", source.strip(), "```", "")


def _commands(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    yield from _help(path, command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands((*path, name), child)


def _help(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path), max_content_width=90, help_option_names=["-h", "--help"])
    heading = "#" * min(len(path) + 1, 4)
    yield from (f"{heading} {' '.join(path)}", "", "```text", command.get_help(context), "```", "")


def _markup(text: str) -> str:
    """Docstring markup as Markdown: a role shows the last name of what it refers to."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
