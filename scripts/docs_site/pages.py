"""Pages of the documentation that are written from the code while the site is built, so that they are never old.

A hook of mkdocs (``hooks:`` in ``mkdocs.yml``); each function that gives a page can be called on its own.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from markdown.extensions.toc import slugify

from nxdt_core.kernel import Kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs_site import api, errors, gallery, mutants, nxd_keys, reference

PAGES: dict[str, Callable[[], str]] = {}
"""Path below ``docs/`` → function that gives the page's Markdown."""


def page(path: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register the function that writes a page."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        PAGES[path] = function
        return function

    return register


GROUPS = {
    "Command line": "reference/cli/",
    "Error codes": "reference/errors/",
    "Configuration keys": "reference/config/",
    "Components": "reference/components/",
    "Plugins": "reference/plugins/",
    "Recipe gallery": "reference/recipes/",
    "Python API": "reference/api/",
}
"""Entry of the navigation → folder whose generated pages it lists."""


def on_config(config: Any) -> Any:
    """List the generated pages of a folder below their entry of the navigation; called by mkdocs."""
    if not any(path.startswith(tuple(GROUPS.values())) for path in PAGES):
        kernel = Kernel.start()
        pages = [
            *cli_pages(),
            *errors.errors_pages(),
            *reference.section_pages(),
            *reference.component_pages(kernel),
            *reference.plugin_pages(kernel),
            *gallery.gallery_pages(kernel),
            *api.api_pages(),
        ]
        for path, text in pages:
            PAGES[path] = lambda text=text: text
    _fill(config["nav"])
    return config


def _fill(entries: list[Any]) -> None:
    for entry in entries:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if isinstance(below, list):
                if title in GROUPS:
                    below += [path for path in PAGES if path.startswith(GROUPS[title]) and path not in below]
                _fill(below)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; called by mkdocs when it has listed ``docs/``."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    files.append(File.generated(config, "reference/recipes/llama-small.svg", content=gallery.loss_image("llama-small")))
    return files


WEIGHTS = {
    "how-to/": 4.0,
    "plugins.md": 4.0,
    "trainium.md": 8.0,
    "checkpoints.md": 6.0,
    "precision.md": 6.0,
    "migration.md": 4.0,
    "data.md": 3.0,
    "finetuning.md": 3.0,
    "kinds/": 2.0,
    "tutorials/": 2.0,
    "reference/plugins/": 2.0,
    "reference/components/": 0.5,
    "reference/api/": 0.3,
    "reference/api/nxdt_testing": 0.05,
}
"""Beginning of a page's path → factor on its place in the results of the site's search; the last that fits counts."""
HIDDEN = ("decisions", "defects.md", "reference/schema.md")
"""Beginnings of the pages for contributors, which the site's search leaves out."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Set what the search does with a page; called by mkdocs."""
    path = page.file.src_uri
    if path.startswith(HIDDEN):
        page.meta["search"] = {"exclude": True}
    for beginning, factor in WEIGHTS.items():
        if path.startswith(beginning):
            page.meta["search"] = {"boost": factor}
    if path == "decisions.md":
        return markdown + titles_of_decisions()
    return markdown


def titles_of_decisions() -> str:
    """Return Markdown that lists the entries of all pages of decisions, with links."""
    lines = ["", "## All entries", ""]
    for path in sorted((Path(__file__).parents[2] / "docs/decisions").glob("*.md")):
        subject, *titles = re.findall(r"^##? (.+)", path.read_text(), re.MULTILINE)
        name = subject.partition(": ")[2]
        lines += [f"### {name[0].upper()}{name[1:]}", ""]
        lines += [f"- [{title}](decisions/{path.name}#{slugify(title, '-')})" for title in titles] + [""]
    return "\n".join(lines)


@page("reference/schema.md")
def schema_page() -> str:
    """Return the page that lists the treatment of every key of NxD Training."""
    return nxd_keys.schema_page(Kernel.start())


@page("reference/hooks.md")
def hooks_page() -> str:
    """Every hook, from its specification."""
    from nxdt_core.kernel.hookspecs import HOOKS

    lines = [
        "# All hooks",
        "",
        "A plugin implements a hook by a function of the same name, marked with `@hookimpl` from `nxdt_core.api`. It",
        "takes the argument `context` or none. `nxdt plugins hooks` shows who implements what. Hooks with an argument",
        "are called when a configuration is loaded, the others once for each plugin when the kernel starts.",
        "",
        "## Hooks",
        "",
    ]
    for name, specification in HOOKS.items():
        lines += _hook(name, specification)
    lines += ["## Arguments of hooks", "", *_contexts()]
    return "\n".join(lines)


def cli_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the list of all commands, and of a page for each with the help texts below it."""
    from nxdt_core.cli.app import COMMANDS, root

    lines = ["# Command line", "", "These pages show what `--help` prints.", "", "| Command | Summary |", "|---|---|"]
    for name, entry in COMMANDS.items():
        command = entry.load()
        lines += (
            f"| [`{' '.join(path)}`](cli/{name}.md#{'-'.join(path)}) | {_sentence(each.get_short_help_str(200))} |"
            for path, each in _commands(("nxdt", name), command)
        )
        below = (line for path, each in _commands(("nxdt", name), command) for line in _help(path, each))
        yield f"reference/cli/{name}.md", "\n".join(below)
    yield "reference/cli.md", "\n".join([*lines, "", *_help(("nxdt", "--help"), root)])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


@page("reference/support.md")
def support_page() -> str:
    """Return the support matrix of models, engines and optimizers."""
    return reference.support_page(Kernel.start())


@page("reference/mutants.md")
def mutants_page() -> str:
    """Return the table of what the conformance kits catch."""
    return mutants.mutants_page()


def _hook(name: str, specification: Callable[..., Any]) -> Iterator[str]:
    signature, source = inspect.signature(specification), inspect.getsource(specification)
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    example = source.splitlines()[function.body[1].lineno - 1 :]  # behind the docstring
    shown = str(signature).replace("'", "")
    yield from (f"### `{name}`", "", f"`{name}{shown}`", "", _markup(inspect.getdoc(specification) or ""), "")
    yield from ("```python", "@hookimpl", f"def {name}({', '.join(signature.parameters)}):", *example, "```", "")


def _contexts() -> Iterator[str]:
    """A table of fields for each context class, from the class body: docstrings are below the fields."""
    from nxdt_core.kernel import hookspecs

    for name in (each for each in hookspecs.__all__ if each != "HOOKS"):
        source = textwrap.dedent(inspect.getsource(getattr(hookspecs, name)))
        yield from (f"### `{name}`", "", "```python", source.strip(), "```", "")


def _commands(path: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands((*path, name), child)


def _help(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(
        command,
        info_name=" ".join(path).removesuffix(" --help"),
        max_content_width=90,
        help_option_names=["-h", "--help"],
    )
    heading = "#" * min(len(path) - 1, 4)
    yield from (
        f"{heading} {' '.join(path)} {{ #{'-'.join(path)} }}",
        "",
        "```text",
        command.get_help(context),
        "```",
        "",
    )


def _markup(text: str) -> str:
    """Docstring markup as Markdown: a role shows the last name of what it refers to."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
