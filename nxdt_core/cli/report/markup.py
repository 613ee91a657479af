"""HTML and SVG from data. Every tag of a report is made here, so that text from files can only ever be text."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, final

from nxdt_core.visible_text import visible

__all__ = ["Content", "Markup", "document", "element", "policy"]


@final
@dataclass(frozen=True, slots=True)
class Markup:
    """Finished markup. It is not a ``str``, and only :func:`element` makes it: what is formatted is escaped again."""

    html: str


Content: TypeAlias = "Markup | str | int | Iterable[Content] | None"
"""Text is escaped, markup stays, None is nothing."""


def element(tag: str, *content: Content, **attributes: object) -> Markup:
    """Return an element, with all text escaped and control characters visible.

    Args:
        tag: its name.
        content: what is inside.
        attributes: by name, with ``_`` for ``-`` and ``class_`` for ``class``; None leaves one out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(visible(str(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{given}>" + ("" if tag == "meta" else f"{_inside(content)}</{tag}>"))


def document(title: str, *body: Content, style: str, refresh_s: int | None = None) -> str:
    """Return a whole page, whose policy lets a browser load nothing and run nothing.

    Args:
        title: of the window.
        body: what is shown.
        style: CSS without ``<``, ``>`` and ``&``, never from data.
        refresh_s: seconds after which a browser loads the page again; None for never.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(style)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        None if refresh_s is None else element("meta", http_equiv="refresh", content=refresh_s),
        element("title", title),
        element("style", style),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en').html}\n"


def policy(style: str) -> str:
    """Return the Content-Security-Policy of a page: its own style, no scripts, no requests, no forms."""
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _inside(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content.html
    if isinstance(content, str | int):
        return escape(visible(str(content)), quote=False)
    return "".join(map(_inside, content))
