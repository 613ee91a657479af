"""What the files of a Hugging Face tokenizer say for chats: the template, and the tokens that it may name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxdt_core.data.tokenizers.huggingface_sources import Loaded, read_json, read_record, token_text

__all__ = ["FOR_TOOLS", "chat_template", "special_tokens"]

FOR_TOOLS = "additional_chat_templates/tool_use.jinja"
"""File of the template for conversations with tools, where ``chat_template.jinja`` is another one."""


def chat_template(loaded: Loaded) -> str | None:
    """Return the Jinja text, sought where transformers seeks it and in its order; None where there is none.

    Of several templates with names, ``tool_use`` renders conversations with tools and ``default`` all others.
    """
    named = {} if loaded.directory is None else _named_templates(loaded.directory)
    default, with_tools = named.get("default"), named.get("tool_use")
    if isinstance(default, str) and isinstance(with_tools, str):
        with_tools, default = with_tools.removesuffix("\n"), default.removesuffix("\n")  # as Jinja does at the end
        return f"{{% if tools is not none +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif %}}"
    return default if isinstance(default, str) else None


def _named_templates(directory: Path) -> Mapping[str, Any]:
    paths = {"default": directory / "chat_template.jinja", "tool_use": directory / FOR_TOOLS}
    if found := {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}:
        return found
    kept = read_json(directory / "chat_template.json").get("chat_template")
    kept = read_record(directory).get("chat_template") if kept is None else kept
    if isinstance(kept, list):  # an older form: several of them, each with a name
        return {str(entry.get("name")): entry.get("template") for entry in kept if isinstance(entry, dict)}
    return {"default": kept}


def special_tokens(loaded: Loaded, named: Mapping[str, str | None]) -> dict[str, str]:
    """Return the tokens by the name that a template calls them by, such as ``unk_token``; ``named`` ones replace the
    files'."""
    record = {} if loaded.directory is None else read_record(loaded.directory)
    found = {key: token_text(value) for key, value in record.items() if key.endswith("_token")}
    return {key: token for key, token in {**found, **named}.items() if token is not None}
