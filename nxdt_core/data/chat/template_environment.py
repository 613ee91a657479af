"""The Jinja environment of chat templates: that of transformers, in which no operation makes a text without limit.

Python cannot interrupt a single operation, and ``'a' * 10**10`` is one. Operations that can make much of little are
therefore estimated before they run: operators, blocks, methods of texts, and filters. What they and slices return is
counted, so that a template cannot collect copies either. Each call and each turn of a loop looks at the clock.
Jinja is imported here, so this module is imported when the first template runs.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template

_ITEM = 8
"""Bytes of a list's item, where a character counts as one."""
_PIECE = 60
"""Bytes of a short text that is split off."""
_NUMBER = re.compile(r"\d+")

_LONGEST_NUMBER = 100_000
"""Decimal digits of an integer; powers and products of longer ones take seconds."""
_DROPPED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters of Jinja that can make much of little; no chat template has a use for them."""
_TIMED = "nxdt_timed"
"""Attribute of nodes that a loop goes through."""


def digits_of(value: int) -> int:
    """Return the number of decimal digits, or one more."""
    return value.bit_length() * 3 // 10 + 1


def length_of(value: Any) -> int:
    """Return the bytes of one more copy of a text or list, roughly."""
    return len(value) if isinstance(value, (str, bytes)) else _ITEM * len(value) if hasattr(value, "__len__") else 0


def size_of(value: Any, sizes: dict[int, int] | None = None) -> int:
    """Return the characters of ``str(value)``, roughly. A part that it contains twice counts twice."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # its text has them
    if not isinstance(value, Collection):
        return digits_of(value) if isinstance(value, int) else 1
    sizes = {} if sizes is None else sizes
    if id(value) not in sizes:
        parts = [part for pair in value.items() for part in pair] if isinstance(value, Mapping) else value
        sizes[id(value)] = 2 * len(parts) + sum(size_of(part, sizes) for part in parts)
    return sizes[id(value)]


def numbers_in(text: str) -> int:
    """Return the sum of the widths and precisions in a format, and its length."""
    return len(text) + sum(int(number[:18]) for number in _NUMBER.findall(text))


def printed(text: str | bytes, values: Any) -> int:
    """Return the characters of ``text % values`` at most: values may be widths, and those of a mapping be repeated."""
    form = text.decode("latin-1") if isinstance(text, bytes) else text
    items = list(values.values()) if isinstance(values, Mapping) else values if isinstance(values, tuple) else [values]
    widths = sum(abs(item) for item in items if isinstance(item, int)) if "*" in form else 0
    largest = max((size_of(item) for item in items), default=0)
    return numbers_in(form) + widths + form.count("%") * largest


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    times = len(text) + 1 if isinstance(text, bytes) else str(text).count(str(old))
    return len(text) + times * size_of(new)


def _padded(text: Any, width: Any = 80, *rest: Any, **more: Any) -> int:
    return abs(width) if isinstance(width, int) else 0


def _strung(separator: Any, values: Any = ()) -> int:
    return size_of(values) + len(separator) * (len(values) if hasattr(values, "__len__") else 0)


def _split(text: Any, sep: Any = None, *rest: Any, **more: Any) -> int:
    if not isinstance(text, str):
        return _PIECE * len(text)
    separators = [sep] if isinstance(sep, str) and sep else [*" \t\n"]
    count = sum(text.count(separator) for separator in separators)
    return _PIECE * (count + 1)


def _translated(text: Any, table: Any = ()) -> int:
    return len(text) * max((size_of(new) for new in table.values()), default=1) if isinstance(table, Mapping) else 0


METHODS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * abs(tabsize) if isinstance(text, str) else abs(tabsize),
    "join": _strung,
    "replace": _replaced,
    "translate": _translated,
}
"""Method of a text, of bytes or of an integer → estimate of its result, from the same arguments."""


def _indented(text: Any, width: Any = 4, *rest: Any, **more: Any) -> int:
    step = width if isinstance(width, int) else len(width)
    return size_of(text) + step * (str(text).count("\n") + 1)


FILTERS: Mapping[str, Callable[..., int]] = {
    "batch": lambda value, linecount, fill_with=None: _ITEM * linecount,
    "center": _padded,
    "format": lambda text, *args, **kwargs: printed(str(text), kwargs or args),
    "indent": _indented,
    "join": lambda value, d="", attribute=None: _strung(d, value),
    "list": length_of,
    "replace": _replaced,
    "slice": lambda value, slices, fill_with=None: _ITEM * slices,
    "string": size_of,
    "sum": lambda iterable, attribute=None, start=0: 0 if isinstance(start, (int, float)) else size_of(iterable),
    "tojson": lambda value, *args, indent=None, **kwargs: size_of(value) * (1 + _padded("", indent)),
}
"""Filter → estimate of its result, from the same arguments."""


class _Budget(threading.local):
    """Characters that the rendering of this thread may still make, and when it has to end."""

    single = total = 0
    seconds = ends_at = math.inf


class TooLarge(Exception):
    """A template asked for more, or took longer, than it may."""


