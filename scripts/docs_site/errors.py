"""The page of error codes: an anchor for each code, with cause, example and fix, from the classes and their uses."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.cli.explain import Explanation, explanations

FAMILIES = {
    "A": "Alignment and preference data",
    "B": "Teachers of distillation",
    "R": "Rewards and their prompts",
    "C": "Configuration",
    "D": "Data and tokenizers",
    "E": "Evaluation",
    "K": "Kernel and plugins",
    "L": "LoRA",
    "M": "Models and Hugging Face files",
    "N": "Trainium through neuronx-distributed",
    "P": "Parallel layouts and ranks",
    "S": "Checkpoints and storage",
    "T": "Training",
}


def errors_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the list of all codes, and of a page for each family with a section per code."""
    found = explanations()
    yield "reference/errors.md", "\n".join(_index(list(found)))
    for letter, title in FAMILIES.items():
        lines = [f"# Errors {letter}: {title.lower()}", ""]
        lines += [
            f"This page explains each error whose code begins with `NXDT-{letter}`: cause, message and fix. A name in",
            "‹angle quotes› stands for a value of your run.",
            "",
        ]
        for code, each in found.items():
            if _letter(code) == letter:
                lines += _section(each)
        yield f"reference/errors/{letter}.md", "\n".join(lines)


def _index(codes: list[str]) -> Iterator[str]:
    yield from ("# Error codes", "")
    yield "Look up the code of an error message here. Each code has a section with its cause, its message and a fix."
    yield "`nxdt explain NXDT-C016` prints the same without a network. The exit status of an error that you can fix"
    yield "is 2, or 1 if a process died."
    for letter, title in FAMILIES.items():
        yield from ("", f"## {title}", "")
        links = [
            f"[{code.removeprefix('NXDT-')}](errors/{letter}.md#{code})" for code in codes if _letter(code) == letter
        ]
        yield " · ".join(links)


def _letter(code: str) -> str:
    return code.removeprefix("NXDT-")[0]


def _section(each: Explanation) -> Iterator[str]:
    yield from (f"## {each.code} {{ #{each.code} }}", "", _cell(each.cause), "")
    yield from (f"**Message:** {_cell(each.message)}", "")
    depends = " The second sentence of the message is more exact." if each.depends else ""
    yield from (f"**Fix:** {_cell(each.fix)}{depends}", "")
    for found, fix in each.examples:
        yield f"- **Example:** {_cell(found)}.{' **Fix:** ' + _cell(fix) if fix else ''}"
    yield ""


def _cell(text: str) -> str:
    """Return text for a table and a paragraph of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")
