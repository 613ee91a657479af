"""Strategies that change valid examples: trees of JSON values, and files of a known layout."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["changed", "changed_bytes", "odd_numbers", "odd_values"]

Path = tuple[Any, ...]

odd_numbers = st.sampled_from((
    0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**60, 2**61, 2**62, 2**63 - 1, 2**63,
    -(2**63), 2**64 - 8, 2**64 - 1, 2**64, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308, 1e30,
    math.nan, math.inf, -math.inf,
))  # fmt: skip
"""Numbers at which types, products and comparisons break."""

_ODD_TEXTS = st.sampled_from((
    "", " ", "\0", "a\0b", "\ud800", "\udfff x", "\ufeff", "\u2028", "\x1b[2J", "a" * 70_000, "é" * 300, "../../x",
    "/", ".", "~", "${oc.env:HOME}", "${name}", "${", "{0}", "{reason}", "%s", "1e400", "-0", "nan", "null", "0x10",
    "1_0", "9" * 5000, "!!python/object:os.system x", "&a [*a]", "[" * 60, "{" * 60, "- " * 60, "*x", "<<", "__",
    "<|im_end|>", "</think>", "{{ 1 }}", "{% for x in y %}", "9999-99-99", "s3://a:b@c", "file:///", "package://x",
))  # fmt: skip


def _deep(levels: int, inner: Any, *, mapping: bool) -> Any:
    for _ in range(levels):
        inner = {"a": inner} if mapping else [inner]
    return inner


_DEEP = st.builds(_deep, st.sampled_from((2, 30, 99, 101, 300)), st.sampled_from((None, 0, "x")), mapping=st.booleans())
_PLAIN = st.one_of(st.none(), st.booleans(), odd_numbers, st.integers(), st.floats(), _ODD_TEXTS, st.text(max_size=8))
odd_values = st.one_of(
    _PLAIN,
    st.sampled_from(([], {}, [[]], [{}], [None], {"": None}, {"\ud800": 1}, ["a", 1, None], [0] * 1000)).map(
        copy.deepcopy
    ),
    st.lists(_PLAIN, max_size=3),
    st.dictionaries(st.sampled_from(("a", "name", "type", "0", "__nxdt__", "$")), _PLAIN, max_size=3),
    _DEEP,
)
"""JSON values of every type, most of them at an edge."""


def _places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values within ``tree``, itself first; of long lists the first ones."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _places(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree[:20]):
            yield from _places(value, (*path, number))


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def changed(draw: st.DrawFn, examples: Sequence[Any], most: int = 3) -> Any:
    """One of ``examples`` with up to ``most`` changes."""
    tree = copy.deepcopy(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, most))):
        tree = _change(draw, tree)
    return tree


def _change(draw: st.DrawFn, tree: Any) -> Any:
    path = draw(st.sampled_from([*_places(tree)]))
    how = draw(st.sampled_from(("replace", "replace", "drop", "number", "copy", "wrap", "key", "repeat", "text")))
    if not path:
        return draw(odd_values) if how == "replace" else tree
    parent, key, value = _at(tree, path[:-1]), path[-1], _at(tree, path)
    if how == "replace":
        parent[key] = draw(odd_values)
    elif how == "drop":
        del parent[key]
    elif how == "number":
        parent[key] = draw(odd_numbers)
    elif how == "copy":
        parent[key] = copy.deepcopy(_at(tree, draw(st.sampled_from([*_places(tree)]))))
    elif how == "wrap":
        parent[key] = draw(st.sampled_from(([value], {"a": value}, str(value)[:100])))
    elif how == "repeat" and isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(value)] * draw(st.sampled_from((1, 2, 40)))
    elif how == "text" and isinstance(value, str):
        place = draw(st.integers(0, len(value)))
        parent[key] = value[:place] + draw(_ODD_TEXTS) + value[place:]
    elif isinstance(parent, dict):
        parent[draw(_ODD_TEXTS)] = value
    return tree


@st.composite
def changed_bytes(draw: st.DrawFn, example: bytes, most: int = 4) -> bytes:
    """``example`` with up to ``most`` changes: bytes, little-endian integers, cuts, insertions."""
    data = bytearray(example)
    for _ in range(draw(st.integers(1, most))):
        place = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(("byte", "int4", "int8", "cut", "insert", "repeat", "cut out")))
        if how == "byte":
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how in ("int4", "int8"):
            form = "<I" if how == "int4" else "<Q"
            number = int(draw(odd_numbers.filter(lambda n: isinstance(n, int)))) % (1 << 8 * struct.calcsize(form))
            data[place : place + struct.calcsize(form)] = struct.pack(form, number)
        elif how == "cut":
            del data[place:]
        elif how == "insert":
            data[place:place] = draw(st.binary(max_size=16))
        elif how == "repeat":
            data[place:place] = data[place : place + 64]
        else:
            del data[place : place + draw(st.integers(1, 16))]
    return bytes(data)