class _WatchedCode(CodeGenerator):
    """Lets slices and loops, which no environment can intercept, go through :class:`BoundedEnvironment`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        setattr(node.iter, _TIMED, True)
        super().visit_For(node, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not getattr(node, _TIMED, False):
            return super().visit(node, *args, **kwargs)
        self.write("environment.timed(")  # without the checks of a call that the template has written
        super().visit(node, *args, **kwargs)
        return self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.counted(")
        super().visit_Getitem(node, frame)
        return self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does, with the same filters, globals and ``generation`` blocks.

    Args:
        single: characters that one operation may make; a rendering may make ten times as many.
    """

    code_generator_class = _WatchedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, single: int) -> None:
        theirs = _compile_jinja_template("").environment
        extensions = [type(extension) for extension in theirs.extensions.values()]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._checked)
        self._single = single
        self._budget = _Budget()
        self.globals = {name: value for name, value in theirs.globals.items() if name != "lipsum"}
        self.filters = {name: value for name, value in theirs.filters.items() if name not in _DROPPED_FILTERS}
        for name, function in self.filters.items():
            self.filters[name] = self._bounded(function, FILTERS.get(name))

    def begin(self, seconds: float = math.inf) -> None:
        """Grant this thread what one compilation or rendering may make, and the time that it may take."""
        self._budget.single, self._budget.total = self._single, 10 * self._single
        self._budget.seconds, self._budget.ends_at = seconds, time.monotonic() + seconds

    def render(
        self, template: Template, variables: Mapping[str, Any], *, marks: bool, seconds: float
    ) -> tuple[str, list[Any]]:
        """Return the text, made within ``seconds``, and the spans of the generation blocks where ``marks`` is set."""
        self.begin(seconds)
        pieces: list[str] = []
        spans: list[Any] = []
        if not marks:
            return self.concat(template.root_render_func(template.new_context(dict(variables)))), spans
        with self.activate_tracker(pieces, spans):  # type: ignore[attr-defined]
            pieces.extend(self._counted(template.root_render_func(template.new_context(dict(variables)))))
            return self.concat(pieces), spans

    def spend(self, size: int) -> None:
        """Take ``size`` characters from the budget.

        Raises:
            TooLarge: it has fewer.
        """
        budget = self._budget
        budget.total -= size
        if size > budget.single or budget.total < 0:
            raise TooLarge(f"one of its operations, or all of them, write more than {budget.single:,} characters")

    def timed(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop while there is time."""
        for value in values:
            self._look_at_clock()
            yield value

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._budget.ends_at:
            raise TooLarge(f"it has not ended after {self._budget.seconds:g} seconds")

    def concat(self, pieces: Iterable[str]) -> str:
        """Return the texts of a block, or of the whole template, as one."""
        return "".join(list(self._counted(pieces)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless its result is too large."""
        if operator == "%" and isinstance(left, (str, bytes)):
            self.spend(printed(left, right))
        elif isinstance(left, int) and isinstance(right, int):
            digits = digits_of(left) * abs(right) if operator == "**" else digits_of(left) + digits_of(right)
            if digits > _LONGEST_NUMBER:
                raise TooLarge(f"it calculates a number of more than {_LONGEST_NUMBER:,} digits")
        elif operator == "*":
            value, times = (right, left) if isinstance(left, int) else (left, right)
            self.spend(length_of(value) * max(times, 0) if isinstance(times, int) else 0)
        elif operator == "+":
            self.spend(length_of(left) + length_of(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, unless its result is too large. (Macros and recursive loops are called, too.)"""
        self._look_at_clock()
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(owner, (str, bytes, int)) and name in METHODS:
            args = tuple(list(argument) if isinstance(argument, Iterator) else argument for argument in args)
            self.spend(METHODS[name](owner, *args, **kwargs))
        return self.counted(super().call(context, called, *args, **kwargs))

    def counted(self, value: Any) -> Any:
        """Return ``value`` after taking its size from the budget."""
        self.spend(length_of(value))
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` with limited widths, where ``value`` is that."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, formatter = str(value.__self__), _BoundedFormatter(self)
        if value.__name__ == "format_map":
            return lambda values: formatter.vformat(text, (), values)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)

    def _bounded(self, function: Callable[..., Any], estimate: Callable[..., int] | None) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(argument) if isinstance(argument, Iterator) else argument for argument in args)
            if estimate is not None:
                self.spend(estimate(*args[skipped:], **kwargs))
            return self.counted(function(*args, **kwargs))

        return bounded

    def joined(self, function: Callable[[Iterable[Any]], str]) -> Callable[[Iterable[Any]], str]:
        """Return ``function``, which joins texts, unless its result is too large."""

        def joined(values: Iterable[Any]) -> str:
            parts = tuple(values)
            self.spend(size_of(parts))
            return function(parts)

        return joined

    def _counted(self, pieces: Iterable[str]) -> Iterator[str]:
        written = 0
        for piece in pieces:
            written += len(piece)
            if written > self._budget.single:
                raise TooLarge(f"it writes more than {self._budget.single:,} characters")
            yield piece
        self.spend(written)

    def _checked(self, value: Any) -> Any:
        """Return what is written, unless it is a list or mapping whose text is too large."""
        if not isinstance(value, (str, int, float)):
            self.spend(size_of(value))
        return value


@lru_cache(maxsize=64)
def compiled(source: str, single: int) -> tuple[BoundedEnvironment, Template]:
    """Return a template and its environment, compiled once; arguments are those of :class:`BoundedEnvironment`."""
    environment = BoundedEnvironment(single)
    environment.begin()
    template = environment.from_string(source)
    names = template.root_render_func.__globals__
    for name in ("str_join", "markup_join"):  # what the operator ~ calls
        names[name] = environment.joined(names[name])
    return environment, template


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.spend(size_of(value) + numbers_in(format_spec))  # type: ignore[attr-defined]
        return super().format_field(value, format_spec)
