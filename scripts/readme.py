"""Write the tables of ``README.md`` that follow from the plugins: ``python scripts/readme.py``.

Each is between ``<!-- NAME -->`` and ``<!-- end -->``. A test fails where the file is out of date.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from distributions import ROOT, folders, plugins

README = ROOT / "README.md"
SITE = "https://github.com/nxdt/nxdt/blob/main"
"""Prefix of links, so that they also work on the page of a package index."""

_FAMILIES = {
    "llama": "Llama 2, 3, 3.1",
    "mistral qwen2 qwen3": "Mistral, Qwen2, Qwen2.5, dense Qwen3",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "gpt": "GPT-2, GPT-NeoX, Pythia",
    "hf": "Gemma, Phi, OLMo, … from transformers",
}
_FEATURES = ("tp", "pp", "cp", "ep", "lora")


def filled(text: str) -> str:
    """Return the README with every table written again."""
    for name, rows in TABLES.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"README.md has no table {name!r}"
        text = "".join([before, found, *(f"{row}\n" for row in rows()), end, after])
    return text


def distributions() -> Iterator[str]:
    """Yield the table of distributions: name, with a link to its README, and description."""
    yield from ("| Distribution | What it adds |", "|---|---|")
    for folder in folders():
        project = _project(folder)
        page = f"{SITE}/{folder.removeprefix('./')}/README.md" if folder != "." else f"{SITE}/docs/architecture.md"
        yield f"| [`{project['name']}`]({page}) | {project['description']} |"


def models() -> Iterator[str]:
    """Yield the table of model families by the capabilities of their records."""
    yield "| `model.name` | Models | TP, SP | PP | CP | EP | LoRA | HF in, out |"
    yield "|---|---|---|---|---|---|---|---|"
    # Without the one that a program builds.
    records = {record.name: record for record in _model_records() if record.hf_architectures}
    named = {name for names in _FAMILIES for name in names.split()}
    assert records.keys() == named, "a model without a line in _FAMILIES"
    for names, family in _FAMILIES.items():
        name, *like = names.split()
        assert all(records[other].capabilities == records[name].capabilities for other in like)
        marks = ["✓" if feature in records[name].capabilities else "–" for feature in _FEATURES]
        exchange = "✓" if records[name].hf_architectures else "–"
        yield f"| `{'`, `'.join(names.split())}` | {family} | {' | '.join(marks)} | {exchange} |"


def _model_records() -> Iterator[Any]:
    for folder in plugins():
        for module in _project(folder)["entry-points"]["nxdt.plugins"].values():
            sys.path.insert(0, str(ROOT / folder / "src"))
            yield from getattr(importlib.import_module(module), "nxdt_models", list)()
            del sys.path[0]


def _project(folder: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return project


TABLES: dict[str, Callable[[], Iterator[str]]] = {"distributions": distributions, "models": models}

if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
