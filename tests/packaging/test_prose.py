"""The wording check of ``make lint`` finds what it should, in the text that a reader sees and nowhere else."""

import pytest

from scripts.prose import check
from tests.packaging.conftest import ROOT


def found(path, source):
    return [(finding.line, finding.found) for finding in check(path, source)]


@pytest.mark.parametrize(
    "phrase", ["goes on", "in silence", "to the bit", "is no file", "tokens a second", "learning-rate\ncurves"]
)
def test_translated_wording_is_found_in_every_kind_of_text(phrase):
    one_line = " ".join(phrase.split())
    first, _, rest = one_line.partition(" ")
    in_two_literals = f'X = (\n    "the run {first} "\n    f"{rest} {{x}}"\n)'
    for source in (f'"""It {phrase}."""', f'print(f"{{x}} it {one_line}")', in_two_literals):
        ((_, text),) = found("a.py", source)
        assert text.startswith(first)
        assert text.endswith(rest)
    assert found("a.md", f"# Title\n\nIt {phrase}.\n") == [(3, one_line)]


@pytest.mark.parametrize(
    "source",
    ["the run continues", "`is told` and `whoever`", "```text\ngoes on\n```", "there is no file", "is no longer there"],
)
def test_code_and_plain_sentences_pass(source):
    assert found("a.md", source) == []


def test_identifiers_and_expressions_in_braces_pass():
    assert found("a.py", 'alike = 1\nprint(f"{alike} of them: {beside!r}")\nhelp = "anew"') == []


@pytest.mark.parametrize("text", ["Of one run.", "Nothing.", "As above.", "The loss of a step.", "Whether it is."])
def test_a_docstring_says_what_its_function_returns(text):
    source = f'def loss() -> float:\n    """{text}"""\n'
    assert found("a.py", source) == [(2, text)]
    assert found("a.py", source.replace(text, f"Return {text}")) == []


LIMIT = " ".join(["word"] * 24)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/data.md", "docs/how-to/s3.md"])
@pytest.mark.parametrize(
    "sentence",
    [
        f"A {LIMIT} more.",
        f"A {LIMIT}\nmore.",
        f"- A {LIMIT}\n  more.",
        f"Short. A {LIMIT} `code`.",
        f"A [link of two]({LIMIT}) {LIMIT}.",
        f"1.5 {LIMIT} more.",
    ],
)
def test_a_sentence_of_documentation_has_at_most_25_words(page, sentence):
    assert found(page, f"# Title\n\n```text\ncode\n```\n\n{sentence}\n")[0][0] == 7


@pytest.mark.parametrize(
    "text",
    [
        f"A {LIMIT}.",
        f"A {LIMIT}. `code` {LIMIT}! (A {LIMIT}.) **A** {LIMIT}",
        f"A {LIMIT} = –",
        f"A {LIMIT}\n- a {LIMIT}\n\na {LIMIT}",
        f"`{LIMIT} {LIMIT}` is code.",
        f"A [link]({LIMIT} {LIMIT}).",
        f"# A {LIMIT} {LIMIT}",
        f"| {LIMIT} | {LIMIT} |\n|---|---|",
        f"- [link](a) {LIMIT} {LIMIT}\n  {LIMIT}",
        f"```text\n{LIMIT} {LIMIT}\n```",
        f"<!-- {LIMIT}\n{LIMIT} -->",
        f"A {LIMIT} {LIMIT} <!-- prose: allow -->",
    ],
)
def test_short_sentences_and_text_that_is_not_prose_pass(text):
    assert found("docs/data.md", f"# Title\n\n{text}\n") == []


@pytest.mark.parametrize("path", ["docs/decisions/data.md", "docs/defects.md", "CHANGELOG.md", "plugins/a/README.md"])
def test_sentences_of_notes_and_of_other_pages_are_not_measured(path):
    assert found(path, f"{LIMIT} {LIMIT}.") == []


def test_the_style_guide_and_the_check_agree():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    avoided = guide.partition("| write | not |")[2].partition("\n\n")[0]
    assert found("a.md", avoided.replace(", ", " . "))
