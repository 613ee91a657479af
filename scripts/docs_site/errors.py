"""The page of error codes: an anchor for each code, with cause, example and fix, from the classes and their uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nxdt_core.cli.explain import Explanation, explanations

FAMILIES = {
    "A": ("Alignment and preference data", "records of pairs and labels, the losses of DPO, KTO and others"),
    "B": ("Teachers of distillation", "models that teach, their vocabularies and tokenizers"),
    "C": ("Configuration", "keys, values, files, overrides, and settings that exclude each other"),
    "D": (
        "Data and tokenizers",
        "data files, `nxdt data preprocess`, chat templates, tokens, the position in the data",
    ),
    "E": ("Evaluation", "`nxdt evaluate`, its records, metrics and tasks"),
    "H": ("Hugging Face hub", "names of models and data on the hub, tokens, downloads and uploads"),
    "K": ("Kernel and plugins", "plugins that are missing, broken, blocked or of another version"),
    "L": ("LoRA", "adapters, their targets and their files"),
    "M": ("Models and Hugging Face files", "architectures, weights that do not fit, exports and imports"),
    "N": ("Trainium through neuronx-distributed", "packages, layouts and settings of the engine `nxd`"),
    "P": ("Parallel layouts and ranks", "sizes that do not divide, launchers, ranks that die or hang"),
    "R": ("Rewards and their prompts", "reward functions and prompts of GRPO"),
    "S": ("Checkpoints and storage", "saves, loads, damage, signatures, S3, FSx and other stores"),
    "T": ("Training", "optimizers, schedules, steps that are not finite, callbacks, resumes"),
}
"""Letter of the codes → title of the family, and what its errors are about."""


def errors_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the list of all codes, and of a page for each family with a section per code."""
    found = explanations()
    yield "reference/errors.md", "\n".join(_index(found))
    for letter, (title, about) in FAMILIES.items():
        lines = [f"# Errors {letter}: {title}", ""]
        lines += [f"Errors about {about}. A name in ‹angle quotes› stands for a value of your run.", ""]
        for code, each in found.items():
            if _letter(code) == letter:
                lines += _section(each)
        yield f"reference/errors/{letter}.md", "\n".join(lines)


def _index(found: Mapping[str, Explanation]) -> Iterator[str]:
    yield from ("# Error codes", "", "```sh", "nxdt explain NXDT-C016", "```", "")
    yield "This prints the cause, the message and the fix of an error code. The pages below have the same. To find a"
    yield "code, type it into the search. The exit status of an error that you can fix is 2, or 1 if a process died."
    for letter, (title, about) in FAMILIES.items():
        codes = [each for code, each in found.items() if _letter(code) == letter]
        yield from ("", f"## {letter}: {title} {{ data-search-exclude }}", "", f"{about[0].upper()}{about[1:]}.", "")
        yield from (f'??? abstract "{len(codes)} codes"', "", "    | Code | Cause |", "    |---|---|")
        for each in codes:
            yield f"    | [{each.code.removeprefix('NXDT-')}](errors/{letter}.md#{each.code}) | {_cell(each.cause)} |"


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
