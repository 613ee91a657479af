"""What the files of a Hugging Face tokenizer say for chats: the template, and the tokens that it may name."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.builtins.tokenizers.huggingface_sources import Loaded, read_json, read_record, token_text

__all__ = ["chat_template", "special_tokens"]

_DEFAULT = "default"
"""Name of the template that transformers takes where there are several and none is asked for."""


def chat_template(loaded: Loaded) -> str | None:
    """Return the Jinja text, sought where transformers seeks it and in its order; None where there is none."""
    if loaded.directory is None:
        return None
    own = loaded.directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = read_json(loaded.directory / "chat_template.json").get("chat_template")
    found = read_record(loaded.directory).get("chat_template") if found is None else found
    if isinstance(found, list):  # an older form: several of them, each with a name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get(_DEFAULT)
    return found if isinstance(found, str) else None


def special_tokens(loaded: Loaded, named: Mapping[str, str | None]) -> dict[str, str]:
    """Return the tokens by the name that a template calls them by, such as ``unk_token``; ``named`` ones replace the
    files'."""
    record = {} if loaded.directory is None else read_record(loaded.directory)
    found = {key: token_text(value) for key, value in record.items() if key.endswith("_token")}
    return {key: token for key, token in {**found, **named}.items() if token is not None}
