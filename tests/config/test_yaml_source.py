"""Scalars as their writer means them, and documents that would do harm."""

from __future__ import annotations

import pytest

from nxdt_core.config.tree import parse_yaml
from nxdt_core.errors.configuration import YamlSyntax
from tests.sampling import slow_except

SCALARS = {
    "1e-4": 1e-4,
    "5e5": 5e5,
    "-2.5E+3": -2500.0,
    "1_000": 1000,
    "010": 10,
    "0x10": 16,
    "1:30": "1:30",
    "00:12:00:00": "00:12:00:00",
    "2024-01-01": "2024-01-01",
    "yes": True,
    "off": False,
    "~": None,
    "": None,
    "'1e-4'": "1e-4",
    '"true"': "true",
    "${trainer.max_steps}": "${trainer.max_steps}",
    "[1, {a: 2e-1}]": [1, {"a": 0.2}],
    "1e": "1e",
    "e5": "e5",
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items(), ids=[repr(text) for text in SCALARS])
def test_scalars_mean_what_they_say(text, value):
    found = parse_yaml(f"value: {text}", "")[0].get("value")
    assert (type(found), found) == (type(value), value)


def test_keys_stay_text_and_know_their_lines():
    tree, problems = parse_yaml("on: 1\n1:\n  null: 2\n", "f")
    assert not problems
    assert tree.data == {"on": 1, "1": {"null": 2}}
    assert tree.origin("1.null").where == "f:3"


def test_anchors_and_merges_work():
    tree, problems = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [{x: 8}, *a]}\nd: *a\n", "f")
    assert not problems
    assert tree.data == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 8, "y": 2},
        "d": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: &a {b: *a}\n", "an anchor that contains itself"),
        ("a: !!python/object/apply:os.system ['true']\n", "the tag !!python/object/apply:os.system"),
        ("a: !!python/name:os.system\n", "the tag !!python/name:os.system"),
        ("a: !custom {b: 1}\n", "the tag !custom"),
        ("a: !!int x\n", "'x' tagged !!int"),
        ("? [a]\n: 1\n", "a key that is a list or mapping"),
        ("a: {<<: 3}\n", "no mapping"),
    ],
)
def test_documents_that_are_no_plain_data_are_refused(text, found):
    _, problems = parse_yaml(text, "f")
    assert [problem.what().partition(";")[0] for problem in problems] == [f"found {found}"]
    assert problems[0].place == "f:1"


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n \tc: 2\n"])
def test_a_tab_that_indents_is_named(text):
    _, (problem,) = parse_yaml(text, "f")
    assert (problem.code, problem.reason) == ("NXDT-C004", "a tab indents the line, and YAML takes spaces alone")
    assert problem.line == text.count("\n")


BOMB = "\n".join(
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
        *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
    ]
)


ENDLESS = {
    "aliases": (BOMB, 1, "with its aliases"),
    "aliases of a mapping": ("m: &m {a: 1}\n" + BOMB.replace("x", "*m"), 1, "with its aliases"),
    "lists": ("ok: 1\na: " + "[" * 3000 + "]" * 3000, 2, "nested deeper than 100 levels"),
    "mappings": ("ok: 1\na: " + "{b: " * 3000 + "}" * 3000, 2, "nested deeper than 100 levels"),
    "blocks": ("".join(" " * i + f"k{i}:\n" for i in range(3000)), 101, "nested deeper than 100 levels"),
}
PARSED = [(name, pure) for name in ENDLESS for pure in (False, True)]


@pytest.mark.parametrize(
    ("name", "pure"),
    slow_except(PARSED, [*((name, False) for name in ENDLESS), ("lists", True), ("blocks", True)]),
    ids=[f"{name}-{'pure Python' if pure else 'libyaml'}" for name, pure in PARSED],
)
def test_documents_without_end_are_refused_with_their_line(name, pure, monkeypatch):
    """Aliases are counted by the same code, whichever parser has read them."""
    import yaml

    from nxdt_core.config import tree

    if pure:
        monkeypatch.setattr(tree, "_Loader", yaml.SafeLoader)
    text, line, reason = ENDLESS[name]
    _, problems = parse_yaml(text, "f")
    assert [type(problem).__name__ for problem in problems] == ["YamlTooLarge"]
    assert reason in problems[0].what()
    assert problems[0].line == line


def test_a_parser_that_refuses_depth_itself_is_told_alike(monkeypatch):
    """libyaml 0.2.6 does; other tests see it only with PyYAML 6.0.4 and newer."""
    import yaml

    mark = yaml.Mark("f", 0, 6, 1, None, None)
    error = yaml.scanner.ScannerError("while increasing flow level", mark, "exceeded maximum nesting depth", mark)

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(yaml, "parse", refuse)
    _, (problem,) = parse_yaml("ok: 1", "f")
    assert (type(problem).__name__, problem.line) == ("YamlTooLarge", 7)
    assert "nested deeper than 100 levels" in problem.what()


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        ("[" * 100 + "]" * 100, "[" * 101 + "]" * 101),
        ("[" + "1," * 99_999 + "]", "[" + "1," * 100_000 + "]"),
        ("[&a [1,1]," + "*a," * 33_332 + "]", "[&a [1,1]," + "*a," * 33_333 + "]"),
    ],
    ids=["levels", "values", "values of aliases"],
)
def test_the_largest_document_is_read_and_a_larger_one_is_a_problem(largest, larger):
    assert parse_yaml(largest, "f")[1] == []
    assert [problem.code for problem in parse_yaml(larger, "f")[1]] == ["NXDT-C008"]


@pytest.mark.parametrize(
    "text",
    ["1" * 10_000, "0" + "1" * 10_000, "0x" + "f" * 10_000, "0b" + "1" * 64, str(2**63), str(-(2**63) - 1)],
    ids=["decimal", "octal", "hexadecimal", "binary", "one too large", "one too small"],
)
def test_integers_of_more_than_64_bits_are_a_problem(text):
    tree, (problem,) = parse_yaml(f"a: {text}", "f")
    assert tree.get("a") is None
    assert "; allowed: integers from -9223372036854775808 to 9223372036854775807" in problem.what()
    assert len(problem.what()) < 200


@pytest.mark.parametrize(("text", "value"), [(str(2**63 - 1), 2**63 - 1), (str(-(2**63)), -(2**63)), ("1e9999", None)])
def test_the_largest_numbers_are_read(text, value):
    tree, problems = parse_yaml(f"a: {text}", "f")
    assert problems == []
    assert tree.get("a") == (float("inf") if value is None else value)


def test_the_parser_without_libyaml_reads_the_same(monkeypatch):
    import yaml

    from nxdt_core.config import tree

    text = "a: 1e-4\nb: [x, {c: ~}]\n"
    fast = parse_yaml(text, "f")
    monkeypatch.setattr(tree, "_Loader", yaml.SafeLoader)
    assert parse_yaml(text, "f") == fast


def test_half_a_character_is_a_problem():
    """Bytes of a command line that are not UTF-8 come as such."""
    _, problems = parse_yaml("value: \udcff", "f")
    assert [type(problem) for problem in problems] == [YamlSyntax]
    assert "half a character" in problems[0].what()
