"""Messages → text by a chat template, in the sandbox of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxdt_core.errors import ChatTemplateMissing, ChatTemplateRefuses
from nxdt_core.protocols.tokenizer import ChatTokenizer, Tokenizer

__all__ = ["Messages", "render"]

Messages = Sequence[Mapping[str, Any]]


def render(
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    place: str,
    template: str | None = None,
    prompts: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of ``messages``.

    Args:
        messages: of one conversation, each with ``role`` and ``content``.
        tokenizer: whose special tokens the template may write.
        place: of the conversation, for errors.
        template: None takes the tokenizer's own.
        prompts: write the beginning of the assistant's next turn behind them.
        tools: JSON schemas of the functions that the assistant may call.

    Raises:
        ChatTemplateMissing: there is no template.
        ChatTemplateRefuses: it raises, or is none.
    """
    chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
    source = template or (chat.chat_template() if chat else None)
    if chat is None or source is None:
        raise ChatTemplateMissing(place=place)
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            [list(messages)],
            tools=None if tools is None else list(tools),
            chat_template=source,
            add_generation_prompt=prompts,
            **chat.special_tokens(),
        )
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ChatTemplateRefuses(place=place, reason=reason) from error
    return str(texts[0])
