"""Entry module of ``nxdt-plugin-text``: declares the component; the loader is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nxdt_core.api import Component, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ValidateConfigContext


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the loader of plain text and JSONL."""
    return [
        Component(
            name="text",
            target="nxdt_plugin_text.loader:TextData",
            config="nxdt_plugin_text.config:TextConfig",
            summary="plain text or JSONL files, tokenised and packed on the fly",
        )
    ]


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report texts that nothing turns into tokens."""
    if context.components["dataset"] == "text:text" and "tokenizer" not in context.components:
        message, remedy = "the data are texts, and no tokenizer is named", "Set data.tokenizer.library, such as byte."
        yield ConfigFinding(key="data.tokenizer", message=message, remedy=remedy)
